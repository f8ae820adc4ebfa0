"""Storage on S3: conditional creation, lost answers and errors, against moto."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
from botocore.exceptions import ClientError

from elastic_ddp.errors import ConfigError, StorageError
from elastic_ddp.storage.storage import Storage


def patch_conditions(monkeypatch: pytest.MonkeyPatch, condition: Callable[[], None]) -> None:
    """Makes moto handle `If-None-Match` with `condition` and then write, like a server without conditional writes."""
    import s3fs

    real = s3fs.S3FileSystem._call_s3

    async def call(fs: Any, method: str, *arguments: Any, **options: Any) -> Any:
        if options.pop("IfNoneMatch", None):
            condition()
        return await real(fs, method, *arguments, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
    s3fs.S3FileSystem.clear_instance_cache()


def refuse_condition() -> None:
    answer = {"Error": {"Code": "NotImplemented"}, "ResponseMetadata": {"HTTPStatusCode": 501}}
    raise OSError(errno.ENOSYS, "NotImplemented") from ClientError(answer, "PutObject")  # type: ignore[arg-type]


@pytest.mark.parametrize("condition", [lambda: None, refuse_condition], ids=["ignored", "refused"])
def test_a_server_without_conditional_writes_is_refused(
    s3: str, monkeypatch: pytest.MonkeyPatch, condition: Callable[[], None]
) -> None:
    with monkeypatch.context() as patch:
        patch_conditions(patch, condition)
        storage = Storage(f"{s3}/runs")
        with pytest.raises(ConfigError, match=r"cannot be used: .*If-None-Match"):
            storage.check_writable()
        assert storage.list() == []
    Storage(f"{s3}/runs").check_writable()


def fake_answers(storage: Storage, monkeypatch: pytest.MonkeyPatch, *answers: tuple[bool, Exception]) -> list[str]:
    """Replaces the first answers to creates, which reach S3 or not. Returns a list that grows with each create."""
    fs = storage.filesystem_and_path()[0].handler.fs
    real, remaining, calls = fs.pipe_file, list(answers), list[str]()

    def pipe_file(path: str, data: bytes, **options: object) -> None:
        calls.append(path)
        arrives, answer = remaining.pop(0) if remaining else (True, None)
        if arrives:
            real(path, data, **options)
        if answer is not None:
            raise answer

    monkeypatch.setattr(fs, "pipe_file", pipe_file)
    return calls


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


def test_a_listing_shows_changes_of_other_clients_at_once(s3: str) -> None:
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


@pytest.mark.parametrize("answer", [ConnectionError("reset"), FileExistsError("PreconditionFailed")], ids=repr)
def test_a_create_whose_answer_was_lost_succeeds(s3: str, monkeypatch: pytest.MonkeyPatch, answer: Exception) -> None:
    """The connection broke, or it broke and the client repeated the request, which was refused."""
    storage = Storage(s3)
    calls = fake_answers(storage, monkeypatch, (True, answer))
    storage.create("a", b"mine")
    assert len(calls) == 1 and storage.list() == ["a"]


def test_cephs_invalid_argument_means_that_the_object_exists(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(s3)
    storage.create("a", b"theirs")
    fake_answers(storage, monkeypatch, (False, OSError(errno.EINVAL, "PreconditionFailed")))
    with pytest.raises(FileExistsError):
        storage.create("a", b"mine")
    assert storage.read("a") == b"theirs"


def test_a_create_that_conflicts_with_one_in_progress_is_refused(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"Error": {"Code": "ConditionalRequestConflict"}, "ResponseMetadata": {"HTTPStatusCode": 409}}
    conflict = OSError(errno.EIO, "ConditionalRequestConflict")
    conflict.__cause__ = ClientError(answer, "PutObject")  # type: ignore[arg-type]
    storage = Storage(s3)
    fake_answers(storage, monkeypatch, (False, conflict))
    with pytest.raises(FileExistsError):
        storage.create("a", b"mine")
    storage.create("a", b"mine")
    assert storage.read("a") == b"mine"


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


def test_a_denied_request_fails_at_once_with_its_cause(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(s3)
    fake_answers(storage, monkeypatch, (False, PermissionError("AccessDenied")))
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot create 'a' in s3://.*AccessDenied") as caught:
        storage.create("a", b"mine")
    assert isinstance(caught.value.__cause__, PermissionError) and time.monotonic() - began < 5


def test_a_user_can_configure_the_retries(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def options() -> dict[str, Any]:
        return Storage(s3).filesystem_and_path()[0].handler.fs.config_kwargs  # type: ignore[no-any-return]

    assert options()["retries"]["total_max_attempts"] == 6
    with monkeypatch.context() as patch:
        patch.setenv("AWS_MAX_ATTEMPTS", "3")
        assert "retries" not in options()
    with monkeypatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"retries": {"total_max_attempts": 2}}})
        assert options()["retries"] == {"total_max_attempts": 2}
