"""A Ray Train worker group whose workers are added and removed one by one, each in its own placement group.

A removed worker's resources are free at once, and the bundle of a dead node blocks no other worker. Adding a worker
does not block: `request` reserves resources, and each call of `advance` moves the starting workers forward.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import ray
from ray.exceptions import RayActorError, RayError
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.context import DistributedContext
from ray.train.v2._internal.execution.worker_group import ActorMetadata, WorkerGroup, state, worker_group
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupContext
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_ddp import signals
from elastic_ddp.ray_internals.ray_messages import mark_messages
from elastic_ddp.ray_internals.scaling_policy import NODE_ID
from elastic_ddp.ray_internals.standbys import Standbys, StartingWorker
from elastic_ddp.ray_internals.worker_states import death_cause
from elastic_ddp.rendezvous import standby_process
from elastic_ddp.telemetry.event import EXITED

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class _PlacementGroups(PlacementGroupHandle):
    """The placement groups of a group's first workers, as the one handle that Ray Train expects."""

    def __init__(self, placement_groups: list[PlacementGroup]) -> None:
        self.placement_groups = placement_groups

    @property
    def placement_group(self) -> Any:
        return self

    def ready(self) -> Any:
        raise NotImplementedError("each worker has its own placement group")

    def wait(self, timeout_seconds: float = 30) -> bool:
        end = time.monotonic() + timeout_seconds
        return all(group.wait(max(0.0, end - time.monotonic())) for group in self.placement_groups)

    def shutdown(self) -> None:
        for group in self.placement_groups:
            remove_placement_group(group)
        self.placement_groups = []


def release_placement_groups(prefix: str) -> None:
    """Removes placement groups. Ray keeps groups of a killed controller until the driver's process ends."""
    for group in placement_group_table().values():
        if group["name"].startswith(prefix) and group["state"] != "REMOVED":
            remove_placement_group(get_placement_group(group["name"]))


def actor_id(worker: Worker) -> str:
    """Returns the id of the worker's actor, as its own process knows it."""
    return str(worker.actor._actor_id.hex())


class ElasticWorker(RayTrainWorker):
    """Ray Train's worker process, with SIGTERM as a notice to leave. Ray creates it in the main thread.

    A standby sees `gpus`, and uses none before `take_place`.
    """

    def __init__(
        self, environment: Mapping[str, str], *, is_standby: bool = False, gpus: Sequence[int | str] = ()
    ) -> None:
        gc.disable()  # imports of torch and its compiler take a fifth less; `work` enables it
        os.environ.update(environment)
        super().__init__()
        mark_messages()
        signals.listen_for_sigterm()
        if is_standby:
            standby_process.stand_by(gpus)

    def take_place(self, gpus: Sequence[int | str], predecessor: int) -> bool:
        """Ends the wait of a standby; see `standby_process.take_place`."""
        return standby_process.take_place(gpus, predecessor)


def device_of_worker() -> torch.device:
    """Returns this worker's device, and makes it the current one. `ray.train.torch.get_device` imports all trainers."""
    import torch
    from ray.air._internal.device_manager import get_torch_device_manager_by_context

    device: torch.device = get_torch_device_manager_by_context().get_devices()[0]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


class ElasticWorkerGroup(WorkerGroup):
    """Adds and removes workers while others train. The ranks of Ray Train are unrelated to ranks in a generation."""

    _worker_cls: Any = ElasticWorker
    avoid: ClassVar[list[str]] = []
    """Ids of nodes on which no worker may start. Shared by all groups of the process, as one can replace another."""
    placement_group_prefix: ClassVar[str] = ""
    """Start of the names of placement groups."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._placement_groups: dict[str, PlacementGroup] = {}  # of running workers, by actor id
        self._starting: list[StartingWorker] = []
        self.standbys = Standbys(self._start_standby, self._follow)

    # The first workers start together.

    def _start_impl(self, *arguments: Any) -> None:
        """Starts the first workers. All failures of a start are retried, and leave no worker or resources behind.

        Ray Train does not retry if a worker dies when its function starts, and leaves the other workers running.
        """
        # The actor for the barrier of `ray.train.report` is not used here, and its process takes 1 s.
        no_actor: Any = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda **_: ""))
        worker_group.SynchronizationActor = no_actor  # type: ignore[attr-defined]
        state._shutdown_sync_actor = lambda sync_actor: None
        try:
            super()._start_impl(*arguments)
        except (RayActorError, WorkerGroupStartupFailedError) as error:
            if self._worker_group_state is not None:
                self._worker_group_state.shutdown()
                self._clear_state()
            raise WorkerGroupStartupFailedError(f"a worker failed during the start of its group: {error}") from error

    def _create_placement_group(
        self, scaling_config: Any, worker_group_context: WorkerGroupContext
    ) -> _PlacementGroups:
        return _PlacementGroups([self._reserve() for _ in range(worker_group_context.num_workers)])

    def _reserve(self) -> PlacementGroup:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} if self.avoid else set()
        avoid = alive.intersection(self.avoid)
        return placement_group(
            [self._worker_group_context.resources_per_worker],
            strategy="PACK",
            bundle_label_selector=[{NODE_ID: f"!in({','.join(sorted(avoid))})"}] if avoid else None,
            name=self.placement_group_prefix + uuid.uuid4().hex,
        )

    def _create_workers(self, num_workers: int, placement_group: Any, *args: Any, **kwargs: Any) -> list[Worker]:
        groups: list[PlacementGroup] = placement_group.placement_groups
        actors = [self._create_actor(group) for group in groups]
        try:
            metadata = ray.get([actor.get_metadata.remote() for actor in actors])
        except RayActorError:
            for actor in actors:
                ray.kill(actor)
            raise
        workers = [Worker(actor, data, self._resources()) for actor, data in zip(actors, metadata, strict=True)]
        self._placement_groups |= {actor_id(worker): group for worker, group in zip(workers, groups, strict=True)}
        return WorkerGroup._assign_worker_ranks(workers)

    def _create_actor(self, placement_group: PlacementGroup) -> Any:
        strategy = PlacementGroupSchedulingStrategy(placement_group=placement_group, placement_group_bundle_index=0)
        return self._start_actor(self._resources(), {"scheduling_strategy": strategy})

    def _start_actor(self, resources: dict[str, float], options: Mapping[str, Any], **arguments: Any) -> Any:
        variables = (self._train_run_context.run_config.worker_runtime_env or {}).get("env_vars")
        # Only if needed: Ray starts a process that has a runtime environment with two imports of Ray instead of one.
        runtime_env: dict[str, Any] = {"runtime_env": {"env_vars": variables}} if variables else {}
        actor = ray.remote(**runtime_env, **bundle_to_remote_args(resources))(self._worker_cls)
        environment = {**get_env_vars_to_propagate(), **(variables or {})}
        return actor.options(**options).remote(environment, **arguments)

    def _resources(self) -> Any:
        return self._worker_group_context.resources_per_worker

    # Later workers start one by one.

    @property
    def num_starting(self) -> int:
        return len(self._starting)

    def request(self, num_workers: int) -> None:
        for _ in range(num_workers):
            self._starting.append(StartingWorker(self._reserve(), time.monotonic()))

    def limit_starting(self, num_workers: int) -> None:
        """Cancels the newest starting workers if there are more than `num_workers`."""
        for starting in self._starting[max(0, num_workers) :]:
            self._cancel(starting)

    def cancel_unplaced(self, timeout_s: float) -> None:
        """Cancels starting workers that have waited `timeout_s` for their resources."""
        now = time.monotonic()
        for starting in list(self._starting):
            if starting.actor is None and now - starting.requested_at >= timeout_s:
                self._cancel(starting)

    def advance(self) -> int:
        """Moves all starting workers forward without blocking. Returns how many failed to start."""
        started = []
        num_failed = 0
        for starting in list(self._starting):
            try:
                if self._advance(starting):
                    assert starting.worker is not None and starting.placement_group is not None
                    self._starting.remove(starting)
                    self._placement_groups[actor_id(starting.worker)] = starting.placement_group
                    started.append(starting.worker)
                else:
                    starting.check_timeout()
            except (RayError, TimeoutError) as error:
                _log.warning("a new worker failed to start: %s", death_cause(error) or EXITED)
                self._cancel(starting)
                num_failed += 1
        if started:
            self._set_workers([*self.get_workers(), *started])
        return num_failed

    def _advance(self, starting: StartingWorker) -> bool:
        """Moves one starting worker forward. Returns whether it is running."""
        if starting.actor is None:
            assert starting.placement_group is not None
            if not starting.placement_group.wait(0):
                return False
            starting.actor = self._create_actor(starting.placement_group)
            starting.placed_at = time.monotonic()
            starting.pending = starting.actor.get_metadata.remote()
        return self._use_standby(starting) or self._follow(starting)

    def _follow(self, starting: StartingWorker) -> bool:
        """Moves a worker that has a process forward. Returns whether it is running."""
        while ray.wait([starting.pending], timeout=0)[0]:
            result = ray.get(starting.pending)
            if starting.worker is None:
                starting.worker = self._make_worker(starting.actor, result)
                starting.pending = self._init_context(starting.worker)
            elif not starting.launched:
                starting.launched = True
                starting.pending = starting.actor.run_train_fn.remote(self._worker_group_context.train_fn_ref)
            else:
                return True
        return False

    def _make_worker(self, actor: Any, metadata: Any) -> Worker:
        worker = Worker(actor, metadata, self._resources())
        workers = self.get_workers()
        num_on_node = sum(other.metadata.node_ip == metadata.node_ip for other in workers)
        worker.distributed_context = DistributedContext(
            world_rank=len(workers),
            world_size=len(workers) + 1,
            local_rank=num_on_node,
            local_world_size=num_on_node + 1,
            node_rank=0,
        )
        return worker

    def _init_context(self, worker: Worker) -> Any:
        arguments: dict[str, Any] = {}
        for callback in self._execution_group_callbacks:
            arguments |= {name: values[0] for name, values in callback.before_init_train_context([worker]).items()}
        return worker.actor.init_train_context.remote(
            train_run_context=self._train_run_context,
            distributed_context=worker.distributed_context,
            synchronization_actor=self._worker_group_state.sync_actor,
            storage_context=self._storage_context,
            worker_callbacks=self._worker_callbacks_to_propagate,
            controller_actor=ray.get_runtime_context().current_actor,
            **arguments,
        )

    # Standbys hold no resources. A standby takes the resources of a worker that fails, exits, or is still starting.

    def _start_standby(self, neighbor: ActorMetadata) -> StartingWorker:
        """Starts a standby on the node of a worker."""
        options = {"label_selector": {NODE_ID: neighbor.node_id}}
        actor = self._start_actor({}, options, is_standby=True, gpus=neighbor.gpu_ids)
        now = time.monotonic()
        return StartingWorker(None, now, placed_at=now, actor=actor, pending=actor.get_metadata.remote())

    def _use_standby(self, starting: StartingWorker) -> bool:
        """Gives the place of a starting worker to a standby, if there is one on its node. Returns whether it did.

        Only a process with these resources knows which GPUs they are, so the worker's process must have started.
        """
        if starting.worker is not None or not ray.wait([starting.pending], timeout=0)[0]:
            return False
        replacement = self.standbys.take(ray.get(starting.pending))
        if replacement is None:
            return False
        ray.kill(starting.actor)
        starting.actor = replacement.actor
        starting.worker = replacement
        return True

    def replace(self, ranks: Collection[int]) -> set[int]:
        """Kills workers, dead or alive, and gives the place of each to a standby on its node, if there is one.

        Returns the ranks of the workers that were replaced; the ranks of others do not change.
        """
        workers = list(self.get_workers())
        replaced = set()
        for rank in sorted(ranks):
            worker = workers[rank]
            ray.kill(worker.actor)
            replacement = self.standbys.take(worker.metadata)
            if replacement is not None:
                self._placement_groups[actor_id(replacement)] = self._placement_groups.pop(actor_id(worker))
                workers[rank] = replacement
                replaced.add(rank)
        if replaced:
            self._set_workers(workers)
        return replaced

    def remove(self, ranks: Collection[int]) -> None:
        """Kills workers, dead or alive, and frees their resources at once."""
        remaining = []
        for rank, worker in enumerate(self.get_workers()):
            if rank in ranks:
                ray.kill(worker.actor)
                remove_placement_group(self._placement_groups.pop(actor_id(worker)))
            else:
                remaining.append(worker)
        self._set_workers(remaining)

    def _cancel(self, starting: StartingWorker) -> None:
        self._starting.remove(starting)
        if starting.actor is not None:
            ray.kill(starting.actor)
        assert starting.placement_group is not None
        remove_placement_group(starting.placement_group)

    def _set_workers(self, workers: list[Worker]) -> None:
        for rank, worker in enumerate(workers):
            assert worker.distributed_context is not None
            worker.distributed_context = dataclasses.replace(
                worker.distributed_context, world_rank=rank, world_size=len(workers)
            )
        assert self._worker_group_state is not None
        self._worker_group_state = dataclasses.replace(self._worker_group_state, workers=workers)
        self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(workers))}
        self._world_rank_to_ongoing_poll.clear()  # polls are keyed by rank, and ranks have changed
        self._latest_poll_status = None

    def _clear_state(self) -> None:
        self.standbys.clear()
        for starting in list(self._starting):
            self._cancel(starting)
        for group in self._placement_groups.values():
            remove_placement_group(group)
        self._placement_groups = {}
        super()._clear_state()
