"""Reads and writes with O_DIRECT, and the fallbacks to the page cache."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from elastic_ddp.storage import direct_io
from elastic_ddp.storage.direct_io import (
    BOUNCE_BYTES,
    DISK_BLOCK_BYTES,
    MEMORY_ALIGNMENT,
    MIN_DIRECT_BYTES,
    read_into,
    write,
)

CONTENT = random.Random(0).randbytes(5_000_123)
preadv, pwrite, is_on_disk = os.preadv, os.pwrite, direct_io._is_on_disk


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as one on a disk."""
    monkeypatch.setattr(direct_io, "_is_on_disk", lambda file: True)
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    evict(path)
    with path.open("rb") as file:
        if direct_io._is_cached(file, 0, len(CONTENT)):
            pytest.skip("the file system keeps it in memory, like tmpfs")
    return path


def evict(path: Path) -> None:
    """Evicts a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


class ReadRange(NamedTuple):
    """A range of a file and where its bytes go."""

    start: int
    size: int
    offset: int
    """Distance of the target from aligned memory, in bytes."""


def ranges() -> Iterator[ReadRange]:
    """Yields random ranges: aligned to blocks or not, within the file or beyond its end, into aligned memory or not."""
    chance = random.Random(1)
    for _ in range(150):
        start = chance.choice([0, chance.randrange(900) * DISK_BLOCK_BYTES, chance.randrange(len(CONTENT) + 100)])
        size = MIN_DIRECT_BYTES + chance.choice(
            [0, chance.randrange(300) * DISK_BLOCK_BYTES, chance.randrange(2 * BOUNCE_BYTES)]
        )
        yield ReadRange(start, size, chance.choice([0, 0, chance.randrange(1, MEMORY_ALIGNMENT)]))


def check_read(path: Path, wanted: ReadRange) -> None:
    """Reads a range and checks its bytes, and that the memory around it is unchanged."""
    memory = bytearray(wanted.size + 2 * DISK_BLOCK_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first = (wanted.start - address) % DISK_BLOCK_BYTES + wanted.offset
    count = read_into(path, wanted.start, memoryview(memory)[first : first + wanted.size])
    expected = CONTENT[wanted.start : wanted.start + wanted.size]
    assert count == len(expected) and memory[first : first + count] == expected
    assert not any(memory[:first]) and not any(memory[first + wanted.size :])


@pytest.fixture
def direct_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that read directly, one entry for each call."""
    calls: list[str] = []

    def recording(name: str, function: Any) -> Any:
        def record(descriptor: int, *args: Any) -> int:
            calls.append(name)
            assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
            return int(function(descriptor, *args))

        return record

    for name in ("_read_in_place", "_read_bounced"):
        monkeypatch.setattr(direct_io, name, recording(name, getattr(direct_io, name)))
    return calls


def test_any_range_is_read_into_any_memory(path: Path, direct_reads: list[str]) -> None:
    for wanted in ranges():
        evict(path)
        check_read(path, wanted)
    complete = [wanted for wanted in ranges() if wanted.start + wanted.size <= len(CONTENT)]
    aligned = sum(wanted.offset == 0 for wanted in complete)
    assert direct_reads.count("_read_in_place") == aligned > 10
    assert direct_reads.count("_read_bounced") == len(complete) - aligned > 10


@pytest.mark.parametrize("size", [1, DISK_BLOCK_BYTES, 100_000])
def test_short_reads_are_completed(path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The kernel may read fewer bytes than requested."""

    def read_less(descriptor: int, targets: list[Any], start: int) -> int:
        return min(size, preadv(descriptor, targets, start))

    monkeypatch.setattr(os, "preadv", read_less)
    for wanted in ranges():
        evict(path)
        check_read(path, wanted)


def refuse_direct(monkeypatch: pytest.MonkeyPatch, code: int) -> list[int]:
    """Refuses O_DIRECT, like a file system without it. Returns a list that grows with each refusal."""
    refused: list[int] = []
    original = fcntl.fcntl

    def refuse(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            refused.append(flags)
            raise OSError(code, os.strerror(code))
        return original(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    return refused


@pytest.mark.parametrize("call", ["fcntl", "preadv"])
@pytest.mark.parametrize("code", [errno.EFAULT, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
def test_without_o_direct_files_are_read_through_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    refused: list[int] = []

    def refuse(*args: Any) -> int:
        refused.append(1)
        raise OSError(code, os.strerror(code))

    if call == "fcntl":
        refused = refuse_direct(monkeypatch, code)
    else:
        monkeypatch.setattr(os, "preadv", refuse)
    for wanted in ranges():
        check_read(path, wanted)
    assert refused


def test_a_read_error_of_the_disk_is_raised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        read_into(path, 0, memoryview(bytearray(MIN_DIRECT_BYTES)))


def test_cached_bytes_are_read_from_the_page_cache(path: Path, direct_reads: list[str]) -> None:
    path.read_bytes()
    check_read(path, ReadRange(0, MIN_DIRECT_BYTES, 0))
    assert not direct_reads
    evict(path)
    check_read(path, ReadRange(0, MIN_DIRECT_BYTES, 0))
    assert direct_reads


@pytest.mark.parametrize(("cached_mib", "is_cached"), [(0, False), (1, False), (3, True), (4, True)])
def test_a_range_counts_as_cached_if_most_of_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch, cached_mib: int, is_cached: bool
) -> None:
    def mincore(address: Any, length: Any, vector: Any) -> int:
        pages = (cached_mib << 20) // mmap.PAGESIZE
        vector[:pages] = b"\x01" * pages
        return 0

    monkeypatch.setattr(direct_io, "_libc", SimpleNamespace(mincore=mincore))
    with path.open("rb") as file:
        assert direct_io._is_cached(file, 0, 4 << 20) == is_cached


def test_without_mincore_files_are_read_through_the_page_cache(
    path: Path, direct_reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "_libc", SimpleNamespace(mincore=lambda *args: -1))
    check_read(path, ReadRange(0, MIN_DIRECT_BYTES, 0))
    assert not direct_reads


def test_small_ranges_are_read_through_the_page_cache(path: Path, direct_reads: list[str]) -> None:
    check_read(path, ReadRange(0, MIN_DIRECT_BYTES - 1, 0))
    assert not direct_reads


@pytest.mark.parametrize(("major", "is_direct"), [(259, True), (0, False)])
def test_files_not_on_a_disk_are_read_through_the_page_cache(
    path: Path, direct_reads: list[str], monkeypatch: pytest.MonkeyPatch, major: int, is_direct: bool
) -> None:
    """NFS, FUSE, tmpfs and overlays have anonymous devices, with major number 0."""
    monkeypatch.setattr(direct_io, "_is_on_disk", is_on_disk)
    monkeypatch.setattr(os, "major", lambda device: major)
    check_read(path, ReadRange(0, MIN_DIRECT_BYTES, 0))
    assert bool(direct_reads) == is_direct


def test_a_missing_file_raises_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_into(tmp_path / "none", 0, memoryview(bytearray(MIN_DIRECT_BYTES)))


def memory_at(offset: int, data: bytes) -> memoryview:
    """Returns memory that holds `data`, `offset` bytes after an aligned address."""
    memory = bytearray(len(data) + DISK_BLOCK_BYTES)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % MEMORY_ALIGNMENT + offset
    memory[first : first + len(data)] = data
    return memoryview(memory)[first : first + len(data)]


def contents() -> Iterator[bytes | memoryview]:
    """Yields data of whole blocks or not, in aligned, unaligned and read-only memory."""
    chance = random.Random(2)
    for number in range(30):
        block = DISK_BLOCK_BYTES
        rest = [0, 1, block - 1, block, BOUNCE_BYTES, chance.randrange(2 * BOUNCE_BYTES)][number % 6]
        data = CONTENT[: MIN_DIRECT_BYTES + rest]
        yield chance.choice([data, memory_at(0, data), memory_at(chance.randrange(1, MEMORY_ALIGNMENT), data)])


def written(path: Path, data: bytes | memoryview) -> bytes:
    """Writes `data` to a new file and returns what is on the disk then."""
    path.unlink()
    with path.open("xb") as file:
        write(file, data)
    evict(path)
    return path.read_bytes()


@pytest.mark.parametrize("size", [None, 1, DISK_BLOCK_BYTES, 100_000])
def test_short_writes_are_completed(path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    """The kernel may write fewer bytes than given."""
    counts: list[int] = []

    def write_less(descriptor: int, data: memoryview, start: int) -> int:
        with path.open("r+b") as file:  # without O_DIRECT, which refuses partial blocks
            counts.append(pwrite(file.fileno(), data[:size], start))
        return counts[-1]

    monkeypatch.setattr(os, "pwrite", write_less)
    for data in contents():
        counts.clear()
        assert written(path, data) == data
        assert sum(counts) >= (size or MIN_DIRECT_BYTES)


def test_a_direct_write_without_progress_falls_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *args: 0)
    assert written(path, CONTENT) == CONTENT


@pytest.mark.parametrize("call", ["fcntl", "pwrite", "the second pwrite"])
@pytest.mark.parametrize("code", [errno.EFAULT, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
def test_without_o_direct_files_are_written_through_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    refused: list[int] = []

    def refuse(descriptor: int, data: memoryview, start: int) -> int:
        if not start and call == "the second pwrite":
            return pwrite(descriptor, data[:DISK_BLOCK_BYTES], start)
        refused.append(start)
        raise OSError(code, os.strerror(code))

    if call == "fcntl":
        refused = refuse_direct(monkeypatch, code)
    else:
        monkeypatch.setattr(os, "pwrite", refuse)
    for data in contents():
        refused.clear()
        assert written(path, data) == data and refused


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_or_failing_disk_raises_its_error(path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        written(path, CONTENT)


def test_only_large_files_on_a_disk_are_written_directly(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def record(descriptor: int, data: memoryview, start: int) -> int:
        calls.append(len(data))
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        return pwrite(descriptor, data, start)

    monkeypatch.setattr(os, "pwrite", record)
    path.unlink()
    with path.open("xb") as file:
        write(file, memory_at(0, CONTENT))
        assert calls == [len(CONTENT) // DISK_BLOCK_BYTES * DISK_BLOCK_BYTES], "one call"
        assert not fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_DIRECT
    calls.clear()
    assert written(path, CONTENT[: MIN_DIRECT_BYTES - 1]) == CONTENT[: MIN_DIRECT_BYTES - 1] and not calls, "too small"
    monkeypatch.setattr(direct_io, "_is_on_disk", lambda file: False)
    assert written(path, CONTENT) == CONTENT and not calls, "not on a disk"
