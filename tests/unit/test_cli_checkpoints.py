"""The command line, of what a run has committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from elastic_ddp import cli
from elastic_ddp.checkpoint import CheckpointStore, Commit
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.job import COMMITS
from elastic_ddp.storage import Storage
from tests.unit.test_checkpoint import corrupt, make_state


@pytest.fixture
def commits(tmp_path: Path) -> list[Commit]:
    store = CheckpointStore(Storage(tmp_path / "lm").at(COMMITS), keep=3)
    record = {"time": 1_795_169_703.0, "epoch": 1, "samples": 40}
    return [store.save(make_state(step), step=step, record=record) for step in (10, 20, 30)]


def invoke(*arguments: str) -> Any:
    result = CliRunner().invoke(cli.app, ["checkpoints", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_commits_are_listed_with_what_is_wrong_with_them(tmp_path: Path, commits: list[Commit]) -> None:
    storage, run = Storage(tmp_path / "lm").at(COMMITS), str(tmp_path / "lm")
    corrupt(storage, commits[1].objects[0].key, "missing")
    rows = json.loads(invoke("ls", run, "--json").stdout)
    assert [row["step"] for row in rows] == [30, 20, 10]
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert rows[0]["samples"] == 40 and rows[0]["bytes"] == commits[2].num_bytes
    text = invoke("ls", run).stdout
    assert "complete" in text and f"{commits[1].objects[0].key} is missing" in " ".join(text.split())
    assert "this run has no commits" in invoke("ls", str(tmp_path / "other")).stdout


def test_verify_reads_everything_and_exits_with_1_if_anything_is_bad(tmp_path: Path, commits: list[Commit]) -> None:
    run = str(tmp_path / "lm")
    good = invoke("verify", run)
    assert good.exit_code == 0 and good.stdout.count("every byte is as it was committed") == 3
    corrupt(Storage(run).at(COMMITS), commits[0].objects[0].key, "flip")
    bad = invoke("verify", run)
    assert bad.exit_code == 1
    assert f"step 10: bad: {commits[0].objects[0].key} does not have the checksum" in " ".join(bad.stdout.split())
    assert invoke("verify", run, "--step", "30").exit_code == 0
    with pytest.raises(ConfigError, match="there is no commit at step 7 here; those there are: 30, 20, 10"):
        invoke("verify", run, "--step", "7")


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_weights_are_exported_for_other_tools(tmp_path: Path, commits: list[Commit], suffix: str) -> None:
    file = tmp_path / f"weights.{suffix}"
    invoke("export", str(tmp_path / "lm"), str(file), "--step", "20")
    found = load_file(file) if suffix == "safetensors" else torch.load(file, weights_only=True)
    expected = make_state(20)["model"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_export_refuses_other_files_and_bad_commits(tmp_path: Path, commits: list[Commit]) -> None:
    run = str(tmp_path / "lm")
    with pytest.raises(ConfigError, match=r"end the file's name in \.safetensors"):
        invoke("export", run, str(tmp_path / "weights.bin"))
    corrupt(Storage(run).at(COMMITS), commits[2].key, "flip")
    with pytest.raises(CheckpointError, match=r"commits/30\.json"):
        invoke("export", run, str(tmp_path / "weights.pt"))
    assert not (tmp_path / "weights.pt").exists()
