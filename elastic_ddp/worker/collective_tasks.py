"""Tasks that all workers do together outside of steps, for example evaluations, and their repetition after a failure.

Some survivors of a failure may have the result of a task and others not, and some may not start the task at all. So the
members of a new generation compare their tasks before they wait for each other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from elastic_ddp.errors import ElasticDDPError


class TasksDifferError(ElasticDDPError):
    """After a worker failed, not all survivors do the same collective task."""


class Task(NamedTuple):
    """One collective task, equal on all ranks that do the same thing at the same place."""

    step: int  # steps done
    is_in_step: bool  # whether the next step has begun
    number: int  # among the tasks at this place, from 1
    name: str


class CollectiveTasks:
    """One worker's collective tasks. This class sends no messages: its callers exchange them."""

    def __init__(self) -> None:
        self._last = Task(-1, False, 0, "")
        self._last_result: Any = None
        self._known: tuple[Task, Any] | None = None  # a task that other ranks have done, and its result
        self._begun = -1
        self._place = (-1, False)
        self._count = 0  # tasks done at this place
        self._is_void = False  # whether no more tasks are done at this place, because other ranks are past it
        self.steps_have_ended = False

    def begin_step(self, step: int) -> None:
        self._begun = step
        self._count = 0
        self._is_void = False

    def end_steps(self) -> None:
        """The loop over steps has ended. From here on all ranks do the same tasks, sooner or later."""
        self.steps_have_ended = True
        self._is_void = False

    def next(self, step: int, name: str) -> Task:
        """Returns this worker's next task, after `step` steps. Raises a TasksDifferError if other ranks are past it."""
        place = (step, self._begun == step)
        if place != self._place:
            self._place = place
            self._count = 0
            self._is_void = False
        if self._is_void:
            raise TasksDifferError(
                f"a worker failed, and not all others run {name!r} after step {step - 1}. Let only step.index decide "
                "what to do after a step."
            )
        return Task(*place, self._count + 1, name)

    def done(self, task: Task, result: Any) -> None:
        self._last = task
        self._last_result = result
        self._count = task.number

    def result_of_others(self, task: Task) -> tuple[Any] | None:
        """Returns the result of a task that other ranks have done, in a tuple; None if it is to be done."""
        return (self._known[1],) if self._known is not None and self._known[0] == task else None

    def message(self, wanted: Task | None) -> bytes:
        """Returns this worker's message to the other ranks: its current task, and its last completed task with the
        result."""
        return json.dumps([wanted, self._last, self._last_result]).encode()

    def compare(self, wanted: Task | None, messages: Sequence[bytes]) -> None:
        """Decides from the messages of all ranks whether `wanted` is done by all ranks, or by none."""
        received = [json.loads(message) for message in messages]
        results = {Task(*last): result for _, last, result in received}
        if wanted in results:
            self._known = (wanted, results[wanted])
            return
        others = [None if task is None else Task(*task) for task, _, _ in received]
        # A rank in a task that others have done receives its result, and is then where they are.
        differ = any(task != wanted and task not in results for task in others)
        self._is_void = wanted is not None and not self.steps_have_ended and differ
