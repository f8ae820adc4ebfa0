"""Storage on local disks: durability, exclusive creation, and file systems that lack something."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.errors import ConfigError, StorageError
from elastic_ddp.storage import local
from elastic_ddp.storage.folder import Entry, Upload
from elastic_ddp.storage.storage import Storage


def test_local_addresses_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Storage("runs").uri == Storage("./x/../runs/").uri == str(tmp_path / "runs")
    assert Storage("~/runs").uri == str(tmp_path / "home" / "runs")
    assert Storage(f"file://{tmp_path}/runs").uri == str(tmp_path / "runs")
    assert Storage("s3://bucket/runs/").at("one").uri == "s3://bucket/runs/one"


def test_objects_and_unfinished_writes_are_dated(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.write("a/old", b"")
    storage.write("a/new", b"")
    os.utime(tmp_path / "a" / "old", (1000.0, 1000.0))
    os.utime(tmp_path / "a" / "new", (2000.0, 2000.0))
    (tmp_path / "a" / ".tmp-0123").write_bytes(b"half")
    os.utime(tmp_path / "a" / ".tmp-0123", (3000.0, 3000.0))
    assert storage.listing("a") == {"a/new": Entry(0, 2000.0), "a/old": Entry(0, 1000.0)}
    assert storage.uploads() == [Upload("a/.tmp-0123", ".tmp-0123", 3000.0, 4)]


def test_a_write_that_dies_leaves_the_old_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    storage.write("a", b"old")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, step, die)
            storage.write("a", b"new")
        assert storage.read("a") == b"old"
        assert os.listdir(tmp_path) == ["a"]


def test_the_names_of_new_folders_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append(path.relative_to(tmp_path).as_posix() if path.is_dir() else "a file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    storage = Storage(tmp_path / "runs" / "one")
    storage.write("step=1/attempt=a/x", b"1")
    assert synced == [".", "runs", "runs/one", "runs/one/step=1", "a file", "runs/one/step=1/attempt=a"]
    synced.clear()
    storage.write("step=1/attempt=a/y", b"1")
    assert synced == ["a file", "runs/one/step=1/attempt=a"], "only what is new is synced"
    synced.clear()
    storage.create("commits/1.json", b"1")
    assert synced == ["runs/one", "a file", "runs/one/commits"]


def failing_to_sync(monkeypatch: pytest.MonkeyPatch, directory: Path, code: int) -> None:
    """Makes fsync fail for this directory only."""
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), directory.stat()):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)


def test_a_failed_sync_of_a_directory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    storage.write("commits/1.json", b"1")
    failing_to_sync(monkeypatch, tmp_path / "commits", errno.EIO)
    for store in (storage.write, storage.create):
        with pytest.raises(StorageError, match=f"cannot {store.__name__} 'commits/2.json' .*{os.strerror(errno.EIO)}"):
            store("commits/2.json", b"2")
        storage.delete("commits/2.json")
    failing_to_sync(monkeypatch, tmp_path, errno.EIO)
    with pytest.raises(StorageError, match=os.strerror(errno.EIO)):
        storage.write("step=2/x", b"2")  # also for a new folder


@pytest.mark.parametrize("times", [1, 2])
def test_a_second_attempt_after_a_failed_sync_ends_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The first attempt leaves the object, or its folder, with a name that is not durable."""
    failures = itertools.count()
    fsync, synced = os.fsync, list[str]()

    def sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            if next(failures) < times:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            synced.append(path.relative_to(tmp_path).as_posix())
        fsync(descriptor)

    storage = Storage(tmp_path)
    storage.write("commits/1.json", b"1")
    monkeypatch.setattr(os, "fsync", sync)
    for _ in range(times):
        with pytest.raises(StorageError):
            storage.create("commits/2.json", b"2")
    with pytest.raises(FileExistsError):
        storage.create("commits/2.json", b"2")
    assert synced == ["commits"]
    synced.clear()
    failures = itertools.count()
    for _ in range(times):
        with pytest.raises(StorageError):
            storage.write("step=2/attempt=a/x", b"2")
    storage.write("step=2/attempt=a/x", b"2")
    assert {".", "step=2", "step=2/attempt=a"} <= set(synced)


def test_a_file_system_that_cannot_sync_directories_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(tmp_path)
    storage.write("commits/1.json", b"1")
    failing_to_sync(monkeypatch, tmp_path / "commits", errno.EINVAL)
    storage.write("commits/2.json", b"2")
    storage.create("commits/3.json", b"3")
    assert storage.list() == [f"commits/{n}.json" for n in (1, 2, 3)]


def test_a_directory_without_read_permission_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os_open = os.open

    def refuse(path: Any, flags: int, *mode: Any, **options: Any) -> int:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return os_open(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refuse)
    Storage(tmp_path).write("a", b"1")
    assert Storage(tmp_path).read("a") == b"1"


def refuse_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", refuse)


def test_without_hard_links_objects_are_still_created_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_hard_links(monkeypatch)
    storage = Storage(tmp_path)
    storage.create("a", b"1")
    with pytest.raises(FileExistsError):
        storage.create("a", b"2")
    assert storage.read("a") == b"1" and os.listdir(tmp_path) == ["a"]


def test_an_object_deleted_while_it_is_written_is_not_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an atomic create, another process may see a partial manifest and set it aside."""
    refuse_hard_links(monkeypatch)
    write_through = local._write_and_sync

    def writes(file: Any, data: bytes) -> None:
        write_through(file, data)
        (tmp_path / "a").unlink(missing_ok=True)

    monkeypatch.setattr(local, "_write_and_sync", writes)
    with pytest.raises(StorageError, match="deleted while it was written"):
        Storage(tmp_path).create("a", b"1")


def test_a_file_with_the_name_of_a_folder_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "commits").write_bytes(b"")
    for write in (Storage(tmp_path).create, Storage(tmp_path).write):
        with pytest.raises(StorageError, match=r"commits/1\.json"):
            write("commits/1.json", b"")


def test_an_unwritable_folder_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"file/runs.* cannot be used: NotADirectoryError"):
        Storage(tmp_path / "file" / "runs").check_writable()


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    storage.write("open/a", b"1")
    storage.write("shut/b", b"2")
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("shut"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert storage.list("open") == ["open/a"] and storage.list("missing") == []
    with pytest.raises(StorageError, match="shut"):
        storage.list("shut")


def test_a_folder_deleted_together_with_its_sibling_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Housekeeping deletes an old attempt while the next one at that step starts."""
    storage, path_open, deleted = Storage(tmp_path), Path.open, []

    def open_path(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.parent.name == "attempt=b" and not deleted:
            deleted.append(path)
            path.parent.rmdir()
            storage.delete_tree("step=1/attempt=a")
            assert not (tmp_path / "step=1").exists()
        return path_open(path, *arguments, **options)

    storage.write("step=1/attempt=a/0.bin", b"first")
    monkeypatch.setattr(Path, "open", open_path)
    storage.write("step=1/attempt=b/0.bin", b"second")
    assert deleted and storage.list() == ["step=1/attempt=b/0.bin"]
