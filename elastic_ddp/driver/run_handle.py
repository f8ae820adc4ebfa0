"""Handles to live runs, for other processes of the same Ray cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import ray

from elastic_ddp.config.settings import MAX_DURATION_S
from elastic_ddp.driver.cluster import RESUMES, connect
from elastic_ddp.errors import ConfigError, ElasticDDPError, shorten
from elastic_ddp.ray_internals.nodes import draining_nodes
from elastic_ddp.rendezvous.actor import NAMESPACE, RENDEZVOUS_PREFIX, RendezvousHandle
from elastic_ddp.storage.lease import find_holder
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger, summarize
from elastic_ddp.telemetry.stacks import stacks_of_answers

MAX_PROFILED_STEPS = 20
_POLL_S = 0.2
_STACKS_WITHIN_S = 10.0
"""How long workers have to send their stacks; most need less than a second."""
_ENDED = {
    "finished": "this run has finished",
    "left": "this run left its loop before the last step, and the command that started it resumes it",
    "stopped": "this run was stopped, and the command that started it resumes it",
    "failed": "this run has failed, and the command that started it resumes it",
}


class RunHandle:
    """A handle to a live run, returned by `get_run`.

    Use it from any process on a node of the run's Ray cluster. Each method raises `ElasticDDPError` if the run has
    ended.

    Attributes:
        name: the run's name.
    """

    def __init__(self, name: str, rendezvous: RendezvousHandle) -> None:
        self.name = name
        self._rendezvous = rendezvous

    def status(self) -> Mapping[str, Any]:
        """Returns the current state of the run. A value that is not known yet is None.

        Returns:
            A dict with these keys:

            - `name`, `total_steps`, `min_workers`, `max_workers`: from the configuration.
            - `state`: `starting`, `training`, `waiting` (fewer than `min_workers`), `stopping`, `finished`,
              `left` (its loop, before the last step), `stopped` or `failed`.
            - `waiting_for`: what a run with fewer than `min_workers` waits for, such as CPUs that another run holds.
            - `step`, `loss`, `steps_per_s`: the newest step, its training loss, and the speed in steps per second.
            - `generation`, `world_size`: the current generation, and its number of workers (0 while waiting).
            - `members`: a dict for each worker: `rank`, `node` (address), `node_id` (Ray's node id), `pid`, `id`.
            - `standbys`: the same, without `rank`, for each standby that is ready.
            - `wanted`: the number of workers requested by `resize`.
            - `draining`: ids of nodes that are being drained.
            - `last_commit`: steps done in the newest commit.
            - `last_worker_failure`: `time` and `error` of the last worker failure.
            - `phases`: the ledger's `phases_measured` event, averaged over the newest steps of the current generation:
              30 s, and at least 20 steps if it has them.
            - `bottleneck`: what bounds these steps, as `kind` (`data`, `communication`, `compute`, `other`, `slow rank`
              or `slow node`), `reason` and `advice`, and the slow `ranks` or `node`; None for fewer than 20 steps.
            - `driver`: `host` and `pid` of the driver, the `uri` of the run's folder, and the id of the `job` of Ray
              Jobs that the driver is, or None.
            - `pid`: process id of the rendezvous.
        """
        status: Mapping[str, Any] = self._call("status")
        return status

    def resize(self, num_workers: int) -> None:
        """Requests a number of workers. Returns once the run has accepted the request.

        The run trains on `num_workers`, or on as many as the cluster has capacity for, until the next `resize`. Surplus
        workers leave at the next step boundary. New workers join once they are ready. No step is lost or repeated.

        Args:
            num_workers: the number of workers, from `min_workers` to `max_workers`.

        Raises:
            ConfigError: `num_workers` is out of range or not an int.
        """
        status = self.status()
        least = status["min_workers"]
        most = status["max_workers"]
        if isinstance(num_workers, bool) or not isinstance(num_workers, int):
            raise ConfigError(f"num_workers={num_workers!r} is not an int.")
        if not least <= num_workers <= most:
            raise ConfigError(
                f"num_workers={num_workers} is not from min_workers={least} to max_workers={most} of run "
                f"{self.name!r}. Use a number in that range, or stop the run and resume it with another range."
            )
        self._call("resize", num_workers)

    def drain(self, node: str, *, deadline_s: float = 30.0) -> int:
        """Moves the run's workers off a node. Blocks until they have left.

        The workers leave at the next step boundary if at least `min_workers` others remain. Otherwise training
        continues until replacements have joined, for half of the deadline at most. Then the workers leave anyway; the
        last one hands its state to a new worker or commits it. No worker starts on the node until `undrain`, or a
        restart of the driver.

        Args:
            node: the node's address or Ray's id of it, as in `status()["members"]`.
            deadline_s: seconds until the node is gone.

        Returns:
            The number of workers that left.

        Raises:
            ConfigError: the run has no worker on the node, or `deadline_s` is out of range.
            ElasticDDPError: workers are still on the node after the deadline.
        """
        if not 0 < deadline_s <= MAX_DURATION_S:
            raise ConfigError(
                f"deadline_s={deadline_s:g} is not from 0 to {MAX_DURATION_S:g}. Use the seconds that the node has "
                "left."
            )
        node_ids = self._call("drain", node, deadline_s)
        if not node_ids:
            known = sorted({f"{member['node']} ({member['node_id']})" for member in self.status()["members"]})
            nodes = ", ".join(known) or "none yet"
            raise ConfigError(f"run {self.name!r} has no worker on node {node!r}. Its nodes are {nodes}.")
        end = time.monotonic() + deadline_s
        leaving = set[str]()
        while remaining := {member["id"] for member in self.status()["members"] if member["node_id"] in node_ids}:
            leaving |= remaining
            if time.monotonic() > end:
                raise ElasticDDPError(
                    f"{len(remaining)} workers of run {self.name!r} are still on node {node} after {deadline_s:g} s. "
                    "Use a deadline_s that is longer than a step."
                )
            time.sleep(_POLL_S)
        return len(leaving)

    def undrain(self, node: str) -> None:
        """Lets the run use a node again after `drain`. Returns once the run has accepted the request.

        Workers that have not left stay. New ones start within `resize_interval_s`, up to `max_workers`.

        Args:
            node: the node's address or Ray's id of it, as in `status()["draining"]`.

        Raises:
            ConfigError: the run does not avoid the node, or Ray itself drains it, which cannot be undone.
        """
        addresses = {each["NodeID"]: each["NodeManagerAddress"] for each in ray.nodes()}
        draining = {node_id: addresses.get(node_id, "?") for node_id in self.status()["draining"]}
        node_ids = [node_id for node_id, address in draining.items() if node in (node_id, address)]
        if not node_ids:
            known = ", ".join(f"{address} ({node_id})" for node_id, address in draining.items()) or "none"
            raise ConfigError(f"run {self.name!r} does not avoid node {node!r}. Drained nodes: {known}.")
        by_ray = set(node_ids) & draining_nodes().keys()
        if by_ray:
            raise ConfigError(
                f"Ray itself drains node {node} ({', '.join(by_ray)}), because of a spot notice, its autoscaler or "
                "`ray drain-node`. That cannot be undone; restart Ray on the node: `ray stop`, then `ray start`."
            )
        for node_id in node_ids:
            self._call("undrain", node_id)

    def checkpoint(self) -> int:
        """Requests a commit at the next step boundary. Blocks until it is durable; a failed save is retried.

        Returns:
            The number of steps done in the commit.

        Raises:
            ElasticDDPError: the run ended before the commit was complete.
        """
        return int(self._wait_for("committed", self._call("checkpoint")))

    def verify(self) -> str:
        """Requests a verified step. Blocks until it is done.

        Returns:
            What differs between the ranks and which rank is at fault; "" if all bits are equal. If bits differ, the run
            takes the action of `verify.action`.

        Raises:
            ElasticDDPError: the run cannot be verified, or ended before the step.
        """
        request = self._call("verify")
        if isinstance(request, str):
            raise ElasticDDPError(f"run {self.name!r} cannot be verified: {request}")
        return str(self._wait_for("verified", request))

    def stop(self) -> None:
        """Requests that the run commit and stop at the next step boundary, as Ctrl-C in its driver does.

        Returns once the run has accepted the request. The same command resumes the run. A submitted driver is not
        restarted, also if it dies before the commit.

        Raises:
            ElasticDDPError: the run has ended, or the driver of a submitted run has died and is restarted.
        """
        job = self.status()["driver"]["job"]
        if job is not None:
            from elastic_ddp.driver.submissions import STOPPED, forbid_restart

            forbid_restart(job, STOPPED)
        self._call("stop")

    def stacks(self) -> Mapping[str, Any]:
        """Returns the Python stacks of all threads of all workers, as they are now.

        A thread beside the training thread answers, so a worker that hangs in a collective or in native code answers,
        too, unless that code holds Python's global interpreter lock. Waits up to 10 s for answers.

        Returns:
            A dict with these keys:

            - `workers`: a dict for each worker that answered: `rank` (None for a worker that is not in the current
              generation), `node`, `pid`, `id`, `place` (what its training thread does), and `threads`, a list of dicts
              with `name` and `stack`, the training thread first.
            - `missing`: a dict for each other worker: `rank`, `node`, `pid`, `id` and `reason`.
        """
        return stacks_of_answers(self._answers(self._call("request_stacks"), _STACKS_WITHIN_S), _STACKS_WITHIN_S)

    def profile(
        self,
        *,
        num_steps: int = 5,
        ranks: Sequence[int] | None = None,
        memory: bool = False,
        timeout_s: float = 600.0,
    ) -> Mapping[str, Any]:
        """Makes `torch.profiler` traces of the next steps of the run. Blocks until they are in the run's storage.

        All ranks record the same steps. Training continues with the same bits, somewhat slower during these steps. If
        workers join, leave or fail meanwhile, a rank's trace ends with the steps that are done.

        Args:
            num_steps: the number of steps, from 1 to 20.
            ranks: the ranks to profile; None for all.
            memory: whether to record the allocations of tensors, too. On a GPU this adds a memory snapshot for
                https://pytorch.org/memory_viz.
            timeout_s: how long to wait for the traces, in seconds.

        Returns:
            A dict with these keys:

            - `uri`: the run's folder, in which the files are.
            - `ranks`: a dict for each rank: `rank`, `node`, `pid`, `id`, and either `error`, the reason why there is no
              trace, or `first_step`, `num_steps`, `ended_early` (why it has fewer steps, or None), `window_s`,
              `compute_s`, `communication_s`, `overlap_s`, `idle_s`, `device`, `operators`, `memory` (see
              `elastic_ddp.telemetry.trace.figures_of`), `peak_memory_bytes` (on a GPU of tensors, on a CPU of the
              process), and `trace` and `snapshot`, the names of the files.

        Raises:
            ConfigError: an argument is out of range, or the run has no such rank.
            ElasticDDPError: the run does not train at the moment, or another profile is not complete yet.
        """
        if isinstance(num_steps, bool) or not isinstance(num_steps, int) or not 1 <= num_steps <= MAX_PROFILED_STEPS:
            raise ConfigError(
                f"num_steps={num_steps!r} is not an int from 1 to {MAX_PROFILED_STEPS}. A step can have tens of "
                "thousands of events, which the worker holds in memory. 5 steps are enough for most questions."
            )
        if not 0 < timeout_s <= MAX_DURATION_S:
            raise ConfigError(f"timeout_s={timeout_s:g} is not from 0 to {MAX_DURATION_S:g}. Use a multiple of a step.")
        status = self.status()
        known = [member["rank"] for member in status["members"]]
        if ranks is not None and (not ranks or len({*ranks}) < len(ranks) or not {*ranks} <= {*known}):
            names = shorten([*map(str, known)])
            raise ConfigError(
                f"ranks={list(ranks)!r} are not different ranks of run {self.name!r}. Its ranks are now: {names}."
            )
        request = self._call("request_profile", ranks, num_steps, memory)
        if isinstance(request, str):
            raise ElasticDDPError(f"run {self.name!r} cannot be profiled: {request}. Try again later.")
        silent = {"error": f"no trace within {timeout_s:g} s. Use a longer timeout_s, or fewer steps."}
        workers = self._answers(request, timeout_s)
        facts = [worker | (worker.pop("answer") or silent) for worker in workers]
        return {"uri": status["driver"]["uri"], "ranks": facts}

    def _wait_for(self, method: str, request: int) -> Any:
        """Returns the result of a request, once the run has one."""
        while (result := self._call(method, request)) is None:
            time.sleep(_POLL_S)
        return result

    def _answers(self, request: int, within_s: float) -> list[dict[str, Any]]:
        """Returns the answers of workers to a request, once all have come; see `Requests.answers`."""
        end = time.monotonic() + within_s
        while True:
            is_over = time.monotonic() >= end
            answers: list[dict[str, Any]] | None = self._call("answers", request)
            if answers is None:
                raise ElasticDDPError(f"run {self.name!r}: its rendezvous has restarted meanwhile. Ask again.")
            if is_over or all(worker["answer"] is not None for worker in answers):
                return answers
            time.sleep(_POLL_S)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._rendezvous, method).remote(*arguments))
        except ray.exceptions.RayActorError as error:
            raise ElasticDDPError(f"run {self.name!r} has ended. `elastic-ddp show` shows how.") from error


def live_runs() -> list[str]:
    """Returns the names of the live runs on the Ray cluster of this process. Connects to the cluster if needed.

    Raises:
        ConfigError: there is no cluster to connect to.
    """
    connect()
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted(name.removeprefix(RENDEZVOUS_PREFIX) for name in names if name.startswith(RENDEZVOUS_PREFIX))


def get_run(run: str | PathLike[str]) -> RunHandle:
    """Returns a handle to a live run.

    Args:
        run: the run's name, on the Ray cluster of this process (connects to the one at `RAY_ADDRESS` or on this machine
            if needed); or the run's folder `<storage>/<name>`, which records the address of its cluster.

    Raises:
        ConfigError: there is no cluster to connect to, or no live run of that name on it.
    """
    run = os.fspath(run)
    name = run.rstrip("/").rpartition("/")[2]
    address = None
    if "/" in run:
        driver = find_holder(Storage(run))
        if driver is not None and driver.is_alive() is False:
            raise ConfigError(f"{run}: the driver of this run was killed, and {RESUMES}. The driver was {driver}.")
        if driver is None or driver.ray_address is None:
            status = summarize(read_ledger(Storage(run)))["status"]
            ended = _ENDED.get(status, "no run is live in this folder. Use <storage>/<name> of a live run")
            raise ConfigError(f"{run}: {ended}. `elastic-ddp show {run}` shows the record of a run.")
        address = driver.ray_address
    connect(address)
    try:
        return RunHandle(name, ray.get_actor(RENDEZVOUS_PREFIX + name, namespace=NAMESPACE))
    except ValueError:
        others = ", ".join(live_runs()) or "none"
        cluster = ray.get_runtime_context().gcs_address
        raise ConfigError(
            f"run {name!r} is not live on the cluster at {cluster}. Live runs there: {others}. For another "
            "cluster, set RAY_ADDRESS to the address that the run printed, or use <storage>/<name>. If the run's "
            f"driver was killed, {RESUMES}. `elastic-ddp show <storage>/<name>` shows a run that has ended."
        ) from None
