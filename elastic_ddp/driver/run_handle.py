"""A live run, from another process on its cluster: what it does, and what it should do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray

from elastic_ddp.config.run_config import MAX_DURATION_S
from elastic_ddp.driver.cluster import RESUMES, connect
from elastic_ddp.errors import ConfigError, ElasticDDPError
from elastic_ddp.rendezvous.actor import NAMESPACE, RENDEZVOUS_PREFIX, RendezvousHandle
from elastic_ddp.storage.lease import find_holder
from elastic_ddp.storage.storage import Storage

_ASK_AGAIN_S = 0.2


class RunHandle:
    """A run that is live; from `get_run`. Its methods return once the run has taken note, unless they say otherwise.

    All of them raise `ElasticDDPError` if the run has ended meanwhile.
    """

    def __init__(self, name: str, rendezvous: RendezvousHandle) -> None:
        self.name = name
        self._rendezvous = rendezvous

    def status(self) -> Mapping[str, Any]:
        """What the run does now. What is not known yet is None.

        Returns:
            name, state (starting, training, waiting, stopping, or how it ended), step, total_steps, steps_per_s, loss,
            generation, world_size (0 while it waits), members (of each rank, node, node_id, pid and id), min_workers,
            max_workers, wanted (what `resize` asked for), draining (ids of nodes), last_commit (steps done in it),
            last_loss_of_a_worker (its time and error), driver (its host and pid, and the run's uri), pid (of the
            rendezvous).
        """
        status: Mapping[str, Any] = self._ask("status")
        return status

    def resize(self, num_workers: int) -> None:
        """Has the run train on so many workers, or as many of them as there is room for, until it is told otherwise.

        Workers that are too many leave at the next step boundary, without a step lost; more join as they are ready.

        Raises:
            ConfigError: `num_workers` is not from `min_workers` to `max_workers`.
        """
        status = self.status()
        least, most = status["min_workers"], status["max_workers"]
        if isinstance(num_workers, bool) or not isinstance(num_workers, int):
            raise ConfigError(f"num_workers={num_workers!r} is no number of workers; give an int")
        if not least <= num_workers <= most:
            raise ConfigError(
                f"num_workers={num_workers} is not from min_workers={least} to max_workers={most} of run "
                f"{self.name!r}; choose one that is, or stop the run and resume it with other bounds"
            )
        self._ask("resize", num_workers)

    def drain(self, node: str, *, deadline_s: float = 30.0) -> int:
        """Has the run's workers leave a node, and puts none on it any more. Returns how many left, once they have.

        They leave at the next step boundary if the others are at least `min_workers`. Otherwise training goes on until
        others have joined, for half of the time at most; then they leave all the same, and the last one hands over its
        state or commits it. The run uses the node no more, until its driver is started again.

        Args:
            node: its address or its id by Ray; `status` names them.
            deadline_s: seconds until the node is gone.

        Raises:
            ConfigError: the run has no worker there, or the deadline is none.
            ElasticDDPError: workers are still there after the deadline.
        """
        if not 0 < deadline_s <= MAX_DURATION_S:
            raise ConfigError(
                f"deadline_s={deadline_s:g} is not from 0 to {MAX_DURATION_S:g}; give the seconds until "
                "the node is gone"
            )
        node_ids = self._ask("drain", node, deadline_s)
        if not node_ids:
            known = sorted({f"{each['node']} ({each['node_id']})" for each in self.status()["members"]})
            raise ConfigError(
                f"run {self.name!r} has no worker on node {node!r}; its nodes are {', '.join(known) or 'none yet'}"
            )
        end, leaving = time.monotonic() + deadline_s, set[str]()
        while here := {each["id"] for each in self.status()["members"] if each["node_id"] in node_ids}:
            leaving |= here
            if time.monotonic() > end:
                raise ElasticDDPError(
                    f"{len(here)} workers of run {self.name!r} are still on node {node} after {deadline_s:g} s: a step "
                    "of theirs takes longer; give a longer deadline"
                )
            time.sleep(_ASK_AGAIN_S)
        return len(leaving)

    def checkpoint(self) -> int:
        """Has the run commit at the next step boundary. Returns the steps in the commit, once it is durable. Where that
        fails it is tried again.

        Raises:
            ElasticDDPError: the run has ended without.
        """
        request = self._ask("checkpoint")
        while (step := self._ask("committed", request)) is None:
            time.sleep(_ASK_AGAIN_S)
        return int(step)

    def stop(self) -> None:
        """Has the run commit and stop at the next step boundary, as Ctrl-C in its driver does. The same command resumes
        it."""
        self._ask("stop")

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._rendezvous, method).remote(*arguments))
        except ray.exceptions.RayActorError as error:
            raise ElasticDDPError(f"run {self.name!r} has ended; `elastic-ddp show` says how") from error


def live_runs() -> list[str]:
    """Names of the runs that are live on the cluster of this process; connects to it first if need be.

    Raises:
        ConfigError: there is no cluster.
    """
    connect()
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in actors if each["namespace"] == NAMESPACE]
    return sorted(name.removeprefix(RENDEZVOUS_PREFIX) for name in names if name.startswith(RENDEZVOUS_PREFIX))


def get_run(run: str) -> RunHandle:
    """A live run, by its name on the cluster of this process, or by its folder `<storage>/<name>`, which knows its
    cluster. Connects to that first if need be.

    Raises:
        ConfigError: there is no cluster, or no such run on it; if its driver was killed, this says so.
    """
    name = run.rstrip("/").rpartition("/")[2]
    address = None
    if "/" in run:
        driver = find_holder(Storage(run))
        if driver is not None and driver.is_alive() is False:
            raise ConfigError(f"{run}: the driver of this run was killed, and {RESUMES}. It was {driver}")
        if driver is None or driver.ray_address is None:
            raise ConfigError(f"{run}: no driver of this run is live; give <storage>/<name> of one that is")
        address = driver.ray_address
    connect(address)
    try:
        return RunHandle(name, ray.get_actor(RENDEZVOUS_PREFIX + name, namespace=NAMESPACE))
    except ValueError:
        others, here = ", ".join(live_runs()) or "none", ray.get_runtime_context().gcs_address
        raise ConfigError(
            f"run {name!r} is not live on the cluster at {here}; live there are: {others}. Where there are "
            "several, set RAY_ADDRESS to the one that the run printed, or give <storage>/<name>. If its driver was "
            f"killed, {RESUMES}"
        ) from None
