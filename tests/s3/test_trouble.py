"""Saves and restores on an S3 server that throttles, refuses, is full, or whose answers get lost."""

from __future__ import annotations

import itertools
import random

import pytest
from s3fs import S3FileSystem

from elastic_ddp.checkpoint import Commit
from elastic_ddp.errors import ConfigError, StorageError
from tests.s3.ceph import Ceph, Keys
from tests.s3.conftest import Bucket, create_bucket
from tests.s3.proxy import SLOW_DOWN, Fault, Plan, Proxy, Refusal, Request
from tests.saving import PART_BYTES, check_commits, large_state, save_on_ranks
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import keys_of, restored_step, step_of


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)


def at(number: int, fault: Fault | Refusal) -> Plan:
    """Injects a fault into one request, counted from 0."""
    numbers = itertools.count()
    return lambda request: fault if next(numbers) == number else None


def is_data(request: Request) -> bool:
    """Returns whether a request writes a part of the state."""
    return request.method == "PUT" and "/step" in request.target


def is_manifest(request: Request) -> bool:
    return request.method == "PUT" and "/commits/" in request.target


def first(count: int, fault: Fault | Refusal, of: Plan) -> Plan:
    """Injects a fault into the first `count` requests that `of` selects."""
    remaining = iter(range(count))

    def plan(request: Request) -> Fault | Refusal | None:
        return fault if of(request) and next(remaining, None) is not None else None

    return plan


@pytest.mark.parametrize(
    "what",
    [
        *(SLOW_DOWN, Fault.HALF_READ, Fault.LOST, Fault.HALF_ANSWERED),
        *(pytest.param(what, marks=pytest.mark.s3) for what in (Refusal(500, "InternalError"), Fault.RESET)),
    ],
    ids=str,
)
def test_a_save_survives_temporary_faults(bucket: Bucket, proxy: Proxy, what: Fault | Refusal) -> None:
    storage = bucket.storage(endpoint=proxy.endpoint, client_retries=True)
    assert isinstance(save_on_ranks([storage] * 2, 1), Commit)
    proxy.plan = first(4, what, is_data)
    assert isinstance(outcome := save_on_ranks([storage] * 2, 2), Commit), outcome
    proxy.plan = first(4, what, lambda request: "/commits/3.json" in request.target)
    assert isinstance(outcome := save_on_ranks([storage] * 2, 3), Commit), outcome
    assert {is_manifest(request) for request, _ in proxy.injected} == {False, True}
    check_commits(bucket.storage(), 2, 3)


def test_a_save_that_is_throttled_for_too_long_fails(bucket: Bucket, proxy: Proxy) -> None:
    storage = bucket.storage(endpoint=proxy.endpoint, client_retries=True)
    assert isinstance(save_on_ranks([storage] * 2, 1), Commit)
    proxy.plan = lambda request: SLOW_DOWN
    storage.filesystem_and_path()[0].handler.fs.retries = 2  # by s3fs, besides those by botocore
    outcome = save_on_ranks([storage] * 2, 2)
    assert isinstance(outcome, StorageError) and "SlowDown, 503" in str(outcome)
    assert sum(is_data(request) for request, _ in proxy.injected) > 2, "retried"
    assert restored_step(bucket.storage()) == 1
    proxy.plan = lambda request: None
    assert isinstance(save_on_ranks([storage] * 2, 3), Commit)
    check_commits(bucket.storage(), 1, 3)


def test_bad_credentials_end_a_save_at_once(bucket: Bucket, proxy: Proxy) -> None:
    storage = bucket.storage(endpoint=proxy.endpoint, client_retries=True)
    assert isinstance(save_on_ranks([storage] * 2, 1), Commit)
    proxy.plan = lambda request: Refusal(403, "ExpiredToken")
    outcome = save_on_ranks([storage] * 2, 2)
    assert isinstance(outcome, StorageError)
    assert "ExpiredToken, 403" in str(outcome) and "renew the credentials" in str(outcome)
    assert sum(is_data(request) for request, _ in proxy.injected) == 2, "one request per rank"
    assert restored_step(bucket.storage()) == 1


def test_credentials_that_expire_before_the_manifest_leave_no_commit(bucket: Bucket, proxy: Proxy) -> None:
    storage = bucket.storage(endpoint=proxy.endpoint, client_retries=True)
    assert isinstance(save_on_ranks([storage] * 2, 1), Commit)
    proxy.plan = lambda request: Refusal(403, "ExpiredToken") if is_manifest(request) or proxy.injected else None
    outcome = save_on_ranks([storage] * 2, 2)
    assert isinstance(outcome, StorageError) and "ExpiredToken" in str(outcome)
    assert sum(is_manifest(request) for request, _ in proxy.injected) == 1
    assert restored_step(bucket.storage()) == 1


def test_a_missing_bucket_is_an_error_at_once_not_an_empty_folder(bucket: Bucket, proxy: Proxy) -> None:
    missing = Bucket(bucket.endpoint, f"{bucket.uri}-missing").storage(endpoint=proxy.endpoint, client_retries=True)
    puts: list[Request] = []
    proxy.plan = lambda request: puts.append(request) if is_data(request) else None
    outcome = save_on_ranks([missing] * 2, 1)
    assert isinstance(outcome, StorageError) and len(puts) == 2
    for needed in (missing.uri, "NoSuchBucket, 404", "create the bucket"):
        assert needed in str(outcome)
    with pytest.raises(StorageError, match="create the bucket"):
        SingleRankStore(missing, keep=1).latest()
    for read in (
        lambda: missing.read("a"),
        lambda: missing.size("a"),
        lambda: missing.read_into("a", 0, memoryview(bytearray(1))),
    ):
        with pytest.raises(StorageError, match="create the bucket"):
            read()
    with pytest.raises(StorageError, match="create the bucket"):
        missing.create("a", b"")
    with pytest.raises(ConfigError, match="create the bucket"):
        missing.check_writable()


def test_a_commit_whose_answer_was_lost_is_complete(bucket: Bucket, proxy: Proxy) -> None:
    storage = bucket.storage(endpoint=proxy.endpoint)
    assert isinstance(save_on_ranks([storage] * 2, 1), Commit)

    def plan(request: Request) -> Fault | None:
        if is_manifest(request) and not proxy.injected:
            return Fault.LOST
        return Fault.RESET if proxy.injected else None

    proxy.plan = plan
    outcome = save_on_ranks([storage] * 2, 2)
    assert isinstance(outcome, StorageError) and "commits/2.json" in str(outcome)
    check_commits(bucket.storage(), 1, 2)
    proxy.plan = lambda request: None
    again = save_on_ranks([storage] * 2, 2)
    assert isinstance(again, Commit)
    check_commits(bucket.storage(), 1, 2)


@pytest.mark.parametrize("what", [SLOW_DOWN, Fault.LOST], ids=str)
@pytest.mark.parametrize("which", ["?uploads", "partNumber=2", "POST complete"])
def test_a_large_object_survives_temporary_faults(
    bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, which: str, what: Fault | Refusal
) -> None:
    monkeypatch.setattr("elastic_ddp.storage.s3.PART_BYTES", PART_BYTES)

    def is_selected(request: Request) -> bool:
        if which == "POST complete":
            return request.method == "POST" and "uploadId=" in request.target
        return which in request.target

    storage, state = bucket.storage(endpoint=proxy.endpoint, client_retries=True), large_state(1, 2)
    proxy.plan = first(1, what, is_selected)
    outcome = save_on_ranks([storage], 1, state=state)
    assert isinstance(outcome, Commit) and len(proxy.injected) == 1, outcome
    SingleRankStore(bucket.storage(), keep=1).verify(outcome)
    assert bucket.storage().list() == sorted(keys_of(outcome))


def test_a_broken_part_is_sent_again_from_its_beginning(bucket: Bucket, proxy: Proxy) -> None:
    storage, data = bucket.storage(endpoint=proxy.endpoint, client_retries=True), random.Random(0).randbytes(17 << 20)
    fault = first(1, Fault.HALF_READ, lambda request: "partNumber=2" in request.target)
    targets: list[str] = []

    def plan(request: Request) -> Fault | Refusal | None:
        targets.append(request.target)
        return fault(request)

    proxy.plan = plan
    storage.write("a", data)
    assert len(proxy.injected) == 1 and sum("?uploads" in target for target in targets) == 1, "in the same upload"
    assert sum("partNumber=2" in target for target in targets) == 2, "sent twice"
    assert bucket.storage().read("a") == data


def test_a_large_object_can_be_the_first_request_of_a_process(bucket: Bucket) -> None:
    S3FileSystem.clear_instance_cache()
    data = random.Random(0).randbytes((16 << 20) + 5)
    bucket.storage().write("a", data)
    assert bucket.storage().read("a") == data


def test_a_refused_part_fails_the_save_and_leaves_nothing(
    bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ddp.storage.s3.PART_BYTES", PART_BYTES)
    storage, state = bucket.storage(endpoint=proxy.endpoint, client_retries=True), large_state(1, 2)
    for which, what, expected in (
        ("partNumber=2", Refusal(403, "ExpiredToken"), "ExpiredToken, 403"),
        ("uploadId=", Refusal(404, "NoSuchBucket"), "create the bucket"),  # also refuses to abort the upload
    ):
        proxy.plan = lambda request, which=which, what=what: what if which in request.target else None  # type: ignore[misc]
        outcome = save_on_ranks([storage], 1, state=state)
        assert isinstance(outcome, StorageError) and expected in str(outcome)
        if which == "partNumber=2":
            assert not bucket.storage().uploads() and not bucket.storage().list()


@pytest.mark.parametrize("what", [SLOW_DOWN, Fault.HALF_ANSWERED], ids=str)
def test_a_restore_that_fails_at_any_request_rejects_no_commit(
    bucket: Bucket, proxy: Proxy, what: Fault | Refusal
) -> None:
    for step in (1, 2):
        assert isinstance(save_on_ranks([bucket.storage()] * 2, step), Commit)
    storage = bucket.storage(endpoint=proxy.endpoint)
    for number in itertools.count():
        proxy.plan = at(number, what)
        store = SingleRankStore(storage, keep=2)
        try:
            restored = store.load_latest()
        except StorageError:
            restored = None
        assert store.rejected == []
        assert restored is None or step_of(restored[1]) == 2
        if len(proxy.injected) == number:  # the restore made fewer requests
            break
    assert number >= 6 and restored is not None


def noise(seed: int, probability: float) -> Plan:
    """Injects random faults."""
    draws = random.Random(seed)
    kinds = [SLOW_DOWN, Refusal(500, "InternalError"), *Fault]
    return lambda request: draws.choice(kinds) if draws.random() < probability else None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.s3) for seed in range(1, 6))])
def test_random_faults_lose_no_commit(bucket: Bucket, proxy: Proxy, seed: int) -> None:
    storage = bucket.storage(endpoint=proxy.endpoint, client_retries=True)
    proxy.plan = noise(seed, 0.2)
    previous: int | None = None
    for step in range(1, 5):
        outcome = save_on_ranks([storage] * 2, step)
        newest = restored_step(bucket.storage())
        assert newest == step if isinstance(outcome, Commit) else newest in (previous, step)
        previous = newest

        reader = SingleRankStore(storage, keep=2)
        try:
            restored = reader.load_latest()
        except StorageError:
            pass
        else:
            assert restored is None if newest is None else restored and step_of(restored[1]) == newest
        assert reader.rejected == [], "an outage does not make a commit bad"
    assert len(proxy.injected) > 5
    proxy.plan = lambda request: None
    for step in (5, 6):
        assert isinstance(save_on_ranks([storage] * 2, step), Commit)
    check_commits(bucket.storage(), 5, 6)


# Only the real server checks credentials.


@pytest.mark.s3
@pytest.mark.parametrize(
    ("keys", "code"),
    [(Keys("unknown", "secret"), "InvalidAccessKeyId"), (Keys("test", "wrong"), "SignatureDoesNotMatch")],
    ids=["no such user", "wrong secret"],
)
def test_refused_credentials_are_a_clear_error(real_bucket: Bucket, keys: Keys, code: str) -> None:
    assert isinstance(save_on_ranks([real_bucket.storage()], 1), Commit)
    unauthorized = real_bucket.storage(keys=keys, client_retries=True)
    outcome = save_on_ranks([unauthorized] * 2, 2)
    assert isinstance(outcome, StorageError)
    assert f"{code}, 403" in str(outcome) and "renew the credentials" in str(outcome)
    with pytest.raises(StorageError, match=code):
        SingleRankStore(unauthorized, keep=1).latest()
    check_commits(real_bucket.storage(), 1)


@pytest.mark.s3
def test_a_full_server_fails_the_save_and_keeps_the_previous_commit(real_server: Ceph) -> None:
    keys = Keys("small", "smallsecret")
    real_server.add_user("small", keys, max_bytes=PART_BYTES)
    storage = create_bucket(real_server.endpoint, keys).storage(keys=keys, client_retries=True)
    assert isinstance(save_on_ranks([storage] * 2, 1), Commit)
    outcome = save_on_ranks([storage] * 2, 2, state=large_state(2, 2))
    assert isinstance(outcome, StorageError)
    assert "QuotaExceeded, 403" in str(outcome) and "free space there" in str(outcome)
    check_commits(storage, 1)
    assert isinstance(save_on_ranks([storage] * 2, 3), Commit)
    check_commits(storage, 1, 3)
