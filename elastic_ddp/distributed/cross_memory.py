"""The memory of another process on this machine, which Linux lets a process of the same user read ("cross-memory
attach", process_vm_readv(2)). MPI libraries carry messages within a machine like this."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc_at_once = ctypes.PyDLL(None)
"""The same, for calls that take no longer than it may take to have the interpreter's lock again, if it is let go: up to
5 ms where another thread has work for it."""
_SET_PTRACER, _ANYBODY, _NOBODY = 0x59616D61, ctypes.c_ulong(-1), ctypes.c_ulong(0)
"""prctl(2): who may look into this process where the kernel's Yama lets nobody but its parents, as on Ubuntu."""


class _Range(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


def address_of(data: memoryview) -> int:
    """Where it is in the memory of this process."""
    return np.frombuffer(data, dtype=np.uint8).ctypes.data


def read(pid: int, address: int, into: memoryview) -> None:
    """As many bytes from an address on, in the memory of a process, as there is room for.

    Raises:
        OSError: there is no such process, or no such memory in it, or this one may not read it, or this is no Linux.
    """
    process_vm_readv = getattr(_libc, "process_vm_readv", None)
    if process_vm_readv is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    process_vm_readv.restype = ctypes.c_ssize_t
    one, no_flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    here, done = address_of(into), 0
    while done < len(into):
        mine, theirs = (_Range(start + done, len(into) - done) for start in (here, address))
        count = process_vm_readv(pid, ctypes.byref(mine), one, ctypes.byref(theirs), one, no_flags)
        if count <= 0:
            code = ctypes.get_errno() if count < 0 else errno.EFAULT
            raise OSError(code, os.strerror(code))
        done += count


@contextmanager
def readable() -> Iterator[None]:
    """Processes of this user can read the memory of this one meanwhile, where they could not. Not within itself, nor
    where somebody else has asked the kernel for the same: afterwards they cannot."""
    _let_look(_ANYBODY)
    try:
        yield
    finally:
        _let_look(_NOBODY)


def _let_look(who: ctypes.c_ulong) -> None:
    if hasattr(_libc, "prctl"):
        _libc.prctl(_SET_PTRACER, who)  # an error where there is no Yama, which forbids nothing then


_FORM = struct.Struct("<qQ16s")
_NUMBER = struct.Struct("=q")
_MARK_BYTES = 16
_unmarked: list[bytearray] = []
"""Places of marks that are used again, and never let go: others may look there at any time."""


@dataclass(frozen=True)
class Mark:
    """By which others tell whether they read the memory of a process: its number may be that of another one, where they
    are on another machine or in another container."""

    pid: int
    address: int
    content: bytes
    """That is there: random bytes."""

    @classmethod
    @contextmanager
    def of_this_process(cls) -> Iterator[Mark]:
        """It is there meanwhile, and never again."""
        place = _unmarked.pop() if _unmarked else bytearray(_MARK_BYTES)
        place[:] = os.urandom(_MARK_BYTES)
        try:
            yield cls(os.getpid(), address_of(memoryview(place)), bytes(place))
        finally:
            place[:] = bytes(_MARK_BYTES)
            _unmarked.append(place)

    def to_bytes(self) -> bytes:
        return _FORM.pack(self.pid, self.address, self.content)

    @classmethod
    def from_bytes(cls, data: bytes) -> Mark:
        return cls(*_FORM.unpack(data))

    def is_found(self) -> bool:
        """Whether this process can read that one's memory."""
        found = bytearray(len(self.content))
        try:
            read(self.pid, self.address, memoryview(found))
        except OSError:
            return False
        return found == self.content


class Board:
    """Numbers that this process tells others on its machine: each has a place, where it is 0 until then. To look there
    takes them some 2 µs."""

    def __init__(self, size: int) -> None:
        self._numbers = np.zeros(size, dtype=np.int64)
        self.address: int = self._numbers.ctypes.data

    def tell(self, place: int, number: int) -> None:
        """From any thread. What was written to memory before a lock was taken or let go, as the interpreter's is with
        every read and checksum of a piece, is there for whoever finds the number."""
        self._numbers[place] = number


class BoardElsewhere:
    """Another process's `Board`, as long as that one's mark is there.

    Args:
        mark: of that process.
        address: of the board in it.
    """

    def __init__(self, mark: Mark, address: int) -> None:
        self.pid = mark.pid
        self._content = mark.content
        self._address = address
        self._found = bytearray(2 * _NUMBER.size + _MARK_BYTES)
        self._here = _Range(address_of(memoryview(self._found)), len(self._found))
        # The kernel may read a number byte by byte while it is told: then it is another one the second time. And if the
        # mark is there after it, the board was.
        number = _Range(address, _NUMBER.size)
        self._there = (_Range * 3)(number, number, _Range(mark.address, _MARK_BYTES))

    def look(self, place: int) -> int | None:
        """The number at a place; None if the mark is not there any more."""
        self._there[0].start = self._there[1].start = self._address + place * _NUMBER.size
        one, three, no_flags = map(ctypes.c_ulong, (1, 3, 0))
        count = _libc_at_once.process_vm_readv(self.pid, ctypes.byref(self._here), one, self._there, three, no_flags)
        if count != len(self._found) or self._found[2 * _NUMBER.size :] != self._content:
            return None
        [first] = _NUMBER.unpack_from(self._found)
        [second] = _NUMBER.unpack_from(self._found, _NUMBER.size)
        return int(first) if first == second else 0
