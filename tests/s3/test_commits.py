"""Commits on S3, over HTTP."""

from __future__ import annotations

import threading
import time
from typing import Any

import boto3
import pytest
import torch
from moto.s3.models import S3Backend

from elastic_ddp.checkpoint import CheckpointStore, Commit, CommitCatalog, housekeeping
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.restore import restore
from tests.ranks import single_rank_group
from tests.s3.ceph import USER
from tests.s3.conftest import Bucket
from tests.s3.proxy import Fault, Proxy, Refusal
from tests.saving import PART_BYTES, large_state, save_on_ranks
from tests.unit.checkpoint.test_checkpoint import restored_step, step_of


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_commit_of_several_ranks_is_restored(bucket: Bucket, world_size: int) -> None:
    storage = bucket.storage()
    for step in (1, 2, 3):
        commit = save_on_ranks([storage] * world_size, step)
        assert isinstance(commit, Commit), commit
        assert restored_step(storage) == step
    writers = {item.key.rpartition("/")[2].split("-")[0] for item in commit.objects}
    assert writers == {str(rank) for rank in range(world_size)}
    assert not storage.list("step=1") and storage.list("step=2") and storage.list("step=3")


def test_large_objects_are_uploaded_in_parts_and_restored(
    bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ddp.storage.s3.PART_BYTES", PART_BYTES)
    parts: list[str] = []
    proxy.plan = lambda request: parts.append(request.target) if "partNumber=" in request.target else None
    storage, state = bucket.storage(endpoint=proxy.endpoint), large_state(1, 5)
    commit = save_on_ranks([storage] * 2, 1, state=state)
    assert isinstance(commit, Commit), commit
    assert sum(item.size for item in commit.objects) > 5 * PART_BYTES and len(parts) >= 5
    restored = CheckpointStore(bucket.storage(), keep=1).load(commit)
    assert all(torch.equal(restored["large"][name], tensor) for name, tensor in state["large"].items())


def test_a_restore_needs_four_requests_before_the_first_piece(bucket: Bucket, proxy: Proxy) -> None:
    commit = save_on_ranks([bucket.storage()], 1)
    assert isinstance(commit, Commit), commit
    requests: list[str] = []
    proxy.plan = lambda request: requests.append(f"{request.method} {request.target}")
    storage = bucket.storage(endpoint=proxy.endpoint)
    restored = restore(CommitCatalog(storage), storage, single_rank_group())
    assert restored is not None and step_of(restored[1]) == 1
    listed, manifest, *both = requests[:4]
    assert "GET" in listed and "prefix=" in listed and f"/{commit.key}" in manifest and manifest.startswith("GET ")
    assert sorted("prefix=" in request for request in both) == [False, True] and all(
        request.startswith("GET ") for request in both
    )
    assert not any(request.startswith("HEAD ") for request in requests)


@pytest.mark.parametrize("which", ["manifest", "skeleton"])
def test_a_restore_survives_a_broken_answer(bucket: Bucket, proxy: Proxy, which: str) -> None:
    commit = save_on_ranks([bucket.storage()], 1)
    assert isinstance(commit, Commit), commit
    name = (commit.key if which == "manifest" else commit.state.key).rpartition("/")[2]
    proxy.plan = lambda request: Fault.HALF_ANSWERED if f"/{name}" in request.target and not proxy.injected else None
    storage = bucket.storage(endpoint=proxy.endpoint, client_retries=True)
    restored = restore(CommitCatalog(storage), storage, single_rank_group())
    assert restored is not None and step_of(restored[1]) == 1 and len(proxy.injected) == 1


def test_a_second_save_of_a_step_returns_the_first_commit(bucket: Bucket) -> None:
    storage = bucket.storage()
    first = save_on_ranks([storage], 4)
    assert isinstance(first, Commit), first
    assert save_on_ranks([storage], 4) == first
    assert storage.list("step=4") == sorted(item.key for item in first.all_objects)


def test_of_many_concurrent_creators_exactly_one_succeeds(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    put = S3Backend.put_object  # delayed after moto's check for the object, so that all creators pass the check
    monkeypatch.setattr(S3Backend, "put_object", lambda *args, **kwargs: time.sleep(0.01) or put(*args, **kwargs))
    storages = [bucket.storage() for _ in range(6)]
    barrier, winners = threading.Barrier(len(storages)), []

    def compete(number: int, storage: Storage) -> None:
        barrier.wait()
        try:
            storage.create("commits/1.json", b"%d" % number)
        except FileExistsError:
            return
        winners.append(b"%d" % number)

    threads = [threading.Thread(target=compete, args=numbered) for numbered in enumerate(storages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert winners == [storages[0].read("commits/1.json")]


def test_the_check_for_writing_accepts_both_servers(bucket: Bucket) -> None:
    bucket.storage().check_writable()
    assert bucket.storage().list() == []


def client_of(bucket: Bucket) -> Any:
    return boto3.client(
        "s3", endpoint_url=bucket.endpoint, aws_access_key_id=USER.access, aws_secret_access_key=USER.secret
    )


def unfinished_uploads(bucket: Bucket) -> list[str]:
    answer = client_of(bucket).list_multipart_uploads(Bucket=bucket.uri.removeprefix("s3://"))
    return sorted(upload["Key"] for upload in answer.get("Uploads", []))


def begin_uploads(bucket: Bucket, *keys: str) -> None:
    """Starts uploads and does not finish them, like a killed process."""
    for key in keys:
        client_of(bucket).create_multipart_upload(Bucket=bucket.uri.removeprefix("s3://"), Key=key)


@pytest.mark.parametrize("by_command", [False, True], ids=["saver", "prune"])
def test_old_uploads_of_killed_savers_are_aborted(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, by_command: bool
) -> None:
    of_attempt, of_others = f"runs/step=9/attempt={'a' * 32}/0-0.bin", "runs/step=9/notes.bin"
    begin_uploads(bucket, of_attempt, of_others, f"another/{of_attempt}")

    def clean_up(age_s: float) -> list[str]:
        monkeypatch.setattr(housekeeping, "ORPHAN_AGE_S", age_s)
        if by_command:
            housekeeping.remove(
                bucket.storage(), housekeeping.plan_prune(bucket.storage(), None, orphan_age_s=age_s)[0]
            )
        else:
            step = len(bucket.storage().list("commits")) + 1
            assert isinstance(save_on_ranks([bucket.storage()], step), Commit)
        return unfinished_uploads(bucket)

    assert clean_up(100 * 365 * 24 * 3600.0) == sorted([of_attempt, of_others, f"another/{of_attempt}"])
    assert clean_up(-60.0) == sorted([of_others, f"another/{of_attempt}"])


def test_a_server_that_does_not_list_uploads_is_accepted(
    bucket: Bucket, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.plan = lambda request: Refusal(403, "AccessDenied") if "uploads" in request.target else None
    assert isinstance(save_on_ranks([bucket.storage(endpoint=proxy.endpoint)], 1), Commit)
    assert proxy.injected and not caplog.records


def test_a_failed_multipart_upload_is_aborted(bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ddp.storage.s3.PART_BYTES", PART_BYTES)
    proxy.plan = lambda request: Refusal(403, "ExpiredToken") if "partNumber=2" in request.target else None
    outcome = save_on_ranks([bucket.storage(endpoint=proxy.endpoint)], 1, state=large_state(1, 3))
    assert isinstance(outcome, Exception) and "ExpiredToken" in str(outcome)
    assert bucket.storage().list() == [] and unfinished_uploads(bucket) == []
