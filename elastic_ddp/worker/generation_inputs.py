"""`GenerationInputs`: what a worker brings into each of its generations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from elastic_ddp.data.feed_cache import FeedCache
    from elastic_ddp.distributed.process_group import ProcessGroup
    from elastic_ddp.distributed.torch_store import StoreConnection
    from elastic_ddp.telemetry.event import Event
    from elastic_ddp.tensors.state_tree import Layout
    from elastic_ddp.worker.clock import WorkerClock
    from elastic_ddp.worker.job import Job
    from elastic_ddp.worker.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class GenerationInputs:
    """What a worker brings into each of its generations."""

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
