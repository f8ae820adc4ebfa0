"""Starts the rendezvous actor of a run."""

from __future__ import annotations

import time
from typing import Any

import ray

from elastic_ddp.errors import ConfigError
from elastic_ddp.rendezvous.actor import LONG_POLL_S, NAMESPACE, RENDEZVOUS_PREFIX, Rendezvous, RendezvousHandle
from elastic_ddp.rendezvous.messages import RendezvousOptions

OLD_ACTOR_TIMEOUT_S = 120.0
"""How long Ray may take to end the rendezvous of a driver that has exited."""
ANSWERS_WITHIN_S = 5.0
"""Timeout for calls of an actor that may be dead."""


def start_rendezvous(run_name: str, total_steps: int, options: RendezvousOptions) -> RendezvousHandle:
    """Starts the rendezvous of a run on this node. Raises ConfigError if the name belongs to a run in another storage.

    The driver holds the run's lease. An existing rendezvous for the same storage therefore belongs to a driver that
    has exited, and Ray is about to end it.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # It needs no CPUs, so without this Ray could place it on a node that fails.
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Rendezvous).options(
        name=RENDEZVOUS_PREFIX + run_name,
        namespace=NAMESPACE,
        num_cpus=0,
        max_concurrency=10_000,
        max_restarts=-1,  # a new process resumes from the snapshot
        max_task_retries=-1,
        scheduling_strategy=this_node,
    )
    end = time.monotonic() + OLD_ACTOR_TIMEOUT_S
    while True:
        try:
            return actor.remote(run_name, total_steps, options)
        except ValueError as error:  # a live actor has the name
            driver = _driver_of(run_name)
            is_same_run = driver is None or driver.get("uri") == options.driver.get("uri")
            if is_same_run and time.monotonic() < end:
                time.sleep(LONG_POLL_S)
                continue
            where = f", in {driver.get('uri')}, by pid {driver.get('pid')} on {driver.get('host')}" if driver else ""
            raise ConfigError(
                f"a run named {run_name!r} is live on this cluster{where}. Stop it first (`elastic-ddp stop "
                f"{run_name}`), or use another name."
            ) from error


def _driver_of(run_name: str) -> dict[str, Any] | None:
    """Returns where the driver of a run's existing rendezvous runs; None if the rendezvous does not answer."""
    try:
        rendezvous: Any = ray.get_actor(RENDEZVOUS_PREFIX + run_name, namespace=NAMESPACE)
        return dict(ray.get(rendezvous.status.remote(), timeout=ANSWERS_WITHIN_S)["driver"])
    except (ValueError, ray.exceptions.RayError):
        return None
