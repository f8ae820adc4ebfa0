"""Reads and writes of large files with O_DIRECT (open(2)), past the page cache, on local disks.

A checkpoint gains nothing from the page cache. Copying the checkpoint there costs as much CPU as all other work on it,
and evicts pages that other programs use. Memory that is not aligned goes through the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import IO

MIN_DIRECT_BYTES = 1 << 20
"""Smaller reads and writes go through the page cache."""
DISK_BLOCK_BYTES = 4096
"""Alignment in the file. No disk has larger blocks."""
MEMORY_ALIGNMENT = 512
"""Alignment in memory. The kernel refuses it on a disk that needs more."""

_UNSUPPORTED = frozenset({errno.EFAULT, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})
"""Errors of file systems without O_DIRECT, and of the kernel if a disk cannot access the memory."""


def read_into(path: Path, start: int, buffer: memoryview) -> int:
    """Fills `buffer` from a file, from offset `start`. Returns the number of bytes read, less at the file's end."""
    with path.open("rb", buffering=0) as file:
        done = 0
        if _is_suitable(file, buffer, start):
            # Only the partial blocks at both ends go through the page cache.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
            done = _read(file, start, buffer[: -start % DISK_BLOCK_BYTES])
            blocks = buffer[done:][: (len(buffer) - done) // DISK_BLOCK_BYTES * DISK_BLOCK_BYTES]
            with _ignore_unsupported(), _direct_mode(file) as descriptor:
                done += os.preadv(descriptor, [blocks], start + done)
        return done + _read(file, start + done, buffer[done:])


def _read(file: FileIO, start: int, buffer: memoryview) -> int:
    """Fills `buffer` through the page cache. Returns the number of bytes read."""
    file.seek(start)
    done = 0
    while done < len(buffer) and (count := file.readinto(buffer[done:])):
        done += count
    return done


def write(file: IO[bytes], data: bytes | memoryview) -> None:
    """Writes `data` into a new file. The caller syncs it afterwards."""
    view = memoryview(data).cast("B")
    blocks = view[: len(view) // DISK_BLOCK_BYTES * DISK_BLOCK_BYTES]
    done = 0
    if _is_suitable(file, view, 0):
        with _ignore_unsupported(), _direct_mode(file) as descriptor:
            while blocks[done:] and done % DISK_BLOCK_BYTES == 0:
                count = os.pwrite(descriptor, blocks[done:], done)
                if not count:
                    break
                done += count
    file.seek(done)
    file.write(view[done:])
    file.flush()


def _is_suitable(file: IO[bytes], memory: memoryview, start: int) -> bool:
    """Returns whether a range is large, its memory aligned, and the file on a block device.

    Network mounts, tmpfs and overlays have the device number 0.
    """
    return (
        hasattr(os, "O_DIRECT")
        and len(memory) >= MIN_DIRECT_BYTES
        and not memory.readonly
        and (ctypes.addressof(ctypes.c_char.from_buffer(memory)) - start) % MEMORY_ALIGNMENT == 0
        and os.major(os.fstat(file.fileno()).st_dev) != 0
    )


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
