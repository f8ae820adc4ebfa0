"""`elastic-ddp checkpoints`: list, verify, prune and export."""

from __future__ import annotations

import json
import os
import re
import resource
from collections import Counter, OrderedDict
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from elastic_ddp.checkpoint import Commit, CommitCatalog, Retention
from elastic_ddp.checkpoint.housekeeping import plan_prune, remove
from elastic_ddp.checkpoint.pieces import Piece
from elastic_ddp.checkpoint.retention import Removals
from elastic_ddp.cli import main
from elastic_ddp.errors import CheckpointError, ConfigError, StorageError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry.events import SessionStarted
from elastic_ddp.telemetry.ledger import Ledger
from elastic_ddp.worker.job import COMMITS
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import corrupt, make_state
from tests.unit.cli.checkpoint_commands import invoke, steps_left


def words(result: Any) -> str:
    """What a command prints, whose long lines wrap."""
    return " ".join(result.stdout.split())


def save(tmp_path: Path, weights: Any, **record: Any) -> None:
    """Makes a run with one commit, of step 7."""
    store = SingleRankStore(Storage(tmp_path / "lm").at(COMMITS), keep=1)
    store.save({"model": weights}, step=7, record=record)


def test_ls_lists_commits_with_their_errors(tmp_path: Path, commits: list[Commit]) -> None:
    storage, run = Storage(tmp_path / "lm").at(COMMITS), str(tmp_path / "lm")
    corrupt(storage, commits[1].objects[0].key, "missing")
    rows = json.loads(invoke("ls", run, "--json").stdout)
    assert [row["step"] for row in rows] == [30, 20, 10]
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert rows[0]["samples"] == 40 and rows[0]["bytes"] == commits[2].num_bytes
    assert rows[0]["metrics"] == {"validation": 0.75} and rows[1]["metrics"] == {}
    text = words(invoke("ls", run))
    assert "validation 0.75" in text and "complete" in text and f"{commits[1].objects[0].key} is missing" in text
    with pytest.raises(ConfigError, match=r"other: there are no commits .*<storage>/<name>"):
        invoke("ls", str(tmp_path / "other"))


def test_a_commit_that_cannot_be_read_is_listed_and_the_others_are_checked(
    tmp_path: Path, commits: list[Commit], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Storage.read

    def refuse(storage: Storage, key: str) -> bytes:
        if key in (commits[2].key, commits[1].state.key):
            raise StorageError("no rights") from PermissionError("no rights")
        return read(storage, key)

    monkeypatch.setattr(Storage, "read", refuse)
    rows = json.loads(invoke("ls", str(tmp_path / "lm"), "--json").stdout)
    assert {row["step"]: row["error"] is None for row in rows} == {10: True, 20: True, 30: False}
    result = CliRunner().invoke(main.app, ["checkpoints", "verify", str(tmp_path / "lm")])
    bad = ["no rights" in report for report in re.split(r"\bstep (?=\d)", words(result))[1:]]
    assert result.exit_code == 1 and bad == [True, True, False]


def test_tables_fit_80_columns_with_long_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    store, run = SingleRankStore(Storage(tmp_path / "lm").at(COMMITS), keep=9), str(tmp_path / "lm")
    values = {"validation_loss_of_the_held_out_set": {"value": 0.251234, "step": 10_000_000}}
    record = {"time": 1_795_169_703.0, "epoch": 12_345, "samples": 10**12, "metrics": values}
    for step in (10_000_500, 10_001_000):
        store.save(make_state(step), step=step, record=record)
    lines = invoke("ls", run).stdout.splitlines()
    assert lines[0].split() == ["step", "committed", "epoch", "size", "state", "metrics"]
    assert all(number in " ".join(lines) for number in ("10,001,000", "12345", "0.2512", "10,000,000)"))
    lines += (
        invoke("verify", run).stdout.splitlines() + invoke("prune", run, "--keep", "1", "--dry-run").stdout.splitlines()
    )
    assert all(len(line) <= 80 for line in lines) and "…" not in "".join(lines)


def test_ls_prints_the_step_of_a_metric_that_is_older_than_its_commit_and_no_control_characters(tmp_path: Path) -> None:
    measured = {"\x1b]0;a title\x07\x1b[2Jloss": {"value": 5.5, "step": 0}}
    save(tmp_path, {}, metrics=measured)
    text = invoke("ls", str(tmp_path / "lm")).stdout
    assert "loss 5.5 (step 0)" in text and text.replace("\n", "").isprintable()
    [row] = json.loads(invoke("ls", str(tmp_path / "lm"), "--json").stdout)
    assert [*row["metrics"].values(), *row["measured_at"].values()] == [5.5, 0]


def test_verify_reads_all_bytes_and_exits_with_1_if_a_commit_is_bad(tmp_path: Path, commits: list[Commit]) -> None:
    run = str(tmp_path / "lm")
    good = invoke("verify", run)
    assert good.exit_code == 0 and good.stdout.count("all bytes are intact") == 3
    corrupt(Storage(run).at(COMMITS), commits[0].objects[0].key, "flip")
    bad = invoke("verify", run)
    assert bad.exit_code == 1
    assert f"step 10: bad: {commits[0].objects[0].key} does not have the checksum" in words(bad)
    assert invoke("verify", run, "--step", "30").exit_code == 0
    with pytest.raises(ConfigError, match=r"no commit at step 7.* 30, 20, 10"):
        invoke("verify", run, "--step", "7")


def test_registered_state_is_exported_by_its_name(tmp_path: Path) -> None:
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 1))
    state = {"model": {"weight": torch.zeros(1)}, "user": {"average": average.state_dict(), "queue": {}}}
    SingleRankStore(Storage(tmp_path / "lm").at(COMMITS), keep=1).save(state, step=7, record={})
    run, file = str(tmp_path / "lm"), str(tmp_path / "average.pt")
    assert "'average' of step 7 are in" in invoke("export", run, file, "--registered", "average").stdout
    torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 1)).load_state_dict(torch.load(file))
    assert torch.equal(torch.load(file)["module.weight"], average.module.weight)
    with pytest.raises(ConfigError, match=r"--registered ema: step 7 has no such name. It has 'average', 'queue'"):
        invoke("export", run, file, "--registered", "ema")


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_an_export_has_the_weights_of_the_commit_is_synced_and_a_symbolic_link_to_it_stays(
    tmp_path: Path, commits: list[Commit], suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, file = tmp_path / f"newest.{suffix}", tmp_path / "shelf" / f"weights.{suffix}"
    file.parent.mkdir()
    file.write_text("the previous file")
    file.chmod(0o640)
    client.symlink_to(file)
    done: list[str] = []
    fsync, replace_file = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def put(source: Any, target: Any) -> None:
        assert str(source) in done
        done.append("put")
        replace_file(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", put)
    invoke("export", str(tmp_path / "lm"), str(client))
    assert client.is_symlink() and done[-2:] == ["put", str(file.parent)]
    assert [*file.parent.iterdir()] == [file] and file.stat().st_mode & 0o777 == 0o640
    fresh = tmp_path / f"fresh.{suffix}"
    invoke("export", str(tmp_path / "lm"), str(fresh), "--step", "20")
    (tmp_path / "plain").touch()
    assert fresh.stat().st_mode == (tmp_path / "plain").stat().st_mode
    for exported, step in ((file, 30), (fresh, 20)):
        found = load_file(exported) if suffix == "safetensors" else torch.load(exported, weights_only=True)
        expected = make_state(step)["model"]
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_verify_tolerates_a_commit_that_a_live_run_removes_during_the_check(
    tmp_path: Path, commits: list[Commit], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(tmp_path / "lm").at(COMMITS)
    removals = [partial(remove, storage, removals_of(storage, keep)) for keep in (1, 2)]
    plain: Any = CommitCatalog.skeleton

    def skeleton(self: CommitCatalog, commit: Commit) -> bytes:
        if removals:
            removals.pop()()
        return bytes(plain(self, commit))

    monkeypatch.setattr(CommitCatalog, "skeleton", skeleton)
    result = invoke("verify", str(tmp_path / "lm"))
    assert result.exit_code == 0 and result.stdout.count("all bytes are intact") == 1
    assert "step 20: removed" in result.stdout and "step 10: removed" in result.stdout
    assert steps_left(tmp_path) == [30]


def test_ls_leaves_out_a_commit_that_is_removed_meanwhile(
    tmp_path: Path, commits: list[Commit], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(tmp_path / "lm").at(COMMITS)
    going = removals_of(storage, 2)
    plain: Any = Commit.check_present

    def check_present(self: Commit, sizes: Any) -> None:
        if self.step == 10:  # its manifest was read
            remove(storage, going)
        plain(self, storage.listing(self.prefix))

    monkeypatch.setattr(Commit, "check_present", check_present)
    assert [row["step"] for row in json.loads(invoke("ls", str(tmp_path / "lm"), "--json").stdout)] == [30, 20]


def removals_of(storage: Storage, keep: int) -> Removals:
    going, _ = plan_prune(storage, Retention(last=keep), orphan_age_s=1e9)
    return going


def test_export_reads_only_the_weights(tmp_path: Path, commits: list[Commit], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    plain = Piece.verify

    def verify(piece: Piece, data: memoryview) -> None:
        read.extend(name for name, _ in piece.blocks)
        plain(piece, data)

    monkeypatch.setattr(Piece, "verify", verify)
    invoke("export", str(tmp_path / "lm"), str(tmp_path / "weights.pt"))
    assert sorted(read) == ["model.bias", "model.weight"]


def test_weights_that_are_not_tensors_are_exported_to_pt_and_left_out_of_safetensors(tmp_path: Path) -> None:
    save(tmp_path, {"layer.weight": torch.ones(3), "layer._extra_state": {"scale": 2.0}})
    text = words(invoke("export", str(tmp_path / "lm"), str(tmp_path / "w.safetensors")))
    assert "left out" in text and text.endswith("layer._extra_state")
    assert load_file(tmp_path / "w.safetensors").keys() == {"layer.weight"}
    assert "left out" not in invoke("export", str(tmp_path / "lm"), str(tmp_path / "w.pt")).stdout
    assert torch.load(tmp_path / "w.pt", weights_only=True)["layer._extra_state"] == {"scale": 2.0}


def test_torch_load_reads_an_export_with_other_values_by_default(tmp_path: Path) -> None:
    extra = [OrderedDict({1: (2.0, b"x", None)}), Counter("aab"), torch.float16, torch.Size([2])]
    save(tmp_path, {"w": torch.ones(3), "q._extra_state": extra})
    invoke("export", str(tmp_path / "lm"), str(tmp_path / "w.pt"))
    assert torch.load(tmp_path / "w.pt", weights_only=True).keys() == {"w", "q._extra_state"}


def test_a_dtype_that_safetensors_does_not_support_is_refused_before_writing(tmp_path: Path) -> None:
    weights = {"w": torch.ones(2, dtype=torch.bfloat16), "phases": torch.ones(2, dtype=torch.complex128)}
    save(tmp_path, weights)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "w.safetensors").write_text("good")
    message = r"does not support the dtype of phases \(torch.complex128\).*\.pt file"
    with pytest.raises(ConfigError, match=message):
        invoke("export", str(tmp_path / "lm"), str(folder / "w.safetensors"))
    assert {file.name: file.read_text() for file in folder.iterdir()} == {"w.safetensors": "good"}
    invoke("export", str(tmp_path / "lm"), str(folder / "w.pt"))
    found = torch.load(folder / "w.pt", weights_only=True)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_an_export_to_a_full_disk_leaves_the_previous_file_unchanged(tmp_path: Path) -> None:
    save(tmp_path, {"weight": torch.zeros(1 << 19)})
    folder = tmp_path / "out"
    folder.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for suffix in ("safetensors", "pt"):
        file = folder / f"weights.{suffix}"
        file.write_text("good")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            with pytest.raises(StorageError, match=f"cannot write {file}.*File too large.* permissions of {folder}"):
                invoke("export", str(tmp_path / "lm"), str(file))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert file.read_text() == "good"
    assert len([*folder.iterdir()]) == 2
    with pytest.raises(ConfigError, match=f"folder {tmp_path}/nowhere does not exist"):
        invoke("export", str(tmp_path / "lm"), f"{tmp_path}/nowhere/weights.pt")


def test_export_refuses_unknown_suffixes_and_bad_commits(tmp_path: Path, commits: list[Commit]) -> None:
    run = str(tmp_path / "lm")
    with pytest.raises(ConfigError, match=r"weights\.bin: .*\.safetensors"):
        invoke("export", run, str(tmp_path / "weights.bin"))
    corrupt(Storage(run).at(COMMITS), commits[2].key, "flip")
    with pytest.raises(CheckpointError, match=r"commits/30\.json .* --step 20"):
        invoke("export", run, str(tmp_path / "weights.pt"))
    assert not (tmp_path / "weights.pt").exists()


def write_session(folder: Path, **checkpoint: Any) -> None:
    """Writes the ledger of a session with these settings under `checkpoint`."""
    with closing(Ledger(Storage(folder), "s1")) as ledger:
        ledger.append(SessionStarted(config={"checkpoint": checkpoint}))


@pytest.mark.parametrize(("mode", "step"), [("min", 10), ("max", 30)])
def test_the_best_commit_by_the_metric_of_the_run_is_exported(
    tmp_path: Path, commits: list[Commit], mode: str, step: int
) -> None:
    write_session(tmp_path / "lm", best_metric="validation", best_mode=mode)
    assert f"step {step} " in invoke("export", str(tmp_path / "lm"), str(tmp_path / "w.pt"), "--best").stdout
    assert torch.equal(torch.load(tmp_path / "w.pt")["weight"], make_state(step)["model"]["weight"])


@pytest.mark.parametrize(
    ("metric", "options", "message"),
    [
        (None, (), "has no checkpoint.best_metric. Use --step.*: validation"),
        ("accuracy", (), "has no commit with a value of 'accuracy'. Use --step.*: validation"),
        ("validation", ("--step", "10"), "--step 10 and --best: use one of them"),
    ],
)
def test_an_export_of_the_best_commit_without_one_names_the_metrics(
    tmp_path: Path, commits: list[Commit], metric: str | None, options: tuple[str, ...], message: str
) -> None:
    write_session(tmp_path / "lm", best_metric=metric)
    with pytest.raises(ConfigError, match=message):
        invoke("export", str(tmp_path / "lm"), str(tmp_path / "w.pt"), "--best", *options)
