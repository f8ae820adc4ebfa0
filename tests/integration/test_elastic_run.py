"""A run waits for capacity, and grows and shrinks with its cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger
from tests.integration import jobs
from tests.integration.clusters import command, kill, status, until

pytestmark = pytest.mark.slow


def trains_with(run: Storage, num_workers: int, step: int) -> bool:
    """Whether a run has this number of workers, and has done this many steps."""
    try:
        events = list(read_ledger(run))
    except FileNotFoundError:
        return False
    sizes = [event.world_size for event in events if event.event == "generation_started"]
    return sizes[-1:] == [num_workers] and any(e.event == "steps_completed" and e.step >= step for e in events)


@pytest.mark.chaos
def test_a_run_grows_when_a_node_joins_and_ends_with_the_same_bits(
    undisturbed: Mapping[str, Any], cluster: Cluster, folder: Path
) -> None:
    data, storage = str(folder / "data"), str(folder / "runs")
    grown = folder / "grown"
    with jobs.driver(data, storage, "grows", "1:3", "grow", str(grown), "25", RAY_ADDRESS=cluster.address) as run:
        until(grown.exists, run)
        cluster.add_node(num_cpus=2, object_store_memory=10**8)
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors

    facts = jobs.summary(folder, "grows")
    assert jobs.same_bits(facts, undisturbed)
    generations = facts["generations"]
    assert [generations[0]["world_size"], generations[-1]["world_size"]] == [1, 3]
    assert {generation["reason"] for generation in generations[1:]} == {"workers joined"}
    assert generations[1]["first_step"] == generations[0]["last_step"] in (26, 27), "the step in flight is finished"
    assert facts["recoveries"] == 0


@pytest.mark.chaos
def test_a_run_without_capacity_names_who_holds_it_and_finishes_later(cluster: Cluster, folder: Path) -> None:
    data, storage = str(folder / "data"), str(folder / "runs")
    with jobs.driver(data, storage, "waits", "2", RAY_ADDRESS=cluster.address) as run:
        until(lambda: status(cluster, "waits")["state"] == "starting", run)
        os.killpg(run.pid, signal.SIGINT)
        output, errors = run.communicate(timeout=60)
    assert run.returncode == 0, errors
    assert "waiting for nodes: 1 workers of {'CPU': 1.0} fit, below min_workers=2" in errors
    assert "status='stopped', steps=0" in output
    assert "No run is live" in command(cluster, "status")

    cluster.add_node(num_cpus=1, object_store_memory=10**8)
    hold = folder / "hold"
    with jobs.driver(data, storage, "waits", "2", "wait", str(hold), "25", RAY_ADDRESS=cluster.address) as run:
        until(lambda: status(cluster, "waits")["step"] == 25, run)
        with jobs.driver(data, storage, "next", "1", RAY_ADDRESS=cluster.address) as other:
            reason = "0 of min_workers=1 workers of CPU=1 fit. In use: run 'waits' (CPU=2)"
            until(lambda: reason in (status(cluster, "next").get("waiting_for") or ""), other)
            hold.touch()
            _, errors = run.communicate(timeout=120)
            assert run.returncode == 0, errors
            _, errors = other.communicate(timeout=120)
            assert other.returncode == 0 and reason in " ".join(errors.split()), errors
    facts = jobs.summary(folder, "waits")
    assert (facts["status"], facts["steps"], facts["sessions"]) == ("finished", 44, 2)


@pytest.mark.chaos
def test_a_run_survives_the_death_of_a_node_without_repeating_a_step(
    undisturbed: Mapping[str, Any], cluster: Cluster, folder: Path
) -> None:
    """It commits at once, because the state is left on one node."""
    data, storage = str(folder / "data"), str(folder / "runs")
    doomed = cluster.add_node(num_cpus=2, object_store_memory=10**8)
    hold = folder / "hold"
    with jobs.driver(data, storage, "shrinks", "1:3", "wait", str(hold), "25", "3", RAY_ADDRESS=cluster.address) as run:
        until(lambda: trains_with(Storage(storage).at("shrinks"), 3, step=25), run)
        kill(cluster, doomed)
        hold.touch()
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors

    facts = jobs.summary(folder, "shrinks")
    assert jobs.same_bits(facts, undisturbed)
    generations = facts["generations"]
    assert max(generation["world_size"] for generation in generations) == 3 > generations[-1]["world_size"] == 1
    for before, after in pairwise(generations):
        assert after["first_step"] == before["last_step"], "no step is repeated"
    commits = [event.step for event in read_ledger(Storage(storage).at("shrinks")) if event.event == "commit_succeeded"]
    assert generations[-1]["first_step"] + 1 in commits
    assert {1, 3} <= {row["world_size"] for row in facts["scaling"] if row["samples_per_s_per_worker"] > 0}


@pytest.mark.chaos
def test_a_run_whose_workers_have_all_failed_can_be_stopped(cluster: Cluster, folder: Path) -> None:
    data, storage = str(folder / "data"), str(folder / "runs")
    cluster.add_node(num_cpus=2, object_store_memory=10**8)
    with jobs.driver(
        data, storage, "failed", "2", "wait", str(folder / "never"), "25", RAY_ADDRESS=cluster.address
    ) as run:
        until(lambda: status(cluster, "failed")["step"] == 25, run)
        for node in list(cluster.worker_nodes):
            kill(cluster, node)
        until(lambda: status(cluster, "failed")["state"] == "waiting", run)
        os.killpg(run.pid, signal.SIGINT)
        output, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors
    assert "status='stopped', steps=20" in output
