"""Loads the weights of another run, for `run.load_weights`."""

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
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import CommitRejected, WeightsLoaded
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
"""The component of a state that holds the weights."""


@dataclass(frozen=True)
class PretrainedWeights:
    """The weights in the commits of another run.

    Attributes:
        uri: the run's folder.
        step: of the commit; None for the newest usable one.
        strict: whether the names of both models must be equal.
    """

    uri: str
    step: int | None
    strict: bool

    def load(
        self, module: torch.nn.Module, group: ProcessGroup, record: Callable[[Event], None], activity: Activity
    ) -> None:
        """Loads the weights into a module. Every rank calls it, and every rank loads or raises the same.

        Args:
            module: the model.
            group: the open process group. Rank 0 chooses the commit, because the other run may be live.
            record: appends an event to the ledger; rank 0 reports what was loaded, and each unusable commit.
            activity: the time that the storage takes does not count as a hang.

        Raises:
            ConfigError: there is no such commit, or its weights do not fit the model.
            CheckpointError: no commit is usable.
            StorageError: the storage failed.
        """
        storage = RetryingStorage(Storage(self.uri).at(COMMITS))
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
            usable = first_usable(store, self._candidates(store), group, read)
        assert usable is not None, "the candidates end in an error"
        commit, state = usable
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
            text = "; ".join(f"{len(names)} {kind}: {shorten(names)}" for kind, names in differences.items() if names)
            _log.warning("loaded the weights of step %d in %s with differences: %s", step, self.uri, text)

    def _candidates(self, store: CommitCatalog) -> Iterator[Commit]:
        """Yields the commits to try, and raises an error when there are no more."""
        yield from store.manifests(self.step)
        if store.rejected:
            reasons = "; ".join(f"{key}: {reason}" for key, reason in store.rejected)
            raise CheckpointError(f"no commit in {self.uri} is usable: {reasons}")
        if self.step is not None and (steps := store.steps()):
            raise ConfigError(
                f"run.load_weights: {self.uri} has no commit at step {self.step}. Use one of "
                f"{', '.join(map(str, steps))}."
            )
        raise ConfigError(f"run.load_weights: {self.uri} has no commit. Give the folder of a run, <storage>/<name>.")


@dataclass(frozen=True)
class Fit:
    """How the weights of a commit fit a model.

    Attributes:
        matching: names that both have, with equal shapes.
        missing: names that only the model has.
        unexpected: names that only the commit has.
        reshaped: for each name with different shapes, what they are.
        converted: for each name with different dtypes, what they are.
    """

    matching: list[str]
    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]
    converted: list[str]

    @classmethod
    def of(cls, module: torch.nn.Module, commit: Commit, skeleton: bytes) -> Fit:
        """Compares a commit with a model. Raises CheckpointError if the commit does not hold a model's weights."""
        saved: Any = build_state(commit, skeleton, meta_tensors(commit, {MODEL}), {MODEL})[MODEL]
        if not isinstance(saved, dict) or not all(isinstance(name, str) for name in saved):
            raise CheckpointError(f"{commit.key} does not hold the weights of a model")
        built = module.state_dict()
        shared = [name for name in sorted(built.keys() & saved.keys()) if isinstance(built[name], torch.Tensor)]
        shapes = {name: (_shape(saved[name]), _shape(built[name])) for name in shared}
        matching = [name for name, (saved_shape, built_shape) in shapes.items() if saved_shape == built_shape]
        return cls(
            matching=matching,
            missing=sorted(built.keys() - saved.keys()),
            unexpected=sorted(saved.keys() - built.keys()),
            reshaped=[
                f"{name} is {saved_shape} in the commit and {built_shape} in the model"
                for name, (saved_shape, built_shape) in shapes.items()
                if saved_shape != built_shape
            ],
            converted=[
                f"{name} from {dtype_name(saved[name].dtype)} to {dtype_name(built[name].dtype)}"
                for name in matching
                if saved[name].dtype != built[name].dtype
            ],
        )

    def check(self, source: str, *, strict: bool) -> None:
        """Raises ConfigError if the weights of `source` do not fit the model."""
        problems = [*self.reshaped]
        if strict:
            problems += [f"{name} is missing in the commit" for name in self.missing]
            problems += [f"{name} is missing in the model" for name in self.unexpected]
        if not problems and not self.matching:
            problems = [
                f"no name is in both: the commit has {shorten(self.unexpected)}, and the model {shorten(self.missing)}"
            ]
        if problems:
            fix = "Build the same model, or use strict=False if only some names differ."
            if self.reshaped:
                fix = (
                    "Build the same model. Or rename what has another shape, such as a new head, and use strict=False: "
                    "it keeps its initial values."
                )
            raise ConfigError(f"the weights of {source} do not fit: {shorten(problems, separator='; ')}. {fix}")


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "not a tensor"
