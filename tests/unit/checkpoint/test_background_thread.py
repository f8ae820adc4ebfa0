"""Tasks in the background thread."""

from __future__ import annotations

import logging
import os
import threading
import weakref

import pytest

from elastic_ddp.checkpoint.background_thread import NICE, BackgroundThread


def test_tasks_run_in_order_in_one_thread_of_lower_priority() -> None:
    behind, release = BackgroundThread("test"), threading.Event()
    done: list[tuple[int, int, int]] = []

    def work(number: int) -> None:
        release.wait()
        done.append((number, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0)))

    for number in range(3):
        behind.submit(lambda number=number: work(number))
    assert behind.is_busy and not behind.wait(0.01) and done == []
    release.set()
    assert behind.wait() and not behind.is_busy
    numbers, threads, priorities = zip(*done, strict=True)
    assert numbers == (0, 1, 2) and len({*threads}) == 1 and threading.get_native_id() not in threads
    assert {*priorities} == {min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE)}


def test_an_unexpected_error_is_logged_and_later_tasks_run(caplog: pytest.LogCaptureFixture) -> None:
    behind, done = BackgroundThread("test"), threading.Event()
    with caplog.at_level(logging.ERROR):
        behind.submit(lambda: 1 // 0)
        assert behind.wait()
    assert "ZeroDivisionError" in caplog.text
    behind.submit(done.set)
    assert behind.wait() and done.is_set()


def test_a_thread_keeps_no_finished_task_and_ends_with_its_owner() -> None:
    class Owner:
        def __init__(self) -> None:
            self.behind = BackgroundThread("test-that-ends")

        def work(self) -> None:
            pass

    owner = Owner()
    owner.behind.submit(owner.work)
    assert owner.behind.wait()
    thread = [other for other in threading.enumerate() if other.name == "test-that-ends"]
    assert len(thread) == 1
    gone = weakref.ref(owner)
    del owner
    thread[0].join(timeout=30)
    assert gone() is None and not thread[0].is_alive()
