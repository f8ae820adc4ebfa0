"""Saves and restores that take longer than the hang timeout: no hang, as long as the storage makes progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ddp.checkpoint import Save
from elastic_ddp.rendezvous.hang import Activity, HangDetector
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.run import Run
from tests.inside_run import checkpointer_of, is_durable, job_of
from tests.saving import LocalMailbox
from tests.unit.checkpoint.test_checkpoint import make_state
from tests.unit.single_worker import NewRun, client_of, prepared, train

TIMEOUT_S = 0.05
LIMIT_S = 20.0


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation of the storage exceeds its limit."""
    monkeypatch.setattr("elastic_ddp.storage.watchdog.MAX_OPERATION_S", 0.0)


@contextmanager
def while_blocked(
    monkeypatch: pytest.MonkeyPatch, operation: str, do: Callable[[], Any], activity: Activity, place: str
) -> Iterator[Future[Any]]:
    """Runs `do` in a thread, and the block while an operation of the storage blocks that thread.

    Args:
        monkeypatch: blocks the operation until the block ends.
        operation: a method of `Storage`.
        do: what to run.
        activity: the activity of that thread.
        place: where the activity is when the operation blocks.
    """
    is_blocked, released, plain = threading.Event(), threading.Event(), getattr(Storage, operation)

    def blocked_operation(*arguments: Any, **options: Any) -> Any:
        is_blocked.set()
        released.wait()
        return plain(*arguments, **options)

    monkeypatch.setattr(Storage, operation, blocked_operation)
    with ThreadPoolExecutor(1) as thread:
        try:
            result = thread.submit(do)
            assert is_blocked.wait(LIMIT_S)
            wait_until_at(activity, place)
            yield result
        finally:
            released.set()
        result.result()


def wait_until_at(activity: Activity, place: str) -> None:
    end = time.monotonic() + LIMIT_S
    while activity.now.place != place:
        assert time.monotonic() < end, activity.now
        time.sleep(0.001)


def detect_hang(**activities: Activity) -> HangDetector | None:
    """The detector that finds these hung; None if it does not within many timeouts."""
    detector, begun = HangDetector(TIMEOUT_S), time.monotonic()
    detector.begin(activities, begun)
    while (now := time.monotonic()) < begun + 10 * TIMEOUT_S:
        for name, activity in activities.items():
            detector.update(name, activity.now, now)
        if detector.is_hung(now):
            return detector
        time.sleep(TIMEOUT_S / 10)
    return None


def waiting_activity() -> Activity:
    activity = Activity()
    activity.enter("collective")
    return activity


def test_a_slow_last_commit_is_no_hang(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    activity = client_of(run).activity
    with while_blocked(monkeypatch, "write", lambda: train(run), activity, "commit") as result:
        assert detect_hang(rank0=activity) is None and not result.done()
    assert client_of(run).steps_of("commit_succeeded") == [6]


def test_a_slow_manifest_is_no_hang(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    activity = client_of(run).activity
    with while_blocked(monkeypatch, "create", lambda: train(run), activity, "commit"):
        assert detect_hang(rank0=activity) is None


def test_a_write_that_never_ends_is_a_hang(new_run: NewRun, monkeypatch: pytest.MonkeyPatch, stuck: None) -> None:
    run = new_run()
    activity = client_of(run).activity
    with while_blocked(monkeypatch, "write", lambda: train(run), activity, "commit"):
        assert detect_hang(rank0=activity) is not None


def test_a_slow_save_of_rank_0_is_no_hang_for_the_ranks_that_wait(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(checkpoint={"every_steps": 6})  # the last save is in progress when the last commit is due
    activity = client_of(run).activity
    with while_blocked(monkeypatch, "write", lambda: train(run), activity, "commit"):
        assert detect_hang(rank0=activity, rank1=waiting_activity()) is None


def test_the_rank_whose_write_never_ends_is_the_culprit(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, stuck: None
) -> None:
    run = new_run(checkpoint={"every_steps": 6})
    activity = client_of(run).activity
    with while_blocked(monkeypatch, "write", lambda: train(run), activity, "commit"):
        detector = detect_hang(rank0=activity, rank1=waiting_activity())
    culprits = detector and detector.decide(is_broken=False)
    assert isinstance(culprits, dict) and [*culprits] == ["rank0"]


def begin_save(run: Run, rank: int, mailbox: LocalMailbox) -> None:
    """Begins a save of two ranks on one of them."""
    save = Save(
        step=1,
        attempt=f"{1:032x}",
        world_size=2,
        rank=rank,
        mailbox=mailbox,
        record={},
        fence=lambda: None,
        on_end=lambda outcome: None,
    )
    checkpointer_of(run)._saver.begin(make_state(1), save)


def test_a_rank_that_writes_while_rank_0_waits_makes_progress(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    activity = client_of(run).activity
    answered = threading.Event()

    def broadcast(data: bytes | None) -> bytes:
        assert data is None
        answered.wait()
        return b"there"

    generation: Any = SimpleNamespace(group=SimpleNamespace(rank=1, broadcast_bytes=broadcast), activity=activity)

    def save_and_ask() -> bool:
        begin_save(run, 1, LocalMailbox())
        return is_durable(run, generation)

    with while_blocked(monkeypatch, "write", save_and_ask, activity, "collective"):
        detector = detect_hang(rank1=activity)
        answered.set()
    assert detector is None


def test_a_rank_0_that_waits_for_a_share_is_not_the_culprit(new_run: NewRun) -> None:
    run = new_run()
    activity, mailbox, other = client_of(run).activity, LocalMailbox(), Activity()
    other.enter("commit")
    group: Any = SimpleNamespace(aborted=False)

    def save_and_wait() -> None:
        begin_save(run, 0, mailbox)
        checkpointer_of(run).wait(group)

    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(save_and_wait)
        wait_until_at(activity, "shares")
        detector = detect_hang(rank0=activity, rank1=other)
        mailbox.put(f"{1:032x}/1", '{"error": "disk full"}')
        result.result()
    culprits = detector and detector.decide(is_broken=False)
    assert isinstance(culprits, dict) and [*culprits] == ["rank1"]


def test_a_slow_restore_is_no_hang(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    train(new_run(steps=3))
    run = new_run()
    activity = client_of(run).activity
    with while_blocked(monkeypatch, "read_into", lambda: train(run), activity, "hand-over"):
        assert detect_hang(rank0=activity) is None
    assert client_of(run).steps_of("resumed") == [3]


def test_slow_weights_of_another_run_are_no_hang(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    other = new_run(folder="other")
    train(other)
    run = new_run()
    activity = client_of(run).activity

    def load_and_begin() -> None:
        prepared(run)
        run.load_weights(job_of(other).storage.uri)
        next(run.steps())

    with while_blocked(monkeypatch, "read_into", load_and_begin, activity, "hand-over"):
        assert detect_hang(rank0=activity) is None


def test_every_transferred_piece_counts_as_progress(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    activity = client_of(run).activity
    seen = []

    def transfer_state(*_: Any, tick: Callable[[], None], **__: Any) -> None:
        for _ in range(3):
            seen.append(activity.now)
            tick()

    monkeypatch.setattr("elastic_ddp.worker.state_sharing.transfer_state", transfer_state)
    train(run)
    assert len(set(seen)) == 3 and {snapshot.place for snapshot in seen} == {"hand-over"}
