"""The hyperparameters of a run: recorded as the code sets them, and compared with the code when the run resumes.

A commit has two values of a learning rate: what the training function set, and what a schedule has made of it since.
The first is compared with the code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as validated
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elastic_ddp import torch_internals
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.tensors.state_tree import flatten, unflatten

Every = Literal["step", "epoch"]
"""When `Step.optimize` steps a scheduler."""
PREPARED = "prepared"
"""The component of a state that holds a `Prepared`."""
_DERIVED = frozenset({"base_lrs", "_last_lr"})
"""State of a scheduler that repeats settings of its optimizer."""
_SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""Settings of an optimizer that schedulers change."""


@validated(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Prepared:
    """Hyperparameters as the code of a session sets them.

    Attributes:
        optimizer: for each optimizer, the settings of its param_groups.
        scheduler: the states of the schedulers, by key.
        kind: for each of them, the name of its class.
        every: for each of them, `Schedule.every`.
    """

    optimizer: list[list[dict[str, Any]]]
    scheduler: dict[str, dict[str, Any]]
    kind: dict[str, str]
    every: dict[str, Every | None]

    @classmethod
    def of(cls, saved: Any) -> Prepared:
        """Returns the hyperparameters in a state. Raises CheckpointError if they are invalid."""
        try:
            return cls(**saved)
        except (TypeError, ValueError) as error:
            raise invalid(error) from error

    def replaced_in(self, now: Prepared) -> list[str]:
        """Returns the keys of schedulers that have another class now, or are stepped at other times."""
        return [
            key
            for key in now.kind.keys() & self.kind.keys()
            if (self.kind[key], self.every.get(key)) != (now.kind[key], now.every[key])
        ]


@dataclass(frozen=True)
class Schedule:
    """A scheduler of a prepared optimizer.

    Attributes:
        scheduler: the scheduler.
        every: when `Step.optimize` steps it; None if the training function steps it.
        num_due: how often `every` asks to step it up to the run's position; the largest number for None.
    """

    scheduler: LRScheduler
    every: Every | None
    num_due: int


@dataclass(frozen=True)
class Change:
    """A hyperparameter that differs between a commit and the code."""

    name: str
    saved: Any
    now: Any

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "saved": _as_json(self.saved), "now": _as_json(self.now)}


def record(optimizers: Sequence[torch.optim.Optimizer], schedules: Mapping[str, Schedule]) -> Prepared:
    """Returns a copy of all hyperparameters. Raises CheckpointError if one cannot be saved."""
    return Prepared(
        optimizer=[_copy_of(_settings(optimizer)) for optimizer in optimizers],
        scheduler={key: _copy_of(schedule.scheduler.state_dict()) for key, schedule in schedules.items()},
        kind={key: type(schedule.scheduler).__qualname__ for key, schedule in schedules.items()},
        every={key: schedule.every for key, schedule in schedules.items()},
    )


def compare(
    optimizers: Sequence[torch.optim.Optimizer], schedules: Mapping[str, Schedule], then: Prepared, now: Prepared
) -> list[Change]:
    """Returns the hyperparameters that differ between what `record` returned for a commit and what it returns now."""
    changes: list[Change] = []
    for optimizer, before, after in zip(optimizers, then.optimizer, now.optimizer, strict=True):
        changes += _of_groups(_name_of(optimizer, optimizers), before, after)
    for key, schedule in schedules.items():
        name = _name_of(schedule.scheduler, [other.scheduler for other in schedules.values()])
        changes += _of_schedule(name, key, then, now)
    return changes


def use_code(
    optimizers: Sequence[torch.optim.Optimizer], schedules: Mapping[str, Schedule], then: Prepared, now: Prepared
) -> None:
    """Replaces restored hyperparameters by those of the code, `now`, where the code has changed since `then`.

    If a schedule has changed, its scheduler moves from its start to its number of steps in the commit, at once. So a
    longer cosine continues from its own value there.

    Raises:
        ConfigError: a changed scheduler cannot be moved.
    """
    for optimizer, before, after in zip(optimizers, then.optimizer, now.optimizer, strict=True):
        edited: set[str] = set()
        for group, saved, own in zip(optimizer.param_groups, before, after, strict=True):
            keys = {*_differing_keys(saved, own), *(own.keys() - saved.keys())}
            group.update({key: _copy_of(own[key]) for key in keys})
            edited |= {key for key in keys if key in _SCHEDULED or key not in optimizer.defaults}
        moved = {}
        for key, schedule in schedules.items():
            if schedule.scheduler.optimizer is not optimizer:
                continue
            if isinstance(schedule.scheduler, ReduceLROnPlateau):
                changed = [
                    each for each in _differing_keys(then.scheduler[key], now.scheduler[key]) if each not in _DERIVED
                ]
                state = {each: _copy_of(now.scheduler[key][each]) for each in changed}
                schedule.scheduler.load_state_dict({**schedule.scheduler.state_dict(), **state})
            else:
                moved[key] = schedule
        if edited or any([*_of_schedule("", key, then, now)] for key in moved):
            _move(moved, then, now)


def steps_taken(scheduler: LRScheduler) -> int:
    """Returns how often a scheduler was stepped, or 0 if that is not known."""
    if hasattr(scheduler, "last_epoch"):
        return scheduler.last_epoch
    return max(map(steps_taken, torch_internals.inner_schedulers(scheduler)), default=0)


def invalid(error: Exception) -> CheckpointError:
    """Returns the error for hyperparameters of a commit that cannot be used."""
    return CheckpointError(
        f"the commit's hyperparameters are invalid: {error}. Remove the commit; the run then resumes from the one "
        "before."
    )


def _move(schedules: Mapping[str, Schedule], then: Prepared, now: Prepared) -> None:
    """Moves the scheduler of an optimizer from its initial state to its number of steps in the commit."""
    for key, schedule in schedules.items():
        scheduler = schedule.scheduler
        position = schedule.num_due if key in then.replaced_in(now) else steps_taken(scheduler)
        scheduler.load_state_dict(_copy_of(now.scheduler[key]))
        try:
            if len(schedules) > 1:
                raise ValueError(f"the optimizer has {len(schedules)} schedulers, of which each changes its settings")
            torch_internals.move_scheduler(scheduler, position)
        except Exception as error:  # such as that of a OneCycleLR beyond its end
            raise ConfigError(
                f"{type(scheduler).__name__} has changed since the commit, and cannot be moved to step {position}, "
                f"where the run resumes: {error}. Use one scheduler that computes the learning rate from the number of "
                "steps, such as LambdaLR, up to run.total_steps. Or restore the scheduler, or set "
                'checkpoint.hyperparameters = "saved".'
            ) from error


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = optimizer.state_dict()["param_groups"]
    return [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]


def _of_schedule(name: str, key: str, then: Prepared, now: Prepared) -> Iterator[Change]:
    """Yields the changes of a scheduler that the training function prepared or registered."""
    before, after = then.scheduler[key], now.scheduler[key]
    if then.kind[key] != now.kind[key]:
        yield Change(f"scheduler {key}", then.kind[key], now.kind[key])
        return
    for attribute in before:
        if attribute in after:
            yield from _differences(f"{name}.{attribute}", before[attribute], after[attribute])
    if then.every[key] != now.every[key]:
        yield Change(f"{name}.every", then.every[key], now.every[key])


def _of_groups(name: str, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    """Yields the changes of an optimizer's settings; one that is the same in all param_groups once."""
    differing = [_differing_keys(saved, own) for saved, own in zip(before, after, strict=True)]
    for key in dict.fromkeys(key for keys in differing for key in keys):
        # With a scheduler, `initial_lr` is what the code sets as `lr`. That of a warm-up's first step follows from it.
        numbers = [n for n, keys in enumerate(differing) if key in keys and not (key == "lr" and "initial_lr" in keys)]
        label = "lr" if key == "initial_lr" else key
        changes = [Change(f"{name}.param_groups[{n}].{label}", before[n][key], after[n][key]) for n in numbers]
        if len(changes) == len(differing) and all(_is_same(_values(change), _values(changes[0])) for change in changes):
            changes = [Change(f"{name}.{label}", *_values(changes[0]))]
        yield from changes


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
    (skeleton, tensors), (other_skeleton, others) = flatten(first), flatten(second)
    return skeleton == other_skeleton and all(torch.equal(tensors[name].cpu(), others[name].cpu()) for name in tensors)


def _copy_of(value: Any) -> Any:
    skeleton, tensors = flatten(value)
    return unflatten(skeleton, {name: tensor.clone() for name, tensor in tensors.items()})


def _name_of(thing: object, all_things: Sequence[object]) -> str:
    """Returns the name of the class, with a number if there are several."""
    alike = [other for other in all_things if type(other) is type(thing)]
    number = next(number for number, other in enumerate(alike) if other is thing)
    return type(thing).__name__ + (f"[{number}]" if len(alike) > 1 else "")


def _values(change: Change) -> tuple[Any, Any]:
    return change.saved, change.now


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
