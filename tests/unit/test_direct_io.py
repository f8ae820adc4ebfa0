"""Files that are read and written past the kernel's memory of them."""

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
    """A file on what counts as a disk here, whatever it is."""
    monkeypatch.setattr(direct_io, "_is_on_disk", lambda file: True)
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    forget(path)
    with path.open("rb") as file:
        if direct_io._is_cached(file, 0, len(CONTENT)):
            pytest.skip("it stays in the kernel's memory here, as in tmpfs")
    return path


def forget(path: Path) -> None:
    """Has the kernel let go of a file's content."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


class Ranges(NamedTuple):
    """Of a file and of memory."""

    start: int
    size: int
    offset: int
    """Of its place in memory from where direct reads can come to."""


def ranges() -> Iterator[Ranges]:
    """Such as begin and end at blocks' ends or not, in the file or beyond, and come to such places or others."""
    chance = random.Random(1)
    for _ in range(150):
        start = chance.choice([0, chance.randrange(900) * DISK_BLOCK_BYTES, chance.randrange(len(CONTENT) + 100)])
        size = MIN_DIRECT_BYTES + chance.choice(
            [0, chance.randrange(300) * DISK_BLOCK_BYTES, chance.randrange(2 * BOUNCE_BYTES)]
        )
        yield Ranges(start, size, chance.choice([0, 0, chance.randrange(1, MEMORY_ALIGNMENT)]))


def read_back(path: Path, each: Ranges) -> None:
    """Reads a range, and looks whether that is what it should be, and nothing else was written to."""
    memory = bytearray(each.size + 2 * DISK_BLOCK_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first = (each.start - address) % DISK_BLOCK_BYTES + each.offset
    count = read_into(path, each.start, memoryview(memory)[first : first + each.size])
    there = CONTENT[each.start : each.start + each.size]
    assert count == len(there) and memory[first : first + count] == there
    assert not any(memory[:first]) and not any(memory[first + each.size :])


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which are taken, one for each range that is not read as usual."""
    taken: list[str] = []

    def noting(name: str, way: Any) -> Any:
        def noted(descriptor: int, *args: Any) -> int:
            taken.append(name)
            assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
            return int(way(descriptor, *args))

        return noted

    for name in ("_read_in_place", "_read_bounced"):
        monkeypatch.setattr(direct_io, name, noting(name, getattr(direct_io, name)))
    return taken


def test_any_range_comes_to_any_place(path: Path, ways: list[str]) -> None:
    for each in ranges():
        forget(path)
        read_back(path, each)
    within = [each for each in ranges() if each.start + each.size <= len(CONTENT)]
    to_place = sum(each.offset == 0 for each in within)
    assert ways.count("_read_in_place") == to_place > 10 and ways.count("_read_bounced") == len(within) - to_place > 10


@pytest.mark.parametrize("size", [1, DISK_BLOCK_BYTES, 100_000])
def test_what_comes_in_several_parts_is_all_there(path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The kernel may return fewer bytes than it was asked for."""

    def less(descriptor: int, places: list[Any], start: int) -> int:
        return min(size, preadv(descriptor, places, start))

    monkeypatch.setattr(os, "preadv", less)
    for each in ranges():
        forget(path)
        read_back(path, each)


def refuse_direct(monkeypatch: pytest.MonkeyPatch, code: int) -> list[int]:
    """As a file system does that cannot. Notes how often."""
    refused: list[int] = []
    plain = fcntl.fcntl

    def refuse(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            refused.append(flags)
            raise OSError(code, os.strerror(code))
        return plain(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    return refused


@pytest.mark.parametrize("call", ["fcntl", "preadv"])
@pytest.mark.parametrize("code", [errno.EFAULT, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_that_refuses_is_read_as_usual(
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
    for each in ranges():
        read_back(path, each)
    assert refused


def test_a_disk_that_fails_is_not_read_as_usual(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        read_into(path, 0, memoryview(bytearray(MIN_DIRECT_BYTES)))


def test_what_the_kernel_has_in_memory_is_read_from_there(path: Path, ways: list[str]) -> None:
    path.read_bytes()
    read_back(path, Ranges(0, MIN_DIRECT_BYTES, 0))
    assert not ways
    forget(path)
    read_back(path, Ranges(0, MIN_DIRECT_BYTES, 0))
    assert ways


@pytest.mark.parametrize(("mebibytes", "is_there"), [(0, False), (1, False), (3, True), (4, True)])
def test_of_what_the_kernel_has_in_part_most_counts(
    path: Path, monkeypatch: pytest.MonkeyPatch, mebibytes: int, is_there: bool
) -> None:
    def mincore(address: Any, length: Any, vector: Any) -> int:
        pages = mebibytes << 20
        vector[: pages // mmap.PAGESIZE] = b"\x01" * (pages // mmap.PAGESIZE)
        return 0

    monkeypatch.setattr(direct_io, "_libc", SimpleNamespace(mincore=mincore))
    with path.open("rb") as file:
        assert direct_io._is_cached(file, 0, 4 << 20) == is_there


def test_where_the_kernel_does_not_tell_what_it_has_files_are_read_as_usual(
    path: Path, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "_libc", SimpleNamespace(mincore=lambda *args: -1))
    read_back(path, Ranges(0, MIN_DIRECT_BYTES, 0))
    assert not ways


def test_little_is_read_as_usual(path: Path, ways: list[str]) -> None:
    read_back(path, Ranges(0, MIN_DIRECT_BYTES - 1, 0))
    assert not ways


@pytest.mark.parametrize(("major", "is_direct"), [(259, True), (0, False)])
def test_what_lies_elsewhere_than_on_a_disk_is_read_as_usual(
    path: Path, ways: list[str], monkeypatch: pytest.MonkeyPatch, major: int, is_direct: bool
) -> None:
    """NFS, FUSE, tmpfs and overlays have anonymous devices, of which the major number is 0."""
    monkeypatch.setattr(direct_io, "_is_on_disk", is_on_disk)
    monkeypatch.setattr(os, "major", lambda device: major)
    read_back(path, Ranges(0, MIN_DIRECT_BYTES, 0))
    assert bool(ways) == is_direct


def test_a_file_that_is_missing_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_into(tmp_path / "none", 0, memoryview(bytearray(MIN_DIRECT_BYTES)))


def memory_at(offset: int, data: bytes) -> memoryview:
    """With some content, so far from where a direct write may begin."""
    memory = bytearray(len(data) + DISK_BLOCK_BYTES)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % MEMORY_ALIGNMENT + offset
    memory[first : first + len(data)] = data
    return memoryview(memory)[first : first + len(data)]


def contents() -> Iterator[bytes | memoryview]:
    """Such as end at a block's end or not, from places that can be written directly or not, or that cannot be known."""
    chance = random.Random(2)
    for place in range(30):
        rest = [0, 1, DISK_BLOCK_BYTES - 1, DISK_BLOCK_BYTES, BOUNCE_BYTES, chance.randrange(2 * BOUNCE_BYTES)][
            place % 6
        ]
        data = CONTENT[: MIN_DIRECT_BYTES + rest]
        yield chance.choice([data, memory_at(0, data), memory_at(chance.randrange(1, MEMORY_ALIGNMENT), data)])


def written(path: Path, data: bytes | memoryview) -> bytes:
    """What a new file has then, on the disk."""
    path.unlink()
    with path.open("xb") as file:
        write(file, data)
    forget(path)
    return path.read_bytes()


@pytest.mark.parametrize("size", [None, 1, DISK_BLOCK_BYTES, 100_000])
def test_what_is_written_is_all_there(path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    """The kernel may take fewer bytes than it is given."""
    taken: list[int] = []

    def less(descriptor: int, data: memoryview, start: int) -> int:
        with path.open("r+b") as file:  # which takes parts of blocks
            taken.append(pwrite(file.fileno(), data[:size], start))
        return taken[-1]

    monkeypatch.setattr(os, "pwrite", less)
    for data in contents():
        taken.clear()
        assert written(path, data) == data
        assert sum(taken) >= (size or MIN_DIRECT_BYTES)


def test_a_disk_that_takes_nothing_is_written_to_as_usual(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *args: 0)
    assert written(path, CONTENT) == CONTENT


@pytest.mark.parametrize("call", ["fcntl", "pwrite", "the second pwrite"])
@pytest.mark.parametrize("code", [errno.EFAULT, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_that_refuses_is_written_to_as_usual(
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
def test_a_disk_that_is_full_or_fails_is_heard(path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        written(path, CONTENT)


def test_what_is_large_and_on_a_disk_is_written_directly_and_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def noted(descriptor: int, data: memoryview, start: int) -> int:
        calls.append(len(data))
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        return pwrite(descriptor, data, start)

    monkeypatch.setattr(os, "pwrite", noted)
    path.unlink()
    with path.open("xb") as file:
        write(file, memory_at(0, CONTENT))
        assert calls == [len(CONTENT) // DISK_BLOCK_BYTES * DISK_BLOCK_BYTES], "at once"
        assert not fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_DIRECT
    calls.clear()
    assert written(path, CONTENT[: MIN_DIRECT_BYTES - 1]) == CONTENT[: MIN_DIRECT_BYTES - 1] and not calls, "little"
    monkeypatch.setattr(direct_io, "_is_on_disk", lambda file: False)
    assert written(path, CONTENT) == CONTENT and not calls, "elsewhere than on a disk"
