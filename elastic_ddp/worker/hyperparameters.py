"""The hyperparameters of a run: recorded as the code sets them, and compared with the code when the run resumes.

A commit has two values of a learning rate: what the training function set, and what a schedule has made of it since. If
the function now sets another value, that is used. Otherwise the value of the schedule is kept.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as validated
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elastic_ddp import torch_internals
from elastic_ddp.errors import ConfigError
from elastic_ddp.worker.hyperparameter_changes import (
    DERIVED,
    Change,
    Factors,
    copy_of,
    differences,
    differing_keys,
    is_same,
    lambda_factors,
    name_of,
    of_functions,
    of_groups,
)

Every = Literal["step", "epoch"]
"""When `Step.optimize` steps a scheduler."""
_SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""Settings of an optimizer that schedulers change."""
_STEPS_PER_TICK = 1000


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
        optimizer=[copy_of(_settings(optimizer)) for optimizer in optimizers],
        scheduler={key: copy_of(schedule.scheduler.state_dict()) for key, schedule in schedules.items()},
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
    tick: Callable[[], object] = lambda: None,
) -> list[Change]:
    """Replaces restored hyperparameters by those of the code where the code has changed. Returns the changes.

    If a schedule has changed, the schedulers of its optimizer are stepped from their start to the run's position. So a
    longer cosine continues from its own value there. The reductions of a `ReduceLROnPlateau` beside them stay.

    Args:
        optimizers: the optimizers, with their restored state.
        schedules: the schedulers, by the keys that `record` got, with their restored state unless their class is new.
        then: what `record` returned in the session that made the commit.
        now: what it returned in this one, before the restore.
        factors: what `factors_of` returned before the restore.
        tick: called now and then while schedulers are stepped.

    Raises:
        ConfigError: a changed scheduler cannot be stepped to the run's position.
    """
    changes: list[Change] = []
    for optimizer, before, after in zip(optimizers, then.optimizer, now.optimizer, strict=True):
        differing = [differing_keys(saved, own) for saved, own in zip(before, after, strict=True)]
        changes += of_groups(name_of(optimizer, optimizers), before, after, differing)
        is_rescheduled = any(
            key not in optimizer.defaults
            or not is_same(saved[key], group.get(key))  # a schedule has set it, or changed it
            for keys, saved, group in zip(differing, before, optimizer.param_groups, strict=True)
            for key in keys
        )
        rates = [copy_of(group["lr"]) for group in optimizer.param_groups]
        for group, own, keys in zip(optimizer.param_groups, after, differing, strict=True):
            group.update({key: copy_of(own[key]) for key in keys})
        replayed, has_plateau, has_new_form = {}, False, False
        for key, schedule in schedules.items():
            if schedule.scheduler.optimizer is not optimizer:
                continue
            name = name_of(schedule.scheduler, [other.scheduler for other in schedules.values()])
            functions = list(of_functions(name, schedule.scheduler, factors.get(key, {})))
            changed = [*_of_schedule(name, schedule, key, then, now), *functions]
            changes += changed
            if schedule.is_replayable:
                replayed[key] = schedule
                is_rescheduled |= bool(changed)
                has_new_form |= bool(functions) or then.kind[key] != now.kind[key]
            else:
                has_plateau = True
                _adopt_settings(schedule.scheduler, then.scheduler[key], now.scheduler[key])
        if replayed and is_rescheduled:
            # What another class or other functions did cannot be computed any more.
            restored = rates if has_plateau and not has_new_form else []
            _replay(optimizer, replayed, then, now, before, after, restored, tick)
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
    before: Sequence[Mapping[str, Any]],
    settings: Sequence[Mapping[str, Any]],
    rates: Sequence[Any],
    tick: Callable[[], object],
) -> None:
    """Steps the schedulers of an optimizer from their start to the run's position.

    Given the restored learning rates, keeps what else has reduced them: their ratio to those of the schedulers of the
    commit, which start from the settings `before`.
    """
    loaded = [dict(group) for group in optimizer.param_groups]
    taken = {key: steps_taken(schedule.scheduler) for key, schedule in schedules.items()}
    reductions = []
    if rates:
        _reset(optimizer, schedules, then.scheduler, before)
        _step_all(schedules, {key: n - steps_taken(schedules[key].scheduler) for key, n in taken.items()}, tick)
        reductions = [_ratio(lr, group["lr"]) for lr, group in zip(rates, optimizer.param_groups, strict=True)]
    _reset(optimizer, schedules, now.scheduler, settings)
    counts = {}
    for key, schedule in schedules.items():
        counted = taken[key] - steps_taken(schedule.scheduler)
        is_known = then.every[key] == schedule.every and then.kind[key] == now.kind[key]
        counts[key] = min(counted, schedule.num_due) if is_known else schedule.num_due
    _step_all(schedules, counts, tick)
    for group, own, values in zip(optimizer.param_groups, settings, loaded, strict=True):
        unscheduled = [key for key in own if key not in _SCHEDULED and is_same(group[key], own[key])]
        group.update({key: values[key] for key in unscheduled if key in values})
    for group, reduction in zip(optimizer.param_groups, reductions, strict=False):
        group["lr"] = group["lr"] * reduction


def _ratio(restored: Any, scheduled: Any) -> float:
    ratio = float(restored) / float(scheduled) if scheduled else 1.0
    return 1.0 if math.isclose(ratio, 1.0, rel_tol=1e-6) else ratio


def _reset(
    optimizer: torch.optim.Optimizer,
    schedules: Mapping[str, Schedule],
    states: Mapping[str, Mapping[str, Any]],
    settings: Sequence[Mapping[str, Any]],
) -> None:
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(copy_of(own))
    for key, schedule in schedules.items():
        schedule.scheduler.load_state_dict(copy_of(states[key]))


def _step_all(schedules: Mapping[str, Schedule], counts: Mapping[str, int], tick: Callable[[], object]) -> None:
    """Steps each scheduler as often as `counts` says, evenly, as they were stepped in training."""
    total = max(counts.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the order of scheduler.step() and optimizer.step()
        for step in range(total):
            if step % _STEPS_PER_TICK == 0:
                tick()
            for key, count in counts.items():
                if (step + 1) * count // total > step * count // total:
                    _step(schedules[key].scheduler, total)


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
    changed = {key: after[key] for key in differing_keys(before, after) if key not in DERIVED}
    if changed:
        scheduler.load_state_dict({**scheduler.state_dict(), **copy_of(changed)})


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = optimizer.state_dict()["param_groups"]
    return [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]


def _of_schedule(name: str, schedule: Schedule, key: str, then: Prepared, now: Prepared) -> Iterator[Change]:
    """Yields the changes of a scheduler that the training function prepared or registered."""
    before, after = then.scheduler[key], now.scheduler[key]
    if then.kind[key] != now.kind[key]:
        yield Change(f"scheduler {key}", then.kind[key], now.kind[key])
        return
    for attribute in before:
        if attribute in after:
            yield from differences(f"{name}.{attribute}", before[attribute], after[attribute])
    if then.every[key] != schedule.every:
        yield Change(f"{name}.every", then.every[key], schedule.every)


def factors_of(schedules: Mapping[str, Schedule], states: Mapping[str, Mapping[str, Any]]) -> dict[str, Factors]:
    """Returns what the functions of LambdaLRs return where saved states of the schedulers stand."""
    return {
        key: {place: factors for place, (_, factors) in lambda_factors(schedule.scheduler, states[key])}
        for key, schedule in schedules.items()
        if key in states
    }
