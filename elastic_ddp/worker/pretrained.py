"""The weights of another run, for a run to begin with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from elastic_ddp.checkpoint import Commit, CommitCatalog
from elastic_ddp.checkpoint.reader import build_state, meta_tensors
from elastic_ddp.errors import CheckpointError, ConfigError, shorten
from elastic_ddp.storage.retry import RetryingStorage
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry.events import CommitRejected, Event, WeightsLoaded
from elastic_ddp.tensors.state_tree import dtype_name
from elastic_ddp.worker.agreed_errors import agree_on_error, without_traceback
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.restore import first_usable
from elastic_ddp.worker.shared_read import read_shared

if TYPE_CHECKING:
    from elastic_ddp.distributed.process_group import ProcessGroup
    from elastic_ddp.rendezvous.hang import Activity

_log = logging.getLogger(__name__)
MODEL = "model"
"""The component of a state with the weights."""


@dataclass(frozen=True)
class Weights:
    """Those of a model in another run's commits.

    Attributes:
        uri: the run's folder.
        step: of the commit; None for the newest that can be used.
        strict: refuse names that only one of the two has.
    """

    uri: str
    step: int | None
    strict: bool

    def load(
        self, module: torch.nn.Module, group: ProcessGroup, record: Callable[[Event], None], activity: Activity
    ) -> None:
        """Every rank calls it, and gets the same or raises the same: rank 0's word counts, as the run that they are of
        may go on meanwhile.

        Args:
            record: appends an event to the ledger; rank 0 reports what was loaded, and each unusable commit.
            activity: told of what is read, which is no hang however long it takes.

        Raises:
            ConfigError: there is no such commit, or it does not fit the model.
            CheckpointError: none can be used.
            StorageError: the storage could not be read.
        """
        storage = self._storage()
        store = CommitCatalog(storage)
        fits: dict[int, Fit] = {}

        def read(commit: Commit, skeleton: bytes) -> dict[str, Any]:
            error: Exception | None = None
            try:
                fits[commit.step] = Fit.of(module, commit, skeleton)
                fits[commit.step].check(f"step {commit.step} in {self.uri}", strict=self.strict)
            except (CheckpointError, ConfigError) as raised:
                error = without_traceback(raised)
            agree_on_error(error, group)
            return read_shared(commit, skeleton, storage, group, components={MODEL}, tick=activity.tick)

        with activity.within("hand-over", storage.worked_s):
            found = first_usable(store, self._candidates(store), group, read)
        assert found is not None, "the candidates end in an error"
        commit, state = found
        module.load_state_dict(state[MODEL], strict=self.strict)
        if group.rank == 0:
            self._report(commit.step, fits[commit.step], store.rejected, record)

    def _report(self, step: int, fit: Fit, rejected: list[tuple[str, str]], record: Callable[[Event], None]) -> None:
        for key, reason in rejected:
            record(CommitRejected(key=f"{self.uri}/{COMMITS}/{key}", reason=reason))
        record(
            WeightsLoaded(
                uri=self.uri, step=step, missing=fit.missing, unexpected=fit.unexpected, converted=fit.converted
            )
        )
        differences = {"missing": fit.missing, "unexpected": fit.unexpected, "converted": fit.converted}
        if any(differences.values()):
            text = "; ".join(f"{len(names)} {what}: {shorten(names)}" for what, names in differences.items() if names)
            _log.warning("of the weights of step %d in %s are %s", step, self.uri, text)

    def _storage(self) -> RetryingStorage:
        return RetryingStorage(Storage(self.uri).at(COMMITS))

    def _candidates(self, store: CommitCatalog) -> Iterator[Commit]:
        """Those that may be used, and an error when there are no more."""
        yield from store.manifests(self.step)
        if not store.rejected:
            if self.step is not None and (there := store.steps()):
                raise ConfigError(
                    f"run.load_weights: there is no commit at step {self.step} in {self.uri}; there are those at "
                    f"{', '.join(map(str, there))}"
                )
            raise ConfigError(f"run.load_weights: there is no commit in {self.uri}; give a run's <storage>/<name>")
        reasons = "; ".join(f"{key}: {reason}" for key, reason in store.rejected)
        raise CheckpointError(f"the weights in {self.uri} cannot be used: {reasons}")


@dataclass(frozen=True)
class Fit:
    """How the weights of a commit fit a model, by name."""

    matching: list[str]
    """Tensors that both have."""
    missing: list[str]
    """What the model alone has."""
    unexpected: list[str]
    """What the commit alone has."""
    reshaped: list[str]
    """Where shapes differ, and how."""
    converted: list[str]
    """Where dtypes do, and how."""

    @classmethod
    def of(cls, module: torch.nn.Module, commit: Commit, skeleton: bytes) -> Fit:
        """CheckpointError if the commit does not hold the weights of a model."""
        shapes = meta_tensors(commit, {MODEL})
        theirs: Any = build_state(commit, skeleton, shapes, {MODEL})[MODEL]
        if not isinstance(theirs, dict) or not all(isinstance(name, str) for name in theirs):
            raise CheckpointError(f"{commit.key} does not hold the weights of a model")
        ours = module.state_dict()
        both = [name for name in sorted(ours.keys() & theirs.keys()) if isinstance(ours[name], torch.Tensor)]
        same = [name for name in both if _shape_of(ours[name]) == _shape_of(theirs[name])]
        other = [name for name in both if _shape_of(ours[name]) != _shape_of(theirs[name])]
        return cls(
            matching=same,
            missing=sorted(ours.keys() - theirs.keys()),
            unexpected=sorted(theirs.keys() - ours.keys()),
            reshaped=[f"{name} is {_shape_of(theirs[name])} there and {_shape_of(ours[name])} here" for name in other],
            converted=[
                f"{name} from {dtype_name(theirs[name].dtype)} to {dtype_name(ours[name].dtype)}"
                for name in same
                if theirs[name].dtype != ours[name].dtype
            ],
        )

    def check(self, which: str, *, strict: bool) -> None:
        """Raises a ConfigError that names what does not fit the model."""
        wrong = [*self.reshaped]
        if strict:
            wrong += [f"{name} is missing there" for name in self.missing]
            wrong += [f"{name} is unexpected: the model has no such tensor" for name in self.unexpected]
        if not wrong and not self.matching:
            wrong = [f"not one name is the same: there {shorten(self.unexpected)}, and here {shorten(self.missing)}"]
        if wrong:
            remedy = "Build the model that they are of, or use strict=False where some of the names differ"
            if self.reshaped:
                remedy = (
                    "Build the model that they are of; or give what has another shape, such as a new head, another "
                    "name in the model: with strict=False it is left as it was built"
                )
            raise ConfigError(
                f"the weights of {which} do not fit the model: {shorten(wrong, separator='; ')}. {remedy}"
            )


def _shape_of(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "no tensor"
