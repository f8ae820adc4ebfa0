"""A run whose model is sharded: it loses workers and gets others, and trains as a replicated one does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ddp as ed
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger
from elastic_ddp.worker.job import COMMITS
from tests.integration import jobs
from tests.single_rank_store import SingleRankStore

pytestmark = pytest.mark.slow


def fit(
    folder: Path, name: str, fault: Callable[..., None] | None = None, **changes: Any
) -> tuple[Mapping[str, Any], dict[str, torch.Tensor]]:
    """The summary of a run on up to two workers, its validation loss included, and the weights that it ended with."""
    storage, held_out = str(folder / "runs"), folder / "held-out"
    if not held_out.exists():
        held_out.mkdir()
        jobs.write_rows(str(held_out), rows=101, seed=1)  # the ranks' micro-batches with rows are not as many
    config = jobs.settings(storage, name, 2, **{"min_workers": 1, "resize_interval_s": 1.0, **changes})
    train = jobs.make_train(fault, str(held_out))
    result = ed.ElasticTrainer(train, str(folder / "data"), config, transform=jobs.jitter).fit()
    store = SingleRankStore(Storage(storage).at(name).at(COMMITS), keep=1)
    newest = store.load_latest()
    assert newest is not None and newest[0].step == result.steps
    [evaluated] = [each for each in read_ledger(Storage(storage).at(name)) if each.event == "evaluation"][-1:]
    return {**result.summary, "validation": evaluated.loss}, newest[1]["model"]


def assert_alike(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """But for a bias whose gradient is nothing but rounding errors, as a normalization takes away what it adds."""
    assert found.keys() == expected.keys()
    for name in expected.keys() - {"0.bias", "1.running_mean"}:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.chaos)])
def test_a_sharded_run_goes_on_from_its_newest_commit_when_membership_changes(folder: Path, rank: int) -> None:
    """Where rank 0 is lost, the other one becomes rank 0: of two, and other shards are its own."""
    replicated, expected = fit(folder, "replicated", reduction="native")
    disturbed, ends = fit(
        folder, "disturbed", jobs.lose_and_regain(folder / "killed", rank=rank, step=17), strategy="fsdp"
    )
    for key in ("status", "steps", "samples", "samples_sha256"):
        assert disturbed[key] == replicated[key], key
    assert disturbed["validation"] == pytest.approx(replicated["validation"], rel=1e-3)
    assert_alike(ends, expected)

    first, second, third = disturbed["generations"]
    assert [each["world_size"] for each in (first, second, third)] == [2, 1, 2]
    assert (first["last_step"], second["first_step"]) == (17, 10), "from the newest commit on"
    assert second["last_step"] == third["first_step"] >= 19, "a commit comes before a change that is planned"
    pids = {
        (each.generation, member["rank"]): member["pid"]
        for each in read_ledger(Storage(str(folder / "runs")).at("disturbed"))
        if each.event == "rendezvous"
        for member in each.members
    }
    assert pids[1, 1 - rank] == pids[2, 0] == pids[3, 0], "the process lives on"


@pytest.mark.usefixtures("local_ray")
@pytest.mark.chaos
def test_a_worker_of_a_sharded_run_that_hangs_is_replaced(folder: Path) -> None:
    """The other one waits for its part of the parameters in a forward, and seems to hang there, too."""
    marker = folder / "hung"

    def fault(run: ed.Run, step: int) -> None:
        if run.rank == 1 and step == 17 and not marker.exists():
            marker.touch()
            threading.Event().wait()

    calm, expected = fit(folder, "undisturbed", strategy="fsdp")
    timeouts = {"hang_timeout_s": 8.0, "heartbeat_timeout_s": 8.0}
    found, weights = fit(folder, "hangs", fault, strategy="fsdp", **timeouts)
    assert marker.exists()
    for key in ("status", "steps", "samples", "samples_sha256"):
        assert found[key] == calm[key], key
    assert_alike(weights, expected)
    hangs = [each for each in read_ledger(Storage(str(folder / "runs")).at("hangs")) if each.event == "hang"]
    assert [len(each.culprits) for each in hangs] in ([0, 1], [1]), "whom the other waited for, once that was known"
    assert found["workers_lost"] == 1


@pytest.mark.usefixtures("local_ray")
@pytest.mark.chaos
def test_a_sharded_run_that_stops_is_resumed_with_a_replicated_model(folder: Path) -> None:
    fit(folder, "switches", strategy="fsdp", steps=20)
    summary, weights = fit(folder, "switches", reduction="native")
    _, expected = fit(folder, "replicated", reduction="native")
    assert (summary["sessions"], summary["steps"]) == (2, 44)
    assert_alike(weights, expected)
