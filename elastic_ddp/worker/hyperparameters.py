"""The hyperparameters of a run: recorded as the code sets them, and compared with the code when the run resumes.

A commit has two values of a learning rate: what the training function set, and what a schedule has made of it since. If
the function now sets another value, that counts. Otherwise the value of the schedule is kept.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as validated
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from elastic_ddp import torch_internals
from elastic_ddp.errors import ConfigError
from elastic_ddp.tensors.state_tree import flatten, unflatten

Every = Literal["step", "epoch"]
"""When `Step.optimize` steps a scheduler."""
_SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""Settings of an optimizer that schedulers change."""
Factors = Mapping[str, list[float] | None]
"""Values of the functions of LambdaLRs, by their place in a scheduler."""
_DERIVED = frozenset({"base_lrs", "_last_lr"})
"""State of a scheduler that repeats settings of its optimizer."""


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

    def replaced_in(self, now: Prepared) -> list[str]:
        """Returns the keys of schedulers that have another class now."""
        return [key for key, kind in now.kind.items() if self.kind.get(key, kind) != kind]


@dataclass(frozen=True)
class Change:
    """A hyperparameter that differs between a commit and the code."""

    name: str
    saved: Any
    now: Any

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "saved": _as_json(self.saved), "now": _as_json(self.now)}


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

    @property
    def is_replayable(self) -> bool:
        """Whether its steps depend on their number only."""
        return not isinstance(self.scheduler, ReduceLROnPlateau)


def record(optimizers: Sequence[torch.optim.Optimizer], schedules: Mapping[str, Schedule]) -> Prepared:
    """Returns a copy of all hyperparameters. Raises CheckpointError if one cannot be saved."""
    return Prepared(
        optimizer=[_copy(_settings(optimizer)) for optimizer in optimizers],
        scheduler={key: _copy(schedule.scheduler.state_dict()) for key, schedule in schedules.items()},
        kind={key: type(schedule.scheduler).__qualname__ for key, schedule in schedules.items()},
        every={key: schedule.every for key, schedule in schedules.items()},
    )


def adopt(
    optimizers: Sequence[torch.optim.Optimizer],
    schedules: Mapping[str, Schedule],
    *,
    then: Prepared,
    now: Prepared,
    factors: Mapping[str, Factors],
) -> list[Change]:
    """Replaces restored hyperparameters by those of the code where the code has changed. Returns the changes.

    If a schedule has changed, the schedulers of its optimizer are stepped from their start to the run's position. So a
    longer cosine continues from its own value there.

    Args:
        optimizers: the optimizers, with their restored state.
        schedules: the schedulers, by the keys that `record` got, with their restored state unless their class is new.
        then: what `record` returned in the session that made the commit.
        now: what it returned in this one, before the restore.
        factors: what `factors_of` returned before the restore.

    Raises:
        ConfigError: a changed scheduler cannot be stepped to the run's position.
    """
    changes: list[Change] = []
    for optimizer, before, after in zip(optimizers, then.optimizer, now.optimizer, strict=True):
        differing = [_differing(saved, own) for saved, own in zip(before, after, strict=True)]
        changes += _of_groups(_name(optimizer, optimizers), before, after, differing)
        is_rescheduled = any(
            key not in optimizer.defaults
            or not _same(saved[key], group.get(key))  # a schedule has set it, or changed it
            for keys, saved, group in zip(differing, before, optimizer.param_groups, strict=True)
            for key in keys
        )
        for group, own, keys in zip(optimizer.param_groups, after, differing, strict=True):
            group.update({key: _copy(own[key]) for key in keys})
        replayed = {}
        for key, schedule in schedules.items():
            if schedule.scheduler.optimizer is not optimizer:
                continue
            name = _name(schedule.scheduler, [each.scheduler for each in schedules.values()])
            changed = [
                *_of_schedule(name, schedule, key, then, now),
                *_of_functions(name, schedule.scheduler, factors.get(key, {})),
            ]
            changes += changed
            if schedule.is_replayable:
                replayed[key] = schedule
                is_rescheduled |= bool(changed)
            else:
                _adopt_settings(schedule.scheduler, then.scheduler[key], now.scheduler[key])
        if replayed and is_rescheduled:
            _replay(optimizer, replayed, then, now, after)
    return changes


def kept(optimizers: Sequence[torch.optim.Optimizer], schedules: Mapping[str, Schedule], now: Prepared) -> list[Change]:
    """Returns the differences between restored hyperparameters and the code, for a commit that has no record of them.

    Settings that training changes, such as a scheduled learning rate, are left out.
    """
    changes: list[Change] = []
    for optimizer, after in zip(optimizers, now.optimizer, strict=True):
        is_scheduled = any(schedule.scheduler.optimizer is optimizer for schedule in schedules.values())
        before = _settings(optimizer)
        differing = [
            [key for key in _differing(saved, own) if not (is_scheduled and key in _SCHEDULED)]
            for saved, own in zip(before, after, strict=True)
        ]
        changes += _of_groups(_name(optimizer, optimizers), before, after, differing)
    for key, schedule in schedules.items():
        name = _name(schedule.scheduler, [each.scheduler for each in schedules.values()])
        changes += _of_arguments(name, schedule.scheduler, now.scheduler[key])
    return changes


def steps_taken(scheduler: LRScheduler) -> int:
    """Returns how often a scheduler was stepped, or 0 if that is not known."""
    if hasattr(scheduler, "last_epoch"):
        return scheduler.last_epoch
    return max(map(steps_taken, torch_internals.inner_schedulers(scheduler)), default=0)


def _replay(
    optimizer: torch.optim.Optimizer,
    schedules: Mapping[str, Schedule],
    then: Prepared,
    now: Prepared,
    settings: Sequence[Mapping[str, Any]],
) -> None:
    """Steps the schedulers of an optimizer from their start to the run's position."""
    loaded = [dict(group) for group in optimizer.param_groups]
    taken = {key: steps_taken(schedule.scheduler) for key, schedule in schedules.items()}
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(_copy(own))
    for key, schedule in schedules.items():
        schedule.scheduler.load_state_dict(_copy(now.scheduler[key]))
        counted = taken[key] - steps_taken(schedule.scheduler)
        is_known = then.every[key] == schedule.every and then.kind[key] == now.kind[key]
        taken[key] = min(counted, schedule.num_due) if is_known else schedule.num_due
    total = max(taken.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the order of scheduler.step() and optimizer.step()
        for step in range(total):
            for key, count in taken.items():  # evenly, as they were stepped in training
                if (step + 1) * count // total > step * count // total:
                    _step(schedules[key].scheduler, total)
    for group, own, values in zip(optimizer.param_groups, settings, loaded, strict=True):
        unscheduled = [key for key in own if key not in _SCHEDULED and _same(group[key], own[key])]
        group.update({key: values[key] for key in unscheduled if key in values})


def _step(scheduler: LRScheduler, position: int) -> None:
    try:
        scheduler.step()
    except Exception as error:  # such as that of a OneCycleLR beyond its end
        raise ConfigError(
            f"{type(scheduler).__name__} has changed since the commit, and cannot be stepped {position} times, up to "
            f"where the run resumes: {error}. Give it a horizon that covers the whole run, such as run.total_steps."
        ) from error


def _adopt_settings(scheduler: LRScheduler, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Sets what has changed in a scheduler that cannot be replayed."""
    changed = {key: after[key] for key in _differing(before, after) if key not in _DERIVED}
    if changed:
        scheduler.load_state_dict({**scheduler.state_dict(), **_copy(changed)})


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = optimizer.state_dict()["param_groups"]
    return [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]


# Comparisons.


def _of_groups(
    name: str, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], differing: Sequence[list[str]]
) -> Iterator[Change]:
    """Yields the changes of an optimizer's settings; one that is the same in all param_groups once."""
    for key in dict.fromkeys(key for keys in differing for key in keys):
        # The first learning rate of a warm-up follows from `initial_lr`.
        numbers = [n for n, keys in enumerate(differing) if key in keys and not (key == "lr" and "initial_lr" in keys)]
        changes = [Change(f"{name}.param_groups[{n}].{key}", before[n][key], after[n][key]) for n in numbers]
        if len(changes) == len(differing) and all(_same(_values(change), _values(changes[0])) for change in changes):
            changes = [Change(f"{name}.{key}", *_values(changes[0]))]
        yield from changes


def _of_schedule(name: str, schedule: Schedule, key: str, then: Prepared, now: Prepared) -> Iterator[Change]:
    """Yields the changes of a scheduler that the training function prepared or registered."""
    before, after = then.scheduler[key], now.scheduler[key]
    if then.kind[key] != now.kind[key]:
        yield Change(f"scheduler {key}", then.kind[key], now.kind[key])
        return
    for attribute in before:
        if attribute in after:
            yield from _differences(f"{name}.{attribute}", before[attribute], after[attribute])
    if then.every[key] != schedule.every:
        yield Change(f"{name}.every", then.every[key], schedule.every)


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
    elif not _same(saved, now):
        yield Change(name, saved, now)


def _of_functions(name: str, scheduler: LRScheduler, before: Factors) -> Iterator[Change]:
    """Yields a change if the functions of a LambdaLR return other values than before; its state does not have them."""
    after = dict(_factors(scheduler, scheduler.state_dict()))
    for place, (inner, factors) in after.items():
        # A function whose value depends on what was restored cannot be compared.
        if factors is None or place not in before or before[place] != factors:
            continue
        saved = [float(lr) for lr in inner.get_last_lr()]
        now = [float(base) * factor for base, factor in zip(inner.base_lrs, factors, strict=True)]
        # Another machine may round a cosine differently.
        if not all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-12) for pair in zip(saved, now, strict=True)):
            yield Change(f"{name}{place}.lr after {inner.last_epoch} steps", saved, now)


def factors_of(schedules: Mapping[str, Schedule], states: Mapping[str, Mapping[str, Any]]) -> dict[str, Factors]:
    """Returns what the functions of LambdaLRs return where saved states of the schedulers stand."""
    return {
        key: {place: factors for place, (_, factors) in _factors(schedule.scheduler, states[key])}
        for key, schedule in schedules.items()
        if key in states
    }


def _factors(
    scheduler: LRScheduler, state: Mapping[str, Any], place: str = ""
) -> Iterator[tuple[str, tuple[LambdaLR, list[float] | None]]]:
    """Yields each LambdaLR in a scheduler: where it is, itself, and the values of its functions, or None."""
    inner, states = torch_internals.inner_schedulers(scheduler), torch_internals.inner_scheduler_states(state)
    for number, (each, its_state) in enumerate(zip(inner, states, strict=False)):
        yield from _factors(each, its_state, f"{place}._schedulers[{number}]")
    step = state.get("last_epoch")
    if isinstance(scheduler, LambdaLR) and type(step) is int and step >= 0:
        try:
            factors = [float(function(step)) for function in scheduler.lr_lambdas]
        except Exception:  # the next step raises it
            factors = None
        yield place, (scheduler, factors)


def _of_arguments(name: str, scheduler: LRScheduler, now: Mapping[str, Any]) -> Iterator[Change]:
    """Yields the differences of a scheduler's state that its constructor takes."""
    arguments = inspect.signature(type(scheduler)).parameters.keys() - {"last_epoch", "schedulers"}
    for key, saved in _copy(scheduler.state_dict()).items():
        if key.lstrip("_") in arguments and key in now:
            yield from _differences(f"{name}.{key}", saved, now[key])
    schedulers, states = torch_internals.inner_schedulers(scheduler), torch_internals.inner_scheduler_states(now)
    for number, (inner, state) in enumerate(zip(schedulers, states, strict=True)):
        yield from _of_arguments(f"{name}._schedulers[{number}]", inner, state)


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns the keys with different values. Versions of torch add keys."""
    return [key for key in before if key in after and not _same(before[key], after[key])]


def _same(first: Any, second: Any) -> bool:
    (skeleton, tensors), (other_skeleton, others) = flatten(first), flatten(second)
    return skeleton == other_skeleton and all(torch.equal(tensors[name].cpu(), others[name].cpu()) for name in tensors)


def _copy(value: Any) -> Any:
    skeleton, tensors = flatten(value)
    return unflatten(skeleton, {name: tensor.clone() for name, tensor in tensors.items()})


def _name(thing: object, all_things: Sequence[object]) -> str:
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
