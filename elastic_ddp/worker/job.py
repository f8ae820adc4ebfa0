"""What the driver hands to every worker: the run's definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastic_ddp.checkpoint.record import different_runs, identity_of
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.order import EpochShape
from elastic_ddp.storage.storage import Storage

if TYPE_CHECKING:
    from elastic_ddp.data.source import Transform


COMMITS = "checkpoints"
"""The folder of a run's commits, in the run's storage."""


def has_commits(storage: Storage) -> bool:
    """Whether a run, in its own folder, has anything that other data or other settings could not go on from."""
    return bool(storage.list(f"{COMMITS}/commits"))


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, as its workers need to know it."""

    config: RunConfig
    train: Callable[[Any], Any]
    """The user's function, which takes a `Run`."""
    index: DatasetIndex
    transform: Transform | None
    storage: Storage
    """The run's own folder, `<storage>/<name>`."""
    session: str = ""
    """Of the driver, which holds the lease on the run."""

    def difference_to(self, record: Mapping[str, Any]) -> str | None:
        """What defines the run of a commit with this record and is something else here; None if it is the same run."""
        mine = {"identity": self.config.identity(), "data": self.index.fingerprint}
        different = different_runs(mine, record)
        there, here = (
            ", ".join(f"{name} is {identity[name]!r}" for name in different)
            for identity in (identity_of(record), identity_of(mine))
        )
        return f"{there}; here {here}" if different else None

    @property
    def shape(self) -> EpochShape:
        return EpochShape(self.index.num_rows, self.config.num_micro_batches, self.config.micro_batch_size)

    @property
    def total_steps(self) -> int:
        if self.config.steps is not None:
            return self.config.steps
        assert self.config.epochs is not None
        return self.config.epochs * self.shape.steps_per_epoch
