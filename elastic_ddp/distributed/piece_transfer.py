"""Pieces of bytes sent from rank to rank over the process group, in one order on all ranks and in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from elastic_ddp.distributed.process_group import Message, ProcessGroup

Item = TypeVar("Item")


class TransferWindow(Generic[Item]):
    """What this rank has begun to send or receive, oldest first. It is full with `max_items` or `max_bytes`."""

    def __init__(self, group: ProcessGroup, *, max_items: int, max_bytes: int) -> None:
        self._group = group
        self._max_items, self._max_bytes = max_items, max_bytes
        self._items: deque[tuple[Item, Sequence[Message], int]] = deque()
        self._num_bytes = 0

    def add(self, item: Item, messages: Sequence[Message], num_bytes: int) -> None:
        self._items.append((item, messages, num_bytes))
        self._num_bytes += num_bytes

    def finish_oldest(self) -> Item:
        """Waits for the messages of the oldest item and returns it. Raises if a peer failed; see `is_peer_failure`."""
        item, messages, num_bytes = self._items.popleft()
        self._group.finish(messages)
        self._num_bytes -= num_bytes
        return item

    @property
    def is_full(self) -> bool:
        return len(self._items) >= self._max_items or self._num_bytes >= self._max_bytes

    def __len__(self) -> int:
        return len(self._items)


def begin_transfer(
    data: memoryview, group: ProcessGroup, *, tag: int, source: int, ranks: Sequence[int]
) -> list[Message]:
    """Begins to send a piece from rank `source` to `ranks`, and returns the messages to wait for.

    The source and each of the ranks call it. Ranks that share pieces begin them in the same order; otherwise they wait
    for each other forever.

    Args:
        data: the bytes on the source, and the memory to receive them on the others. It must not change until the
            messages have been waited for.
        tag: the same on all ranks, and different for each piece in flight.
    """
    others = [rank for rank in ranks if rank != source]
    if not data or not others:
        return []
    tensor = torch.frombuffer(data, dtype=torch.uint8)
    if group.rank == source:
        return [group.begin_send(tensor, rank, tag) for rank in others]
    return [group.begin_receive(tensor, source, tag)]
