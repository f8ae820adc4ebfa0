"""Commits of several ranks that were damaged: the damage is named, and the commit before is used."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from elastic_ddp.checkpoint import Commit
from elastic_ddp.cli import main
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.restore import restore
from tests.ranks import run_ranks
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import corrupt, step_of
from tests.unit.faulty import ranks_of_many_blocks

HOW = ["flip", "missing", "short", "long", "swapped"]


@pytest.fixture
def commits(tmp_path: Path, quick_ranks: None) -> list[Commit]:
    """Two commits of a run in the folder `run`; each of three ranks wrote several objects."""
    storage = Storage(tmp_path / "run").at(COMMITS)
    ranks = ranks_of_many_blocks(lambda rank: storage, 3)
    commits: list[Any] = []
    for step in (1, 2):
        ranks.begin(step)
        commits.append(ranks.wait())
    assert len(commits[1].objects) >= 6
    return commits


def damaged(folder: Path, commits: list[Commit]) -> dict[str, Path]:
    """Copies of the run by damage: in each copy, one object of the newer commit is damaged in one way."""
    old, new = commits
    names = {stored.key.removeprefix(new.prefix) for stored in new.all_objects}
    assert names == {stored.key.removeprefix(old.prefix) for stored in old.all_objects}, "needed to swap them"
    copies = {}
    for key in [new.key, *(stored.key for stored in new.all_objects)]:
        for how in HOW:
            if key == new.key and how in ("missing", "long"):
                continue  # a missing manifest is no commit, and JSON may end in white space
            copies[f"{key} {how}"] = copy = folder / f"{len(copies)}"
            shutil.copytree(folder / "run", copy)
            storage = Storage(copy).at(COMMITS)
            if how == "swapped":
                other = old.key if key == new.key else key.replace(new.prefix, old.prefix)
                storage.write(key, storage.read(other))
            else:
                corrupt(storage, key, how)
    return copies


def restore_all(group: ProcessGroup, runs: list[str]) -> list[tuple[int | None, list[tuple[str, str]]]]:
    """The step that this rank restores from each run, and the rejected commits."""
    results = []
    for run in runs:
        storage = Storage(run).at(COMMITS)
        store = SingleRankStore(storage, keep=2)
        restored = restore(store, storage, group)
        results.append((None if restored is None else step_of(restored[1]), store.rejected))
    return results


def test_any_damage_is_named_and_all_ranks_restore_the_commit_before(tmp_path: Path, commits: list[Commit]) -> None:
    copies = damaged(tmp_path, commits)
    first, second = run_ranks(2, restore_all, [str(copy) for copy in copies.values()])
    for name, (step, rejected), (other_step, _) in zip(copies, first, second, strict=True):
        key, _ = name.split()
        assert (step, other_step) == (1, 1), name
        [(manifest, reason)] = rejected
        assert manifest == commits[1].key and key in reason, f"{name}: {reason}"


def test_verify_names_any_damage_and_exits_with_1(tmp_path: Path, commits: list[Commit]) -> None:
    for name, copy in damaged(tmp_path, commits).items():
        key, _ = name.split()
        result = CliRunner().invoke(main.app, ["checkpoints", "verify", str(copy)])
        output = "".join(result.stdout.split())  # lines are wrapped
        assert result.exit_code == 1, name
        assert f"step2:bad:{key}" in output and "step1:allbytesareintact" in output, f"{name}: {result.stdout}"
    assert CliRunner().invoke(main.app, ["checkpoints", "verify", str(tmp_path / "run")]).exit_code == 0


def test_a_flipped_bit_in_any_object_or_manifest_is_noticed(tmp_path: Path, commits: list[Commit]) -> None:
    storage = Storage(tmp_path / "run").at(COMMITS)
    newest = commits[1]
    for key in [newest.key, *(stored.key for stored in newest.all_objects)]:
        file = tmp_path / "run" / COMMITS / key
        good = file.read_bytes()
        for position in range(0, len(good), 1 + len(good) // 15):
            bad = bytearray(good)
            bad[position] ^= 1 << position % 8
            file.write_bytes(bad)
            loaded = SingleRankStore(storage, keep=2).load_latest()
            assert loaded is not None
            assert loaded[0] == commits[0] or (key == newest.key and loaded[0] == newest), (key, position)
        file.write_bytes(good)
    loaded = SingleRankStore(storage, keep=2).load_latest()
    assert loaded is not None and loaded[0] == newest
