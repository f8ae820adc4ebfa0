"""Drivers that run on the cluster as jobs of Ray Jobs, through its job server: submission, restart, stop, logs."""

from __future__ import annotations

import json
import shlex
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.job_submission import JobDetails, JobSubmissionClient

from elastic_ddp.config.environment import has_credential
from elastic_ddp.driver.submissions import (
    FIRST,
    RESOURCES,
    RESTARTS,
    STOPPED,
    Jobs,
    describe,
    find,
    following,
    marker,
    newest_first,
    newest_of,
    next_id,
    why_not_restarted,
)
from elastic_ddp.errors import ConfigError, ElasticDDPError
from elastic_ddp.formatting import last_line
from elastic_ddp.ray_internals.job_server import follow_log
from elastic_ddp.ray_internals.this_job import RUN

STOP_WAIT_S = 600
"""How long a driver may take to commit after a request to stop its job. Ray's default is 3 s, and then SIGKILL."""
POLL_S = 1.0
SILENT_S = 120.0
"""How long the job server may be silent, as after a restart of the head, while a log is followed."""


def submit(
    client: JobSubmissionClient,
    program: Path,
    arguments: Sequence[str],
    *,
    working_dir: Path | None,
    restarts: int = 0,
    resources: Mapping[str, float] | None = None,
) -> str:
    """Submits a driver, a Python script or a TOML file for `elastic-ddp run`, and returns the id of its job.

    Without a `working_dir`, the program is a path on the cluster's nodes. `resources` are custom resources of the node
    on which the driver runs; None places it on the head. Raises ConfigError if the program or the arguments are not
    valid, or Ray rejects the job.
    """
    path = str(program)
    if working_dir is not None:
        if not program.is_file():
            raise ConfigError(f"{program}: no such file. Use a Python script or a TOML file.")
        if not program.resolve().is_relative_to(working_dir.resolve()):
            raise ConfigError(f"{program} is not in --working-dir {working_dir}, the folder that the cluster gets.")
        path = program.resolve().relative_to(working_dir.resolve()).as_posix()
    elif not program.is_absolute():
        raise ConfigError(f"{program}: with --no-working-dir, use the absolute path on the cluster's nodes.")
    command = entrypoint(path, arguments, restarts)
    job = f"{program.stem}-{uuid.uuid4().hex[:6]}"
    metadata = {FIRST: job, RESTARTS: str(restarts), RESOURCES: json.dumps(resources)}
    runtime_env: dict[str, Any] = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}}
    if working_dir is not None:
        runtime_env["working_dir"] = str(working_dir.resolve())
    try:
        return client.submit_job(
            entrypoint=command,
            submission_id=job,
            runtime_env=runtime_env,
            metadata=metadata,
            entrypoint_resources=dict(resources) if resources else None,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"Ray rejects the job: {error} If the folder is too large, use another --working-dir, or list files that "
            "are not needed in its .rayignore; with --no-working-dir nothing is copied."
        ) from error


def entrypoint(program: str, arguments: Sequence[str], restarts: int) -> str:
    """Returns the shell command of a job. Raises ConfigError if an argument has a credential in it."""
    if any(map(has_credential, arguments)):
        raise ConfigError(
            "an argument of the job has a credential in a URI, and Ray records the command of a job. Give credentials "
            "by a role of the machine, by files such as ~/.aws/credentials, or by the environment of `ray start`."
        )
    if program.endswith(".toml"):
        if arguments:
            raise ConfigError(f"{shlex.join(arguments)}: a TOML file takes no arguments. Put settings into {program}.")
        words = ["-m", "elastic_ddp.cli.main", "run", program]
    else:
        words = [program, *arguments]
    # The shell would return 128 + the signal's number, and keep signals to itself.
    command = f"exec {shlex.join(['python', *words])}"
    return f"python -m elastic_ddp.driver.job_restarts && {command}" if restarts else command


def restart(client: JobSubmissionClient, jobs: Jobs, job: JobDetails) -> str | None:
    """Submits the job that restarts the driver of a job. Returns its id; None if the driver is not restarted."""
    next_job = following(jobs, job)
    if next_job is None:
        return None
    metadata = {name: value for name, value in (job.metadata or {}).items() if not name.startswith(RUN)}
    return client.submit_job(
        entrypoint=job.entrypoint,
        submission_id=next_job,
        runtime_env=job.runtime_env,
        metadata=metadata,
        entrypoint_resources=json.loads(metadata[RESOURCES]),
    )


def record_dead_jobs(client: JobSubmissionClient, job: str) -> None:
    """Makes a new head record that jobs died with the old one. `job` is the id of any job.

    Ray on a new head considers these jobs running until a request to submit a job arrives. Ray rejects this request,
    because the id is in use.
    """
    try:
        client.submit_job(entrypoint="true", submission_id=job)
    except RuntimeError as error:
        if "already exists" not in str(error):
            raise


def all_jobs(client: JobSubmissionClient) -> Jobs:
    """Returns the jobs of Ray Jobs on the cluster by their ids, newest first."""
    return newest_first(client.list_jobs())


def find_job(client: JobSubmissionClient, run: str) -> JobDetails:
    """Returns the newest job of a run, given by its name, its folder, or the id of a job; ConfigError if none."""
    jobs = all_jobs(client)
    job = find(jobs, run)
    if job is None:
        known = ", ".join(f"{id} ({describe(job)})" for id, job in jobs.items()) or "none"
        raise ConfigError(
            f"the cluster at {client.get_address()} has no submitted job of run {run!r}. Jobs: {known}. A job is known "
            "by the name of its run once `fit` has begun, and by its id before."
        )
    return job


def stop_job(client: JobSubmissionClient, run: str) -> str | None:
    """Asks the driver of a submitted run to commit and stop. Returns the id of its job; None if it has ended for good.

    The driver gets SIGTERM. It is not restarted, also if it dies meanwhile or has died already. Raises ElasticDDPError
    if the job server does not accept the request.
    """
    rejected: str | None = None
    while True:
        jobs = all_jobs(client)
        job = find(jobs, run)
        if job is None:
            return None
        job = newest_of(jobs, job)
        if job.submission_id is None or (job.status.is_terminal() and following(jobs, job) is None):
            return None
        next_job = next_id(job)
        if next_job is not None and why_not_restarted(jobs, job) is None:
            try:
                client.submit_job(entrypoint="true", submission_id=next_job, metadata=marker(job, STOPPED))
            except RuntimeError as error:
                if rejected == next_job:
                    raise _rejection(error) from error
                rejected = next_job  # the driver may have died, and may have been restarted
                continue
        try:
            if not job.status.is_terminal():
                client.stop_job(job.submission_id)
        except RuntimeError as error:
            raise _rejection(error) from error
        return job.submission_id


def _rejection(error: Exception) -> ElasticDDPError:
    """Returns the error for a rejected request, with the last line of the server's message: the rest is a traceback."""
    return ElasticDDPError(f"the job server does not accept the request: {last_line(str(error))}")


def follow(
    client: JobSubmissionClient,
    job: str,
    write: Callable[[str], None],
    note: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> JobDetails:
    """Passes the log of a job to `write` until the job ends, then the logs of its restarts. Returns the last job.

    `note` gets a line for each restart, and when the job server stops responding. Raises ElasticDDPError if it has not
    responded for `SILENT_S`, or does not know the job any more.
    """
    num_written = 0
    silent_since = None
    while True:
        num_written = follow_log(client, job, num_written, write)
        try:
            jobs = all_jobs(client)
            silent_since = None
        except (OSError, RuntimeError) as error:
            if silent_since is None:
                silent_since = clock()
                note(f"The dashboard at {client.get_address()} does not respond. Waiting for it for {SILENT_S:g} s.")
            if clock() - silent_since > SILENT_S:
                raise ElasticDDPError(
                    f"the dashboard at {client.get_address()} has not responded for {SILENT_S:g} s: {error}. If the "
                    "head or Ray's GCS on it has ended, call `ray up`; then the same command resumes the run from its "
                    "newest commit."
                ) from error
            sleep(POLL_S)
            continue
        details = jobs.get(job)
        if details is None:
            raise ElasticDDPError(
                f"the cluster at {client.get_address()} does not know job {job} any more: it was deleted, or the head "
                "was restarted without Redis. The same command resumes the run from its newest commit."
            )
        if details.status.is_terminal():
            next_job = following(jobs, details)
            if next_job is None:
                return details
            if next_job in jobs:
                note(f"{job} {describe(details)}. {next_job} restarts it.")
                job = next_job
                num_written = 0
                continue
        sleep(POLL_S)
