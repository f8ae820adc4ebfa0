"""Commits are made, restored, rejected and replaced."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ddp.checkpoint import Commit
from elastic_ddp.checkpoint.manifest import committed_steps, parse_set_aside
from elastic_ddp.errors import CheckpointError, StorageError
from elastic_ddp.storage.folder import Entry
from elastic_ddp.storage.storage import Storage
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.states import make_state, step_of


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        return Storage(f"{request.getfixturevalue('s3')}/runs/one")
    return Storage(tmp_path / "run")


def save(storage: Storage, *steps: int, keep: int = 3) -> list[Commit]:
    store = SingleRankStore(storage, keep=keep)
    return [store.save(make_state(step), step=step, record={"step": step}) for step in steps]


def restored_step(storage: Storage) -> int | None:
    restored = SingleRankStore(storage, keep=1).load_latest()
    if restored is None:
        return None
    commit, state = restored
    assert commit.step == commit.record["step"] == step_of(state)
    return commit.step


def test_a_run_without_commits_has_no_latest_commit(storage: Storage) -> None:
    store = SingleRankStore(storage, keep=1)
    assert store.latest() is None and store.load_latest() is None and store.rejected == []


def test_the_newest_commit_is_loaded_with_its_record(storage: Storage) -> None:
    record = {"epoch": 2, "samples_sha256": "ab", "nested": {"a": [1]}, "loss": 0.1, "none": None}
    store = SingleRankStore(storage, keep=2)
    store.save(make_state(9), step=9, record={})
    saved = store.save(make_state(10), step=10, record=record)
    other = SingleRankStore(storage, keep=2)
    assert other.latest() == saved and saved.record == record and saved.step == 10
    assert step_of(other.load(saved)) == 10
    assert other.rejected == []


@pytest.mark.parametrize("keys", [(9, 10), ("\U0001f600", "\uffff")], ids=["numbers", "beyond the BMP"])
def test_record_keys_may_sort_differently_as_text(storage: Storage, keys: tuple[Any, Any]) -> None:
    SingleRankStore(storage, keep=1).save(make_state(1), step=1, record={"x": dict.fromkeys(keys, 1)})
    restored = SingleRankStore(storage, keep=1).latest()
    assert restored is not None and restored.record["x"] == {str(key): 1 for key in keys}


def keys_of(commit: Commit) -> list[str]:
    return [commit.key, *(item.key for item in commit.all_objects)]


def test_tensors_are_stored_as_raw_bytes(storage: Storage) -> None:
    [commit] = save(storage, 5)
    assert [item.key.removeprefix(commit.prefix) for item in commit.all_objects] == ["/0-0.bin", "/state.json"]
    stored = commit.tensors["model.weight"]
    assert stored.dtype == "float32" and stored.shape == (16, 8)
    [block] = stored.blocks
    data = bytearray(16 * 8 * 4)
    assert storage.read_into(commit.objects[block.object].key, block.start, memoryview(data)) == len(data)
    assert bytes(data) == make_state(5)["model"]["weight"].numpy().tobytes()
    assert storage.list() == sorted(keys_of(commit))


def test_retention_keeps_the_newest_and_removes_all_bytes_of_the_others(storage: Storage) -> None:
    commits = save(storage, 1, 2, 3, 10, keep=2)
    kept = [key for commit in commits[2:] for key in keys_of(commit)]
    assert storage.list() == sorted(kept)
    assert restored_step(storage) == 10


def test_the_next_commit_removes_leftovers_of_earlier_steps_only(storage: Storage) -> None:
    save(storage, 1)
    storage.write(f"step=2/attempt={'a' * 32}/0-0.bin", b"half")
    storage.write(f"step=9/attempt={'b' * 32}/0-0.bin", b"of another saver")
    storage.write("notes.txt", b"not ours")
    save(storage, 3)
    left = [key for key in storage.list() if not key.startswith(("commits/", "step=1/", "step=3/"))]
    assert left == ["notes.txt", f"step=9/attempt={'b' * 32}/0-0.bin"]


def test_a_step_is_committed_once(storage: Storage) -> None:
    [first] = save(storage, 4)
    before = storage.list()
    store = SingleRankStore(storage, keep=3)
    assert store.save(make_state(4), step=4, record={"another": "attempt"}) == first
    assert storage.list() == before


@pytest.mark.parametrize("is_removed", [True, False])
def test_the_second_of_two_savers_removes_its_attempt_and_returns_the_first_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_removed: bool
) -> None:
    """Both find no commit before they write; the other publishes its manifest first."""
    storage, rival = Storage(tmp_path), list[Commit]()
    store = SingleRankStore(storage, keep=3)
    publish = store._publish

    def late(*arguments: Any) -> Commit:
        rival.extend(save(Storage(tmp_path), 4))
        return publish(*arguments)

    def refuse(self: Storage, prefix: str) -> None:
        raise StorageError("503 SlowDown")

    store._publish = late  # type: ignore[method-assign]
    with monkeypatch.context() as patch:
        if not is_removed:
            patch.setattr(Storage, "delete_tree", refuse)
        assert store.save(make_state(4), step=4, record={}) == rival[0]
    if not is_removed:
        assert "stays until the next commit: 503 SlowDown" in caplog.text
        save(storage, 5)
    assert storage.list("step=4") == sorted(keys_of(rival[0])[1:])


def test_a_fenced_saver_leaves_nothing(storage: Storage) -> None:
    save(storage, 1)
    before = storage.list()

    def refuse() -> None:
        raise CheckpointError("its generation has ended")

    with pytest.raises(CheckpointError, match="its generation has ended"):
        SingleRankStore(storage, keep=3).save(make_state(2), step=2, record={"step": 2}, fence=refuse)
    assert storage.list() == before
    assert restored_step(storage) == 1


def test_a_bad_commit_is_replaced_when_its_step_is_saved_again(storage: Storage) -> None:
    save(storage, 3)
    [bad] = save(storage, 4)
    corrupt(storage, bad.objects[0].key, "flip")
    assert restored_step(storage) == 3
    store = SingleRankStore(storage, keep=3)
    again = store.save(make_state(4), step=4, record={"step": 4})
    assert again.attempt != bad.attempt and restored_step(storage) == 4
    assert store.rejected[0][0] == "commits/4.json"
    assert storage.list("set-aside") == [f"set-aside/4-{bad.attempt}.json"] and storage.list(bad.prefix)


def test_every_unreadable_manifest_is_set_aside_under_its_own_key(storage: Storage) -> None:
    store = SingleRankStore(storage, keep=3)
    for text in (b"torn", b"torn", b"also torn"):
        storage.write("commits/4.json", text)
        store.set_aside("commits/4.json", None)
    kept = storage.list("set-aside")
    assert sorted(map(storage.read, kept)) == [b"also torn", b"torn"] and not storage.list("commits")
    assert {parse_set_aside(key) for key in kept} == {(4, None)}


def test_rejected_commits_do_not_displace_good_ones(storage: Storage) -> None:
    save(storage, 5)
    [bad] = save(storage, 9, keep=9)
    corrupt(storage, bad.objects[0].key, "missing")
    # The run has resumed from step 5; step 9 is still the newest by number.
    for step in (6, 7):
        save(storage, step, keep=1)
        assert restored_step(storage) == step


def corrupt(storage: Storage, key: str, how: str) -> None:
    data = bytearray(storage.read(key))
    if how == "missing":
        storage.delete(key)
        return
    if how == "flip":
        data[len(data) // 2] ^= 0x10
    elif how == "short":
        data = data[:-1]
    elif how == "long":
        data += b" "
    else:
        raise ValueError(how)
    storage.write(key, bytes(data))


@pytest.mark.parametrize("how", ["missing", "flip", "short"])
@pytest.mark.parametrize("which", ["manifest", "skeleton", "tensors"])
def test_a_damaged_commit_is_rejected_for_the_one_before_it(
    storage: Storage, which: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(storage, 1, 2)
    [_, newest] = [*save(storage, 1), *save(storage, 3)]
    key = {"manifest": newest.key, "skeleton": newest.state.key, "tensors": newest.objects[0].key}[which]
    corrupt(storage, key, how)
    store = SingleRankStore(storage, keep=3)
    with caplog.at_level(logging.WARNING):
        restored = store.load_latest()
    assert restored is not None and step_of(restored[1]) == restored[0].step == 2
    if (which, how) == ("manifest", "missing"):
        return
    [(rejected, reason)] = store.rejected
    assert rejected == newest.key and key in reason and rejected in caplog.text
    if how == "flip" and which != "manifest":
        with pytest.raises(CheckpointError, match=key):
            store.load(newest)
        assert store.latest() == newest  # its sizes are right
    else:
        latest = store.latest()
        assert latest is not None and latest.step == 2


def test_if_no_commit_verifies_all_are_rejected_with_reasons(storage: Storage) -> None:
    for commit in save(storage, 1, 2):
        corrupt(storage, commit.objects[0].key, "flip")
    store = SingleRankStore(storage, keep=3)
    assert store.load_latest() is None
    assert [key for key, _ in store.rejected] == ["commits/2.json", "commits/1.json"]


class _Outage(Storage):
    """Lists objects, and fails to read them."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        if key.startswith("step="):
            raise StorageError("connection reset")
        return super().read_into(key, start, buffer)


def test_unreadable_objects_reject_commits_without_setting_them_aside(tmp_path: Path) -> None:
    save(Storage(tmp_path), 1, 2)
    before = Storage(tmp_path).list()
    store = SingleRankStore(_Outage(tmp_path), keep=2)
    assert store.load_latest() is None
    assert [key for key, _ in store.rejected] == ["commits/2.json", "commits/1.json"]
    assert all("connection reset" in reason for _, reason in store.rejected)
    assert Storage(tmp_path).list() == before


class _BusySaver(Storage):
    """After the reader's first listing, another process commits and removes what was listed."""

    busy = True

    def listing(self, prefix: str = "") -> dict[str, Entry]:
        restored = super().listing(prefix)
        if self.busy:
            self.busy = False
            save(Storage(self.uri), 3, 4, keep=1)
        return restored


def test_a_reader_lists_again_if_a_saver_removed_what_it_listed(tmp_path: Path) -> None:
    save(Storage(tmp_path), 1, 2)
    restored = SingleRankStore(_BusySaver(tmp_path), keep=1).load_latest()
    assert restored is not None and restored[0].step == 4


def test_states_and_records_that_cannot_be_saved_are_refused_before_a_write(storage: Storage) -> None:
    store = SingleRankStore(storage, keep=1)
    for state, record, message in (
        ({"user": {"rng": torch.Generator()}}, {}, r"user\.rng: a Generator cannot be saved without pickle"),
        ({"../model": {}}, {}, "name a component"),
        ({"model": {}}, {"loss": float("nan")}, "record of step 1"),
        ({"model": {}}, {"path": Path()}, "record of step 1"),
    ):
        with pytest.raises(CheckpointError, match=message):
            store.save(state, step=1, record=record)
    assert storage.list() == []
    with pytest.raises(ValueError, match="keep=0"):
        SingleRankStore(storage, keep=0)


def test_a_manifest_that_is_torn_of_another_format_or_of_another_step_is_refused(storage: Storage) -> None:
    [commit] = save(storage, 7)
    good = commit.to_bytes()
    assert Commit.from_bytes("commits/7.json", good) == commit
    for data in (b"", b"[]", b"\xff\xfe", good[:-2], good[: len(good) // 2]):
        with pytest.raises(CheckpointError, match=r"commits/7\.json is not a valid manifest"):
            Commit.from_bytes("commits/7.json", data)
    with pytest.raises(CheckpointError, match="its format is 2; this version reads 3"):
        Commit.from_bytes("commits/7.json", good.replace(b'"format":3', b'"format":2'))
    with pytest.raises(CheckpointError, match=r"commits/8\.json is the manifest of another step, 7"):
        Commit.from_bytes("commits/8.json", good)


@pytest.mark.parametrize("key", ["../../secret", "{prefix}/../../secret", "/etc/secret", "step=1/attempt=0/0-0.bin"])
def test_a_manipulated_manifest_names_no_object_outside_of_its_folder(tmp_path: Path, key: str) -> None:
    [commit] = save(Storage(tmp_path), 7)
    item = commit.objects[0].model_copy(update={"key": key.format(prefix=commit.prefix)})
    with pytest.raises(CheckpointError, match="is not in step=7/attempt="):
        Commit.from_bytes(commit.key, commit.model_copy(update={"objects": (item,)}).to_bytes())
    with pytest.raises(CheckpointError, match="attempt"):
        Commit.from_bytes(commit.key, commit.model_copy(update={"attempt": "../.."}).to_bytes())


def test_only_keys_of_manifests_count_as_commits() -> None:
    keys = ["commits/2.json", "commits/10.json", "commits/2.json.bak", "commits/.tmp-1.json", "x/commits/3.json"]
    assert committed_steps(keys) == [10, 2]


def test_a_commit_with_an_object_that_is_too_long_is_replaced(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    [bad] = save(storage, 4)
    corrupt(storage, bad.objects[0].key, "long")
    store = SingleRankStore(storage, keep=3)
    store.verify(bad)  # it reads only the listed bytes
    assert store.save(make_state(4), step=4, record={"step": 4}).attempt != bad.attempt
    assert restored_step(storage) == 4
