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
        """It is there meanwhile."""
        content = bytearray(os.urandom(16))
        yield cls(os.getpid(), address_of(memoryview(content)), bytes(content))

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
