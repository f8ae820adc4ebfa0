"""`StepGuard`: refuses training functions that step or change the optimizers and schedulers that the run steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from elastic_ddp.errors import ConfigError
from elastic_ddp.worker.hyperparameters import steps_taken


class StepGuard:
    """Checks that only the run steps prepared optimizers and schedulers. Before `begin`, optimizers may step freely."""

    def __init__(self) -> None:
        self._is_stepping = False
        self._group_sizes: list[list[int]] | None = None
        self._scheduler_steps: list[int] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes steps of an optimizer outside of `stepping` raise a ConfigError."""
        with suppress(AttributeError):  # an optimizer that does not call Optimizer.__init__ has no hooks
            optimizer.register_step_pre_hook(self._check_step)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A block in which the run steps optimizers."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def begin(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The training function has begun its loop, and must not change param_groups from here on."""
        self._group_sizes = _group_sizes(optimizers)

    def count(self, schedulers: Sequence[LRScheduler]) -> None:
        """The run has stepped or loaded the schedulers."""
        self._scheduler_steps = [steps_taken(scheduler) for scheduler in schedulers]

    def check(self, optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[LRScheduler]) -> None:
        """Raises a ConfigError if the training function stepped a scheduler, or changed the groups of an optimizer."""
        if self._group_sizes is not None and _group_sizes(optimizers) != self._group_sizes:
            raise ConfigError(
                "the param_groups of a prepared optimizer changed inside run.steps(). The groups of each had "
                f"{self._group_sizes} parameters before, and have {_group_sizes(optimizers)} now. A worker that joins "
                "or resumes builds the optimizer as before the loop. Create all param_groups there, and keep the "
                "learning rate of those that wait at 0, for example with a LambdaLR."
            )
        for scheduler, count in zip(schedulers, self._scheduler_steps, strict=False):
            if steps_taken(scheduler) != count:
                kind = type(scheduler).__name__
                raise ConfigError(
                    f"the training function called step() of the prepared {kind}, which the run calls after its "
                    "optimizer. Remove scheduler.step() from the training function. To step it once an epoch, use "
                    'run.prepare(scheduler, every="epoch"); to step it yourself, use run.register("scheduler", '
                    "scheduler) in place of run.prepare."
                )

    def _check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._group_sizes is not None and not self._is_stepping:
            kind = type(optimizer).__name__
            raise ConfigError(
                f"the training function called step() of the prepared {kind}, which the run calls in step.optimize(), "
                "or at the end of step.update. Remove optimizer.step() from the training function, or do not prepare "
                "an optimizer that you step yourself."
            )


def _group_sizes(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[int]]:
    return [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
