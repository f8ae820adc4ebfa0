"""FSDP runs whose workers fail and are replaced train as replicated runs do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import elastic_ddp as ed
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger
from tests.integration import jobs

pytestmark = pytest.mark.slow


def fit(folder: Path, name: str, fault: Callable[..., None] | None = None, **changes: Any) -> Mapping[str, Any]:
    """Trains on up to two workers. Returns the summary with the validation loss."""
    storage, held_out = str(folder / "runs"), folder / "held-out"
    if not held_out.exists():
        held_out.mkdir()
        jobs.write_rows(str(held_out), rows=101, seed=1)  # ranks have different numbers of non-empty micro-batches
    config = jobs.settings(storage, name, 2, **{"min_workers": 1, "resize_interval_s": 1.0, **changes})
    train = jobs.make_train(fault, str(held_out))
    result = ed.ElasticTrainer(train, str(folder / "data"), config, transform=jobs.jitter).fit()
    [evaluated] = [e for e in read_ledger(Storage(storage).at(name)) if e.event == "evaluation_finished"][-1:]
    return {**result.summary, "validation": evaluated.value}


@pytest.mark.chaos
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_and_a_join_cost_an_fsdp_run_no_step(folder: Path, rank: int) -> None:
    """If rank 0 fails, the other worker becomes rank 0 and holds other shards."""
    replicated = fit(folder, "replicated", clip_grad_norm=None)
    kill = jobs.kill_and_replace(folder / "killed", rank=rank, step=17)
    disturbed = fit(folder, "disturbed", kill, strategy="fsdp", clip_grad_norm=None)
    assert jobs.same_bits(disturbed, replicated)
    assert all(disturbed[key] == replicated[key] for key in ("status", "steps", "validation"))

    first, second, third = disturbed["generations"]
    assert [each["world_size"] for each in (first, second, third)] == [2, 1, 2]
    assert (first["last_step"], second["first_step"]) == (17, 17), "the step in flight is repeated from memory"
    assert second["last_step"] == third["first_step"] >= 19, "a planned change happens in place"
    events = read_ledger(Storage(str(folder / "runs")).at("disturbed"))
    commits = {event.step for event in events if event.event == "commit_succeeded"}
    assert commits == {10, 20, 30, 40, 44}, "it needs no commit of its own"
    pids = {
        (event.generation, member["rank"]): member["pid"]
        for event in read_ledger(Storage(str(folder / "runs")).at("disturbed"))
        if event.event == "generation_formed"
        for member in event.members
    }
    assert pids[1, 1 - rank] == pids[2, 0] == pids[3, 0], "the process keeps running"


@pytest.mark.usefixtures("local_ray")
@pytest.mark.chaos
def test_a_worker_of_an_fsdp_run_that_hangs_is_replaced(folder: Path) -> None:
    """The other worker waits for its shards in a forward pass, and appears to hang as well."""
    marker = folder / "hung"

    def fault(run: ed.Run, step: int) -> None:
        if run.rank == 1 and step == 17 and not marker.exists():
            marker.touch()
            threading.Event().wait()

    calm = fit(folder, "undisturbed", strategy="fsdp")
    timeouts = {"hang_timeout_s": 8.0, "heartbeat_timeout_s": 8.0}
    found = fit(folder, "hangs", fault, strategy="fsdp", **timeouts)
    assert marker.exists()
    assert jobs.same_bits(found, calm) and (found["status"], found["steps"]) == (calm["status"], calm["steps"])
    hangs = [e for e in read_ledger(Storage(str(folder / "runs")).at("hangs")) if e.event == "hang_detected"]
    assert [len(event.culprits) for event in hangs] in ([0, 1], [1]), "only the worker that the other one waited for"
    assert found["workers_failed"] == 1


@pytest.mark.usefixtures("local_ray")
@pytest.mark.chaos
def test_a_run_may_switch_between_sharded_and_replicated_models(folder: Path) -> None:
    fit(folder, "switches", strategy="fsdp", steps=20, clip_grad_norm=None)
    fit(folder, "switches", steps=30, clip_grad_norm=None)
    switched = fit(folder, "switches", strategy="fsdp", clip_grad_norm=None)
    assert (switched["sessions"], switched["steps"]) == (3, 44)
    assert jobs.same_bits(switched, fit(folder, "replicated", clip_grad_norm=None))
