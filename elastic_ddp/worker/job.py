"""The driver's messages to a worker: `Job`, the definition of the run, and `WorkerContext`, the worker's identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from elastic_ddp.checkpoint.record import different_runs
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.map_style import MapStyleIndex
from elastic_ddp.data.order import EpochShape
from elastic_ddp.data.weights import SampleWeights
from elastic_ddp.errors import CheckpointError
from elastic_ddp.rendezvous.members import Member
from elastic_ddp.storage.storage import Storage

if TYPE_CHECKING:
    from elastic_ddp.checkpoint import Commit
    from elastic_ddp.data.work import CollateFn, Transform


COMMITS = "checkpoints"
"""The folder of a run's commits, in the run's storage."""


def has_commits(storage: Storage) -> bool:
    """Returns whether the run in this folder has commits, which other data or settings cannot continue."""
    return bool(storage.list(f"{COMMITS}/commits"))


@dataclass(frozen=True)
class WorkerContext:
    """The identity of a worker, its device, and all resources of its node, by Ray's names."""

    member: Member
    device: torch.device
    node_resources: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, as its workers see it."""

    config: RunConfig
    train: Callable[[Any], Any]
    """The training function, which takes a `Run`."""
    index: DatasetIndex | MapStyleIndex
    transform: Transform | None
    collate_fn: CollateFn | None = None
    weights: SampleWeights | None = None
    storage: Storage
    """The run's own folder, `<storage>/<name>`."""
    session: str = ""
    """The session of the driver that holds the run's lease."""
    debugged: Storage | None = None
    """In `ElasticTrainer.debug`, which saves nothing: the folder that has the commits of the run."""

    def identity(self) -> dict[str, Any]:
        """Returns what decides the weights' bits, as JSON values."""
        weights = None if self.weights is None else self.weights.fingerprint
        return {**self.config.identity(), "sample_weights": weights, "data": self.index.fingerprint}

    def to_record(self) -> dict[str, Any]:
        """Returns the entries for a commit's record that identify the run."""
        return {"identity": self.identity(), "data_set": str(self.index)}

    def difference_to(self, record: Mapping[str, Any]) -> str | None:
        """Returns how this run differs from the run of a commit with this record; None if it is the same run."""
        own = self.to_record()
        before, now = record.get("data_set"), own["data_set"]
        data = "has the same paths but other contents" if before == now else f"is {now}"
        changes = [
            f"data was {before} and {data} ({self.index.compared_by})"
            if name == "data"
            else f"{name} was {record['identity'][name]!r} and is {own['identity'][name]!r}"
            for name in different_runs(own, record)
        ]
        return "; ".join(changes) or None

    def check_same_run(self, commit: Commit) -> None:
        """Raises a CheckpointError if a commit belongs to another run."""
        difference = self.difference_to(commit.record)
        if difference is not None:
            raise CheckpointError(
                f"{commit.key} belongs to another run: {difference}. To start from its weights, use run.load_weights."
            )

    @property
    def shape(self) -> EpochShape:
        """How an epoch is cut into steps and micro-batches."""
        config = self.config
        return EpochShape(self.index.num_rows, config.num_micro_batches, config.micro_batch_size, config.data.drop_last)

    @property
    def num_data_tasks(self) -> int:
        """How many tasks of a worker's data pipeline must run at a time."""
        concurrency = self.config.data.concurrency
        if isinstance(self.index, MapStyleIndex):
            return concurrency
        return 2 if concurrency > 1 and (self.transform or self.collate_fn) else 1  # one reads

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole run."""
        if self.config.steps is not None:
            return self.config.steps
        assert self.config.epochs is not None
        return self.config.epochs * self.shape.steps_per_epoch
