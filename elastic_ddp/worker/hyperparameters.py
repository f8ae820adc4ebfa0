"""The hyperparameters of a run: recorded as the code sets them, and compared with the code when the run resumes.

A commit has two values of a learning rate: the value that the training function set, and the scheduled value at the
commit. A resume compares the first value with the code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elastic_ddp import torch_internals
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.tensors.state_tree import flatten, unflatten

Every = Literal["step", "epoch"]
"""When `Step.optimize` steps a scheduler."""
_DERIVED = frozenset({"base_lrs", "_last_lr"})
"""State of a scheduler that repeats settings of its optimizer."""
_SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""Settings of an optimizer that schedulers change."""


@dataclass(frozen=True)
class Prepared:
    """Hyperparameters as the code of a session sets them.

    Attributes:
        optimizer: for each optimizer, the settings of its param_groups.
        scheduler: the states of the schedulers, by key.
        kind: for each optimizer and scheduler, its class; for a scheduler also when `Step.optimize` steps it, or None
            if the training function steps it.
    """

    optimizer: list[list[dict[str, Any]]]
    scheduler: dict[str, dict[str, Any]]
    kind: dict[str, str]


@dataclass(frozen=True)
class Change:
    """A hyperparameter that differs between a commit and the code."""

    name: str
    saved: Any
    now: Any

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "saved": _as_json(self.saved), "now": _as_json(self.now)}


def record(
    optimizers: Sequence[torch.optim.Optimizer], schedulers: Mapping[str, LRScheduler], every: Sequence[Every]
) -> Prepared:
    """Returns a copy of all hyperparameters. Raises CheckpointError if one cannot be saved.

    `every` has when `Step.optimize` steps the first of the `schedulers`; the training function steps the others.
    """
    return Prepared(
        optimizer=[_copy_of(_settings(optimizer)) for optimizer in optimizers],
        scheduler={key: _copy_of(scheduler.state_dict()) for key, scheduler in schedulers.items()},
        kind={f"optimizer {index}": type(optimizer).__name__ for index, optimizer in enumerate(optimizers)}
        | {
            f"scheduler {key}": f"{_class_of(scheduler)} with every={when!r}"
            for (key, scheduler), when in zip_longest(schedulers.items(), every)
        },
    )


def check_kinds(then: Prepared, now: Prepared) -> None:
    """Raises a CheckpointError if an optimizer or scheduler of the code, `now`, is another one than in the commit."""
    for key in now.kind | then.kind:
        before = then.kind.get(key, "missing")
        after = now.kind.get(key, "missing")
        if before != after:
            raise CheckpointError(
                f"{key} is {before} in the commit, and {after} in the code. Restore it, or use another name; "
                "run.load_weights can start that run from this run's weights."
            )


def compare(
    optimizers: Sequence[torch.optim.Optimizer], schedulers: Mapping[str, LRScheduler], then: Prepared, now: Prepared
) -> list[Change]:
    """Returns the hyperparameters that differ between two results of `record`: for a commit, and for the code."""
    changes: list[Change] = []
    for optimizer, before, after in zip(optimizers, then.optimizer, now.optimizer, strict=True):
        changes += _of_groups(_name_of(optimizer, optimizers), before, after)
    for key, scheduler in schedulers.items():
        changes += _of_scheduler(_name_of(scheduler, [*schedulers.values()]), then.scheduler[key], now.scheduler[key])
    return changes


def use_code(
    optimizers: Sequence[torch.optim.Optimizer], schedulers: Mapping[str, LRScheduler], then: Prepared, now: Prepared
) -> None:
    """Replaces restored hyperparameters by the values of the code, `now`, where the code has changed since `then`.

    If a schedule has changed, its scheduler moves from its start to its number of steps in the commit, at once. So a
    longer cosine continues from its own value there.

    Raises:
        ConfigError: a changed scheduler cannot be moved.
    """
    for optimizer, before, after in zip(optimizers, then.optimizer, now.optimizer, strict=True):
        is_rescheduled = False
        for group, saved, own in zip(optimizer.param_groups, before, after, strict=True):
            keys = {*_differing_keys(saved, own), *(own.keys() - saved.keys())}
            group.update({key: _copy_of(own[key]) for key in keys})
            is_rescheduled |= any(key in _SCHEDULED or key not in optimizer.defaults for key in keys)
        moved = []
        for key, scheduler in schedulers.items():
            if scheduler.optimizer is not optimizer:
                continue
            saved = then.scheduler[key]
            own = now.scheduler[key]
            if isinstance(scheduler, ReduceLROnPlateau):
                changed = {name: own[name] for name in _differing_keys(saved, own) if name not in _DERIVED}
                scheduler.load_state_dict({**scheduler.state_dict(), **_copy_of(changed)})
            else:
                moved.append((scheduler, own))
                is_rescheduled |= any(True for _ in _of_scheduler("", saved, own))
        if is_rescheduled:
            _move(moved)


def steps_taken(scheduler: LRScheduler) -> int:
    """Returns how often a scheduler was stepped, or 0 if that is not known."""
    if hasattr(scheduler, "last_epoch"):
        return scheduler.last_epoch
    return max(map(steps_taken, torch_internals.inner_schedulers(scheduler)), default=0)


def _move(schedulers: Sequence[tuple[LRScheduler, Mapping[str, Any]]]) -> None:
    """Moves an optimizer's scheduler, given with its initial state, from there to its number of steps."""
    for scheduler, initial in schedulers:
        position = steps_taken(scheduler)
        scheduler.load_state_dict(_copy_of(initial))
        try:
            if len(schedulers) > 1:
                raise ValueError(f"the optimizer has {len(schedulers)} schedulers, of which each changes its settings")
            torch_internals.move_scheduler(scheduler, position)
        except Exception as error:  # for example of a OneCycleLR beyond its end
            raise ConfigError(
                f"{type(scheduler).__name__} has changed since the commit, and cannot be moved to step {position}, "
                f"where the run resumes: {error}. Use one scheduler that computes the learning rate from the number of "
                "steps, such as LambdaLR, up to run.total_steps. Or restore the scheduler, or set "
                'checkpoint.hyperparameters = "saved".'
            ) from error


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = optimizer.state_dict()["param_groups"]
    return [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]


def _of_scheduler(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """Yields the changes of a scheduler that the training function prepared or registered."""
    for attribute in before:
        if attribute in after:
            yield from _differences(f"{name}.{attribute}", before[attribute], after[attribute])


def _of_groups(name: str, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    """Yields the changes of an optimizer's settings; a change that is the same in all param_groups once."""
    differing = [_differing_keys(saved, own) for saved, own in zip(before, after, strict=True)]
    for key in dict.fromkeys(key for keys in differing for key in keys):
        # With a scheduler, the code's `lr` is stored as `initial_lr`; a warm-up computes its first `lr` from it.
        numbers = [n for n, keys in enumerate(differing) if key in keys and not (key == "lr" and "initial_lr" in keys)]
        label = "lr" if key == "initial_lr" else key
        pairs = {n: (before[n][key], after[n][key]) for n in numbers}
        if len(pairs) == len(differing) and all(_is_same(pair, pairs[0]) for pair in pairs.values()):
            yield Change(f"{name}.{label}", *pairs[0])
            continue
        for n, pair in pairs.items():
            yield Change(f"{name}.param_groups[{n}].{label}", *pair)


def _differences(name: str, saved: Any, now: Any) -> Iterator[Change]:
    """Yields the differences of two trees, each at the deepest place."""
    if name.rpartition(".")[2] in _DERIVED:
        return
    if type(saved) is dict and type(now) is dict and saved.keys() == now.keys():
        for key, value in saved.items():
            yield from _differences(f"{name}.{key}", value, now[key])
    elif type(saved) is list and type(now) is list and len(saved) == len(now) and any(type(v) is dict for v in now):
        for number, value in enumerate(saved):
            yield from _differences(f"{name}[{number}]", value, now[number])
    elif not _is_same(saved, now):
        yield Change(name, saved, now)


def _differing_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns the keys with different values. Versions of torch add keys."""
    return [key for key in before if key in after and not _is_same(before[key], after[key])]


def _is_same(first: Any, second: Any) -> bool:
    skeleton, tensors = flatten(first)
    other_skeleton, others = flatten(second)
    return skeleton == other_skeleton and all(torch.equal(tensors[name].cpu(), others[name].cpu()) for name in tensors)


def _copy_of(value: Any) -> Any:
    skeleton, tensors = flatten(value)
    return unflatten(skeleton, {name: tensor.clone() for name, tensor in tensors.items()})


def _class_of(scheduler: LRScheduler) -> str:
    """Returns the names of the classes of a scheduler and of those that it runs."""
    inner = [_class_of(each) for each in torch_internals.inner_schedulers(scheduler)]
    return type(scheduler).__name__ + (f"({', '.join(inner)})" if inner else "")


def _name_of(thing: object, all_things: Sequence[object]) -> str:
    """Returns the name of the class, with a number if there are several."""
    alike = [other for other in all_things if type(other) is type(thing)]
    number = next(number for number, other in enumerate(alike) if other is thing)
    return type(thing).__name__ + (f"[{number}]" if len(alike) > 1 else "")


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
