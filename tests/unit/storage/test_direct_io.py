"""Reads and writes with O_DIRECT, and the fallbacks to the page cache."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest

from elastic_ddp.storage.direct_io import DISK_BLOCK_BYTES, MEMORY_ALIGNMENT, MIN_DIRECT_BYTES, read_into, write

CONTENT = random.Random(0).randbytes(5_000_123)
preadv, pwrite = os.preadv, os.pwrite


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as one on a disk."""
    monkeypatch.setattr(os, "major", lambda device: 259)
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        pytest.skip("the file system has no O_DIRECT")
    finally:
        os.close(descriptor)
    return path


class ReadRange(NamedTuple):
    """A range of a file and where its bytes go."""

    start: int
    size: int
    offset: int
    """Distance of the target from aligned memory, in bytes."""


def ranges() -> Iterator[ReadRange]:
    """Yields random ranges: aligned to blocks or not, within the file or beyond its end, into aligned memory or not."""
    chance = random.Random(1)
    for _ in range(30):
        start = chance.choice([0, chance.randrange(900) * DISK_BLOCK_BYTES, chance.randrange(len(CONTENT) + 100)])
        size = MIN_DIRECT_BYTES + chance.choice(
            [0, chance.randrange(300) * DISK_BLOCK_BYTES, chance.randrange(4 << 20)]
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
def direct_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets of direct reads."""
    calls: list[int] = []

    def record(descriptor: int, targets: list[Any], start: int) -> int:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        calls.append(start)
        return preadv(descriptor, targets, start)

    monkeypatch.setattr(os, "preadv", record)
    return calls


def test_any_range_is_read_into_any_memory(path: Path, direct_reads: list[int]) -> None:
    for wanted in ranges():
        check_read(path, wanted)
    assert len(direct_reads) == sum(wanted.offset == 0 for wanted in ranges()) > 10


@pytest.mark.parametrize("size", [1, DISK_BLOCK_BYTES, 100_000])
def test_short_reads_are_completed(path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The kernel may read fewer bytes than requested."""

    def read_less(descriptor: int, targets: list[Any], start: int) -> int:
        return min(size, preadv(descriptor, targets, start))

    monkeypatch.setattr(os, "preadv", read_less)
    for wanted in ranges():
        check_read(path, wanted)


def refuse_direct(monkeypatch: pytest.MonkeyPatch, call: str) -> list[int]:
    """Refuses O_DIRECT or its use, like a file system without it. Returns a list that grows with each refusal."""
    refused: list[int] = []
    set_flags = fcntl.fcntl

    def refuse(*arguments: Any) -> int:
        if call == "fcntl" and not (arguments[1] == fcntl.F_SETFL and arguments[2] & os.O_DIRECT):
            return set_flags(*arguments)
        if call == "the second pwrite" and not arguments[2]:
            return pwrite(arguments[0], arguments[1][:DISK_BLOCK_BYTES], 0)
        refused.append(1)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl if call == "fcntl" else os, call.split()[-1], refuse)
    return refused


@pytest.mark.parametrize("call", ["fcntl", "preadv"])
def test_without_o_direct_files_are_read_through_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    refused = refuse_direct(monkeypatch, call)
    for wanted in ranges():
        check_read(path, wanted)
    assert refused


@pytest.mark.parametrize(("call", "code"), [("preadv", errno.EIO), ("pwrite", errno.EIO), ("pwrite", errno.ENOSPC)])
def test_a_full_or_failing_disk_raises_its_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    monkeypatch.setattr(os, call, Mock(side_effect=OSError(code, os.strerror(code))))
    with pytest.raises(OSError, match=os.strerror(code)):
        if call == "preadv":
            read_into(path, 0, memory_at(0, bytes(MIN_DIRECT_BYTES)))
        else:
            written(path, memory_at(0, CONTENT))


def test_small_ranges_and_files_not_on_a_disk_are_read_through_the_page_cache(
    path: Path, direct_reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS, FUSE, tmpfs and overlays have anonymous devices, with major number 0."""
    check_read(path, ReadRange(0, MIN_DIRECT_BYTES - 1, 0))
    monkeypatch.setattr(os, "major", lambda device: 0)
    check_read(path, ReadRange(0, MIN_DIRECT_BYTES, 0))
    assert not direct_reads


def memory_at(offset: int, data: bytes) -> memoryview:
    """Returns memory that holds `data`, `offset` bytes after an aligned address."""
    memory = bytearray(len(data) + DISK_BLOCK_BYTES)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % MEMORY_ALIGNMENT + offset
    memory[first : first + len(data)] = data
    return memoryview(memory)[first : first + len(data)]


def contents() -> Iterator[bytes | memoryview]:
    """Yields data of whole blocks or not, in aligned memory first, then in unaligned and in read-only memory."""
    for rest in (0, 1, DISK_BLOCK_BYTES, 2_345_678):
        data = CONTENT[: MIN_DIRECT_BYTES + rest]
        yield from (memory_at(0, data), memory_at(1, data), memory_at(MEMORY_ALIGNMENT - 8, data), data)


def written(path: Path, data: bytes | memoryview) -> bytes:
    """Writes `data` to a new file and returns its content."""
    path.unlink()
    with path.open("xb") as file:
        write(file, data)
    return path.read_bytes()


@pytest.mark.parametrize("size", [None, 1, DISK_BLOCK_BYTES])
def test_short_writes_are_completed(path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    """The kernel may write fewer bytes than given."""
    counts: list[int] = []

    def write_less(descriptor: int, data: memoryview, start: int) -> int:
        with path.open("r+b") as file:  # without O_DIRECT, which refuses partial blocks
            counts.append(pwrite(file.fileno(), data[:size], start))
        return counts[-1]

    monkeypatch.setattr(os, "pwrite", write_less)
    for data in contents():
        assert written(path, data) == data
    assert sum(counts) >= (size or MIN_DIRECT_BYTES)


@pytest.mark.parametrize("call", ["fcntl", "pwrite", "the second pwrite"])
def test_without_o_direct_files_are_written_through_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    refused = refuse_direct(monkeypatch, call)
    for data in contents():
        assert written(path, data) == data
    assert refused


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
    small = CONTENT[: MIN_DIRECT_BYTES - 1]
    assert written(path, memory_at(0, small)) == small and not calls, "too small"
    monkeypatch.setattr(os, "major", lambda device: 0)
    assert written(path, memory_at(0, CONTENT)) == CONTENT and not calls, "not on a disk"
