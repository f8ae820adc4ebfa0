"""How a driver waits for its workers when the run is over, and what it prints meanwhile."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from elastic_ddp.driver import session as session_module
from elastic_ddp.driver.cluster_watch import GcsWatch
from elastic_ddp.driver.display import RunDisplay
from elastic_ddp.driver.session import Session
from elastic_ddp.errors import ConfigError
from elastic_ddp.rendezvous.event_log import EventLog
from elastic_ddp.rendezvous.members import JoinRequest
from elastic_ddp.rendezvous.messages import DriverUpdate
from elastic_ddp.storage.lease import DriverLease
from elastic_ddp.telemetry import Progress
from elastic_ddp.telemetry.description import describe_event
from elastic_ddp.telemetry.event import PEER_FAILED, Event
from elastic_ddp.telemetry.events import CommitSucceeded
from elastic_ddp.telemetry.ledger import read_ledger
from tests.inside_run import job_of
from tests.unit.inprocess_rendezvous import FAKE_RAY, InProcessRendezvous
from tests.unit.ledger_events import ledger_event
from tests.unit.rendezvous_harness import member
from tests.unit.single_worker import NewRun

WORKER = member("a", 0, size=1)
LIMIT_S = 20.0

GCS = "10.0.0.1:6379"

Drive = Callable[[Callable[[InProcessRendezvous], Any]], list[Event]]


@contextmanager
def session_of(job: Any, rendezvous: Any, gcs: GcsWatch | None = None) -> Iterator[Session]:
    with DriverLease(job.storage, "test", lambda _: "s000001-a", print) as lease:
        lease.acquire()
        yield Session(job, rendezvous, None, lease, time.time(), gcs or GcsWatch(GCS))


@pytest.fixture
def drive(
    new_run: NewRun, inprocess_rendezvous: Callable[..., InProcessRendezvous], monkeypatch: pytest.MonkeyPatch
) -> Drive:
    """Runs a session whose only worker fails during a save and then calls `then`. Returns the ledger."""
    monkeypatch.setattr(session_module, "EXIT_TIMEOUT_S", 0.1)

    def run(then: Callable[[InProcessRendezvous], Any]) -> list[Event]:
        def work(*_: Any, **__: Any) -> None:
            rendezvous.ask("join", JoinRequest(member=WORKER, step=None, between_steps=True))
            rendezvous.ask("report", ledger_event("commit_started", at=0.0, step=2), None, WORKER.id, 1)
            rendezvous.ask("end", WORKER, None, {"status": "failed", "error": "the loss is no number"})
            then(rendezvous)

        job, rendezvous = job_of(new_run()), inprocess_rendezvous()
        monkeypatch.setattr(session_module, "run_workers", work)
        with session_of(job, rendezvous) as session:
            assert session.run()["error"] == "the loss is no number"
        return read_ledger(job.storage)

    return run


def test_the_driver_waits_for_a_save_that_is_in_progress_when_the_run_fails(drive: Drive) -> None:
    def save(rendezvous: InProcessRendezvous) -> None:
        threading.Event().wait(0.3)  # longer than the exit timeout
        event = ledger_event("commit_succeeded", at=0.0, step=2, seconds=0.5, num_bytes=1)
        rendezvous.ask("report", event, None, WORKER.id, 2)

    assert [event.step for event in drive(save) if isinstance(event, CommitSucceeded)] == [2]


def test_the_driver_retries_while_the_rendezvous_fails(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rendezvous fails while the disk of its snapshot is full."""
    monkeypatch.setattr(session_module, "RETRY_S", 0.01)
    after, failures = EventLog.after, iter(range(3))

    def fail(journal: EventLog, number: int) -> list[Event]:
        if next(failures, None) is not None:
            full = OSError(errno.ENOSPC, "no space left on device")
            raise ray.exceptions.RayTaskError("wait_for_update", "", full)
        return after(journal, number)

    monkeypatch.setattr(EventLog, "after", fail)
    assert drive(lambda _: None)[-1].event == "run_finished" and next(failures, None) is None


def test_the_metrics_get_each_event_of_the_ledger(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []
    monkeypatch.setattr(session_module.RunMetrics, "record", lambda metrics, event: recorded.append(event.event))
    assert [event.event for event in drive(lambda _: None)] == recorded
    assert recorded[0] == "session_started" and recorded[-2:] == ["run_failed", "run_finished"]


class SilentRendezvous:
    """Its process does not answer any more."""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: Future())


@pytest.mark.parametrize(("requested", "status"), [(True, "stopped"), (False, "failed")])
def test_a_session_ends_soon_if_ray_has_ended_on_this_machine(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, requested: bool, status: str
) -> None:
    """Ray itself waits for a minute, and then ends the driver."""
    monkeypatch.setattr(session_module, "ray", FAKE_RAY)
    monkeypatch.setattr(session_module, "RAY_CHECK_S", 0.01)
    monkeypatch.setattr(session_module, "has_ray_ended", lambda is_ending: is_ending or not requested)
    monkeypatch.setattr(session_module, "run_workers", lambda *_: None)
    with session_of(job_of(new_run()), SilentRendezvous()) as session:
        session.stop_requests.requested = requested
        assert session.run()["status"] == status


def test_a_run_whose_gcs_does_not_return_commits_and_ends_with_what_to_do(
    new_run: NewRun, inprocess_rendezvous: Callable[..., InProcessRendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself ends the driver after a minute, with its own line only."""
    job, rendezvous, clock = job_of(new_run()), inprocess_rendezvous(), iter(range(0, 10**6, 10))

    def refuse(*_: Any) -> None:
        raise ConnectionRefusedError

    def train_until_stopped(*_: Any) -> None:
        rendezvous.ask("join", JoinRequest(member=WORKER, step=None, between_steps=True))
        while not rendezvous.actor._coordinator.membership.wanted.stop:
            time.sleep(0.01)
        rendezvous.ask("end", WORKER, None, {"status": "stopped"})
        assert rendezvous.has_ended.wait(LIMIT_S)
        threading.Event().wait(LIMIT_S)  # without the GCS, Ray Train waits

    monkeypatch.setattr(session_module, "has_ray_ended", lambda is_ending: False)
    monkeypatch.setattr(session_module, "run_workers", train_until_stopped)
    with session_of(job, rendezvous, GcsWatch(GCS, refuse, lambda: next(clock))) as session:
        outcome = session.run()
    assert outcome["status"] == "failed"
    assert f"Ray's GCS at {GCS}" in outcome["error"] and "the same command" in outcome["error"].lower()
    assert rendezvous.has_ended.is_set(), "the worker has left, after its commit"


def test_a_runtime_env_that_ray_cannot_set_up_is_an_error_of_the_configuration(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ray.exceptions.RuntimeEnvSetupError("[Node 10.0.0.3] Traceback\nERROR: no such package")

    monkeypatch.setattr(session_module, "ray", SimpleNamespace(get=fail, exceptions=ray.exceptions))
    monkeypatch.setattr(session_module, "run_workers", lambda *_: None)
    message = r"cannot set up runtime_env on node 10\.0\.0\.3 \(ERROR: no such"
    with session_of(job_of(new_run()), SilentRendezvous()) as session, pytest.raises(ConfigError, match=message):
        session.run()


def test_shown_progress_never_returns_to_an_earlier_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events arrive before the progress that belongs to them."""
    shown: list[tuple[Any, ...]] = []

    def update(_: Progress, step: int, *, world_size: int, state: str, **__: Any) -> None:
        shown.append((step, world_size, state))

    monkeypatch.setattr(Progress, "update", update)
    generation = ledger_event("generation_started", reason="worker failed", world_size=1, generation=2, first_step=40)
    progress = {"step": 31, "samples": 31, "world_size": 2, "generation": 1, "loss": 0.5}
    display = RunDisplay(100, 2, None)
    display.record(replace(generation, reason="start", world_size=2, generation=1, first_step=0))
    display.show_update(running := DriverUpdate([], progress, None, num_alive=2, stopping=False, is_saving=False))
    display.record(ledger_event("worker_failed", generation=1, error="its process exited"))
    display.show_update(running)
    display.show_update(running._replace(num_alive=1))
    display.record(generation)
    display.show_update(running)
    display.show_update(running._replace(progress={**progress, "step": 41, "generation": 2, "world_size": 1}))
    display.show_update(running._replace(num_alive=0))
    assert shown[:3] == [
        (31, 2, "training"),
        (31, 2, PEER_FAILED),
        (31, 2, f"{PEER_FAILED}, waiting for its replacement"),
    ]
    assert shown[3:5] == [(40, 1, "training"), (41, 1, "training")]
    assert shown[5][2].startswith("waiting for workers")


def test_a_failed_worker_and_its_replacement_are_printed_with_their_step() -> None:
    failed = ledger_event("worker_failed", generation=3, error="exit signal SIGKILL\nmore")
    assert describe_event(failed) == "generation 3: a worker failed: exit signal SIGKILL"
    for error, line in (
        ("its process exited: SIGSEGV at a.py:1 in train\n  File", "its process exited: SIGSEGV at a.py:1 in train"),
        ("Traceback:\n  File\nValueError: wrong\n", "ValueError: wrong"),
    ):
        newcomer = ledger_event("newcomer_failed", generation=3, member="m", error=error)
        assert describe_event(newcomer) == f"a worker failed before it trained: {line}"
    formed = ledger_event("generation_started", generation=4, first_step=188, world_size=1, reason="worker failed")
    assert describe_event(formed) == "[step 188] generation 4 (worker failed): 1 worker"
    commit = ledger_event("commit_succeeded", step=200, seconds=0.134)
    assert describe_event(commit) == "[step 200] checkpoint committed in 0.13 s"
    assert describe_event(ledger_event("first_step")) is None


def test_the_driver_does_not_wait_for_a_worker_that_hangs(drive: Drive) -> None:
    go = threading.Event()

    def hang(rendezvous: InProcessRendezvous) -> None:
        event = ledger_event("commit_failed", at=0.0, step=2, error="full", counts=True, of_storage=True)
        rendezvous.ask("report", event, None, WORKER.id, 2)
        assert go.wait(LIMIT_S)

    assert drive(hang)[-1].event == "run_finished"
    go.set()
