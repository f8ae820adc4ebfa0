"""Keeps a worker's feeds: the feed of the current generation, and one that is prepared for the next generation.

A pipeline needs 0.1 s for its first rows, and some time to stop. If the next generation is known in time, a membership
change need not wait: the current feed uses its prefetched rows, while the worker's pipeline already reads for the next
feed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic_ddp.data.feed import MicroBatchFeed
from elastic_ddp.data.micro_batches import MicroBatch

_MAX_SKIPPED_STEPS = 500
"""Beyond this many steps, opening a new feed is faster than skipping."""


class FeedCache:
    """The feeds of a worker. Use it from the training thread only."""

    def __init__(self, make: Callable[[tuple[int, ...], int, Callable[[], object]], MicroBatchFeed]) -> None:
        self._make = make
        self._current: MicroBatchFeed | None = None
        self._prepared: MicroBatchFeed | None = None
        self._closing: list[threading.Thread] = []

    def prepare(self, micro_batches: tuple[int, ...], step: int) -> bool:
        """Prepares a feed for a generation that may begin at a step, and returns whether its first rows are ready.

        Call it again as the step approaches.
        """
        if self._prepared is not None and not _fits(self._prepared, micro_batches, step):
            self._discard()
        if self._prepared is None:
            before_reading = self._current.release_pipeline if self._current else _nothing
            self._prepared = self._make(micro_batches, step, before_reading)
        self._prepared.skip_to(step)
        return self._prepared.is_ready

    def wait(self) -> None:
        """Waits until the first rows of the prepared feed are ready. Raises a DataError if they cannot be read."""
        if self._prepared is not None:
            self._prepared.wait()

    def peek(self) -> MicroBatch | None:
        """Returns a copy of the prepared feed's first micro-batch, or None if it is not ready."""
        return self._prepared.peek() if self._prepared is not None else None

    def discard_unfit(self, micro_batches: tuple[int, ...], step: int | None) -> None:
        """Closes the prepared feed if it does not fit or has no rows yet. Call it before a process group forms.

        Such a feed may open connections. Behind a NAT, the group could not tell these connections from its own. `step`
        is None if the generation finds out where it begins.
        """
        feed = self._prepared
        if feed is None:
            return
        fits = feed.micro_batches == micro_batches if step is None else _fits(feed, micro_batches, step)
        if not fits or not feed.is_ready:
            feed.close()
            self._prepared = None
        elif step is not None:
            feed.skip_to(step)

    def open(self, micro_batches: tuple[int, ...], step: int) -> MicroBatchFeed:
        """Returns the feed of a generation: the prepared one if it fits, or a new one."""
        if self._prepared is not None and _fits(self._prepared, micro_batches, step):
            feed = self._prepared
            self._prepared = None
            feed.skip_to(step)
        else:
            self._discard()
            self._finish_closing()  # otherwise Ray would start another process before the old one is free
            feed = self._make(micro_batches, step, _nothing)
        self._current = feed
        return feed

    def close(self, feed: MicroBatchFeed) -> None:
        """Closes a feed in the background."""
        self._current = None if feed is self._current else self._current
        feed.interrupt()
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        self._closing.append(threading.Thread(target=feed.close, name="closing-feed", daemon=True))
        self._closing[-1].start()

    def shut_down(self) -> None:
        """Closes the prepared feed, and waits until all feeds passed to `close` are closed."""
        self._discard()
        self._finish_closing()

    def _discard(self) -> None:
        if self._prepared is not None:
            self.close(self._prepared)
            self._prepared = None

    def _finish_closing(self) -> None:
        for thread in self._closing:
            thread.join()
        self._closing = []


def _nothing() -> None: ...


def _fits(feed: MicroBatchFeed, micro_batches: tuple[int, ...], step: int) -> bool:
    return feed.micro_batches == micro_batches and feed.next_step <= step < feed.next_step + _MAX_SKIPPED_STEPS
