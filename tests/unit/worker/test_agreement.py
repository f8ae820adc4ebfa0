"""Events that all ranks know, and errors that all raise."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import CheckpointError, ConfigError, PeerFailedError, StorageError
from elastic_ddp.rendezvous.event_log import EventLog
from elastic_ddp.rendezvous.snapshot import Snapshot
from elastic_ddp.telemetry.events import StepsCompleted
from elastic_ddp.worker.agreement import AgreedEvents, agree_on_error
from elastic_ddp.worker.run import Run
from tests.inside_run import measure, rendezvous_client_of
from tests.ranks import run_ranks
from tests.unit.ledger_events import ledger_event
from tests.unit.single_worker import CPU, prepared
from tests.workers import running

STEPS, KILLED_AFTER, EVALUATE_EVERY = 20, 13, 5


def train_and_kill_rank_0(run: Run) -> None:
    """The reports of rank 0 about its steps and evaluations are not sent when it dies."""
    model: Any = prepared(run)
    for step in run.steps():
        is_first_rank_0 = run.rank == 0 and run.world_size == 2
        if is_first_rank_0 and step.index == 0:
            rendezvous_client_of(run)._sender.submit(time.sleep, 60)
        with step:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())
            step.optimize()
        steps_done = step.index + 1
        if steps_done % EVALUATE_EVERY == 0:
            measure(run, "twice", lambda generation: 2 * generation.state.position.step)
        if is_first_rank_0 and steps_done == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)


def test_what_all_ranks_know_is_recorded_once_although_rank_0_dies(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 2, "log_every_steps": 1}
    with running(tmp_path, train_and_kill_rank_0, CPU, 2, **settings) as workers:
        workers.finish(120)
        assert workers.world_sizes() == [2, 1]
        steps: list[Any] = workers.rendezvous.events("steps_completed")
        assert [(event.step, event.generation) for event in steps] == [
            (step, 1 if step <= KILLED_AFTER else 2) for step in range(1, STEPS + 1)
        ]
        evaluations: list[Any] = workers.rendezvous.events("evaluation_finished")
        assert [(event.step, event.value) for event in evaluations] == [(5, 10), (10, 20), (15, 30), (20, 40)]
        assert [event.generation for event in workers.rendezvous.events("first_step")] == [1, 2]
        measured: list[Any] = workers.rendezvous.events("phases_measured")
        unmeasured = (1, 2, KILLED_AFTER, KILLED_AFTER + 1, KILLED_AFTER + 2, STEPS)
        assert [event.step for event in measured] == [step for step in range(1, STEPS) if step not in unmeasured]


def test_what_the_next_rank_0_repeats_is_in_the_ledger_once_also_after_a_restart(tmp_path: Path) -> None:
    def reported(log: EventLog) -> list[int]:
        return [event.step for event in log.after(0) if isinstance(event, StepsCompleted)]

    log, other = EventLog(Snapshot(str(tmp_path))), AgreedEvents(lambda event: log.add(event))
    for step in range(1, 5):
        event = ledger_event("steps_completed", generation=1, step=step, loss=math.nan)
        other.record(event, is_rank_0=False)
        assert step > 2 or log.add(event)
    other.report_again()
    assert reported(log) == [1, 2, 3, 4]
    log = EventLog(Snapshot(str(tmp_path)))
    other.report_again()
    assert reported(log) == [1, 2, 3, 4]
    assert log.add(ledger_event("steps_completed", generation=2, step=4, loss=math.nan)), "the step is repeated"


def agree(group: ProcessGroup, errors: list[Exception | None]) -> str | list[bytes]:
    """What `agree_on_error` returns or raises where each rank has one of these errors."""
    try:
        return agree_on_error(errors[group.rank], group, f"data of {group.rank}".encode())
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([None, None, None], [b"data of 0", b"data of 1", b"data of 2"]),
        ([None, CheckpointError("bad\nin two lines"), None], r"CheckpointError('bad\nin two lines')"),
        ([CheckpointError("bad"), StorageError("down"), ConfigError("full")], "ConfigError('full')"),
        ([PeerFailedError("changed"), CheckpointError("bad"), CheckpointError("worse")], "CheckpointError('bad')"),
    ],
)
def test_all_ranks_raise_the_same_error_or_get_all_data(
    errors: list[Exception | None], expected: str | list[bytes]
) -> None:
    assert run_ranks(3, agree, errors) == [expected] * 3
