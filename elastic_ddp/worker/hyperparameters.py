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
from elastic_ddp.worker.hyperparameter_changes import (
    DERIVED,
    Change,
    copy_of,
    differences,
    differing_keys,
    name_of,
    of_groups,
)

Every = Literal["step", "epoch"]
"""When `Step.optimize` steps a scheduler."""
PREPARED = "prepared"
"""The component of a state that holds a `Prepared`."""
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


def record(optimizers: Sequence[torch.optim.Optimizer], schedules: Mapping[str, Schedule]) -> Prepared:
    """Returns a copy of all hyperparameters. Raises CheckpointError if one cannot be saved."""
    return Prepared(
        optimizer=[copy_of(_settings(optimizer)) for optimizer in optimizers],
        scheduler={key: copy_of(schedule.scheduler.state_dict()) for key, schedule in schedules.items()},
        kind={key: type(schedule.scheduler).__qualname__ for key, schedule in schedules.items()},
        every={key: schedule.every for key, schedule in schedules.items()},
    )


def compare(
    optimizers: Sequence[torch.optim.Optimizer], schedules: Mapping[str, Schedule], then: Prepared, now: Prepared
) -> list[Change]:
    """Returns the hyperparameters that differ between what `record` returned for a commit and what it returns now."""
    changes: list[Change] = []
    for optimizer, before, after in zip(optimizers, then.optimizer, now.optimizer, strict=True):
        changes += of_groups(name_of(optimizer, optimizers), before, after)
    for key, schedule in schedules.items():
        name = name_of(schedule.scheduler, [other.scheduler for other in schedules.values()])
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
            keys = {*differing_keys(saved, own), *(own.keys() - saved.keys())}
            group.update({key: copy_of(own[key]) for key in keys})
            edited |= {key for key in keys if key in _SCHEDULED or key not in optimizer.defaults}
        moved = {}
        for key, schedule in schedules.items():
            if schedule.scheduler.optimizer is not optimizer:
                continue
            if isinstance(schedule.scheduler, ReduceLROnPlateau):
                changed = [
                    each for each in differing_keys(then.scheduler[key], now.scheduler[key]) if each not in DERIVED
                ]
                state = {each: copy_of(now.scheduler[key][each]) for each in changed}
                schedule.scheduler.load_state_dict({**schedule.scheduler.state_dict(), **state})
            else:
                moved[key] = schedule
        if edited or any(any(_of_schedule("", key, then, now)) for key in moved):
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
        scheduler.load_state_dict(copy_of(now.scheduler[key]))
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
            yield from differences(f"{name}.{attribute}", before[attribute], after[attribute])
    if then.every[key] != now.every[key]:
        yield Change(f"{name}.every", then.every[key], now.every[key])
