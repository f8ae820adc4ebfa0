"""Saves and restores that take longer than a hang may: they are none, as long as the storage is at work."""

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
from tests.saving import LocalMailbox
from tests.unit.single_worker import NewRun, client_of, prepared, train
from tests.unit.test_checkpoint import make_state

TIMEOUT_S = 0.05
LIMIT_S = 20.0


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation takes longer than it may."""
    monkeypatch.setattr("elastic_ddp.storage.retry.MAX_OPERATION_S", 0.0)


@contextmanager
def while_held(
    monkeypatch: pytest.MonkeyPatch, operation: str, do: Callable[[], Any], activity: Activity, place: str
) -> Iterator[Future[Any]]:
    """What is done in a thread has come to a place, and waits there for an operation of the storage. It goes on after
    the block."""
    has_come, go_on, plain = threading.Event(), threading.Event(), getattr(Storage, operation)

    def wait_and_do(*arguments: Any, **options: Any) -> Any:
        has_come.set()
        go_on.wait()
        return plain(*arguments, **options)

    monkeypatch.setattr(Storage, operation, wait_and_do)
    with ThreadPoolExecutor(1) as thread:
        try:
            result = thread.submit(do)
            assert has_come.wait(LIMIT_S)
            is_at(activity, place)
            yield result
        finally:
            go_on.set()
        result.result()


def is_at(activity: Activity, place: str) -> None:
    """Returns once it is."""
    end = time.monotonic() + LIMIT_S
    while activity.now.place != place:
        assert time.monotonic() < end, activity.now
        time.sleep(0.001)


def hung(**activities: Activity) -> HangDetector | None:
    """What saw these hang; None if they did not for many times the timeout."""
    watch, begun = HangDetector(TIMEOUT_S), time.monotonic()
    watch.begin(activities, begun)
    while (now := time.monotonic()) < begun + 10 * TIMEOUT_S:
        for name, each in activities.items():
            watch.update(name, each.now, now)
        if watch.is_hung(now):
            return watch
        time.sleep(TIMEOUT_S / 10)
    return None


def waiting() -> Activity:
    activity = Activity()
    activity.enter("collective")
    return activity


def test_a_last_commit_may_take_as_long_as_it_takes(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    activity = client_of(run).activity
    with while_held(monkeypatch, "write", lambda: train(run), activity, "commit") as result:
        assert hung(it=activity) is None and not result.done()
    assert client_of(run).steps_of("commit") == [6]


def test_a_manifest_may_take_as_long_as_it_takes(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    activity = client_of(run).activity
    with while_held(monkeypatch, "create", lambda: train(run), activity, "commit"):
        assert hung(it=activity) is None


def test_a_write_that_never_ends_is_a_hang(new_run: NewRun, monkeypatch: pytest.MonkeyPatch, stuck: None) -> None:
    run = new_run()
    activity = client_of(run).activity
    with while_held(monkeypatch, "write", lambda: train(run), activity, "commit"):
        assert hung(it=activity) is not None


def test_a_rank_0_that_others_wait_for_while_it_saves_is_not_given_up(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(checkpoint={"every_steps": 6})  # the last save is under way when the last commit is asked for
    activity = client_of(run).activity
    with while_held(monkeypatch, "write", lambda: train(run), activity, "commit"):
        assert hung(rank0=activity, rank1=waiting()) is None


def test_one_whose_write_never_ends_is_given_up_for_those_who_wait(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, stuck: None
) -> None:
    run = new_run(checkpoint={"every_steps": 6})
    activity = client_of(run).activity
    with while_held(monkeypatch, "write", lambda: train(run), activity, "commit"):
        watch = hung(rank0=activity, rank1=waiting())
    assert watch is not None and watch.culprits(is_broken=False) == ["rank0"]


def begin_save(run: Run, rank: int, mailbox: LocalMailbox) -> None:
    """One of two ranks' part in a save."""
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
    run._loop.checkpointer._saver.begin(make_state(1), save)


def test_a_rank_that_still_writes_while_rank_0_waits_for_it_gets_somewhere(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    activity = client_of(run).activity
    told = threading.Event()

    def broadcast(word: bytes | None) -> bytes:
        assert word is None
        told.wait()
        return b"there"

    generation: Any = SimpleNamespace(group=SimpleNamespace(rank=1, broadcast_bytes=broadcast), activity=activity)

    def asks() -> bool:
        begin_save(run, 1, LocalMailbox())
        return run._loop._is_durable(generation)

    with while_held(monkeypatch, "write", asks, activity, "collective"):
        watch = hung(rank1=activity)
        told.set()
    assert watch is None


def test_a_rank_0_that_waits_for_a_share_is_not_to_blame(new_run: NewRun) -> None:
    run = new_run()
    activity, mailbox, other = client_of(run).activity, LocalMailbox(), Activity()
    other.enter("commit")
    group: Any = SimpleNamespace(aborted=False)

    def waits() -> None:
        begin_save(run, 0, mailbox)
        run._loop.checkpointer.wait(group)

    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(waits)
        is_at(activity, "shares")
        watch = hung(rank0=activity, rank1=other)
        mailbox.put(f"{1:032x}/1", '{"error": "it is full"}')
        result.result()
    assert watch is not None and watch.culprits(is_broken=False) == ["rank1"]


def test_a_restore_may_take_as_long_as_it_takes(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    train(new_run(steps=3))
    run = new_run()
    activity = client_of(run).activity
    with while_held(monkeypatch, "read_into", lambda: train(run), activity, "hand-over"):
        assert hung(it=activity) is None
    assert client_of(run).steps_of("resumed") == [3]


def test_weights_of_another_run_may_take_as_long_as_they_take(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    other = new_run(folder="other")
    train(other)
    run = new_run()
    activity = client_of(run).activity

    def begins() -> None:
        prepared(run)
        run.load_weights(other._loop.job.storage.uri)
        next(run.steps())

    with while_held(monkeypatch, "read_into", begins, activity, "hand-over"):
        assert hung(it=activity) is None


def test_every_piece_that_is_handed_over_counts(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    activity = client_of(run).activity
    seen = []

    def hand_over(*_: Any, tick: Callable[[], None], **__: Any) -> None:
        for _ in range(3):
            seen.append(activity.now)
            tick()

    monkeypatch.setattr("elastic_ddp.worker.generation.transfer_state", hand_over)
    train(run)
    assert len(set(seen)) == 3 and {each.place for each in seen} == {"hand-over"}
