"""When a worker's feeds are opened and closed, with feeds that only say so."""

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

    def rest(self) -> None:
        self.log.append(f"rest {self.micro_batches}")

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


def test_the_feed_that_was_prepared_is_the_next_one() -> None:
    feeds, log = feeds_and_log()
    assert not feeds.prepare((0, 1), 7)
    feeds._prepared.is_ready = True
    assert feeds.prepare((0, 1), 8), "training went on meanwhile"
    feeds.discard_unfit((0, 1), 10)
    feed = feeds.open((0, 1), 10)
    assert feed.next_step == 10
    assert log == ["open (0, 1) from 7"]
    feeds.shut_down()
    assert not feed.closed, "it is in use"


def test_a_feed_for_another_place_or_a_later_step_is_of_no_use() -> None:
    for micro_batches, step in [((1,), 7), ((0,), 6)]:
        feeds, log = feeds_and_log()
        feeds.prepare((0,), 7)
        feeds._prepared.is_ready = True
        assert not feeds.prepare(micro_batches, step)
        feeds.shut_down()
        assert sorted(log) == sorted(
            ["open (0,) from 7", f"open {micro_batches} from {step}", "close (0,)", f"close {micro_batches}"]
        )


def test_nothing_opens_connections_while_a_group_forms() -> None:
    """What has not begun to flow is closed before, and so is what will not be of use."""
    for micro_batches, step, is_ready in [((0,), 9, False), ((1,), 9, True), ((0,), 8, True), ((0,), None, True)]:
        feeds, log = feeds_and_log()
        feeds.prepare((0,), 9)
        feeds._prepared.is_ready = is_ready
        feeds.discard_unfit(micro_batches, step)
        assert log == ["open (0,) from 9", "close (0,)"]


def test_a_feed_is_closed_in_the_background_and_its_processes_are_waited_for() -> None:
    feeds, log = feeds_and_log()
    old = feeds.open((0,), 0)
    old.may_close.clear()
    feeds.close(old)
    assert feeds.prepare((1,), 5) is False, "others need not wait for it"
    feeds._prepared.is_ready = True
    assert feeds.open((1,), 5).micro_batches == (1,)
    feeds.close(feeds._at_hand)
    threading.Timer(0.05, old.may_close.set).start()
    assert feeds.open((2,), 5).micro_batches == (2,)
    assert log == ["open (0,) from 0", "open (1,) from 5", "close (1,)", "close (0,)", "open (2,) from 5"]


def test_the_feed_at_hand_rests_before_another_begins() -> None:
    feeds, log = feeds_and_log()
    at_hand = feeds.open((0,), 0)
    feeds.prepare((1,), 5)
    feeds.prepare((1,), 6)
    assert log == ["open (0,) from 0", "rest (0,)", "open (1,) from 5"]
    feeds.close(at_hand)
    feeds.prepare((2,), 7)
    assert log[-1] == "open (2,) from 7", "nothing is at hand any more"
    feeds.shut_down()
