"""`elastic-ddp submit` and `elastic-ddp logs`: drivers that run on the cluster as jobs of Ray Jobs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_ddp.cli.output import console
from elastic_ddp.cli.runs import get_run
from elastic_ddp.errors import ConfigError, ElasticDDPError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

Follow = Annotated[bool, typer.Option("--follow", help="Print the driver's log until the job ends.")]


def submit(
    program: Annotated[
        Path, typer.Argument(metavar="JOB", help="A Python script, or a TOML file with settings and a [job] table.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script, after `--`.")
    ] = None,
    follow: Follow = False,
    restarts: Annotated[
        int, typer.Option(min=0, help="How often the driver is restarted if its node dies or a signal ends it.")
    ] = 0,
    working_dir: Annotated[
        Path | None, typer.Option(help="Folder that the nodes get a copy of; by default the folder of JOB.")
    ] = None,
    no_working_dir: Annotated[
        bool, typer.Option("--no-working-dir", help="Copy nothing. JOB is a path on the cluster's nodes.")
    ] = False,
    entrypoint_resources: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Custom resources of the node that the driver runs on, such as {"driver": 0.01}; default: the head.',
        ),
    ] = None,
) -> None:
    """Run a Python script, or the job of a TOML file, on the cluster.

    The driver runs there as a job of Ray Jobs, and continues when this machine disconnects. Nodes start in copies of
    the working directory, without what its .gitignore and .rayignore name. Relative paths are relative to the copy, so
    give data and storage as a bucket or as a folder that all nodes share.

    The job server is the head's dashboard. On a machine that is not a node of the cluster, set RAY_API_SERVER_ADDRESS
    to its address, such as http://127.0.0.1:8265.

    A restarted driver resumes its run. An error of the program, that is an exit status, does not restart it.
    """
    from elastic_ddp.driver import jobs
    from elastic_ddp.ray_internals.job_server import connect_to_jobs

    if no_working_dir and working_dir is not None:
        raise ConfigError(f"--no-working-dir and --working-dir {working_dir}: use one of them.")
    client = connect_to_jobs()
    job = jobs.submit(
        client,
        program,
        arguments or [],
        working_dir=None if no_working_dir else working_dir or program.parent,
        restarts=restarts,
        resources=_parse(entrypoint_resources),
    )
    console().print(f"submitted job {job} to {client.get_address()}; `elastic-ddp logs {job} --follow` shows its log")
    if follow:
        _follow(client, job)


def _parse(resources: str | None) -> dict[str, float] | None:
    try:
        amounts = json.loads(resources or "null")
        return None if amounts is None else {str(name): float(amount) for name, amount in amounts.items()}
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(
            f"--entrypoint-resources {resources} is not a JSON object of amounts by name. Use '{{\"driver\": 0.01}}'."
        ) from None


def logs(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A submitted run: its name, <storage>/<name>, or the id of its job.")
    ],
    follow: Follow = False,
) -> None:
    """Print the log of a submitted run's driver.

    By its name a run is found once fit has begun. For a restarted driver, the command prints the log of the newest job;
    the id of a job shows an earlier one. The exit status of --follow is 1 unless the job succeeds.
    """
    from elastic_ddp.driver import jobs, submissions
    from elastic_ddp.ray_internals.job_server import connect_to_jobs

    client = connect_to_jobs()
    job = jobs.find_job(client, run)
    assert job.submission_id is not None
    if follow:
        _follow(client, job.submission_id)
        return
    try:
        sys.stdout.write(client.get_job_logs(job.submission_id))
        if submissions.how_it_died(job) is not None:
            console(stderr=True).print(f"job {job.submission_id} {submissions.outlook(jobs.all_jobs(client), job)}")
    except RuntimeError:
        raise ConfigError(
            f"the log of job {job.submission_id} ({submissions.describe(job)}) cannot be read: it is on the node of "
            f"its driver, {job.driver_node_id}, which does not respond."
        ) from None


def _follow(client: JobSubmissionClient, job: str) -> None:
    from ray.job_submission import JobStatus

    from elastic_ddp.driver import jobs, submissions

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    note: Callable[[str], None] = console().print
    try:
        details: JobDetails = jobs.follow(client, job, write, note)
    except KeyboardInterrupt:
        note(f"\nThe job continues. Show its log again with `elastic-ddp logs {job} --follow`.")
        raise typer.Exit(130) from None
    note(f"job {details.submission_id} {submissions.outlook(jobs.all_jobs(client), details)}")
    if details.status != JobStatus.SUCCEEDED:
        raise typer.Exit(1)


def stop_submitted(run: str) -> bool:
    """Stops the job of a submitted run that is not live yet, or on a cluster that this machine is not a node of.

    Returns False if there is no such job.
    """
    import ray

    from elastic_ddp.driver import jobs, submissions
    from elastic_ddp.ray_internals.job_server import connect_to_jobs

    try:
        client = connect_to_jobs()
    except ConfigError:  # this node does not reach the job server
        return ray.is_initialized() and submissions.forbid_pending_restart(run)
    return jobs.stop_job(client, run) is not None


def dead_drivers(live: Collection[str]) -> dict[str, str]:
    """Returns whether each dead submitted driver is restarted, or the reason why not, by the name of its run.

    Runs in `live` have a driver.
    """
    import ray

    from elastic_ddp.driver import submissions

    return submissions.dead_drivers(submissions.jobs_here(), live) if ray.is_initialized() else {}


def status_of(run: str) -> Mapping[str, Any]:
    """Returns the status of a live run. If its submitted driver has died, the error says whether it is restarted."""
    try:
        return get_run(run).status()
    except ElasticDDPError as error:
        text = dead_drivers(()).get(run.rstrip("/").rpartition("/")[2])
        if text is not None:
            raise ConfigError(f"run {run!r} is not live: {text}") from error
        raise
