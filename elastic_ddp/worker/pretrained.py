"""Loads the weights of another run, or of plain files, for `run.load_weights`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from elastic_ddp.checkpoint import Commit, CommitCatalog
from elastic_ddp.checkpoint.reader import build_state, meta_tensors
from elastic_ddp.distributed.shard_moves import rows_of
from elastic_ddp.errors import CheckpointError, ConfigError, shorten
from elastic_ddp.storage.storage import Storage
from elastic_ddp.storage.watchdog import WatchedStorage
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import CommitRejected, WeightsLoaded
from elastic_ddp.tensors.dtensor import is_dtensor, shard_of
from elastic_ddp.tensors.state_tree import dtype_name
from elastic_ddp.worker.agreement import errors_on_all_ranks
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.model_state import PARAMETERS, left_out, load_weights
from elastic_ddp.worker.restore import first_usable
from elastic_ddp.worker.shared_read import read_shared
from elastic_ddp.worker.weight_files import INDEX, SINGLE, SUFFIXES, FileTensor, KeyMapping, WeightFiles, rename

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from elastic_ddp.distributed.process_group import ProcessGroup
    from elastic_ddp.rendezvous.hang import Activity
    from elastic_ddp.tensors.state_tree import Layout

_log = logging.getLogger(__name__)
MODEL = "model"
"""The component of a state that holds the weights."""
_SHOWN = 5
"""How many names of each model an error shows that the other model lacks."""


@dataclass(frozen=True)
class PretrainedWeights:
    """The weights in the commits of another run, or in files.

    Attributes:
        uri: the run's folder, a file, or the folder of a Hugging Face model.
        step: the step of the commit; None for the newest usable commit.
        strict: whether the model and the saved weights must have the same names.
        key_mapping: renames the tensors.
    """

    uri: str
    step: int | None
    strict: bool
    key_mapping: KeyMapping | None = None

    def load(
        self,
        module: torch.nn.Module,
        group: ProcessGroup,
        record: Callable[[Event], None],
        activity: Activity,
        layout: Layout | None = None,
    ) -> list[str]:
        """Loads the weights into a module, and returns the names of the loaded tensors.

        Every rank calls it, and every rank raises the same. Each rank loads its rows of sharded tensors. From files,
        rank 0 alone loads the other tensors: a new run starts from the state of rank 0.

        Args:
            module: the model.
            group: the open process group. Rank 0 chooses the commit, because the other run may be live.
            record: appends an event to the ledger; rank 0 reports what was loaded, and each unusable commit.
            activity: the time that the storage takes does not count as a hang.
            layout: how the model is sharded; None if each rank has all of it.

        Raises:
            ConfigError: there are no such weights, or they do not fit the model.
            CheckpointError: no commit is usable, or a file is damaged.
            StorageError: the storage failed.
        """
        found: list[Any] | None = None
        with errors_on_all_ranks(group):
            if group.rank == 0:
                found = self._find_files()
        found = json.loads(group.broadcast_bytes(json.dumps(found).encode() if group.rank == 0 else None))
        step: int | None = None
        fit: Fit | None = None
        if found is None:
            step, fit = self._load_commit(module, group, record, activity, layout)
        else:
            with errors_on_all_ranks(group):
                if layout is not None or group.rank == 0:
                    files = WeightFiles(WatchedStorage(Storage(found[0])), found[1])
                    fit = self._load_files(files, module, group, activity, layout)
        if fit is None:
            return []
        if group.rank == 0:
            differences: dict[str, Any] = {
                "missing": fit.missing,
                "unexpected": fit.unexpected,
                "converted": fit.converted,
            }
            record(WeightsLoaded(uri=self.uri, step=step, **differences))
            texts = [f"{len(names)} {kind}: {shorten(names)}" for kind, names in differences.items() if names]
            if texts:
                source = self.uri if step is None else f"step {step} in {self.uri}"
                _log.warning("loaded the weights of %s with differences: %s", source, "; ".join(texts))
        return fit.matching

    def _find_files(self) -> list[Any] | None:
        """Returns the folder and the names of the files; None if the weights are in commits."""
        files = WeightFiles.find(self.uri)
        if files is None:
            return None
        if self.step is not None:
            raise ConfigError(
                f"run.load_weights: step={self.step} is for the commits of a run, and {self.uri} is none."
            )
        return [files.storage.uri, files.names]

    def _load_files(
        self,
        files: WeightFiles,
        module: torch.nn.Module,
        group: ProcessGroup,
        activity: Activity,
        layout: Layout | None,
    ) -> Fit:
        """Loads this rank's part of the weights in files."""
        with activity.within("hand-over", files.storage.worked_s), files.opened(activity.tick) as stored:
            renamed = rename(stored, self.key_mapping)
            fit = Fit.of(module, renamed, "file")
            fit.check(self.uri, strict=self.strict)
            weights = {name: value for name, value in renamed.items() if not isinstance(value, FileTensor)}
            for name in fit.matching:
                like = _sharded_like(name, layout)
                if like is not None:
                    rows = rows_of(like.shape[0], like.device_mesh.get_local_rank(), like.device_mesh.size())
                    weights[name] = shard_of(renamed[name].read(rows), like)
                elif group.rank == 0:
                    weights[name] = renamed[name].whole()
            load_weights(module, weights)
        return fit

    def _load_commit(
        self,
        module: torch.nn.Module,
        group: ProcessGroup,
        record: Callable[[Event], None],
        activity: Activity,
        layout: Layout | None,
    ) -> tuple[int, Fit]:
        """Loads the weights in a commit. Returns its step, and how they fit."""
        storage = WatchedStorage(Storage(self.uri).at(COMMITS))

        def record_rejected(key: str, reason: str) -> None:
            record(CommitRejected(key=f"{self.uri}/{COMMITS}/{key}", reason=reason))

        store = CommitCatalog(storage, record_rejected)
        fits: dict[int, Fit] = {}

        def read(commit: Commit, skeleton: bytes) -> dict[str, Any]:
            components = _components(commit)
            targets: dict[str, torch.Tensor | None] = {}
            with errors_on_all_ranks(group):
                saved = _weights(build_state(skeleton, meta_tensors(commit, components), components))
                fits[commit.step] = Fit.of(module, rename(saved, self.key_mapping), "commit")
                fits[commit.step].check(f"step {commit.step} in {self.uri}", strict=self.strict)
                for new, name in rename({name: name for name in saved}, self.key_mapping).items():
                    for component in components if layout is not None else ():
                        targets[f"{component}.{name}"] = layout(f"{component}.{new}")  # type: ignore[misc]
            return read_shared(
                commit, skeleton, storage, group, components=components, layout=targets.get, tick=activity.tick
            )

        with activity.within("hand-over", storage.worked_s):
            usable = first_usable(store, self._candidates(store), group, read)
        assert usable is not None, "the candidates end in an error"
        commit, state = usable
        load_weights(module, rename(_weights(state), self.key_mapping))
        return commit.step, fits[commit.step]

    def _candidates(self, store: CommitCatalog) -> Iterator[Commit]:
        """Yields the commits to try, and raises an error when there are no more."""
        yield from store.manifests(self.step)
        if store.rejected:
            reasons = "; ".join(f"{key}: {reason}" for key, reason in store.rejected)
            raise CheckpointError(f"no commit in {self.uri} is usable: {reasons}")
        steps = [] if self.step is None else store.steps()
        if steps:
            raise ConfigError(
                f"run.load_weights: {self.uri} has no commit at step {self.step}. Use one of "
                f"{', '.join(map(str, steps))}."
            )
        raise ConfigError(
            f"run.load_weights: {self.uri} has no commit. Give the folder of a run, <storage>/<name>; a weights file "
            f"({', '.join(SUFFIXES)}); or a folder with {SINGLE} or {INDEX}."
        )


def _components(commit: Commit) -> set[str]:
    """Returns the components of a commit that hold weights."""
    return {MODEL, *({PARAMETERS} & {name.partition(".")[0] for name in commit.tensors})}


def _sharded_like(name: str, layout: Layout | None) -> DTensor | None:
    """Returns the tensor of the model that has a name, if it is sharded."""
    found = (layout(f"{component}.{name}") for component in (MODEL, PARAMETERS)) if layout is not None else ()
    return next((tensor for tensor in found if is_dtensor(tensor)), None)


def _weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the weights in a state, also weights that the state dict of the model leaves out."""
    return {**state[MODEL], **state.get(PARAMETERS, {})}


@dataclass(frozen=True)
class Fit:
    """How saved weights fit a model.

    Attributes:
        kind: the source of the weights, `commit` or `file`.
        matching: names that model and saved weights have, with equal shapes.
        missing: names that only the model has.
        unexpected: names that only the saved weights have.
        reshaped: a sentence for each name whose two shapes differ.
        converted: a phrase for each matching name whose two dtypes differ.
    """

    kind: str
    matching: list[str]
    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]
    converted: list[str]

    @classmethod
    def of(cls, module: torch.nn.Module, saved: Mapping[str, Any], kind: str) -> Fit:
        """Compares saved weights with a model."""
        built = module.state_dict(keep_vars=True)
        built |= {name: tensor for name, tensor in left_out(module, built)[PARAMETERS].items() if name not in built}
        shared = [name for name in sorted(built.keys() & saved.keys()) if isinstance(built[name], torch.Tensor)]
        shapes = {name: (_shape(saved[name]), _shape(built[name])) for name in shared}
        matching = [name for name, (saved_shape, built_shape) in shapes.items() if saved_shape == built_shape]
        # Files have the tensors of tied weights once.
        present = {_memory(built[name]) for name in shared}
        missing = [name for name in sorted(built.keys() - saved.keys()) if _memory(built[name]) not in present]
        return cls(
            kind=kind,
            matching=matching,
            missing=missing,
            unexpected=sorted(saved.keys() - built.keys()),
            reshaped=[
                f"{name} is {saved_shape} in the {kind} and {built_shape} in the model"
                for name, (saved_shape, built_shape) in shapes.items()
                if saved_shape != built_shape
            ],
            converted=[
                f"{name} from {dtype_name(saved[name].dtype)} to {dtype_name(built[name].dtype)}"
                for name in matching
                if saved[name].dtype != built[name].dtype
            ],
        )

    def prefix(self) -> str | None:
        """Returns the prefix that all missing names have in the saved weights (`module.` after DDP), or None."""
        first = next(iter(self.missing), "")
        prefixes = [name.removesuffix(first) for name in self.unexpected if first and name.endswith(f".{first}")]
        saved = {*self.unexpected}
        return next((prefix for prefix in prefixes if {prefix + name for name in self.missing} <= saved), None)

    def check(self, source: str, *, strict: bool) -> None:
        """Raises ConfigError if the weights of `source` do not fit the model."""
        problems = [*self.reshaped]
        if strict:
            missing = [f"{name} is missing in the {self.kind}" for name in self.missing]
            unexpected = [f"{name} is missing in the model" for name in self.unexpected]
            problems += [*missing[:_SHOWN], *unexpected[:_SHOWN], *missing[_SHOWN:], *unexpected[_SHOWN:]]
        if not problems and not self.matching:
            problems = [
                f"no name is in both: the {self.kind} has {shorten(self.unexpected)}, and the model "
                f"{shorten(self.missing)}"
            ]
        if problems:
            fix = "Build the same model, map the names with key_mapping, or use strict=False if only some names differ."
            prefix = self.prefix()
            if prefix is not None:
                others = {*self.unexpected} - {prefix + name for name in self.missing}
                fix = f'The {self.kind} has them as {prefix}NAME: use key_mapping={{r"^{re.escape(prefix)}": ""}}'
                fix += ", and strict=False because of the other names." if others else "."
            elif self.reshaped:
                fix = (
                    "Build the same model. Or rename what has another shape, such as a new head, and use strict=False: "
                    "it keeps its initial values."
                )
            raise ConfigError(f"the weights of {source} do not fit: {shorten(problems, separator='; ')}. {fix}")


def _memory(value: Any) -> Any:
    """Returns where a tensor is in memory, equal for the names of tied weights."""
    if isinstance(value, torch.Tensor) and value.numel() and not value.is_meta and not is_dtensor(value):
        return value.data_ptr(), value.shape, value.stride()
    return id(value)


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor | FileTensor) else "not a tensor"
