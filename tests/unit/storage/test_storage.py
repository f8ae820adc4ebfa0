"""Storage: one contract on local disks, in memory and on S3."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from elastic_ddp.errors import ConfigError, StorageError
from elastic_ddp.storage.folder import Entry
from elastic_ddp.storage.storage import Storage


@pytest.fixture(params=["local", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        return Storage(f"{request.getfixturevalue('s3')}/runs/one")
    return Storage(f"memory://{uuid.uuid4().hex}" if request.param == "memory" else tmp_path / "runs" / "one")


def test_objects_are_written_read_listed_and_deleted(storage: Storage) -> None:
    storage.write("b/two.json", b"2")
    storage.write("b/deep/er.json", b"")
    storage.write("a", b"1")
    storage.write("a", b"one")
    assert storage.read("a") == b"one"
    assert storage.list() == ["a", "b/deep/er.json", "b/two.json"]
    assert {key: entry.size for key, entry in storage.listing("b").items()} == {"b/deep/er.json": 0, "b/two.json": 1}
    assert storage.list("b/") == ["b/deep/er.json", "b/two.json"]
    assert storage.at("b").list() == ["deep/er.json", "two.json"]
    storage.delete("b/two.json")
    assert storage.list("b") == ["b/deep/er.json"]
    storage.delete_tree("b")
    assert storage.list() == ["a"]


def test_a_conditional_delete_spares_other_bytes(storage: Storage) -> None:
    storage.write("a", b"one")
    assert not storage.delete_if("a", b"another") and storage.read("a") == b"one"
    assert storage.delete_if("a", b"one") and storage.list() == []
    assert not storage.delete_if("a", b"one")


def test_objects_are_dated_by_the_storages_own_clock(storage: Storage) -> None:
    before = time.time()  # the storage has this machine's clock here
    storage.write("a/deep/one", b"")
    storage.write("ab/two", b"")
    [(key, entry)] = storage.listing("a").items()
    assert key == "a/deep/one" and entry.written_at is not None
    assert before - 1.5 <= entry.written_at <= time.time() + 0.5, "S3 rounds to seconds"


@pytest.mark.parametrize(
    ("field", "listed"),
    [
        ("LastModified", "2017-07-14T02:40:00+00:00"),
        ("last_modified", "2017-07-14T02:40:00"),
        ("mtime", "2017-07-14T04:40:00+02:00"),
    ],
)
def test_every_format_of_modification_times_is_understood(
    monkeypatch: pytest.MonkeyPatch, listed: str, field: str
) -> None:
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    storage.write("a/b", b"1")
    fs, base = storage.filesystem_and_path()[0].handler.fs, storage.filesystem_and_path()[1]
    listing = {f"{base}/a/b": {"type": "file", "size": 1, field: datetime.fromisoformat(listed)}}
    monkeypatch.setattr(type(fs), "find", lambda *_, **__: listing)
    assert storage.listing("a")["a/b"] == Entry(1, 1_500_000_000.0)


def test_a_folder_does_not_include_one_with_a_longer_name(storage: Storage) -> None:
    storage.write("step=1/x", b"")
    storage.write("step=10/x", b"")
    assert storage.list("step=1") == ["step=1/x"]
    storage.delete_tree("step=1")
    assert storage.list() == ["step=10/x"]


def test_missing_objects_and_folders_are_not_failures(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        storage.read("nothing")
    assert storage.list("nothing") == []
    storage.delete("nothing")
    storage.delete_tree("nothing/here")


def test_creating_an_existing_object_is_refused_even_with_equal_bytes(storage: Storage) -> None:
    storage.create("commits/1.json", b"first")
    for data in (b"second", b"first"):
        with pytest.raises(FileExistsError, match=r"commits/1\.json"):
            storage.create("commits/1.json", data)
    assert storage.read("commits/1.json") == b"first"
    storage.delete("commits/1.json")
    storage.create("commits/1.json", b"third")
    assert storage.list() == ["commits/1.json"]


@pytest.mark.parametrize("storage", ["local", "s3"], indirect=True)
def test_of_many_concurrent_creators_exactly_one_succeeds(storage: Storage) -> None:
    winners = []
    barrier = threading.Barrier(6)

    def compete(number: int) -> None:
        barrier.wait()
        try:
            storage.create("one", b"%d" % number)
        except FileExistsError:
            return
        winners.append(number)

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [b"%d" % number for number in winners] == [storage.read("one")]


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../up", "a/../../up", "a//b", "a*", ".tmp-x", "a\n"])
def test_keys_that_could_escape_the_folder_are_refused(key: str) -> None:
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    calls: list[Callable[[], object]] = [
        lambda: storage.read(key),
        lambda: storage.write(key, b""),
        lambda: storage.create(key, b""),
        lambda: storage.delete(key),
        lambda: storage.delete_tree(key),
        lambda: storage.at(key),
    ]
    for call in calls:
        with pytest.raises(StorageError, match="is not a key"):
            call()
    assert storage.list() == []


def test_a_storage_works_after_pickling_and_in_a_fork(storage: Storage) -> None:
    storage.write("a", b"1")
    copy = pickle.loads(pickle.dumps(storage))  # noqa: S301 (our own bytes)
    assert copy.uri == storage.uri and copy.read("a") == b"1"
    child = os.fork()
    if not child:
        gc.disable()  # what other tests left, such as process groups, cannot be freed in a fork
        try:
            os._exit(0 if storage.read("a") == b"1" and storage.list() == ["a"] else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert storage.read("a") == b"1"


def test_pyarrow_reads_the_same_folder(storage: Storage) -> None:
    storage.write("b/a.bin", b"abc")
    filesystem, path = storage.filesystem_and_path()
    with filesystem.open_input_file(f"{path}/b/a.bin") as file:
        assert file.read() == b"abc"


def test_the_check_for_writing_leaves_nothing_behind(storage: Storage) -> None:
    storage.check_writable()
    assert storage.list() == []


class Plain(MemoryFileSystem):
    """Uses fsspec's default, which checks and then writes: not atomic."""

    protocol = "plain"
    pipe_file = AbstractFileSystem.pipe_file


class Modeless(MemoryFileSystem):
    """Ignores the mode and replaces existing objects."""

    protocol = "modeless"

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        super().pipe_file(path, value)


class Strict(MemoryFileSystem):
    """Does not accept a mode."""

    protocol = "strict"

    def pipe_file(self, path: str, value: bytes) -> None:  # type: ignore[override]
        super().pipe_file(path, value)


@pytest.mark.parametrize("kind", [Plain, Modeless, Strict])
def test_a_file_system_without_exclusive_create_is_refused(kind: type[MemoryFileSystem]) -> None:
    fsspec.register_implementation(kind.protocol, kind, clobber=True)
    storage = Storage(f"{kind.protocol}://{uuid.uuid4().hex}/runs")
    with pytest.raises(ConfigError, match=r"cannot be used: .*; use a storage that can create"):
        storage.check_writable()
    assert storage.list() == []
    if kind is not Modeless:
        with pytest.raises(StorageError, match=r"cannot create 'a' .*mode='create'.*; use a storage that can create"):
            storage.create("a", b"1")
