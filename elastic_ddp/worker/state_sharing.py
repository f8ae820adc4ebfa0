"""How the ranks of a new generation obtain one state: from a rank, from a commit, from shards, or as a new run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_ddp.distributed.assignment import Shards
from elastic_ddp.distributed.fsdp_units import device_of_shards
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.state_transfer import transfer_state
from elastic_ddp.distributed.strategy import Strategy
from elastic_ddp.telemetry.events import HyperparametersDiffer, Warned
from elastic_ddp.tensors.state_tree import Layout
from elastic_ddp.worker import hyperparameters
from elastic_ddp.worker.agreement import errors_on_all_ranks
from elastic_ddp.worker.held_shards import NOTHING, HeldShards, move_shards, share_plain
from elastic_ddp.worker.hyperparameters import Prepared
from elastic_ddp.worker.mirror import Mirror, find_shortage
from elastic_ddp.worker.train_state import TrainState

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from elastic_ddp.data.feed_cache import FeedCache
    from elastic_ddp.distributed.torch_store import StoreConnection
    from elastic_ddp.telemetry.event import Event
    from elastic_ddp.worker.clock import WorkerClock
    from elastic_ddp.worker.job import Job


@dataclass(frozen=True, kw_only=True)
class GenerationInputs:
    """The inputs that a worker brings into each of its generations."""

    job: Job
    state: TrainState
    device: torch.device
    store: StoreConnection
    feeds: FeedCache
    clock: WorkerClock
    restore: Callable[[ProcessGroup, Callable[[], Layout | None]], dict[str, Any] | None]
    """See `Checkpointer.restore`. Called if no rank holds a state."""
    record: Callable[[Event], None]
    """Appends an event to the ledger."""
    on_forming: Callable[[ProcessGroup], None]
    """Called with the process group before its ranks meet."""


def share_state(inputs: GenerationInputs, group: ProcessGroup, strategy: Strategy) -> None:
    """Brings all ranks to the state of the most advanced rank, of the newest commit, or of a new run.

    With FSDP, shards it and mirrors the shards.
    """
    if strategy.replicates_state:
        _share_replica(inputs, group)
    elif group.assignment.resharding is None:
        _shard_whole_state(inputs, group, strategy)
    else:
        _move_shards(inputs, group, strategy)


def _share_replica(inputs: GenerationInputs, group: ProcessGroup) -> None:
    """Brings all ranks to a state that one rank, or a commit, has as a whole."""
    state = inputs.state
    source = group.assignment.source
    receivers = group.assignment.receivers
    if source is None:
        if _resume(inputs, group, lambda: None):
            return
        _load_initial_weights(state, group, None)
        # A new run starts from the weights of rank 0, however each rank initialized its own.
        source = 0
        receivers = tuple(range(1, group.world_size))
    own = state.state_dict() if group.rank == source and receivers else None
    received = transfer_state(own, group, source=source, receivers=receivers, tick=inputs.clock.activity.tick)
    if received is not None:
        state.load_state_dict(received)


def _shard_whole_state(inputs: GenerationInputs, group: ProcessGroup, strategy: Strategy) -> None:
    """Shards the state of the newest commit, or of a new run. No rank holds more than one whole unit at a time."""
    state = inputs.state
    assert state.model is not None

    def shard(*, begins: bool = False) -> Layout | None:
        strategy.shard(state.optimizers, begins=begins)
        state.layout = strategy.layout(state.optimizers)
        return state.layout

    if not _resume(inputs, group, shard):
        layout = shard(begins=True)
        _load_initial_weights(state, group, layout)
        # The rest comes from rank 0, however each rank began.
        held = HeldShards.of(0, state.state_dict(), _own_shard(group), layout)
        shared = share_plain(held, group, inputs.clock.activity.tick, 0, 0, range(1, group.world_size))
        if group.rank:
            state.load_state_dict(replace(held, skeleton=shared.skeleton, plain=shared.plain).restored(layout))
    _mirror_shards(state, group, None, is_wanted=_has_room_for_mirrors(inputs, group, state.mirror_bytes()))


def _resume(inputs: GenerationInputs, group: ProcessGroup, make_layout: Callable[[], Layout | None]) -> bool:
    """Loads the newest commit, with the hyperparameters of the commit or of the code. Returns False if there is none.

    Raises:
        CheckpointError: as `load_state_dict`, or an optimizer or scheduler is another one.
        ConfigError: a changed scheduler cannot be moved to the run's position.
    """
    saved = inputs.restore(group, make_layout)
    if saved is None:
        return False
    state = inputs.state
    used = inputs.job.config.checkpoint.hyperparameters
    then = Prepared(**saved["prepared"])
    now = state.prepared
    hyperparameters.check_kinds(then, now)
    state.load_state_dict(saved)
    schedulers = state.all_schedulers()
    changes = hyperparameters.compare(state.optimizers, schedulers, then, now)
    if used == "code":
        hyperparameters.use_code(state.optimizers, schedulers, then, now)
        state.guard.count(state.schedulers)
        state.prepared = now
    if changes and group.rank == 0:
        listed = [change.to_json() for change in changes]
        inputs.record(HyperparametersDiffer(step=state.position.step, changes=listed, used=used))
    return True


def _load_initial_weights(state: TrainState, group: ProcessGroup, layout: Layout | None) -> None:
    """Loads the weights that a new run begins with, into the shards of each rank or on rank 0."""
    assert state.model is not None
    first = state.model.first_weights
    if state.load_initial_weights is not None:
        first.note_loaded(state.module, state.load_initial_weights(group, layout))
    with errors_on_all_ranks(group):
        if layout is not None or group.rank == 0:
            first.check()


def _move_shards(inputs: GenerationInputs, group: ProcessGroup, strategy: Strategy) -> None:
    """Moves the shards that the ranks hold of a state."""
    state = inputs.state
    assignment = group.assignment
    resharding = assignment.resharding
    source = assignment.source
    step = assignment.first_step
    assert resharding is not None and source is not None and step is not None
    if not resharding.held[group.rank]:  # this rank stood by, and may hold shards of an earlier step
        state.held = None
        state.finish_step = None
    if state.finish_step is not None and step == state.position.step:
        state.drop_doubt()
    receivers = tuple(rank for rank in assignment.receivers if rank in resharding.keepers)
    shared = share_plain(state.held or NOTHING, group, inputs.clock.activity.tick, step, source, receivers)
    if state.finish_step is not None:
        state.settle_doubt(shared)
    state.mirror = None  # its rows are in what is held
    has_room = partial(_has_room_for_mirrors, inputs, group)
    device = device_of_shards(inputs.job.config, group.device)
    held = move_shards(state.held or NOTHING, shared, group, device, has_room, inputs.clock.activity.tick)
    if assignment.ends_after_transfer:
        state.held = held
        state.shards = held.shards
        return
    strategy.shard(state.optimizers, held.tensors(held.shards.held[0]))
    state.layout = strategy.layout(state.optimizers)
    state.load_state_dict(held.restored(state.layout))
    mirrored = held.tensors(held.shards.held[1]) if len(held.shards.held) > 1 else None
    _mirror_shards(state, group, mirrored, is_wanted=mirrored is not None)
    state.held = None


def _mirror_shards(
    state: TrainState, group: ProcessGroup, rows: dict[str, torch.Tensor] | None, *, is_wanted: bool
) -> None:
    """Mirrors the shards if that is wanted, and records which shards this rank holds. Collective."""
    offset = group.assignment.mirror_offset
    own = _own_shard(group)
    state.mirror = Mirror(state.module, state.optimizers, group, offset, rows) if is_wanted else None
    state.shards = own if state.mirror is None else Shards(own.num, (*own.held, state.mirror.shard))


def _own_shard(group: ProcessGroup) -> Shards:
    num = group.assignment.num_shards
    return Shards(num, (group.rank % num,))


def _has_room_for_mirrors(inputs: GenerationInputs, group: ProcessGroup, num_bytes: int) -> bool:
    """Returns whether to mirror the shards. Warns if `num_bytes` for each rank's mirror are not free. Collective."""
    place = group.assignment
    if place.num_shards < place.world_size:  # every shard has replicas
        return False
    if place.world_size == 1 or place.handover_only or not inputs.job.config.fsdp.mirror:
        return False
    shortage = find_shortage(num_bytes, group, device_of_shards(inputs.job.config, group.device))
    if shortage is not None and group.rank == 0:
        text = f"The shards have no mirrors: {shortage}. If a worker dies, the run resumes from its newest commit."
        inputs.record(Warned(text=text))
    return shortage is None
