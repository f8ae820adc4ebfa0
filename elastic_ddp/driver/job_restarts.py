"""Restarts a submitted driver that has died: `python -m elastic_ddp.driver.job_restarts`, in the driver's own job.

The command starts a detached actor on the head, where the job server is. It needs no state: it finds the jobs of the
submission by their ids. Ray restarts the actor, also on a new head that has restored its state from Redis.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.job_submission import JobSubmissionClient

from elastic_ddp.driver.jobs import FIRST, all_jobs, newest_of, restart
from elastic_ddp.errors import ConfigError
from elastic_ddp.ray_internals.jobs import connect_to_jobs
from elastic_ddp.ray_internals.this_job import metadata_of_this_job

NAMESPACE = "elastic_ddp_jobs"
POLL_S = 2.0
HEAD = "node:__internal_head__"
"""A resource that only the head has."""


def watch(first: str, connect: Callable[[], JobSubmissionClient], sleep: Callable[[float], None] = time.sleep) -> None:
    """Restarts the driver of a submission, given by the id of its first job, until it ends by itself."""
    client: JobSubmissionClient | None = None
    while True:
        try:
            client = client or connect()
            jobs = all_jobs(client)
            if first not in jobs:
                return  # a person has deleted it
            job = newest_of(jobs, jobs[first])
            if job.status.is_terminal() and restart(client, job) is None:
                return
        except (ConfigError, OSError, RuntimeError) as error:  # the job server may be restarting
            client = None
            print(f"the job server does not respond, retrying: {error}", flush=True)
        sleep(POLL_S)


class Restarts:
    """The actor. It ends itself when the driver is not to be restarted any more."""

    def __init__(self, first: str) -> None:
        self._first = first
        threading.Thread(target=self._watch, daemon=True).start()

    def ping(self) -> None:
        """Returns once the actor has started."""

    def _watch(self) -> None:
        address = ray.get_runtime_context().gcs_address
        watch(self._first, lambda: connect_to_jobs(address))
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
    ray.get(actor.ping.remote())


if __name__ == "__main__":
    main()
