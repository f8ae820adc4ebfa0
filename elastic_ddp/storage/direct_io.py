"""What is large, read and written past the kernel's memory of files (O_DIRECT, open(2)) where these lie on a disk of
this machine.

A commit goes through that memory for nothing: it takes a processor for as long as all else that is done with it, or for
many times as long, and puts out of there what others read again and again. What is there already is read from there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

LARGE_BYTES = 1 << 20
"""Less goes as usual."""
BLOCK_BYTES = 4096
"""What goes directly begins and ends at multiples of this in a file: disks have no larger blocks."""
MEMORY_ALIGNMENT = 512
"""And at multiples of this in memory, which the kernel refuses where a disk asks for more."""
ASIDE_BYTES = 2 << 20
"""So much at a time goes by way of other memory, where it has not such an address."""

_CANNOT = frozenset({errno.EFAULT, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})
"""How file systems say that they do not go along with it, and the kernel that no disk can reach this memory, as may be
with a driver's."""
_libc = ctypes.CDLL(None, use_errno=True)


def read_into(path: Path, start: int, buffer: memoryview) -> int:
    """Fills a buffer from a file, from `start` on. Returns how many bytes there were: fewer than it takes if the file
    ends before."""
    with path.open("rb", buffering=0) as file:
        done = 0
        if len(buffer) >= LARGE_BYTES and _is_on_disk(file) and not _is_in_memory(file, start, len(buffer)):
            done = _read_directly(file, start, buffer)
        file.seek(start + done)
        while done < len(buffer) and (count := file.readinto(buffer[done:])):
            done += count
    return done


def write(file: IO[bytes], data: bytes | memoryview) -> None:
    """All of it, into a file that has just been made. What the disk is to keep has to be synced afterwards."""
    whole = memoryview(data).cast("B")
    done = 0
    if len(whole) >= LARGE_BYTES and _is_on_disk(file):
        done = _write_directly(file, whole[: len(whole) // BLOCK_BYTES * BLOCK_BYTES])
        file.seek(done)
    file.write(whole[done:])
    file.flush()


def _is_on_disk(file: IO[bytes]) -> bool:
    """Whether that is of this machine, as its device tells, and known to go along: what is mounted from elsewhere, in
    the memory, or put together from other folders has none of its own."""
    return hasattr(os, "O_DIRECT") and os.major(os.fstat(file.fileno()).st_dev) != 0


def _is_in_memory(file: IO[bytes], start: int, size: int) -> bool:
    """Whether the kernel has most of it there, or does not tell."""
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = start + size - first
    pages = bytearray(-(-length // mmap.PAGESIZE))
    try:
        mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=first)
    except (OSError, ValueError):  # the file ends before
        return True
    with mapped:
        vector = (ctypes.c_char * len(pages)).from_buffer(pages)
        if _libc.mincore(ctypes.c_void_p(_address(mapped)), ctypes.c_size_t(length), vector):
            return True
    return 2 * pages.count(0) < len(pages)


def _read_directly(file: IO[bytes], start: int, buffer: memoryview) -> int:
    """Fills a buffer from its begin, as far as that goes: not at all where a file system refuses."""
    with _unless_refused(), _direct(file) as descriptor:
        if (_address(buffer) - start) % MEMORY_ALIGNMENT == 0:
            return _to_its_place(descriptor, start, buffer)
        return _by_way_of(descriptor, start, buffer)
    return 0


def _write_directly(file: IO[bytes], data: memoryview) -> int:
    """Whole blocks to the begin of a file, as far as that goes."""
    done = 0
    with _unless_refused(), _direct(file) as descriptor:
        is_aligned = not data.readonly and _address(data) % MEMORY_ALIGNMENT == 0
        aside = None if is_aligned else memoryview(mmap.mmap(-1, ASIDE_BYTES))
        while done < len(data) and done % BLOCK_BYTES == 0:
            part = data[done:]
            if aside is not None:
                part = part[:ASIDE_BYTES]
                aside[: len(part)] = part
                part = aside[: len(part)]
            count = os.pwrite(descriptor, part, done)
            if not count:
                break
            done += count
    return done


@contextmanager
def _unless_refused() -> Iterator[None]:
    """Ends the block where the file system does not go along."""
    try:
        yield
    except OSError as error:
        if error.errno not in _CANNOT:
            raise


@contextmanager
def _direct(file: IO[bytes]) -> Iterator[int]:
    """Its descriptor, which goes directly meanwhile."""
    descriptor = file.fileno()
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    try:
        yield descriptor
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _to_its_place(descriptor: int, start: int, buffer: memoryview) -> int:
    """All at once, and but for the blocks at both ends without a copy."""
    before = start % BLOCK_BYTES
    head = -start % BLOCK_BYTES
    tail = (len(buffer) - head) % BLOCK_BYTES
    end = len(buffer) - tail
    first, last = (memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(2))
    places = [*([first] if head else []), buffer[head:end], *([last] if tail else [])]
    count = min(os.preadv(descriptor, places, start - before) - before, len(buffer))
    buffer[:head] = first[before : before + head]
    buffer[end:] = last[:tail]
    return max(0, count)


def _by_way_of(descriptor: int, start: int, buffer: memoryview) -> int:
    """Piece by piece, by way of memory that has such an address."""
    done = 0
    aside = memoryview(mmap.mmap(-1, ASIDE_BYTES + 2 * BLOCK_BYTES))
    while done < len(buffer):
        before = (start + done) % BLOCK_BYTES
        size = min(len(buffer) - done, ASIDE_BYTES)
        whole = -(-(before + size) // BLOCK_BYTES) * BLOCK_BYTES
        count = min(os.preadv(descriptor, [aside[:whole]], start + done - before) - before, size)
        if count <= 0:
            break
        buffer[done : done + count] = aside[before : before + count]
        done += count
    return done


def _address(buffer: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
