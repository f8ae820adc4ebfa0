"""Large pieces of bytes, carried from the rank that has them to others that need them: over the process group, or where
these share a machine, from memory to memory.

The loopback takes several times as long for a piece as a copy, and every rank of a machine would get each over it.
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from elastic_ddp.distributed.cross_memory import Board, BoardElsewhere, Mark, address_of, read, readable
from elastic_ddp.distributed.process_group import Message, ProcessGroup
from elastic_ddp.errors import PeerFailedError

IN_FLIGHT = 8
"""Pieces that may have been begun on a rank, and not be through: each waits for the network, or for others to copy."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0001, 0.002
"""Between looks at what others tell in their memory."""
_TAKEN = -1
"""What a rank tells of a piece that it has copied, or cannot. The one that has it tells the address."""
_PLACE = struct.Struct("<Qq")
"""An address, and what tells that it is one: what is copied is not checked again."""


class Carriage(Protocol):
    """Of a piece, on one of the ranks that it concerns."""

    came_over_network: bool
    """Whether this rank gets it in messages: these can come as something else, and a copy cannot."""

    def is_ready(self) -> bool:
        """Whether there is nothing to wait for, if that can be told. Raises what `wait` does."""

    def wait(self) -> bool:
        """Until others have the piece from here, or this rank has it. Returns False if it could not copy it, and has to
        have it from elsewhere.

        Raises:
            PeerFailedError, or what `is_peer_failure` knows: one of them is gone.
        """


class Carrier:
    """Between the ranks of a group. Create it with `opened`.

    From memory to memory ranks tell each other of pieces on boards in their memory. In messages that took a tenth of
    what a restore takes of the processors, where ranks share these: gloo's threads look for each other's locks in a
    loop, for up to 4 ms, while whoever has one waits for the processor.
    """

    def __init__(self, group: ProcessGroup, mark: Mark) -> None:
        self._group = group
        self._marks = functools.cache(group.begin_all_gather(mark.to_bytes()))
        self._board = Board(0)
        self._look: Callable[[], _Near] | None = None

    @classmethod
    @contextmanager
    def opened(cls, group: ProcessGroup) -> Iterator[Carrier]:
        """For as long as ranks may read each other's memory. Every rank calls it, and before it begins a piece
        `look_around`. Both begin what needs no waiting for until then. Who leaves it before all ranks are through, and
        have met, is lost to those that wait for it."""
        with readable() if group.world_size > 1 else nullcontext(), Mark.of_this_process() as mark:
            yield cls(group, mark)

    def look_around(self, num_pieces: int) -> None:
        """Tells the others whose memory this rank can read, and where it tells of pieces: so many, from number 0 on.
        For other ones it is called once more, when all ranks are through with these, and have met."""
        self._board = Board(num_pieces)
        marks = [Mark.from_bytes(each) for each in self._marks()]
        seen = bytes(each.is_found() for each in marks)
        gathered = self._group.begin_all_gather(_PLACE.pack(*_proved(self._board.address)) + seen)
        self._look = functools.cache(lambda: _Near.told(gathered(), marks))

    @property
    def _near(self) -> _Near:
        assert self._look is not None, "look_around first"
        return self._look()

    @property
    def num_near(self) -> int:
        """How many ranks have memory that this one can read; itself counts, where anything can be read at all."""
        return len([each for each in self._near.sees[self._group.rank] if each])

    @property
    def are_all_near(self) -> bool:
        """Whether they and the first one can read each other's memory. The same on all of them."""
        return self._is_near(0, range(self._group.world_size))

    def show(self, number: int, data: memoryview) -> None:
        """Tells those that can copy it of a piece that this rank has, before it is begun. From any thread.

        Args:
            data: it is begun with. It stays as it is from now on.
        """
        self._board.tell(number, address_of(data))

    def begin(self, number: int, data: memoryview, source: int, ranks: Sequence[int]) -> Carriage:
        """Begins to carry a piece from one rank to all of some. These begin what several of them need in one order. In
        that they wait for what comes to them, and for what goes from them when nothing comes: if each waited for others
        to take theirs, only one of them would be at work.

        Args:
            number: of the piece, another one for each.
            data: the bytes, or the place for them. It stays as it is until this has been waited for.

        Raises:
            PeerFailedError, or what `is_peer_failure` knows: one of them is gone. So does waiting.
        """
        group = self._group
        others = [rank for rank in ranks if rank != source]
        if not others or not data:
            return _Messages(group.rank != source, [])
        if self._is_near(source, others):
            if group.rank == source:
                self.show(number, data)
                return _Shown(group, [self._near.boards[each] for each in others], number, data)
            return _Copied(group, self._board, self._near.boards[source], number, data)
        if len(ranks) == group.world_size:
            work = dist.broadcast(_tensor(data), source, async_op=True)
            assert work is not None, "this rank is in the group"
            return _Messages(group.rank != source, [work])
        if group.rank == source:
            return _Messages(False, [group.begin_send(_tensor(data), each, number) for each in others])
        return _Messages(True, [group.begin_receive(_tensor(data), source, number)])

    def _is_near(self, source: int, others: Sequence[int]) -> bool:
        """Whether all of them can read the source's memory, and it theirs."""
        sees = self._near.sees
        return all(sees[rank][source] and sees[source][rank] for rank in others)


class _Near(NamedTuple):
    """What ranks tell of each other's memory, in rank order."""

    sees: list[bytes]
    """Whether it can read each one's memory."""
    boards: list[BoardElsewhere]

    @classmethod
    def told(cls, told: Sequence[bytes], marks: Sequence[Mark]) -> _Near:
        """Raises PeerFailedError if something came as something else."""
        places = [_PLACE.unpack_from(each) for each in told]
        if wrong := [place for place in places if place != _proved(place[0])]:
            raise PeerFailedError(f"where ranks tell of pieces came as something else: {wrong}")
        boards = [BoardElsewhere(mark, address) for mark, (address, _) in zip(marks, places, strict=True)]
        return cls([each[_PLACE.size :] for each in told], boards)


class _Messages:
    """Over the process group."""

    def __init__(self, came_over_network: bool, works: Sequence[dist.Work | Message]) -> None:
        self.came_over_network = came_over_network
        self._works = works

    def is_ready(self) -> bool:
        return not self._works

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        return True


class _Shown:
    """To others, who are told where it is in this rank's memory, and tell once they have no use for it any more."""

    came_over_network = False

    def __init__(self, group: ProcessGroup, others: Sequence[BoardElsewhere], number: int, data: memoryview) -> None:
        self._group = group
        self._others = [*others]
        self._number = number
        self._kept = data  # they copy it

    def is_ready(self) -> bool:
        self._others = [each for each in self._others if _told(each, self._number) != _TAKEN]
        return not self._others

    def wait(self) -> bool:
        _wait_until(self.is_ready, self._group)
        return True


class _Copied:
    """From the memory of another rank, which shows it; unless that cannot be read: not all can that its process can
    read itself."""

    came_over_network = False

    def __init__(
        self, group: ProcessGroup, board: Board, source: BoardElsewhere, number: int, data: memoryview
    ) -> None:
        self._group = group
        self._board = board
        self._source = source
        self._number = number
        self._data = data
        self._address = 0

    def is_ready(self) -> bool:
        self._address = self._address or _told(self._source, self._number)
        return self._address != 0

    def wait(self) -> bool:
        _wait_until(self.is_ready, self._group)
        is_there = True
        try:
            read(self._source.pid, self._address, self._data)
        except OSError:  # if its process is gone the group tells
            is_there = False
        self._board.tell(self._number, _TAKEN)
        return is_there


def _proved(address: int) -> tuple[int, int]:
    return address, ~address


def _told(board: BoardElsewhere, number: int) -> int:
    """What another rank tells of a piece; 0 if nothing yet."""
    told = board.look(number)
    if told is None:
        raise PeerFailedError(f"process {board.pid}, with which this rank shares pieces, does not do so any more")
    return told


def _wait_until(is_so: Callable[[], bool], group: ProcessGroup) -> None:
    """Looks again and again, as nothing wakes who waits for another process's memory to change.

    Raises:
        PeerFailedError: it is not so within the group's timeout, or the group is cut.
    """
    end = time.monotonic() + group.timeout_s
    pause_s = FIRST_PAUSE_S
    while not is_so():
        if group.aborted:
            raise PeerFailedError("a peer was lost while pieces were carried")
        if time.monotonic() > end:
            raise PeerFailedError(f"a peer told nothing of a piece for {group.timeout_s:g} s")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)


def _tensor(data: memoryview) -> torch.Tensor:
    """The same memory."""
    return torch.frombuffer(data, dtype=torch.uint8)
