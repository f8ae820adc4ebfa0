from __future__ import annotations

import errno
import itertools
import os
import pickle
import threading
import time
import tracemalloc
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Never

import fsspec
import pytest
from botocore.exceptions import ClientError
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from elastic_ddp.errors import ConfigError, PeerFailedError, StorageError
from elastic_ddp.storage import local, retry
from elastic_ddp.storage.retry import RetryingStorage
from elastic_ddp.storage.storage import Storage


@pytest.fixture(params=["local", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        return Storage(f"{request.getfixturevalue('s3')}/runs/one")
    return Storage(f"memory://{uuid.uuid4().hex}" if request.param == "memory" else tmp_path / "runs" / "one")


def test_what_is_written_is_read_listed_and_deleted(storage: Storage) -> None:
    storage.write("b/two.json", b"2")
    storage.write("b/deep/er.json", b"")
    storage.write("a", b"1")
    storage.write("a", b"one")
    assert storage.read("a") == b"one"
    assert storage.list() == ["a", "b/deep/er.json", "b/two.json"]
    assert storage.sizes("b") == {"b/deep/er.json": 0, "b/two.json": 1}
    assert storage.list("b/") == ["b/deep/er.json", "b/two.json"]
    assert storage.at("b").list() == ["deep/er.json", "two.json"]
    storage.delete("b/two.json")
    assert storage.list("b") == ["b/deep/er.json"]
    storage.delete_tree("b")
    assert storage.list() == ["a"]


def test_of_what_is_longer_than_it_may_be_one_byte_more_is_read(storage: Storage) -> None:
    for data in (b"", b"12345", bytes(range(256)) * 4096):
        storage.write("object", data)
        for max_bytes in (0, 4, 5, 6, len(data), len(data) + 1):
            assert storage.read("object", max_bytes) == data[: max_bytes + 1]
    with pytest.raises(FileNotFoundError):
        storage.read("another", 5)


def test_what_may_be_long_and_is_not_takes_no_memory_for_that(storage: Storage) -> None:
    storage.write("object", b"12345")
    tracemalloc.start()
    try:
        assert storage.read("object", 1 << 27) == b"12345"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def test_folders_of_a_file_system_are_local(storage: Storage) -> None:
    assert storage.is_local == storage.uri.startswith("/") == RetryingStorage(storage, retry_for_s=1).is_local


def test_what_is_not_there_as_it_was_is_not_removed(storage: Storage) -> None:
    storage.write("a", b"one")
    assert not storage.delete_if("a", b"another") and storage.read("a") == b"one"
    assert storage.delete_if("a", b"one") and storage.list() == []
    assert not storage.delete_if("a", b"one")


def test_what_was_written_last_dates_a_folder_by_the_clock_of_the_storage(storage: Storage) -> None:
    before = time.time()  # the clock of this machine, which is the storage's here
    storage.write("a/deep/one", b"")
    storage.write("ab/two", b"")
    [first, now] = [storage.last_modified("a"), storage.now()]
    assert first is not None and before - 1.5 <= first <= now <= time.time() + 0.5, "S3 counts seconds"
    assert storage.last_modified("nothing") is None
    assert storage.list() == ["a/deep/one", "ab/two"], "and nothing is left of asking for the time"


def test_a_folder_is_as_new_as_the_newest_in_it_even_if_that_is_half_written(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.write("a/old", b"")
    storage.write("a/new", b"")
    os.utime(tmp_path / "a" / "old", (1000.0, 1000.0))
    os.utime(tmp_path / "a" / "new", (2000.0, 2000.0))
    assert storage.last_modified("a") == 2000.0
    (tmp_path / "a" / ".tmp-0123").write_bytes(b"half")
    os.utime(tmp_path / "a" / ".tmp-0123", (3000.0, 3000.0))
    assert storage.last_modified("a") == 3000.0


@pytest.mark.parametrize(
    "listed",
    [
        1_500_000_000.0,
        "2017-07-14T02:40:00+00:00",
        "2017-07-14T02:40:00Z",
        datetime(2017, 7, 14, 2, 40, tzinfo=UTC),
        datetime(2017, 7, 14, 2, 40),
        datetime(2017, 7, 14, 4, 40, tzinfo=timezone(timedelta(hours=2))),
    ],
    ids=str,
)
@pytest.mark.parametrize("field", ["LastModified", "last_modified", "updated", "mtime"])
def test_every_way_to_say_when_an_object_was_written_is_understood(
    monkeypatch: pytest.MonkeyPatch, listed: Any, field: str
) -> None:
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    storage.write("a/b", b"1")
    fs, base = storage.filesystem_and_path()[0].handler.fs, storage.filesystem_and_path()[1]
    found = {f"{base}/a/b": {"type": "file", "size": 1, field: listed}}
    monkeypatch.setattr(type(fs), "find", lambda *_, **__: found)
    assert storage.last_modified("a") == 1_500_000_000.0


def test_a_storage_that_does_not_date_its_objects_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise NotImplementedError("this file system has no modification times")

    storage = Storage(f"memory://{uuid.uuid4().hex}")
    storage.write("a/b", b"1")
    monkeypatch.setattr(type(storage.filesystem_and_path()[0].handler.fs), "modified", refuses)
    with pytest.raises(StorageError, match=r"cannot date 'a' in memory://.*no modification times"):
        storage.last_modified("a")


def test_a_folder_is_not_confused_with_one_whose_name_begins_alike(storage: Storage) -> None:
    storage.write("step=1/x", b"")
    storage.write("step=10/x", b"")
    assert storage.list("step=1") == ["step=1/x"]
    storage.delete_tree("step=1")
    assert storage.list() == ["step=10/x"]


def test_missing_objects_and_folders_are_told_apart_from_failures(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        storage.read("nothing")
    assert storage.list("nothing") == []
    storage.delete("nothing")
    storage.delete_tree("nothing/here")


def test_creating_what_exists_is_refused_even_with_the_same_bytes(storage: Storage) -> None:
    storage.create("commits/1.json", b"first")
    for data in (b"second", b"first"):
        with pytest.raises(FileExistsError, match=r"commits/1\.json"):
            storage.create("commits/1.json", data)
    assert storage.read("commits/1.json") == b"first"
    storage.delete("commits/1.json")
    storage.create("commits/1.json", b"third")
    assert storage.list() == ["commits/1.json"]


def test_of_many_creators_exactly_one_wins(storage: Storage) -> None:
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


@pytest.mark.parametrize(
    "key",
    ["", "/etc/passwd", "../up", "a/../../up", "a/./b", "a//b", "a\\b", "a*", "a?versionId=1", ".tmp-x", "é", "a\n"],
)
def test_keys_that_could_leave_the_folder_are_refused(storage: Storage, key: str) -> None:
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


def test_a_storage_can_be_pickled_compared_and_used_in_a_forked_process(storage: Storage) -> None:
    storage.write("a", b"1")
    copy = pickle.loads(pickle.dumps(storage))  # noqa: S301 (our own bytes)
    assert copy == storage and hash(copy) == hash(storage) and repr(copy) == f"Storage({storage.uri!r})"
    assert copy.read("a") == b"1"
    child = os.fork()
    if not child:
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


def test_a_writable_storage_is_left_as_it_was(storage: Storage) -> None:
    storage.check_writable()
    assert storage.list() == []


def s3_answers(monkeypatch: pytest.MonkeyPatch, condition: Callable[[], None]) -> None:
    """An S3 server of before there were conditional writes: what it does with the condition, and then it writes."""
    import s3fs

    real = s3fs.S3FileSystem._call_s3

    async def call(fs: Any, method: str, *arguments: Any, **options: Any) -> Any:
        if options.pop("IfNoneMatch", None):
            condition()
        return await real(fs, method, *arguments, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
    s3fs.S3FileSystem.clear_instance_cache()


def refuses_conditions() -> None:
    answer = {"Error": {"Code": "NotImplemented"}, "ResponseMetadata": {"HTTPStatusCode": 501}}
    raise OSError(errno.ENOSYS, "NotImplemented") from ClientError(answer, "PutObject")  # type: ignore[arg-type]


@pytest.mark.parametrize("condition", [lambda: None, refuses_conditions], ids=["ignored", "refused"])
def test_a_server_that_does_not_know_conditions_is_no_place_for_commits(
    s3: str, monkeypatch: pytest.MonkeyPatch, condition: Callable[[], None]
) -> None:
    with monkeypatch.context() as patch:
        s3_answers(patch, condition)
        storage = Storage(f"{s3}/runs")
        with pytest.raises(ConfigError, match=r"cannot be trusted with commits: .*If-None-Match"):
            storage.check_writable()
        assert storage.list() == []
    Storage(f"{s3}/runs").check_writable()


class Plain(MemoryFileSystem):
    """As those are that know no more than fsspec does for them: it looks, and then it writes."""

    protocol = "plain"
    pipe_file = AbstractFileSystem.pipe_file


class Modeless(MemoryFileSystem):
    """Replaces what is there, whatever it is asked for."""

    protocol = "modeless"

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        super().pipe_file(path, value)


class Frank(MemoryFileSystem):
    protocol = "frank"

    def pipe_file(self, path: str, value: bytes) -> None:  # type: ignore[override]
        super().pipe_file(path, value)


@pytest.mark.parametrize("kind", [Plain, Modeless, Frank])
def test_a_file_system_that_does_not_create_exclusively_is_refused(kind: type[MemoryFileSystem]) -> None:
    fsspec.register_implementation(kind.protocol, kind, clobber=True)
    storage = Storage(f"{kind.protocol}://{uuid.uuid4().hex}/runs")
    with pytest.raises(ConfigError, match=r"cannot be trusted with commits: .*; use a storage that can create"):
        storage.check_writable()
    assert storage.list() == []
    if kind is not Modeless:
        with pytest.raises(StorageError, match=r"cannot create 'a' .*mode='create'.*; use a storage that can create"):
            storage.create("a", b"1")


def test_whether_one_may_still_create_is_asked_between_tries(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, asked = Storage(s3), itertools.count(1)
    answers = _S3Answers(storage, monkeypatch)
    answers.answers = [(False, OSError(errno.EIO, "InternalError"))] * 10

    def fence() -> None:
        if next(asked) == 2:
            raise PeerFailedError("generation 1 is over")

    with pytest.raises(PeerFailedError, match="generation 1 is over"):
        storage.create("a", b"mine", before_retry=fence)
    assert answers.calls == 2 and storage.list() == []


def test_local_addresses_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Storage("runs").uri == Storage("./x/../runs/").uri == str(tmp_path / "runs")
    assert Storage("~/runs").uri == str(tmp_path / "home" / "runs")
    assert Storage(f"file://{tmp_path}/runs").uri == str(tmp_path / "runs")
    assert Storage("s3://bucket/runs/").at("one").uri == "s3://bucket/runs/one"


def test_a_local_write_that_dies_leaves_the_old_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    storage.write("a", b"old")

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, step, dies)
            storage.write("a", b"new")
        assert storage.read("a") == b"old"
        assert os.listdir(tmp_path) == ["a"]


def test_new_folders_are_on_the_disk_with_what_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert synced == ["a file", "runs/one/step=1/attempt=a"], "no more than there is to sync"
    synced.clear()
    storage.create("commits/1.json", b"1")
    assert synced == ["runs/one", "a file", "runs/one/commits"]


def failing_to_sync(monkeypatch: pytest.MonkeyPatch, directory: Path, code: int) -> None:
    """Files are synced as ever; this directory is not."""
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), directory.stat()):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE], ids=errno.errorcode.get)
def test_a_name_that_did_not_get_to_the_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    storage = Storage(tmp_path)
    storage.write("commits/1.json", b"1")
    failing_to_sync(monkeypatch, tmp_path / "commits", code)
    for store in (storage.write, storage.create):
        with pytest.raises(StorageError, match=f"cannot {store.__name__} 'commits/2.json' .*{os.strerror(code)}"):
            store("commits/2.json", b"2")
        storage.delete("commits/2.json")
    failing_to_sync(monkeypatch, tmp_path, code)
    with pytest.raises(StorageError, match=os.strerror(code)):
        storage.write("step=2/x", b"2")  # a new folder's name, too


@pytest.mark.parametrize("times", [1, 2, None])
def test_what_is_tried_again_is_durable_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int | None
) -> None:
    """The first try leaves the object, or its folder, whose names did not get to the disk."""
    failures = itertools.count()
    fsync, synced = os.fsync, list[str]()

    def sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            if times is None or next(failures) < times:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            synced.append(path.relative_to(tmp_path).as_posix())
        fsync(descriptor)

    storage = Storage(tmp_path)
    storage.write("commits/1.json", b"1")
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(retry, "FIRST_BACKOFF_S", 0.01)
    patient = RetryingStorage(storage, retry_for_s=0.5)
    with pytest.raises(StorageError if times is None else FileExistsError):
        patient.create("commits/2.json", b"2")
    assert synced == ([] if times is None else ["commits"])
    synced.clear()
    failures = itertools.count()
    if times is None:
        with pytest.raises(StorageError):
            patient.write("step=2/attempt=a/x", b"2")
    else:
        patient.write("step=2/attempt=a/x", b"2")
        assert {".", "step=2", "step=2/attempt=a"} <= set(synced)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS], ids=errno.errorcode.get)
def test_where_directories_cannot_be_synced_names_are_left_to_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    storage = Storage(tmp_path)
    storage.write("commits/1.json", b"1")
    failing_to_sync(monkeypatch, tmp_path / "commits", code)
    storage.write("commits/2.json", b"2")
    storage.create("commits/3.json", b"3")
    assert storage.list() == [f"commits/{n}.json" for n in (1, 2, 3)]


def test_a_directory_that_may_be_written_and_not_read_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Any, flags: int, *mode: Any, **options: Any) -> int:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refuse)
    Storage(tmp_path).write("a", b"1")
    assert Storage(tmp_path).read("a") == b"1"


def test_a_temporary_file_of_a_killed_writer_is_not_an_object(tmp_path: Path) -> None:
    (tmp_path / ".tmp-0123").write_bytes(b"half")
    assert Storage(tmp_path).list() == []


def refuse_hard_links(monkeypatch: pytest.MonkeyPatch, *, can_rename: bool) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", refuses)
    if not can_rename:
        monkeypatch.setattr(local, "_rename_if_new", lambda old, new: False)


@pytest.mark.parametrize("can_rename", [True, False])
def test_a_local_folder_without_hard_links_still_creates_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_rename: bool
) -> None:
    refuse_hard_links(monkeypatch, can_rename=can_rename)
    storage = Storage(tmp_path)
    storage.create("a", b"1")
    with pytest.raises(FileExistsError):
        storage.create("a", b"2")
    assert storage.read("a") == b"1" and os.listdir(tmp_path) == ["a"]


def test_without_hard_links_an_object_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_hard_links(monkeypatch, can_rename=True)
    write_through, seen = local._write_and_sync, []

    def writes(file: Any, data: bytes) -> None:
        file.write(data[:1])
        file.flush()
        seen.append(Storage(tmp_path).list())
        write_through(file, data[1:])

    monkeypatch.setattr(local, "_write_and_sync", writes)
    Storage(tmp_path).create("a", b"12")
    assert seen == [[]] and Storage(tmp_path).read("a") == b"12"


def test_an_object_that_is_removed_while_it_is_written_was_not_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it shows meanwhile: somebody may have found that it is no manifest, and set it aside."""
    refuse_hard_links(monkeypatch, can_rename=False)
    write_through = local._write_and_sync

    def writes(file: Any, data: bytes) -> None:
        write_through(file, data)
        (tmp_path / "a").unlink(missing_ok=True)

    monkeypatch.setattr(local, "_write_and_sync", writes)
    with pytest.raises(StorageError, match="deleted while it was written"):
        Storage(tmp_path).create("a", b"1")


def test_a_file_in_the_way_is_not_taken_for_an_object_that_exists(tmp_path: Path) -> None:
    (tmp_path / "commits").write_bytes(b"")
    for write in (Storage(tmp_path).create, Storage(tmp_path).write):
        with pytest.raises(StorageError, match=r"commits/1\.json"):
            write("commits/1.json", b"")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("", "storage='' names no folder"),
        ("nonsense://x", "storage='nonsense://x'.*s3://bucket/runs"),
        ("s3://", "storage='s3://' names no folder or bucket"),
    ],
)
def test_addresses_that_cannot_work_are_refused_with_the_fix(uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Storage(uri)


def test_an_unwritable_folder_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"file/runs.* cannot be written: NotADirectoryError.*use another folder"):
        Storage(tmp_path / "file" / "runs").check_writable()


def test_a_missing_bucket_is_a_config_error_and_never_an_empty_folder(s3: str) -> None:
    missing = Storage(f"{s3}-missing/runs")
    with pytest.raises(ConfigError, match=r"-missing/runs.* cannot be written: .*create the bucket"):
        missing.check_writable()
    with pytest.raises(StorageError):
        missing.list()
    with pytest.raises(StorageError):
        missing.create("a", b"")


def test_missing_credentials_are_a_config_error(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID"):
            Storage(s3).check_writable()
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_listing_shows_what_another_client_has_just_done(s3: str) -> None:
    import boto3

    storage = Storage(f"{s3}/runs")
    storage.write("a", b"1")
    assert storage.list() == ["a"]
    client = boto3.client("s3")
    bucket = s3.removeprefix("s3://")
    client.put_object(Bucket=bucket, Key="runs/b", Body=b"2")
    client.delete_object(Bucket=bucket, Key="runs/a")
    assert storage.list() == ["b"]
    with pytest.raises(FileNotFoundError):
        storage.read("a")


class _S3Answers:
    """Lets a create reach S3 or not, and gives its caller another answer."""

    def __init__(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fs = storage.filesystem_and_path()[0].handler.fs
        self.real = self.fs.pipe_file
        self.answers: list[tuple[bool, Exception]] = []
        self.calls = 0
        monkeypatch.setattr(self.fs, "pipe_file", self)
        monkeypatch.setattr("elastic_ddp.storage.s3.time.sleep", lambda seconds: None)

    def __call__(self, path: str, data: bytes, **options: object) -> None:
        self.calls += 1
        if not self.answers:
            self.real(path, data, **options)
            return
        arrives, answer = self.answers.pop(0)
        if arrives:
            self.real(path, data, **options)
        raise answer


def test_a_create_whose_answer_was_lost_is_a_success(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(s3)
    answers = _S3Answers(storage, monkeypatch)
    answers.answers = [(True, ConnectionError("reset"))]
    storage.create("a", b"mine")
    # The client library repeated the request, and the second one was refused because of the first.
    answers.answers = [(True, FileExistsError("PreconditionFailed"))]
    storage.create("b", b"mine")
    assert answers.calls == 2 and storage.list() == ["a", "b"]


def test_a_refusal_as_an_invalid_argument_is_a_refusal(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(s3)
    storage.create("a", b"theirs")
    _S3Answers(storage, monkeypatch).answers = [(False, OSError(errno.EINVAL, "PreconditionFailed"))]
    with pytest.raises(FileExistsError):
        storage.create("a", b"mine")
    assert storage.read("a") == b"theirs"


def test_a_create_that_met_another_one_under_way_is_tried_again(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(s3)
    answers = _S3Answers(storage, monkeypatch)
    answers.answers = [(False, OSError(errno.EIO, "ConditionalRequestConflict"))] * 2
    storage.create("a", b"mine")
    assert answers.calls == 3 and storage.read("a") == b"mine"
    answers.answers = [(False, OSError(errno.EIO, "InternalError"))] * 10
    with pytest.raises(StorageError, match="InternalError"):
        storage.create("b", b"mine")
    assert storage.list() == ["a"]


def test_a_create_on_s3_is_one_conditional_put(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(s3)
    fs = storage.filesystem_and_path()[0].handler.fs
    requests: list[tuple[str, object]] = []
    real = fs._call_s3

    async def record(method: str, *arguments: object, **options: object) -> object:
        requests.append((method, options.get("IfNoneMatch")))
        return await real(method, *arguments, **options)

    monkeypatch.setattr(fs, "_call_s3", record)
    storage.create("a", b"x" * (6 << 20))
    assert requests == [("put_object", "*")]


def test_a_denied_request_is_a_storage_error_with_its_cause(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(s3)
    _S3Answers(storage, monkeypatch).answers = [(False, PermissionError("AccessDenied"))]
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot create 'a' in s3://.*AccessDenied") as caught:
        storage.create("a", b"mine")
    assert isinstance(caught.value.__cause__, PermissionError) and time.monotonic() - began < 5


def test_a_folder_that_goes_with_another_one_is_made_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an attempt at a step is removed when the next one at that step begins."""
    storage, plain, gone = Storage(tmp_path), Path.open, []

    def opened(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.parent.name == "attempt=b" and not gone:
            gone.append(path)
            path.parent.rmdir()
            storage.delete_tree("step=1/attempt=a")
            assert not (tmp_path / "step=1").exists()
        return plain(path, *arguments, **options)

    storage.write("step=1/attempt=a/0.bin", b"first")
    monkeypatch.setattr(Path, "open", opened)
    storage.write("step=1/attempt=b/0.bin", b"second")
    assert gone and storage.list() == ["step=1/attempt=b/0.bin"]


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "free space there or use another storage"),
        (errno.EROFS, "mount it for writing or use another storage"),
        (errno.EFBIG, "raise the file size limit (ulimit -f) or use another file system"),
    ],
)
def test_what_keeps_a_disk_from_taking_more_is_told_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    def fail(descriptor: int) -> Never:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError) as error:
        Storage(tmp_path).write("a", b"1")
    assert os.strerror(code) in str(error.value) and str(error.value).endswith(remedy)
