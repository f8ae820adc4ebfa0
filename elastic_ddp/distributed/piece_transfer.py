"""Pieces of bytes sent from rank to rank over the process group, in one order on all ranks and in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from elastic_ddp.distributed.process_group import ProcessGroup

Item = TypeVar("Item")


class TransferWindow(Generic[Item]):
    """What this rank has begun to send or receive, oldest first: fewer than `max_items` and `max_bytes` after `add`.

    `finish` is called with each item once it has been sent or received.
    """

    def __init__(self, group: ProcessGroup, finish: Callable[[Item], None], *, max_items: int, max_bytes: int) -> None:
        self._group, self._finish = group, finish
        self._max_items, self._max_bytes = max_items, max_bytes
        self._items: deque[tuple[Item, Sequence[dist.Work], int]] = deque()
        self._num_bytes = 0

    def add(self, item: Item, messages: Sequence[dist.Work], num_bytes: int) -> None:
        """Adds an item, and waits for the oldest ones while there are too many. Raises if a peer failed."""
        self._items.append((item, messages, num_bytes))
        self._num_bytes += num_bytes
        while len(self._items) >= self._max_items or self._num_bytes >= self._max_bytes:
            self._finish_oldest()

    def drain(self) -> None:
        """Waits for all items."""
        while self._items:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        item, messages, num_bytes = self._items.popleft()
        self._group.finish(messages)
        self._num_bytes -= num_bytes
        self._finish(item)


def begin_transfer(
    data: memoryview, group: ProcessGroup, *, tag: int, source: int, ranks: Sequence[int]
) -> list[dist.Work]:
    """Begins to send a piece from rank `source` to `ranks`, and returns the messages for `ProcessGroup.finish`.

    The source and each of the ranks call it. Ranks that share pieces begin them in the same order; otherwise they wait
    for each other forever. `data` is memory with the bytes on the source, and to receive them on the others; it must
    not change until `finish` returns. `tag` is the same on all ranks, and different for each piece in flight.
    """
    others = [rank for rank in ranks if rank != source]
    if not data or not others:
        return []
    tensor = torch.frombuffer(data, dtype=torch.uint8)
    if group.rank != source:
        begun = [dist.irecv(tensor, source, tag=tag)]
    else:
        begun = [dist.isend(tensor, rank, tag=tag) for rank in others]
    return [message for message in begun if message is not None]  # None outside of the group
