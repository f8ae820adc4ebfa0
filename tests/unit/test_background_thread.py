"""What happens behind training."""

from __future__ import annotations

import logging
import os
import threading
import weakref

import pytest

from elastic_ddp.checkpoint.background_thread import NICE, BackgroundThread


def test_one_thing_is_done_after_the_other_in_one_thread_that_is_nice() -> None:
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


def test_an_error_that_was_not_foreseen_is_logged_and_what_comes_next_is_done(caplog: pytest.LogCaptureFixture) -> None:
    behind, done = BackgroundThread("test"), threading.Event()
    with caplog.at_level(logging.ERROR):
        behind.submit(lambda: 1 // 0)
        assert behind.wait()
    assert "ZeroDivisionError" in caplog.text
    behind.submit(done.set)
    assert behind.wait() and done.is_set()


def test_it_holds_nothing_of_what_is_done_and_ends_with_its_owner() -> None:
    class Owner:
        def __init__(self) -> None:
            self.behind = BackgroundThread("test-that-ends")

        def work(self) -> None:
            pass

    owner = Owner()
    owner.behind.submit(owner.work)
    assert owner.behind.wait()
    thread = [each for each in threading.enumerate() if each.name == "test-that-ends"]
    assert len(thread) == 1
    gone = weakref.ref(owner)
    del owner
    thread[0].join(timeout=30)
    assert gone() is None and not thread[0].is_alive()
