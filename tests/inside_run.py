"""Functions with which tests drive the worker behind a `Run`.

Only this file uses private names of `Run` and `Step`. Some tests also replace public attributes of `Loop`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic_ddp.rendezvous.client import RendezvousClient
from elastic_ddp.rendezvous.hang import Activity
from elastic_ddp.rendezvous.members import Member
from elastic_ddp.rendezvous.messages import Signals
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry.account import Account
from elastic_ddp.worker.checkpointing import Checkpointer
from elastic_ddp.worker.generation import Generation
from elastic_ddp.worker.job import Job
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.train_state import TrainState
from elastic_ddp.worker.warmup_step import WarmupStep

if TYPE_CHECKING:
    import pytest
    import torch

# The parts of a worker.


def job_of(run: Run) -> Job:
    return run._loop.job


def state_of(run: Run) -> TrainState:
    return run._loop.state


def generation_of(run: Run) -> Generation | None:
    return run._loop.membership.generation


def checkpointer_of(run: Run) -> Checkpointer:
    return run._loop.checkpointer


def storage_of_commits(run: Run) -> Storage:
    return run._loop.checkpointer._storage._storage


def rendezvous_client_of(run: Run) -> RendezvousClient:
    return run._loop.client


def activity_of(run: Run) -> Activity:
    return run._loop.client.activity


def member_of(run: Run) -> Member:
    return run._loop.client.member


def signals_of(run: Run) -> Signals:
    """Returns the newest signals of the rendezvous."""
    return run._loop.client.signals


def set_clock(run: Run, clock: Callable[[], float]) -> None:
    """Gives a worker another clock, by which it counts the time of a generation."""
    run._loop.membership.clock.account = Account(clock=clock, idle_s=lambda: activity_of(run).idle_s)
    activity_of(run)._clock = clock


def set_device(run: Run, device: torch.device) -> None:
    """Makes a worker read its rows as if it trained on another device."""
    membership = run._loop.membership
    membership._inputs = replace(membership._inputs, device=device)


def fake_weights(monkeypatch: pytest.MonkeyPatch, run: Run, digests: list[str]) -> None:
    """Makes the comparison at the end of a run find these hashes of the ranks' weights."""
    monkeypatch.setattr(run._loop, "_gather_weights_sha256", lambda generation: digests)


# What `worker.main` does beside the training function.


def finish(run: Run) -> dict[str, Any]:
    """Ends a run after its loop over steps, and returns its outcome."""
    return run._loop.finish()


def leave(run: Run, *, intact: bool = True) -> None:
    """Leaves the generation of a run. Not `intact`: other members may be elsewhere."""
    run._loop.membership.leave(intact=intact)


def restart(run: Run) -> Run:
    """Returns the `Run` for another call of the training function, after `RestartTraining`."""
    run._loop.restart()
    return Run(run._loop)


def close_profiler(run: Run) -> None:
    """Ends a profile, and waits until its trace is stored."""
    run._loop.profiler.close()


# What happens beside the steps.


def warm_up(run: Run) -> WarmupStep | None:
    """Returns the step with which a worker that joins warms up, if there is one."""
    return run._loop.membership.warm_up()


def is_saving(run: Run) -> bool:
    return run._loop.checkpointer.is_saving


def wait_for_save(run: Run, within_s: float = 60.0) -> None:
    run._loop.checkpointer.close(within_s)


def wait_for_save_in_generation(run: Run) -> None:
    """Waits for the running save, or until the generation breaks."""
    generation = generation_of(run)
    if generation is not None:
        run._loop.checkpointer._wait_in(generation.group)


def is_durable(run: Run, generation: Generation) -> bool:
    """Returns whether the current state is committed, once the running save has ended. Collective."""
    return run._loop._is_durable(generation)


def is_ready_to_change(run: Run, steps_done: int) -> bool:
    """Returns whether this worker is ready for a change of membership after this many steps."""
    return run._loop.membership.is_ready_to_change(steps_done)


def measure(run: Run, name: str, figure: Callable[[Generation], Any]) -> Any:
    """Returns what all ranks compute together, as in an evaluation of this name."""
    return run._loop.measure(name, figure)


# Inside a step.


def micro_batch_of(step: Step) -> int:
    """Returns the number of the micro-batch that the loop is at."""
    assert step._update.current is not None
    return step._update.current


def rows_of_rank(step: Step, rank: int) -> int:
    """Returns how many rows a rank has in a step."""
    return int(step._plan.rows[list(step.generation.strategy.ranges[rank])].sum())
