"""`WorkerClock`: reports a worker's places to hang detection, the clock of step phases, and the account of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from elastic_ddp.rendezvous.hang import STORING, Activity
from elastic_ddp.rendezvous.user_place import Frame
from elastic_ddp.telemetry.account import Account
from elastic_ddp.worker.phase_clock import PhaseClock

_CPU = torch.device("cpu")


class WorkerClock:
    """Follows a worker from generation to generation.

    The worker calls `form`, `formed`, `ready`, `step_done` for each step, `collective` and `commit` outside of steps,
    `failed` or `barrier_failed` if a peer fails, and `leave`.

    Attributes:
        activity: the current place of the training thread, by which the rendezvous finds hangs. `activity.enter` also
            enters the phase of the place.
        phases: the seconds of each phase of a step.
        account: the seconds of each phase of the generation, for goodput.
    """

    def __init__(self, activity: Activity | None = None, device: torch.device = _CPU) -> None:
        self.activity = activity or Activity()
        self.phases = PhaseClock(device)
        self.account = Account(idle_s=lambda: self.activity.idle_s)
        self.activity.on_enter = self.phases.follow

    def form(self, worked_s: Callable[[], float]) -> None:
        """The worker has its assignment, and its process group starts to form. `worked_s` as in `Activity.enter`."""
        self.account.begin()
        self.activity.enter("hand-over", worked_s)

    def formed(self) -> None:
        """The process group has formed, and all ranks get the same state."""
        self.account.formed()

    def ready(self, generation: int, step: int, num_collectives: Callable[[], int | None]) -> None:
        """Steps can start, with this number of steps done. `num_collectives` as in `Activity.begin_generation`."""
        self.account.ready()
        self.activity.enter("between steps")
        self.phases.begin(step)
        self.activity.begin_generation(generation, num_collectives)

    def step_done(self, step: int) -> float | None:
        """A step is done; `step` is the number of steps done. Returns the seconds of the generation's first step."""
        self.phases.step_done(step)
        return self.account.step_done()

    def collective(self) -> None:
        """A collective task outside of steps begins: a failure in it wastes no earlier work."""
        self.account.mark()

    @contextmanager
    def commit(self, worked_s: Callable[[], float]) -> Iterator[None]:
        """The context in which training waits for a commit. `worked_s` as in `Activity.enter`."""
        with self.account.checkpoint(), self.activity.within(STORING, worked_s):
            yield

    def failed(self, frames: list[Frame], *, in_step: bool) -> None:
        """A peer has failed while the training thread was at this place of the user's code."""
        self.activity.failed_at(frames)
        self.account.record_failure(in_step=in_step)

    def barrier_failed(self) -> None:
        """A peer has failed while this worker waited to leave the generation: all of the wait was detection."""
        self.account.record_detection()

    def leave(self) -> None:
        """The worker leaves the generation."""
        self.account.end()
        self.phases.end()
        self.activity.end_generation()
