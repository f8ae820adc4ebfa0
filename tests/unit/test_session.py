"""How a driver sees its workers off when the run is over."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import ray

from elastic_ddp.driver import session as session_module
from elastic_ddp.driver.session import Session
from elastic_ddp.rendezvous.event_log import EventLog
from elastic_ddp.rendezvous.members import JoinRequest
from elastic_ddp.rendezvous.messages import DriverUpdate
from elastic_ddp.storage.lease import DriverLease
from elastic_ddp.telemetry import Progress
from elastic_ddp.telemetry.events import Event
from elastic_ddp.telemetry.ledger import read_ledger
from tests.unit.inprocess_rendezvous import InProcessRendezvous
from tests.unit.ledger_events import ledger_event
from tests.unit.rendezvous_harness import member
from tests.unit.single_worker import NewRun

WORKER = member("a", 0, size=1)
LIMIT_S = 20.0

Drive = Callable[[Callable[[InProcessRendezvous], Any]], list[Event]]


@pytest.fixture
def drive(
    new_run: NewRun, rendezvous_here: Callable[..., InProcessRendezvous], monkeypatch: pytest.MonkeyPatch
) -> Drive:
    """Follows a run whose one worker fails while it saves, and does something then. Returns what the ledger has."""
    monkeypatch.setattr(session_module, "WORKERS_LEAVE_S", 0.1)

    def run(then: Callable[[InProcessRendezvous], Any]) -> list[dict[str, Any]]:
        def work(*_: Any, **__: Any) -> None:
            rendezvous.ask("join", JoinRequest(member=WORKER, step=None, between_steps=True), 0, None)
            rendezvous.ask("take", [ledger_event("commit_begun", at=0.0, step=2)], None, WORKER.id, 1)
            rendezvous.ask("end", WORKER, None, {"status": "failed", "error": "the loss is no number"})
            then(rendezvous)

        job, rendezvous = new_run()._loop.job, rendezvous_here()
        monkeypatch.setattr(session_module, "run_workers", work)
        with DriverLease(job.storage, "test", "session", print) as lease:
            lease.acquire()
            assert Session(job, rendezvous, None, lease, time.time()).run()["error"] == "the loss is no number"
        return read_ledger(job.storage)

    return run


def test_a_save_that_a_failed_run_leaves_behind_is_waited_for(drive: Drive) -> None:
    def save(rendezvous: InProcessRendezvous) -> None:
        threading.Event().wait(0.5)  # for longer than workers may take to leave
        said = ledger_event("commit", at=0.0, step=2, seconds=0.5, num_bytes=1)
        rendezvous.ask("take", [said], None, WORKER.id, 2)

    assert [each.step for each in drive(save) if each.event == "commit"] == [2]


def test_a_driver_whose_disk_is_full_for_a_while_follows_its_run_all_the_same(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rendezvous cannot write its memory anew then."""
    monkeypatch.setattr(session_module, "LOOK_S", 0.01)
    after, failures = EventLog.after, iter(range(3))

    def fail(journal: EventLog, number: int) -> list[dict[str, Any]]:
        if next(failures, None) is not None:
            full = OSError(errno.ENOSPC, "no space left on device")
            raise ray.exceptions.RayTaskError("wait_for_update", "", full)
        return after(journal, number)

    monkeypatch.setattr(EventLog, "after", fail)
    assert drive(lambda _: None)[-1].event == "finished" and next(failures, None) is None


def test_what_is_shown_never_goes_back_to_the_generation_before(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker tells of steps and of generations apart, and of the newest steps only now and then."""
    shown: list[tuple[Any, ...]] = []

    def update(_: Progress, step: int, *, world_size: int, state: str, **__: Any) -> None:
        shown.append((step, world_size, state))

    monkeypatch.setattr(Progress, "update", update)
    generation = ledger_event("generation", at=0.0, reason="worker lost", world_size=1, generation=2)
    failure = ledger_event("worker_lost", at=0.0, generation=1, error="its process ended")
    job = new_run(min_workers=2, max_workers=2, global_batch_size=8, micro_batch_size=4)._loop.job
    with DriverLease(job.storage, "test", "session", print) as lease:
        session = Session(job, None, None, lease, 0.0)  # type: ignore[arg-type]
        session._record(replace(generation, reason="start", world_size=2, generation=1, first_step=0))
        told = {"step": 31, "samples": 31, "world_size": 2, "generation": 1, "loss": 0.5}
        session._show(news := DriverUpdate([], told, None, num_alive=2, stopping=False, is_saving=False))
        session._record(failure)
        session._show(news)
        session._show(news._replace(num_alive=1))
        session._record(replace(generation, first_step=40))
        session._show(news)
        session._show(news._replace(progress={**told, "step": 41, "generation": 2, "world_size": 1}))
        session._show(news._replace(num_alive=0))
    training, was_lost = "training", "a worker was lost"
    assert shown[:3] == [(31, 2, training), (31, 2, was_lost), (31, 2, f"{was_lost}, waiting for its replacement")]
    assert shown[3:5] == [(40, 1, training), (41, 1, training)]
    assert shown[5][2] == "waiting for workers, which need a node that is not drained"


def test_a_worker_that_does_not_leave_is_not_waited_for(drive: Drive) -> None:
    go = threading.Event()

    def hang(rendezvous: InProcessRendezvous) -> None:
        said = ledger_event("commit_failed", at=0.0, step=2, error="full", counts=True, of_storage=True)
        rendezvous.ask("take", [said], None, WORKER.id, 2)
        assert go.wait(LIMIT_S)

    assert drive(hang)[-1].event == "finished"
    go.set()
