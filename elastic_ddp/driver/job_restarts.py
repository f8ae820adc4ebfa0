"""Restarts a submitted driver that has died: `python -m elastic_ddp.driver.job_restarts`, in the driver's own job.

The command starts a detached actor on the head, where the job server is. The actor needs no state: it finds the jobs of
the submission by their ids. Ray restarts the actor, also on a new head that has restored its state from Redis.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.job_submission import JobSubmissionClient

from elastic_ddp.driver.jobs import all_jobs, record_dead_jobs, restart
from elastic_ddp.driver.submissions import FIRST, forbid_restart, jobs_here, newest_of
from elastic_ddp.errors import ElasticDDPError
from elastic_ddp.formatting import last_line
from elastic_ddp.ray_internals.job_server import connect_to_jobs
from elastic_ddp.ray_internals.this_job import metadata_of_this_job

NAMESPACE = "elastic_ddp_jobs"
POLL_S = 2.0
GIVE_UP_S = 1800.0
"""How long the job server may reject every request until a driver is not restarted any more."""
HEAD = "node:__internal_head__"
"""A resource that only the head has."""


def watch(
    first: str,
    connect: Callable[[], JobSubmissionClient],
    give_up: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Restarts the driver of a submission, given by the id of its first job, until it ends by itself.

    If the job server does not respond, or rejects a restart, for `GIVE_UP_S`, `give_up` gets the reason.
    """
    client: JobSubmissionClient | None = None
    failing_since: float | None = None
    while True:
        try:
            is_new = client is None
            client = client or connect()
            jobs = all_jobs(client)
            if first not in jobs:
                return  # a person has deleted it
            if is_new:
                record_dead_jobs(client, first)
            job = newest_of(jobs, jobs[first])
            if job.status.is_terminal() and restart(client, jobs, job) is None:
                return
            failing_since = None
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:  # it may be restarting
            client = None
            failing_since = clock() if failing_since is None else failing_since
            if clock() - failing_since > GIVE_UP_S:
                reason = last_line(str(error)) or type(error).__name__
                give_up(f"the job server has accepted no request for {GIVE_UP_S / 60:g} minutes: {reason}")
                return
        sleep(POLL_S)


def give_up(first: str, why: str) -> None:
    """Records why the driver of a submission is not restarted; `elastic-ddp status` and `logs` show it."""
    jobs = jobs_here()
    if first in jobs:
        with suppress(ElasticDDPError):  # a restart that the job server has accepted and not confirmed
            forbid_restart(newest_of(jobs, jobs[first]).submission_id or first, why)


class Restarts:
    """The actor. It ends itself when the driver is not to be restarted any more."""

    def __init__(self, first: str) -> None:
        self._first = first
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        address = ray.get_runtime_context().gcs_address
        watch(self._first, lambda: connect_to_jobs(address), lambda why: give_up(self._first, why))
        ray.kill(ray.get_actor(_name(self._first), namespace=NAMESPACE))


def _name(first: str) -> str:
    return f"restarts-{first}"


def main() -> None:
    """Starts the actor for the job of this process, unless it exists."""
    first = metadata_of_this_job()[FIRST]
    ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    options = {"name": _name(first), "lifetime": "detached", "get_if_exists": True, "max_restarts": -1}
    actor_class: Any = ray.remote(Restarts)
    actor = actor_class.options(**options, num_cpus=0, resources={HEAD: 0.001}).remote(first)
    ray.get(actor.__ray_ready__.remote())


if __name__ == "__main__":
    main()
