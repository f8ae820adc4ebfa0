"""The jobs of a submitted driver: how one died, which job restarts it, and whether any will.

A driver that is restarted gets a new job. The jobs of one submission have the ids `ID`, `ID-1`, `ID-2`, ..., and their
metadata has how many there may be. The id of a job can be used once. The next id becomes either a restart, or a
marker: a job without a driver, which ends the restarts.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping

from ray.job_submission import JobDetails, JobErrorType, JobStatus

from elastic_ddp.errors import ElasticDDPError
from elastic_ddp.formatting import first_line
from elastic_ddp.ray_internals.this_job import RUN, add_job, recorded_jobs

FIRST, RESTARTS, RESOURCES, NOT_RESTARTED = (
    f"elastic_ddp.{name}" for name in ("first", "restarts", "resources", "not_restarted")
)
"""Keys of a job's metadata: the id of the first job of its submission, how many restarts there may be, the custom
resources that its driver reserves, as JSON, and, in a marker, why the driver is not restarted."""
STOPPED = "it was stopped"
"""The value of `NOT_RESTARTED` after a request to stop."""
_DEATHS = {
    JobErrorType.JOB_SUPERVISOR_ACTOR_DIED: "its node or its job's supervisor died",
    JobErrorType.JOB_SUPERVISOR_ACTOR_START_FAILURE: "its node or its job's supervisor died",
    JobErrorType.JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE: "its job's supervisor failed",
    JobErrorType.JOB_SUPERVISOR_ACTOR_START_TIMEOUT: "no node had room for it",
}
"""Ends of a job that are not the program's own."""

Jobs = Mapping[str, JobDetails]
"""Jobs by their ids, newest first."""


def newest_first(jobs: Collection[JobDetails]) -> Jobs:
    """Returns the submitted jobs among these jobs."""
    found = sorted(jobs, key=lambda job: job.start_time or 0, reverse=True)
    return {job.submission_id: job for job in found if job.submission_id is not None}


def how_it_died(job: JobDetails) -> str | None:
    """Returns how a driver died; None if it runs, has returned, was stopped, or failed by an error of its program.

    A driver dies if its node, the supervisor of its job, or a signal ends it. An exit status is an error of its
    program, as is SIGINT.
    """
    if job.status != JobStatus.FAILED or job.error_type is None:
        return None
    code = job.driver_exit_code or 0
    number = -code if code < 0 else code - 128
    if job.error_type == JobErrorType.JOB_ENTRYPOINT_COMMAND_ERROR:
        is_signal = number in {*signal.Signals} - {signal.SIGINT}
        return f"{signal.Signals(number).name} ended it" if is_signal else None
    return _DEATHS.get(JobErrorType(job.error_type))


def next_id(job: JobDetails) -> str | None:
    """Returns the id of the job that restarts this job's driver; None if all restarts are used."""
    metadata = job.metadata or {}
    first = metadata.get(FIRST)
    if first is None or job.submission_id is None:
        return None
    number = int(job.submission_id.removeprefix(first).removeprefix("-") or 0) + 1
    return None if number > int(metadata.get(RESTARTS, 0)) else f"{first}-{number}"


def why_not_restarted(jobs: Jobs, job: JobDetails) -> str | None:
    """Returns why the driver of a job must not be restarted; None unless that was decided."""
    marker = jobs.get(next_id(job) or "")
    return None if marker is None else (marker.metadata or {}).get(NOT_RESTARTED)


def following(jobs: Jobs, job: JobDetails) -> str | None:
    """Returns the id of the job that restarts the driver of a job; None if it is not restarted."""
    return None if how_it_died(job) is None or why_not_restarted(jobs, job) is not None else next_id(job)


def marker(job: JobDetails, why: str) -> dict[str, str]:
    """Returns the metadata of the marker after which the driver of a job is not restarted."""
    return {FIRST: (job.metadata or {})[FIRST], RESTARTS: "0", NOT_RESTARTED: why}


def newest_of(jobs: Jobs, job: JobDetails) -> JobDetails:
    """Returns the newest job of a job's submission: the job itself, or the last restart of its driver."""
    while (next_job := following(jobs, job)) is not None and next_job in jobs:
        job = jobs[next_job]
    return job


def find(jobs: Jobs, run: str) -> JobDetails | None:
    """Returns the newest job of a run, given by its name, its folder, or the id of a job; None if it has none."""
    name = run.rstrip("/").rpartition("/")[2]
    if run in jobs:
        return jobs[run]
    return next((newest_of(jobs, job) for job in jobs.values() if RUN + name in (job.metadata or {})), None)


def describe(job: JobDetails) -> str:
    """Returns the state of a job in a few words."""
    if job.status != JobStatus.FAILED:
        return job.status.lower()
    if job.error_type == JobErrorType.JOB_ENTRYPOINT_COMMAND_ERROR and how_it_died(job) is None:
        return f"failed: exit status {job.driver_exit_code}"
    return f"failed: {how_it_died(job) or first_line(job.message or '') or 'no reason is known'}"


def outlook(jobs: Jobs, job: JobDetails) -> str:
    """Returns the state of a job, and if its driver died, whether the driver is restarted."""
    if how_it_died(job) is None:
        return describe(job)
    next_job = following(jobs, job)
    if next_job is not None:
        return f"{describe(job)}. Job {next_job} is going to restart it."
    number = (job.metadata or {}).get(RESTARTS, "0")
    used_up = "it was submitted without --restarts" if number == "0" else f"its restarts are used up ({number})"
    why = why_not_restarted(jobs, job) or used_up
    return f"{describe(job)}. It is not restarted: {why}. The same command resumes the run from its newest commit."


def dead_drivers(jobs: Jobs, live: Collection[str]) -> dict[str, str]:
    """Returns the outlook of each submitted driver that has died, by the name of its run, or by the id of its job.

    Runs in `live` have a driver. A driver that a person has submitted again is another driver.
    """
    seen = set(live)
    found = {}
    for job in jobs.values():
        metadata = job.metadata or {}
        if FIRST not in metadata or NOT_RESTARTED in metadata:
            continue
        newest = newest_of(jobs, job)
        names = [key.removeprefix(RUN) for key in metadata if key.startswith(RUN)] or [metadata[FIRST]]
        for name in names:
            if name not in seen and how_it_died(newest) is not None:
                found[name] = f"job {newest.submission_id} {outlook(jobs, newest)}"
        seen |= {*names, metadata[FIRST]}
    return found


def jobs_here() -> Jobs:
    """Returns the submitted jobs as the GCS has them. This process is connected to Ray, on any node."""
    return newest_first(recorded_jobs())


def forbid_restart(job_id: str, why: str) -> None:
    """Forbids the restart of a driver; ElasticDDPError if it is there already. This process is connected to Ray."""
    jobs = jobs_here()
    job = jobs.get(job_id)
    next_job = None if job is None else next_id(job)
    if job is None or next_job is None:
        return
    now = int(1000 * time.time())
    facts = {"status": JobStatus.STOPPED, "entrypoint": "true", "start_time": now, "end_time": now}
    added = add_job(next_job, message=f"It is not restarted: {why}.", metadata=marker(job, why), **facts)
    if not added and why_not_restarted(jobs_here(), job) is None:
        raise ElasticDDPError(f"the driver of job {job_id} has died, and job {next_job} restarts it. Try it again.")


def forbid_pending_restart(run: str) -> bool:
    """Forbids the restart of a run's dead driver, as `forbid_restart` does. Returns whether one was pending."""
    jobs = jobs_here()
    job = find(jobs, run)
    if job is None:
        return False
    job = newest_of(jobs, job)
    if job.submission_id is None or following(jobs, job) is None:
        return False
    forbid_restart(job.submission_id, STOPPED)
    return True
