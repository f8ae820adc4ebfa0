"""Commits of several ranks that were damaged after they were made: noticed, named, and the one before is used."""

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
from tests.unit.faulty import ranks_of_many_blocks
from tests.unit.test_checkpoint import corrupt, step_of

HOW = ["flip", "missing", "short", "long", "swapped"]


@pytest.fixture
def commits(tmp_path: Path, quick_ranks: None) -> list[Commit]:
    """Two of a run in the folder `run`, each written by three ranks, in several objects by each."""
    storage = Storage(tmp_path / "run").at(COMMITS)
    ranks = ranks_of_many_blocks(lambda rank: storage, 3)
    made: list[Any] = []
    for step in (1, 2):
        ranks.begin(step)
        made.append(ranks.wait())
    assert len(made[1].objects) >= 6
    return made


def damaged(folder: Path, commits: list[Commit]) -> dict[str, Path]:
    """Copies of the run, in each of which an object of the newer commit is damaged in one way; by key and way."""
    old, new = commits
    names = {item.key.removeprefix(new.prefix) for item in new.all_objects}
    assert names == {item.key.removeprefix(old.prefix) for item in old.all_objects}, "each can be swapped"
    copies = {}
    for key in [new.key, *(item.key for item in new.all_objects)]:
        for how in HOW:
            if key == new.key and how in ("missing", "long"):
                continue  # there is no such commit then; white space after JSON is JSON
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
    """The step that this rank restores of each run, and what was rejected."""
    found = []
    for run in runs:
        storage = Storage(run).at(COMMITS)
        store = SingleRankStore(storage, keep=2)
        restored = restore(store, storage, group)
        found.append((None if restored is None else step_of(restored[1]), store.rejected))
    return found


def test_any_damage_is_named_and_all_ranks_use_the_commit_before(tmp_path: Path, commits: list[Commit]) -> None:
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
        said = "".join(result.stdout.split())  # lines are wrapped
        assert result.exit_code == 1, name
        assert f"step2:bad:{key}" in said and "step1:allbytesareintact" in said, f"{name}: {result.stdout}"
    assert CliRunner().invoke(main.app, ["checkpoints", "verify", str(tmp_path / "run")]).exit_code == 0


def test_a_bit_that_flips_anywhere_is_noticed(tmp_path: Path, commits: list[Commit]) -> None:
    """One bit of every few bytes of every object and of the manifest."""
    storage = Storage(tmp_path / "run").at(COMMITS)
    newest = commits[1]
    for key in [newest.key, *(item.key for item in newest.all_objects)]:
        file = tmp_path / "run" / COMMITS / key
        good = file.read_bytes()
        for position in range(0, len(good), 1 + len(good) // 40):
            bad = bytearray(good)
            bad[position] ^= 1 << position % 8
            file.write_bytes(bad)
            found = SingleRankStore(storage, keep=2).load_latest()
            assert found is not None
            assert found[0] == commits[0] or (key == newest.key and found[0] == newest), (key, position)
        file.write_bytes(good)
    found = SingleRankStore(storage, keep=2).load_latest()
    assert found is not None and found[0] == newest
