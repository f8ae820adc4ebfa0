"""When a worker's feeds are opened and closed, with fake feeds that log it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from elastic_ddp.data.feed_cache import FeedCache


class Feed:
    def __init__(self, log: list[str], micro_batches: tuple[int, ...], step: int) -> None:
        self.micro_batches, self.next_step, self.is_ready = micro_batches, step, False
        self.log, self.may_close = log, threading.Event()
        self.may_close.set()
        self.closed = False
        log.append(f"open {micro_batches} from {step}")

    def skip_to(self, step: int) -> None:
        assert step >= self.next_step
        self.next_step = step

    def release_pipeline(self) -> None:
        self.log.append(f"release {self.micro_batches}")

    def interrupt(self) -> None: ...

    def close(self) -> None:
        self.may_close.wait()
        self.closed = True
        self.log.append(f"close {self.micro_batches}")


def feeds_and_log() -> tuple[Any, list[str]]:
    log: list[str] = []

    def make(micro_batches: tuple[int, ...], step: int, after: Callable[[], object]) -> Any:
        after()
        return Feed(log, micro_batches, step)

    return FeedCache(make), log


def test_open_returns_the_prepared_feed() -> None:
    feeds, log = feeds_and_log()
    assert not feeds.prepare((0, 1), 7)
    feeds._prepared.is_ready = True
    assert feeds.prepare((0, 1), 8), "a later step"
    feeds.discard_unfit((0, 1), 10)
    feed = feeds.open((0, 1), 10)
    assert feed.next_step == 10
    assert log == ["open (0, 1) from 7"]
    feeds.shut_down()
    assert not feed.closed, "an open feed stays open"


def test_a_feed_for_other_micro_batches_or_a_later_step_is_replaced() -> None:
    for micro_batches, step in [((1,), 7), ((0,), 6)]:
        feeds, log = feeds_and_log()
        feeds.prepare((0,), 7)
        feeds._prepared.is_ready = True
        assert not feeds.prepare(micro_batches, step)
        feeds.shut_down()
        assert sorted(log) == sorted(
            ["open (0,) from 7", f"open {micro_batches} from {step}", "close (0,)", f"close {micro_batches}"]
        )


def test_a_feed_without_rows_or_that_does_not_fit_is_closed_before_a_group_forms() -> None:
    """Otherwise it could open connections while the group forms."""
    cases = [((0,), 9, False), ((1,), 9, True), ((0,), 8, True), ((0,), None, False), ((1,), None, True)]
    for micro_batches, step, is_ready in cases:
        feeds, log = feeds_and_log()
        feeds.prepare((0,), 9)
        feeds._prepared.is_ready = is_ready
        feeds.discard_unfit(micro_batches, step)
        assert log == ["open (0,) from 9", "close (0,)"]


def test_a_prepared_feed_is_kept_for_a_generation_that_finds_out_its_first_step() -> None:
    for step, replaced in [(0, []), (3, []), (1000, ["close (0,)", "open (0,) from 1000"])]:
        feeds, log = feeds_and_log()
        feeds.prepare((0,), 0)
        feeds._prepared.is_ready = True
        feeds.discard_unfit((0,), None)
        assert feeds.open((0,), step).next_step == step
        assert log == ["open (0,) from 0", *replaced]


def test_open_waits_until_closed_feeds_have_freed_their_processes() -> None:
    feeds, log = feeds_and_log()
    old = feeds.open((0,), 0)
    old.may_close.clear()
    feeds.close(old)
    assert feeds.prepare((1,), 5) is False, "preparing does not wait"
    feeds._prepared.is_ready = True
    assert feeds.open((1,), 5).micro_batches == (1,)
    feeds.close(feeds._current)
    threading.Timer(0.05, old.may_close.set).start()
    assert feeds.open((2,), 5).micro_batches == (2,)
    assert log == ["open (0,) from 0", "open (1,) from 5", "close (1,)", "close (0,)", "open (2,) from 5"]


def test_the_current_feed_releases_its_pipeline_before_another_reads() -> None:
    feeds, log = feeds_and_log()
    current = feeds.open((0,), 0)
    feeds.prepare((1,), 5)
    feeds.prepare((1,), 6)
    assert log == ["open (0,) from 0", "release (0,)", "open (1,) from 5"]
    feeds.close(current)
    feeds.prepare((2,), 7)
    assert log[-1] == "open (2,) from 7", "there is no current feed any more"
    feeds.shut_down()
