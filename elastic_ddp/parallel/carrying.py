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
from elastic_ddp.parallel.process_group import Message, ProcessGroup

IN_FLIGHT = 8
"""Pieces that are on their way between ranks: each waits for the network."""
NEAR_IN_FLIGHT = 4
"""The same from memory to memory: who copies later has more left to copy when all is read."""


class Carriage(Protocol):
    """Of a piece, on one of the ranks that it concerns."""

    came_over_network: bool
    """Whether this rank gets it in messages: these can come as something else, and a copy cannot."""

    def wait(self) -> bool:
        """Until others have the piece from here, or this rank has it. Returns False if it could not copy it, and has to
        have it from elsewhere."""


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
    def are_all_near(self) -> bool:
        """Whether they can read the first one's memory. The same on all of them."""
        return self._is_near(0, range(self._group.world_size))

    @property
    def in_flight(self) -> int:
        """How many pieces may have been begun on a rank, and not be through."""
        return NEAR_IN_FLIGHT if self.are_all_near else IN_FLIGHT

    def begin(self, number: int, data: memoryview, source: int, ranks: Sequence[int]) -> Carriage:
        """Begins to carry a piece from one rank to all of some. These begin what several of them need in one order. In
        that they wait for what comes to them, and for what goes from them when nothing comes: if each waited for others
        to take theirs, only one of them would be at work.

        Args:
            number: of the piece, another one for each.
            data: the bytes, or the place for them. It stays as it is until this has been waited for.

        Raises:
            PeerLostError, or what `is_lost_peer` knows: one of them is gone. So does waiting.
        """
        group = self._group
        others = [rank for rank in ranks if rank != source]
        if not others or not data:
            return _Messages(group.rank != source, [])
        if self._is_near(source, others):
            if group.rank == source:
                return _Shown(group, others, number, data)
            return _Copied(group, self._pids[source], source, number, data)
        if len(ranks) == group.world_size:
            work = dist.broadcast(_tensor(data), source, async_op=True)
            assert work is not None, "this rank is in the group"
            return _Messages(group.rank != source, [work])
        if group.rank == source:
            return _Messages(False, [group.begin_send(_tensor(data), each, number) for each in others])
        return _Messages(True, [group.begin_receive(_tensor(data), source, number)])

    def _is_near(self, source: int, others: Sequence[int]) -> bool:
        """Whether all of them can read the source's memory."""
        return all(self._sees[rank][source] for rank in others)


class _Messages:
    """Over the process group."""

    def __init__(self, came_over_network: bool, works: Sequence[dist.Work | Message]) -> None:
        self.came_over_network = came_over_network
        self._works = works

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        return True


class _Shown:
    """To others, who are told where it is in this rank's memory, and answer once they have no use for it any more."""

    came_over_network = False

    def __init__(self, group: ProcessGroup, others: Sequence[int], number: int, data: memoryview) -> None:
        address = torch.tensor(_where(number, address_of(data)))
        answers = [torch.zeros(1, dtype=torch.uint8) for _ in others]
        self._kept = data, address, answers  # messages are on their way from and to there
        told = [group.begin_send(address, each, number) for each in others]
        answered = [group.begin_receive(answer, each, number) for each, answer in zip(others, answers, strict=True)]
        self._messages = told + answered

    def wait(self) -> bool:
        for each in self._messages:
            each.wait()
        return True


class _Copied:
    """From the memory of another rank, which shows it; unless that cannot be read: not all can that its process can
    read itself."""

    came_over_network = False

    def __init__(self, group: ProcessGroup, pid: int, source: int, number: int, data: memoryview) -> None:
        self._group = group
        self._pid = pid
        self._source = source
        self._number = number
        self._data = data
        self._where = torch.zeros(3, dtype=torch.int64)
        self._told = group.begin_receive(self._where, source, number)

    def wait(self) -> bool:
        self._told.wait()
        _, address, _ = where = self._where.tolist()
        if where != _where(self._number, address):
            raise PeerLostError(f"where rank {self._source} has a piece came as something else: {where}")
        is_there = True
        try:
            read(self._pid, address, self._data)
        except OSError:  # if its process is gone the group tells
            is_there = False
        self._group.begin_send(torch.ones(1, dtype=torch.uint8), self._source, self._number).wait()
        return is_there


def _where(number: int, address: int) -> list[int]:
    """What is told of a piece in memory: so that nothing else is taken for it, as what is copied from there is not
    checked again."""
    return [number, address, number ^ ~address]


def _tensor(data: memoryview) -> torch.Tensor:
    """The same memory."""
    return torch.frombuffer(data, dtype=torch.uint8)
