"""A worker's feeds: the one of its generation, and the one of the next before membership changes.

A pipeline takes a tenth of a second to its first rows and a while to its end. Training waits for neither where it is
known in time what comes next: the feed at hand then lives on what it has read, and the process of its pipeline, of
which there is one for each worker, reads for the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic_ddp.data.feed import MicroBatchFeed
from elastic_ddp.data.micro_batches import MicroBatch

_FAR = 500
"""Steps that are sooner entered anew than reached by leaving out those before them."""


class FeedCache:
    """Used by the training thread alone.

    Args:
        make: a feed of some micro-batches, from a step on, and after something else.
    """

    def __init__(self, make: Callable[[tuple[int, ...], int, Callable[[], object]], MicroBatchFeed]) -> None:
        self._make = make
        self._at_hand: MicroBatchFeed | None = None
        self._prepared: MicroBatchFeed | None = None
        self._closing: list[threading.Thread] = []

    def prepare(self, micro_batches: tuple[int, ...], step: int) -> bool:
        """Has a feed read ahead for a generation that may begin at a step. Call it again as the step draws near.

        Returns whether its first rows are there. It waits for nothing.
        """
        if self._prepared is not None and not _fits(self._prepared, micro_batches, step):
            self._discard()
        if self._prepared is None:
            self._prepared = self._make(micro_batches, step, self._at_hand.rest if self._at_hand else _nothing)
        self._prepared.skip_to(step)
        return self._prepared.is_ready

    def wait(self) -> None:
        """Until the first rows of the prepared feed are there. Raises what keeps them from being read."""
        if self._prepared is not None:
            self._prepared.wait()

    def peek(self) -> MicroBatch | None:
        """A copy of the first micro-batch of the prepared feed, if it is there."""
        return self._prepared.peek() if self._prepared is not None else None

    def discard_unfit(self, micro_batches: tuple[int, ...], step: int | None) -> None:
        """To be called before a process group forms: where addresses are translated it takes connections that are
        opened meanwhile for its own, and a feed that has not its first rows yet may open some. So does one whose rows
        are not what is needed."""
        if self._prepared is None:
            return
        if step is not None and _fits(self._prepared, micro_batches, step) and self._prepared.is_ready:
            self._prepared.skip_to(step)
        else:
            self._prepared.close()
            self._prepared = None

    def open(self, micro_batches: tuple[int, ...], step: int) -> MicroBatchFeed:
        """The feed of a generation: the prepared one if it fits."""
        if self._prepared is not None and _fits(self._prepared, micro_batches, step):
            feed, self._prepared = self._prepared, None
            feed.skip_to(step)
        else:
            self._discard()
            self._finish_closing()  # or Ray would start another process beside the one that is about to be free
            feed = self._make(micro_batches, step, _nothing)
        self._at_hand = feed
        return feed

    def close(self, feed: MicroBatchFeed) -> None:
        """Closes a feed that was handed out, in the background."""
        self._at_hand = None if feed is self._at_hand else self._at_hand
        feed.interrupt()
        self._closing = [each for each in self._closing if each.is_alive()]
        self._closing.append(threading.Thread(target=feed.close, name="closing-feed", daemon=True))
        self._closing[-1].start()

    def shut_down(self) -> None:
        """Returns when nothing is left of any of them."""
        self._discard()
        self._finish_closing()

    def _discard(self) -> None:
        if self._prepared is not None:
            self.close(self._prepared)
            self._prepared = None

    def _finish_closing(self) -> None:
        for each in self._closing:
            each.join()
        self._closing = []


def _nothing() -> None: ...


def _fits(feed: MicroBatchFeed, micro_batches: tuple[int, ...], step: int) -> bool:
    return feed.micro_batches == micro_batches and feed.next_step <= step < feed.next_step + _FAR
