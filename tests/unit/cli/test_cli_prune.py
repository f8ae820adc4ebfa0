"""`elastic-ddp checkpoints prune`: what it removes, what it keeps and what it refuses."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from elastic_ddp.checkpoint import Commit, CommitCatalog, housekeeping
from elastic_ddp.checkpoint.manifest import attempt_prefix, set_aside_key
from elastic_ddp.errors import ConfigError, DriverReplacedError, StorageError
from elastic_ddp.storage.lease import Driver, DriverLease, find_holder, started
from elastic_ddp.storage.local import TEMPORARY_PREFIX
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import COMMITS
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import corrupt
from tests.unit.cli.checkpoint_commands import invoke, steps_left


def prune(tmp_path: Path, *options: str) -> Any:
    """Returns what was, or would be, removed as (step, what)."""
    answer = json.loads(invoke("prune", str(tmp_path / "lm"), *options, "--json").stdout)
    assert answer["removed"] is ("--dry-run" not in options)
    return [(item["step"], item["what"]) for item in answer["items"]]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ([], [30, 20, 10]),
        (["--keep", "1"], [30]),
        (["--keep", "1", "--keep-every-steps", "20"], [30, 20]),
        (["--keep", "1", "--keep-best", "1", "--best-metric", "validation"], [30, 10]),
        (["--keep", "1", "--keep-best", "1", "--best-metric", "validation", "--best-mode", "max"], [30]),
    ],
    ids=str,
)
def test_prune_removes_all_objects_of_commits_that_are_not_kept(
    tmp_path: Path, commits: list[Commit], options: list[str], left: list[int]
) -> None:
    gone = [(step, "commit") for step in (10, 20) if step not in left]
    assert prune(tmp_path, *options, "--dry-run") == gone and steps_left(tmp_path) == [30, 20, 10]
    assert prune(tmp_path, *options) == gone and steps_left(tmp_path) == left
    assert prune(tmp_path, *options) == []


def test_prune_prints_what_it_removes_and_its_size(tmp_path: Path, commits: list[Commit]) -> None:
    run = str(tmp_path / "lm")
    text = invoke("prune", run, "--keep", "1", "--dry-run").stdout
    assert commits[0].prefix in text and commits[1].prefix in text and "would be removed" in text
    items = json.loads(invoke("prune", run, "--keep", "1", "--json").stdout)["items"]
    manifest = len(commits[0].to_bytes())
    assert items[0]["num_bytes"] == commits[0].num_bytes + manifest and items[0]["manifest"] == commits[0].key
    assert "nothing to remove" in invoke("prune", run).stdout


def test_prune_keeps_the_newest_complete_commit_and_newer_bad_ones(tmp_path: Path, commits: list[Commit]) -> None:
    storage = Storage(tmp_path / "lm").at(COMMITS)
    corrupt(storage, commits[2].objects[0].key, "missing")
    assert prune(tmp_path, "--keep", "1") == [(10, "commit")]
    assert SingleRankStore(storage, keep=1).latest() == commits[1]
    assert storage.list(commits[2].key.split("/")[0]) == ["commits/20.json", "commits/30.json"]
    corrupt(storage, commits[1].objects[0].key, "missing")
    assert prune(tmp_path, "--keep", "1", "--orphans-older-than-s", "0") == [], "none is complete"


def test_prune_verifies_the_newest_commit_before_it_removes_older_ones(tmp_path: Path, commits: list[Commit]) -> None:
    storage, run = Storage(tmp_path / "lm").at(COMMITS), str(tmp_path / "lm")
    corrupt(storage, commits[2].objects[0].key, "flip")
    assert prune(tmp_path, "--keep", "1", "--dry-run") == [(10, "commit")]
    text = " ".join(invoke("prune", run, "--keep", "1").stdout.split())
    assert "step 30 is kept, with all of its objects" in text and "does not have the checksum" in text
    assert storage.list("commits") == [commits[1].key, commits[2].key]
    SingleRankStore(storage, keep=1).verify(commits[1])
    corrupt(storage, commits[1].objects[0].key, "flip")
    assert prune(tmp_path, "--keep", "1") == [], "none verifies"


def test_prune_prints_the_bad_commits_that_it_keeps(tmp_path: Path, commits: list[Commit]) -> None:
    storage, run = Storage(tmp_path / "lm").at(COMMITS), str(tmp_path / "lm")
    storage.write(commits[2].key, b"{}")
    corrupt(storage, commits[0].objects[0].key, "missing")
    text = " ".join(invoke("prune", run).stdout.split())
    assert "step 30 is kept, with all of its objects" in text
    assert f"step 10 is kept, with all of its objects: {commits[0].objects[0].key} is missing" in text
    text = " ".join(invoke("prune", run, "--keep", "1").stdout.split())
    assert "step 30 is kept, with all of its objects" in text and "step 10 is kept" not in text
    assert storage.list("commits") == [commits[1].key, commits[2].key]


def test_ls_verify_and_errors_tell_how_many_commits_were_set_aside(tmp_path: Path, commits: list[Commit]) -> None:
    run, catalog = str(tmp_path / "lm"), CommitCatalog(Storage(tmp_path / "lm").at(COMMITS))
    assert "set-aside" not in invoke("ls", run).stdout + invoke("verify", run).stdout
    catalog.set_aside(commits[2].key, commits[2].attempt)
    for command in ("ls", "verify"):
        assert "set-aside/: 1 commit" in " ".join(invoke(command, run).stdout.split())
    assert len(json.loads(invoke("ls", run, "--json").stdout)) == 2
    for each in commits[:2]:
        catalog.set_aside(each.key, each.attempt)
    for arguments in (["ls", run], ["verify", run], ["export", run, str(tmp_path / "w.pt")]):
        with pytest.raises(ConfigError, match=r"no commit is left.*set-aside/: 3 commits"):
            invoke(*arguments)


def test_a_folder_without_a_run_or_inside_of_one_is_refused_and_nothing_is_created(
    tmp_path: Path, commits: list[Commit]
) -> None:
    for inside in ("checkpoints", "checkpoints/commits/30.json"):
        with pytest.raises(ConfigError, match=rf"the run's folder, {tmp_path}/lm\.$"):
            invoke("ls", f"{tmp_path}/lm/{inside}")
    with pytest.raises(ConfigError, match=r"nothing to prune .*<storage>/<name>"):
        invoke("prune", str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_prune_keeps_and_prints_commits_of_another_run_than_the_newest(tmp_path: Path) -> None:
    store = SingleRankStore(Storage(tmp_path / "lm").at(COMMITS), keep=9)
    for step, batch, data in ((10, 64, "a"), (20, 64, "a"), (30, 32, "a"), (40, 64, "a")):
        record = {"identity": {"global_batch_size": batch, "data": data}}
        store.save({"model": {}, "user": {"step": step}}, step=step, record=record)
    text = " ".join(invoke("prune", str(tmp_path / "lm"), "--keep", "1").stdout.split())
    assert "step 30 is kept, with all of its objects: commits/30.json belongs to another run" in text
    assert steps_left(tmp_path) == [40, 30]
    store.save({"model": {}, "user": {"step": 50}}, step=50, record={"identity": {"global_batch_size": 8}})
    assert prune(tmp_path, "--keep", "1", "--orphans-older-than-s", "0") == []
    assert steps_left(tmp_path) == [50, 40, 30]


def test_prune_verifies_only_if_it_removes_and_renews_its_lease_before(
    tmp_path: Path, commits: list[Commit], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    plain = CommitCatalog.verify

    def verify(self: CommitCatalog, commit: Commit) -> None:
        read.append(commit.step)
        plain(self, commit)

    monkeypatch.setattr(CommitCatalog, "verify", verify)
    assert prune(tmp_path, "--keep", "3") == [] and read == []
    with pytest.raises(ConfigError, match="'los'"):
        prune(tmp_path, "--keep", "1", "--keep-best", "1", "--best-metric", "los")
    assert read == []

    def taken_over(self: DriverLease, **options: Any) -> None:
        assert read == [30]
        raise DriverReplacedError("another driver has taken the run over")

    monkeypatch.setattr(DriverLease, "renew", taken_over)
    with pytest.raises(DriverReplacedError):
        invoke("prune", str(tmp_path / "lm"), "--keep", "1")
    assert steps_left(tmp_path) == [30, 20, 10]


def test_prune_removes_uncommitted_objects_that_are_old(tmp_path: Path, commits: list[Commit]) -> None:
    storage = Storage(tmp_path / "lm").at(COMMITS)
    for step in (5, 30, 70):  # before, beside and after the commits
        storage.write(f"step={step}/attempt={'a' * 32}/0-0.bin", b"half")
    assert prune(tmp_path) == []
    for key in storage.list():
        if "a" * 32 in key:
            os.utime(tmp_path / "lm" / COMMITS / key, (time.time() - 7200, time.time() - 7200))
    assert prune(tmp_path, "--orphans-older-than-s", "7500") == []
    orphans = [(5, "orphan"), (30, "orphan"), (70, "orphan")]
    with patch.object(Storage, "write", side_effect=StorageError("AccessDenied")):  # a dry run needs no right to write
        assert sorted(prune(tmp_path, "--orphans-older-than-s", "7000", "--dry-run")) == orphans
    assert sorted(prune(tmp_path, "--orphans-older-than-s", "7000")) == orphans
    assert steps_left(tmp_path) == [30, 20, 10]


def test_prune_removes_commits_that_were_set_aside_only_on_request(tmp_path: Path, commits: list[Commit]) -> None:
    storage = Storage(tmp_path / "lm").at(COMMITS)
    store = SingleRankStore(storage, keep=1)
    corrupt(storage, commits[0].key, "flip")
    store.set_aside(commits[0].key, None)
    store.set_aside(commits[1].key, commits[1].attempt)
    options = ["--keep", "1", "--orphans-older-than-s", "0"]
    assert prune(tmp_path, *options) == [], "the attempt of step 10 is unknown"
    assert storage.list(commits[0].prefix) and storage.list(commits[1].prefix)
    went = prune(tmp_path, *options, "--set-aside")
    assert sorted(went) == [(10, "orphan"), (10, "set aside"), (20, "set aside")]
    assert steps_left(tmp_path) == [30]


def test_a_commit_that_is_also_set_aside_keeps_its_objects(tmp_path: Path, commits: list[Commit]) -> None:
    """The process that set it aside died before it removed the manifest."""
    storage = Storage(tmp_path / "lm").at(COMMITS)
    manifest = storage.read(commits[2].key)
    storage.write(set_aside_key(30, commits[2].attempt, manifest), manifest)
    assert prune(tmp_path, "--set-aside") == [(30, "set aside")]
    assert steps_left(tmp_path) == [30, 20, 10]


def test_prune_keeps_and_prints_what_it_cannot_read(
    tmp_path: Path, commits: list[Commit], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, storage = Storage.read, Storage(tmp_path / "lm").at(COMMITS)
    for step in (10, 5):
        storage.write(f"step={step}/attempt={'a' * 32}/0-0.bin", b"half")

    def archived(storage: Storage, key: str) -> bytes:
        if key == commits[0].key:
            raise StorageError("InvalidObjectState, 403") from PermissionError("403")
        return read(storage, key)

    monkeypatch.setattr(Storage, "read", archived)
    options = ["--keep", "1", "--orphans-older-than-s", "0"]
    answer = json.loads(invoke("prune", str(tmp_path / "lm"), *options, "--dry-run", "--json").stdout)
    unreadable = "commits/10.json cannot be read although the storage answers: InvalidObjectState, 403"
    assert answer["doubtful"] == {"10": unreadable}
    text = " ".join(invoke("prune", str(tmp_path / "lm"), *options).stdout.split())
    assert f"step 10 is kept, with all of its objects: {unreadable}" in text
    assert storage.list("commits") == [commits[0].key, commits[2].key]
    assert len(storage.list("step=10")) == len(commits[0].all_objects) + 1 and not storage.list("step=5")
    storage.write(set_aside_key(10, "b" * 32, b"torn"), b"torn")
    assert prune(tmp_path, *options, "--set-aside") == []
    monkeypatch.undo()
    assert sorted(prune(tmp_path, *options, "--set-aside")) == [(10, "commit"), (10, "set aside")]
    assert steps_left(tmp_path) == [30]


def test_prune_removes_objects_of_a_run_without_a_complete_commit(tmp_path: Path) -> None:
    folder = tmp_path / "lm" / COMMITS / attempt_prefix(5, "0" * 32)
    folder.mkdir(parents=True)
    (folder / f"{TEMPORARY_PREFIX}1").write_bytes(b"half")
    assert prune(tmp_path, "--orphans-older-than-s", "0") == [(5, "orphan")]
    assert not folder.exists()


def test_prune_removes_nothing_while_the_run_is_live(tmp_path: Path, commits: list[Commit]) -> None:
    driver = replace(Driver.this_process(), session="another", started=started(1), pid=1)
    with DriverLease(Storage(tmp_path / "lm"), "lm", lambda _: "another", print, driver=driver) as lease:
        lease.acquire()
        message = rf"the run is live.*pid 1 of .*{socket.gethostname()}"
        with pytest.raises(ConfigError, match=message):
            invoke("prune", str(tmp_path / "lm"), "--keep", "1")
        assert steps_left(tmp_path) == [30, 20, 10]
        assert prune(tmp_path, "--keep", "1", "--dry-run") == [(10, "commit"), (20, "commit")]
    assert prune(tmp_path, "--keep", "1") == [(10, "commit"), (20, "commit")]


def test_prune_holds_the_lease_of_the_run(
    tmp_path: Path, commits: list[Commit], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Driver | None] = []
    plain = housekeeping.remove

    def slowly(*arguments: Any, **options: Any) -> None:
        seen.append(find_holder(Storage(tmp_path / "lm")))
        plain(*arguments, **options)

    monkeypatch.setattr(housekeeping, "remove", slowly)
    assert prune(tmp_path, "--keep", "1")
    [during] = seen
    assert during is not None and during.pid == os.getpid() and find_holder(Storage(tmp_path / "lm")) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep-every-steps", "5"], "--keep-every-steps .* need --keep"),
        (["--keep", "1", "--keep-best", "2"], "--keep-best 2 and --best-metric None"),
        (["--keep", "1", "--best-metric", "x"], "--keep-best 0 and --best-metric x"),
        (["--keep", "1", "--keep-best", "1", "--best-metric", "validatoin"], "'validatoin'.* validation"),
        (["--best-mode", "most"], "--best-mode most: use min or max"),
    ],
    ids=str,
)
def test_prune_options_that_exclude_each_other_are_refused(
    tmp_path: Path, commits: list[Commit], options: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        invoke("prune", str(tmp_path / "lm"), *options)
    assert steps_left(tmp_path) == [30, 20, 10]
