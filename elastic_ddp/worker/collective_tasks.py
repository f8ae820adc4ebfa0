"""What all workers do together outside of steps: who has done what of it, and who is in the midst of it.

A peer that is lost can leave some workers with the result of an evaluation and others without, who cannot do it alone.
And what a training function asks for after a step that was lost, not all of them may ask for. So those who meet again
compare, before anybody waits for somebody who does not come.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from elastic_ddp.errors import ElasticDDPError


class NotTogetherError(ElasticDDPError):
    """Not all workers want something that all have to do together, since a peer was lost."""


class Task(NamedTuple):
    """One thing that all do together."""

    step: int
    """Steps done before it."""
    is_in_step: bool
    """Whether the step after those has begun."""
    number: int
    """Among what was done since then, from 1."""
    name: str


class CollectiveTasks:
    """One worker's. It knows nothing of process groups: others' messages are handed to it."""

    def __init__(self) -> None:
        self._done = Task(-1, False, 0, "")
        self._result: Any = None
        self._known: tuple[Task, Any] | None = None
        """What others have done already."""
        self._begun = -1
        self._place = (-1, False)
        self._count = 0
        """Done since this worker came to that place."""
        self._is_void = False
        """Whether nothing more can be done there, as others have gone on."""
        self.steps_have_ended = False
        """Whether this worker's loop over steps has."""

    def begin_step(self, step: int) -> None:
        """A step begins, perhaps not for the first time."""
        self._begun, self._count, self._is_void = step, 0, False

    def end_steps(self) -> None:
        """From here on all come to do the same, sooner or later."""
        self.steps_have_ended, self._is_void = True, False

    def next(self, step: int, name: str) -> Task:
        """What this worker wants done next, in the state after so many steps.

        Raises:
            NotTogetherError: others have gone on.
        """
        place = (step, self._begun == step)
        if place != self._place:
            self._place, self._count, self._is_void = place, 0, False
        if self._is_void:
            raise NotTogetherError(
                f"a peer was lost, and of those who are left not all ask for {name!r} after step {step - 1}; decide by "
                "step.index alone what to do after a step"
            )
        return Task(*place, self._count + 1, name)

    def done(self, task: Task, result: Any) -> None:
        """A task was done here; `result` is what JSON has."""
        self._done, self._result, self._count = task, result, task.number

    def result_of_others(self, task: Task) -> tuple[Any] | None:
        """What came of it where it is done already; None if it is to be done."""
        return (self._known[1],) if self._known is not None and self._known[0] == task else None

    def message(self, wanted: Task | None) -> bytes:
        """For the others: what this worker wants done, if it is amid something, and what it did last."""
        return json.dumps([wanted, self._done, self._result]).encode()

    def compare(self, wanted: Task | None, everyone: Sequence[bytes]) -> None:
        """Settles from everybody's messages what becomes of it: it is done by all, or not at all."""
        messages = [json.loads(each) for each in everyone]
        done = {Task(*last): result for _, last, result in messages}
        if wanted in done:
            self._known = (wanted, done[wanted])
            return
        theirs = [None if each is None else Task(*each) for each, _, _ in messages]
        # Who wants what others have done gets that, and is where they are.
        are_apart = any(each != wanted and each not in done for each in theirs)
        self._is_void = wanted is not None and not self.steps_have_ended and are_apart
