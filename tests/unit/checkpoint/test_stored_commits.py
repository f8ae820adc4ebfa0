"""Commits and a ledger in the repository, written by an earlier commit of this code, stay readable."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

from elastic_ddp.checkpoint import CheckpointStore, Commit, CommitCatalog
from elastic_ddp.cli.checkpoints import app
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger, summarize
from elastic_ddp.worker.generation import strategy_of
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.restore import restore
from tests.inside_run import finish
from tests.ranks import run_ranks
from tests.unit.distributed.test_fsdp import prepared as prepared_shards
from tests.unit.distributed.test_fsdp import train_on
from tests.unit.single_worker import Model, NewRun, StepCounter, client_of, compute_gradients, prepared

STORED = Path(__file__).parents[2] / "data" / "stored_runs"
EXPECTED: dict[str, Any] = json.loads((STORED / "expected.json").read_text())
"""By folder: what the code that wrote it computed."""


def state_sha256(state: Any) -> str:
    """Returns a hash over the tensors (path, dtype, shape, bytes) and the other values of a state."""
    digest = hashlib.sha256()
    for path, leaf in _leaves("", state):
        if isinstance(leaf, torch.Tensor):
            tensor = (leaf.full_tensor() if isinstance(leaf, DTensor) else leaf).detach().contiguous()
            digest.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{path} {leaf!r}".encode())
    return digest.hexdigest()


def _leaves(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for name in sorted(tree, key=str):
            yield from _leaves(f"{path}/{name}", tree[name])
    elif isinstance(tree, list | tuple):
        for number, child in enumerate(tree):
            yield from _leaves(f"{path}/{number}", child)
    else:
        yield path, tree


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A copy of the stored run folders: a restore may set commits aside, and a save removes older ones."""
    return Path(shutil.copytree(STORED, tmp_path / "stored"))


def _restored(group: ProcessGroup, folder: Path) -> tuple[int, str]:
    storage = Storage(folder).at(COMMITS)
    found = restore(CheckpointStore(storage, keep=1), storage, group)
    assert found is not None
    commit, state = found
    return commit.step, state_sha256(state)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("run", ["ddp", "fsdp"])
def test_a_stored_commit_is_restored_to_the_same_bits(stored: Path, run: str, world_size: int) -> None:
    for restored in run_ranks(world_size, _restored, stored / run):
        assert restored == (EXPECTED[run]["step"], EXPECTED[run]["state_sha256"])


@pytest.mark.parametrize("run", ["ddp", "fsdp"])
def test_a_stored_commit_is_listed_with_its_metrics_and_verifies(stored: Path, run: str) -> None:
    [row] = json.loads(CliRunner().invoke(app, ["ls", str(stored / run), "--json"]).stdout)
    assert (row["step"], row["metrics"], row["error"]) == (EXPECTED[run]["step"], EXPECTED[run]["metrics"], None)
    assert CliRunner().invoke(app, ["verify", str(stored / run)]).exit_code == 0


def _train(new_run: NewRun, steps: int) -> dict[str, Any]:
    run = new_run(folder="stored/ddp", steps=steps, checkpoint={"interval": "auto"})
    model, counted = prepared(run), StepCounter()
    run.register("counted", counted)
    for step in run.steps():
        with step:
            compute_gradients(step, model)
            step.optimize()
            counted.steps.append(step.index)
    assert counted.steps == [*range(steps)]
    return finish(run)


def test_a_finished_run_has_the_same_weights_and_samples(new_run: NewRun, stored: Path) -> None:
    ended = _train(new_run, steps=6)
    assert {name: ended[name] for name in ("weights_sha256", "samples_sha256")} == {
        name: EXPECTED["ddp"][name] for name in ("weights_sha256", "samples_sha256")
    }


def test_a_run_resumes_from_a_stored_commit_and_finishes(new_run: NewRun, stored: Path) -> None:
    catalog = CommitCatalog(Storage(stored / "ddp").at(COMMITS))
    before = catalog.latest()
    assert _train(new_run, steps=8)["steps"] == 8
    after = catalog.latest()
    assert isinstance(before, Commit) and isinstance(after, Commit)
    assert (before.step, after.step) == (6, 8)
    assert after.record["watched_s"] > before.record["watched_s"], "the automatic interval uses what was measured"


def test_a_stored_commit_has_the_hyperparameters_of_its_code(new_run: NewRun, stored: Path) -> None:
    run = new_run(folder="stored/ddp", steps=8, checkpoint={"hyperparameters": "code"})
    model: Any = run.prepare(Model())
    optimizer = run.prepare(torch.optim.AdamW(model.parameters(), lr=0.3, weight_decay=0.5))
    scheduler = run.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
    run.register("counted", StepCounter())
    next(iter(run.steps()))
    assert (optimizer.param_groups[0]["weight_decay"], scheduler.step_size) == (0.5, 3)
    [event] = client_of(run).events_of("hyperparameters_differ")
    assert {change["name"]: (change["saved"], change["now"]) for change in event["changes"]} == {
        "AdamW.weight_decay": (0.01, 0.5),
        "AdamW.lr": (0.1, 0.3),
        "StepLR.step_size": (2, 3),
    }


def _resume_shards(group: ProcessGroup, folder: Path) -> tuple[str, str]:
    """Restores an FSDP commit into shards and trains for two more steps."""
    config, state = prepared_shards("fsdp", "AdamW")
    assert state.model is not None
    strategy = strategy_of(config)(state.model, config, group)

    def layout() -> Any:
        strategy.shard(state.optimizers)
        return strategy.layout(state.optimizers)

    storage = Storage(folder).at(COMMITS)
    restored = restore(CheckpointStore(storage, keep=1), storage, group, layout)
    assert restored is not None
    state.load_state_dict(restored[1])
    weights = state.weights_sha256()
    train_on(strategy, group, state, np.array([3, 3, 3, 3]), range(2, 4))
    return weights, state.weights_sha256()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stored_fsdp_commit_is_resharded_and_trained_on(stored: Path, world_size: int) -> None:
    results = run_ranks(world_size, _resume_shards, stored / "fsdp")
    assert len(set(results)) == 1, "all ranks hold the same weights"
    [(restored, trained), *_] = results
    assert restored == EXPECTED["fsdp"]["weights_sha256"] != trained


def test_a_stored_ledger_has_the_same_summary(stored: Path) -> None:
    written = json.loads((stored / "small" / "summary.json").read_text())
    summary = summarize(read_ledger(Storage(stored / "small")), storage=written["storage"])
    summary |= {"best_step": None, "best_metric": None}  # the driver takes these from commits
    assert {name: json.loads(json.dumps(summary[name])) for name in written} == written
