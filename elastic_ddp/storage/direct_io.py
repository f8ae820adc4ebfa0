"""Reads and writes of large files with O_DIRECT (open(2)), past the page cache, on local disks.

A checkpoint gains nothing from the page cache. Copying it there costs as much CPU as all other work on it, and evicts
pages that other programs use. Bytes that are cached already are read from the cache.
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

MIN_DIRECT_BYTES = 1 << 20
"""Smaller reads and writes go through the page cache."""
DISK_BLOCK_BYTES = 4096
"""Alignment in the file. No disk has larger blocks."""
MEMORY_ALIGNMENT = 512
"""Alignment in memory. The kernel refuses it on a disk that needs more."""
BOUNCE_BYTES = 2 << 20
"""Size of the bounce buffer for memory that is not aligned."""

_UNSUPPORTED = frozenset({errno.EFAULT, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})
"""Errors of file systems without O_DIRECT, and of the kernel if a disk cannot access the memory, such as a driver's."""
_libc = ctypes.CDLL(None, use_errno=True)


def read_into(path: Path, start: int, buffer: memoryview) -> int:
    """Fills `buffer` from a file, from offset `start`. Returns the number of bytes read, less at the file's end."""
    with path.open("rb", buffering=0) as file:
        done = 0
        if len(buffer) >= MIN_DIRECT_BYTES and _is_on_disk(file) and not _is_cached(file, start, len(buffer)):
            done = _read_directly(file, start, buffer)
        file.seek(start + done)
        while done < len(buffer) and (count := file.readinto(buffer[done:])):
            done += count
    return done


def write(file: IO[bytes], data: bytes | memoryview) -> None:
    """Writes `data` into a new file. The caller syncs it afterwards."""
    view = memoryview(data).cast("B")
    done = 0
    if len(view) >= MIN_DIRECT_BYTES and _is_on_disk(file):
        done = _write_directly(file, view[: len(view) // DISK_BLOCK_BYTES * DISK_BLOCK_BYTES])
        file.seek(done)
    file.write(view[done:])
    file.flush()


def _is_on_disk(file: IO[bytes]) -> bool:
    """Returns whether a file is on a block device; network mounts, tmpfs and overlays have the device number 0."""
    return hasattr(os, "O_DIRECT") and os.major(os.fstat(file.fileno()).st_dev) != 0


def _is_cached(file: IO[bytes], start: int, size: int) -> bool:
    """Returns whether most of a range is in the page cache, or the kernel does not report it."""
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = start + size - first
    pages = bytearray(-(-length // mmap.PAGESIZE))
    try:
        mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=first)
    except (OSError, ValueError):  # the file ends within the range
        return True
    with mapped:
        vector = (ctypes.c_char * len(pages)).from_buffer(pages)
        if _libc.mincore(ctypes.c_void_p(_address(mapped)), ctypes.c_size_t(length), vector):
            return True
    return 2 * pages.count(0) < len(pages)


def _read_directly(file: IO[bytes], start: int, buffer: memoryview) -> int:
    """Fills the beginning of `buffer`. Returns the number of bytes read, 0 without O_DIRECT."""
    with _ignore_unsupported(), _direct_mode(file) as descriptor:
        if (_address(buffer) - start) % MEMORY_ALIGNMENT == 0:
            return _read_in_place(descriptor, start, buffer)
        return _read_bounced(descriptor, start, buffer)
    return 0


def _write_directly(file: IO[bytes], data: memoryview) -> int:
    """Writes whole blocks to the beginning of a file. Returns the number of bytes written, 0 without O_DIRECT."""
    done = 0
    with _ignore_unsupported(), _direct_mode(file) as descriptor:
        is_aligned = not data.readonly and _address(data) % MEMORY_ALIGNMENT == 0
        bounce = None if is_aligned else memoryview(mmap.mmap(-1, BOUNCE_BYTES))
        while done < len(data) and done % DISK_BLOCK_BYTES == 0:
            part = data[done:]
            if bounce is not None:
                part = part[:BOUNCE_BYTES]
                bounce[: len(part)] = part
                part = bounce[: len(part)]
            count = os.pwrite(descriptor, part, done)
            if not count:
                break
            done += count
    return done


@contextmanager
def _ignore_unsupported() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


@contextmanager
def _direct_mode(file: IO[bytes]) -> Iterator[int]:
    """Yields the file's descriptor, with O_DIRECT set for the block."""
    descriptor = file.fileno()
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    try:
        yield descriptor
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _read_in_place(descriptor: int, start: int, buffer: memoryview) -> int:
    """Reads the whole range at once; only the partial blocks at both ends are copied."""
    before = start % DISK_BLOCK_BYTES
    head = -start % DISK_BLOCK_BYTES
    tail = (len(buffer) - head) % DISK_BLOCK_BYTES
    end = len(buffer) - tail
    first, last = (memoryview(mmap.mmap(-1, DISK_BLOCK_BYTES)) for _ in range(2))
    targets = [*([first] if head else []), buffer[head:end], *([last] if tail else [])]
    count = min(os.preadv(descriptor, targets, start - before) - before, len(buffer))
    buffer[:head] = first[before : before + head]
    buffer[end:] = last[:tail]
    return max(0, count)


def _read_bounced(descriptor: int, start: int, buffer: memoryview) -> int:
    """Reads the range piece by piece through an aligned bounce buffer."""
    done = 0
    bounce = memoryview(mmap.mmap(-1, BOUNCE_BYTES + 2 * DISK_BLOCK_BYTES))
    while done < len(buffer):
        before = (start + done) % DISK_BLOCK_BYTES
        size = min(len(buffer) - done, BOUNCE_BYTES)
        blocks_end = -(-(before + size) // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES
        count = min(os.preadv(descriptor, [bounce[:blocks_end]], start + done - before) - before, size)
        if count <= 0:
            break
        buffer[done : done + count] = bounce[before : before + count]
        done += count
    return done


def _address(buffer: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
