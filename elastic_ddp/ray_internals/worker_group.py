"""A Ray Train worker group whose workers come and go one by one, each in a placement group of its own.

What a worker held is free when it goes, and the bundle of a dead node blocks nobody. Nothing here waits for a worker
that is to be added: `request` asks for room, and every call of `advance` takes those on their way a step further.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Collection
from typing import Any, ClassVar

import ray
from ray.exceptions import RayActorError, RayError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.context import DistributedContext
from ray.train.v2._internal.execution.worker_group import WorkerGroup
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
from elastic_ddp.ray_internals.scaling import NODE_ID

_log = logging.getLogger(__name__)

START_WITHIN_S = 600.0
"""What a worker's process may take to be there once it has room: its environment may have to be installed first."""


class _Rooms(PlacementGroupHandle):
    """The placement groups of the workers that a group starts with, as the one handle that Ray Train expects."""

    def __init__(self, rooms: list[PlacementGroup]) -> None:
        self.rooms = rooms

    @property
    def placement_group(self) -> Any:
        return self

    def ready(self) -> Any:
        raise NotImplementedError("there is one for each worker")

    def wait(self, timeout_seconds: float = 30) -> bool:
        end = time.monotonic() + timeout_seconds
        return all(room.wait(max(0.0, end - time.monotonic())) for room in self.rooms)

    def shutdown(self) -> None:
        for room in self.rooms:
            remove_placement_group(room)
        self.rooms = []


@dataclasses.dataclass
class _Newcomer:
    """A worker on its way: room, then a process, then its context, then its training function."""

    room: PlacementGroup
    asked_at: float
    placed_at: float | None = None
    """When there was room for it."""
    actor: Any = None
    worker: Worker | None = None
    pending: Any = None
    """The reference that it waits for."""
    launched: bool = False
    """Whether that is the start of its training function, the last of them."""


def release_placement_groups(rooms: str) -> None:
    """Removes what is left of placement groups whose names begin so: those of a controller that was ended live on until
    the driver's process ends."""
    for each in placement_group_table().values():
        if each["name"].startswith(rooms) and each["state"] != "REMOVED":
            remove_placement_group(get_placement_group(each["name"]))


def actor_id(worker: Worker) -> str:
    """The id by which the worker's own process knows its actor."""
    return str(worker.actor._actor_id.hex())


class ElasticWorker(RayTrainWorker):
    """Ray Train's worker process, which takes SIGTERM for a notice. Ray makes it in the process's main thread."""

    def __init__(self) -> None:
        super().__init__()
        signals.listen_for_sigterm()


class ElasticWorkerGroup(WorkerGroup):
    """See the module. Ranks that Ray Train gives its workers are for its own books only."""

    _worker_cls = ElasticWorker
    avoid: ClassVar[list[str]] = []
    """Nodes that no worker is to be started on, by Ray's name. The process's own, as one group may follow another."""
    rooms: ClassVar[str] = ""
    """What the names of its placement groups begin with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rooms: dict[str, PlacementGroup] = {}
        self._newcomers: list[_Newcomer] = []

    # At the start, all at once.

    def _start_impl(self, *arguments: Any) -> None:
        """Ray Train starts a group again that could not be started, but not one whose worker dies in the last moment,
        when its function begins; and of a group that got so far it leaves the workers, and their room."""
        try:
            super()._start_impl(*arguments)
        except (RayActorError, WorkerGroupStartupFailedError) as error:
            if self._worker_group_state is not None:
                self._worker_group_state.shutdown()
                self._clear_state()
            raise WorkerGroupStartupFailedError(f"a worker was lost while all of them started: {error}") from error

    def _create_placement_group(self, scaling_config: Any, worker_group_context: WorkerGroupContext) -> _Rooms:
        selectors: list[Any] = worker_group_context.label_selector or [None] * worker_group_context.num_workers
        return _Rooms([self._ask_for_room(selector) for selector in selectors])

    def _ask_for_room(self, selector: dict[str, str] | None) -> PlacementGroup:
        if self.avoid and (avoid := {each["NodeID"] for each in ray.nodes() if each["Alive"]}.intersection(self.avoid)):
            selector = {**(selector or {}), NODE_ID: f"!in({','.join(sorted(avoid))})"}
        return placement_group(
            [self._worker_group_context.resources_per_worker],
            strategy="PACK",
            bundle_label_selector=[selector] if selector else None,
            name=self.rooms + uuid.uuid4().hex,
        )

    def _create_workers(self, num_workers: int, placement_group: Any, *args: Any, **kwargs: Any) -> list[Worker]:
        rooms: list[PlacementGroup] = placement_group.rooms
        actors = [self._create_actor(room) for room in rooms]
        try:
            metadata = ray.get([actor.get_metadata.remote() for actor in actors])
        except RayActorError:
            for actor in actors:
                ray.kill(actor)
            raise
        workers = [Worker(actor, each, self._resources()) for actor, each in zip(actors, metadata, strict=True)]
        self._rooms |= {actor_id(worker): room for worker, room in zip(workers, rooms, strict=True)}
        return WorkerGroup._assign_worker_ranks(workers)

    def _init_train_context(self, workers: list[Worker], sync_actor: Any) -> None:
        super()._init_train_context(workers, sync_actor)
        # The barrier of `ray.train.report`, which takes the number of workers for fixed: a process for nothing.
        ray.kill(sync_actor)

    def _create_actor(self, room: PlacementGroup) -> Any:
        runtime_env = self._get_worker_runtime_env(self._train_run_context.run_config.worker_runtime_env or {})
        actor = ray.remote(runtime_env=runtime_env, **bundle_to_remote_args(self._resources()))(self._worker_cls)
        strategy = PlacementGroupSchedulingStrategy(placement_group=room, placement_group_bundle_index=0)
        return actor.options(scheduling_strategy=strategy).remote()

    def _resources(self) -> dict[str, float]:
        resources: dict[str, float] = self._worker_group_context.resources_per_worker
        return resources

    # Later, one by one.

    @property
    def num_newcomers(self) -> int:
        """Workers on their way."""
        return len(self._newcomers)

    def request(self, num_workers: int) -> None:
        """Asks for room for more workers."""
        selectors = self._worker_group_context.label_selector
        for _ in range(num_workers):
            room = self._ask_for_room(selectors[0] if selectors else None)
            self._newcomers.append(_Newcomer(room, time.monotonic()))

    def keep_newcomers(self, number: int) -> None:
        """Gives up the youngest of those on their way, if there are more."""
        for each in self._newcomers[max(0, number) :]:
            self._dismiss(each)

    def withdraw(self, waiting_s: float) -> None:
        """Gives up newcomers that have waited for room for so long."""
        now = time.monotonic()
        for each in [each for each in self._newcomers if each.actor is None and now - each.asked_at >= waiting_s]:
            self._dismiss(each)

    def advance(self) -> int:
        """Takes newcomers as far as they get without waiting. Returns how many failed to start."""
        arrived, num_failed, now = [], 0, time.monotonic()
        for each in list(self._newcomers):
            try:
                if self._advance(each):
                    assert each.worker is not None
                    self._newcomers.remove(each)
                    self._rooms[actor_id(each.worker)] = each.room
                    arrived.append(each.worker)
                elif each.placed_at is not None and now - each.placed_at >= START_WITHIN_S:
                    raise TimeoutError(f"its process was not there after {START_WITHIN_S:g} s")
            except (RayError, TimeoutError) as error:
                _log.warning("a worker that was to be added failed to start: %s", error)
                self._dismiss(each)
                num_failed += 1
        if arrived:
            self._set_workers([*self.get_workers(), *arrived])
        return num_failed

    def _advance(self, newcomer: _Newcomer) -> bool:
        if newcomer.actor is None:
            if not newcomer.room.wait(0):
                return False
            newcomer.actor, newcomer.placed_at = self._create_actor(newcomer.room), time.monotonic()
            newcomer.pending = newcomer.actor.get_metadata.remote()
        while ray.wait([newcomer.pending], timeout=0)[0]:
            result = ray.get(newcomer.pending)
            if newcomer.worker is None:
                newcomer.worker = self._make_worker(newcomer.actor, result)
                newcomer.pending = self._init_context(newcomer.worker)
            elif not newcomer.launched:
                newcomer.launched = True
                newcomer.pending = newcomer.actor.run_train_fn.remote(self._worker_group_context.train_fn_ref)
            else:
                return True
        return False

    def _make_worker(self, actor: Any, metadata: Any) -> Worker:
        worker = Worker(actor, metadata, self._resources())
        workers = self.get_workers()
        neighbours = sum(each.metadata.node_ip == metadata.node_ip for each in workers)
        worker.distributed_context = DistributedContext(
            world_rank=len(workers),
            world_size=len(workers) + 1,
            local_rank=neighbours,
            local_world_size=neighbours + 1,
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

    def remove(self, ranks: Collection[int]) -> None:
        """Ends workers, dead or alive, and gives their room back at once."""
        kept = []
        for rank, worker in enumerate(self.get_workers()):
            if rank in ranks:
                ray.kill(worker.actor)
                remove_placement_group(self._rooms.pop(actor_id(worker)))
            else:
                kept.append(worker)
        self._set_workers(kept)

    def _dismiss(self, newcomer: _Newcomer) -> None:
        self._newcomers.remove(newcomer)
        if newcomer.actor is not None:
            ray.kill(newcomer.actor)
        remove_placement_group(newcomer.room)

    def _set_workers(self, workers: list[Worker]) -> None:
        for rank, worker in enumerate(workers):
            assert worker.distributed_context is not None
            worker.distributed_context = dataclasses.replace(
                worker.distributed_context, world_rank=rank, world_size=len(workers)
            )
        assert self._worker_group_state is not None
        self._worker_group_state = dataclasses.replace(self._worker_group_state, workers=workers)
        self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(workers))}
        self._world_rank_to_ongoing_poll.clear()  # they are known by rank
        self._latest_poll_status = None

    def _clear_state(self) -> None:
        for newcomer in list(self._newcomers):
            self._dismiss(newcomer)
        for room in self._rooms.values():
            remove_placement_group(room)
        self._rooms = {}
        super()._clear_state()
