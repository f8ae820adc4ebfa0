"""Large pieces of bytes, carried from the rank that has them to others that need them: over the process group, or where
these share a machine, from memory to memory.

The loopback takes several times as long for a piece as a copy, and every rank of a machine would get each over it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist

from elastic_ddp.errors import PeerLostError
from elastic_ddp.parallel.cross_memory import Mark, address_of, read, readable
from elastic_ddp.parallel.process_group import ProcessGroup

IN_FLIGHT = 8
"""Pieces that are on their way between ranks: each waits for the network."""
NEAR_IN_FLIGHT = 3
"""The same from memory to memory: who copies later has more left to copy when all is read."""


class Waits(Protocol):
    """What a rank has to do with a piece before it has it, and others have it from here. Once."""

    def wait(self) -> object: ...


class Carrier:
    """Between the ranks of a group. Create it with `opened`."""

    def __init__(self, group: ProcessGroup, mark: Mark) -> None:
        self._group = group
        self._marks = group.begin_all_gather(mark.to_bytes())
        self._seen: Callable[[], list[bytes]] | None = None

    @classmethod
    @contextmanager
    def opened(cls, group: ProcessGroup) -> Iterator[Carrier]:
        """For as long as ranks may read each other's memory. Every rank calls it, and before it begins a piece
        `look_around`. Both begin what needs no waiting for until then."""
        with readable() if group.world_size > 1 else nullcontext(), Mark.of_this_process() as mark:
            yield cls(group, mark)

    def look_around(self) -> None:
        """Tells the others whose memory this rank can read. Once: it is as it was."""
        if self._seen is None:
            marks = [Mark.from_bytes(each) for each in self._marks()]
            self._pids = [each.pid for each in marks]
            self._seen = self._group.begin_all_gather(bytes(each.is_found() for each in marks))

    @functools.cached_property
    def _sees(self) -> list[bytes]:
        """Of every rank, whether it can read each one's memory."""
        assert self._seen is not None, "look_around first"
        return self._seen()

    @property
    def num_near(self) -> int:
        """How many ranks have memory that this one can read; itself counts, where anything can be read at all."""
        return len([each for each in self._sees[self._group.rank] if each])

    @property
    def in_flight(self) -> int:
        """How many pieces may have been begun on a rank, and not be through."""
        return NEAR_IN_FLIGHT if self._is_near(0, range(self._group.world_size)) else IN_FLIGHT

    def begin(self, number: int, data: memoryview, source: int, ranks: Sequence[int]) -> list[Waits]:
        """Begins to carry a piece from one rank to all of some. These call it, and wait for it, in one order of those
        that several of them need.

        Args:
            number: of the piece, another one for each.
            data: the bytes, or the place for them. It stays as it is until all that is returned has been waited for.

        Raises:
            PeerLostError, or what `is_lost_peer` knows: one of them is gone. So does waiting.
        """
        others = [rank for rank in ranks if rank != source]
        if not others or not data:
            return []
        if self._is_near(source, others):
            return self._begin_near(number, data, source, others)
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        if len(ranks) == self._group.world_size:
            work = dist.broadcast(tensor, source, async_op=True)
            assert work is not None, "this rank is in the group"
            return [work]
        if self._group.rank == source:
            return [self._group.begin_send(tensor, each, number) for each in others]
        return [self._group.begin_receive(tensor, source, number)]

    def _is_near(self, source: int, others: Sequence[int]) -> bool:
        """Whether all of them can read the source's memory."""
        return all(self._sees[rank][source] for rank in others)

    def _begin_near(self, number: int, data: memoryview, source: int, others: Sequence[int]) -> list[Waits]:
        group = self._group
        if group.rank != source:
            return [_Copy(group, self._pids[source], source, number, data)]
        address = torch.tensor([address_of(data)])
        works: list[Waits] = []
        for each in others:
            works.append(group.begin_send(address, each, number))
            works.append(group.begin_receive(torch.zeros(1, dtype=torch.uint8), each, number))
        return works


class _Copy:
    """Of what is in another rank's memory. That rank tells where, once it is there, and is told when it is copied."""

    def __init__(self, group: ProcessGroup, pid: int, source: int, number: int, data: memoryview) -> None:
        self._group = group
        self._pid = pid
        self._source = source
        self._number = number
        self._data = data
        self._address = torch.zeros(1, dtype=torch.int64)
        self._told = group.begin_receive(self._address, source, number)

    def wait(self) -> None:
        self._told.wait()
        try:
            read(self._pid, int(self._address), self._data)
        except OSError as error:
            raise PeerLostError(f"the memory of rank {self._source} cannot be read any more: {error}") from error
        self._group.begin_send(torch.ones(1, dtype=torch.uint8), self._source, self._number).wait()
