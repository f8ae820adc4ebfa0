"""Requests to a live run: by a handle, by the command line, by signals and by Ray."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from elastic_ddp.driver.run_handle import RunHandle, get_run
from elastic_ddp.errors import ConfigError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger
from elastic_ddp.telemetry.event import Event
from tests.integration import jobs
from tests.integration.clusters import command, until
from tests.unit.cli.test_cli import invoke

pytestmark = pytest.mark.slow

NAME = "controlled"


@pytest.fixture
def connected(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, with this process connected to it."""
    ray.init(cluster.address, logging_level="ERROR", log_to_driver=False)
    yield cluster
    ray.shutdown()


def controlled_run(cluster: Cluster, folder: Path, workers: str) -> Any:
    """A run that stays at step 20 except to serve requests, until `finish` is called."""
    arguments = (str(folder / "data"), str(folder / "runs"), NAME, workers, "ask", str(folder / "marker"), "20")
    return jobs.driver(*arguments, RAY_ADDRESS=cluster.address)


def finish(folder: Path, run: subprocess.Popen[str]) -> Mapping[str, Any]:
    (folder / "marker").touch()
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors
    return jobs.summary(folder, NAME)


def handle_when(run: subprocess.Popen[str], ready: Callable[[Mapping[str, Any]], bool]) -> RunHandle:
    """Returns a handle to the live run, once its status satisfies `ready`."""

    def is_ready() -> bool:
        try:
            return ready(get_run(NAME).status())
        except ConfigError:
            return False

    until(is_ready, run)
    return get_run(NAME)


def invoked(*arguments: str) -> str:
    """Returns what an `elastic-ddp` command prints that runs in this process."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return str(result.output)


def holds_with(num_workers: int) -> Callable[[Mapping[str, Any]], bool]:
    """Whether the run has reached the step at which it stays, with this number of workers."""
    return lambda status: (
        status["state"] == "training"
        and (status["step"] or 0) >= 20
        and status["world_size"] == num_workers == len(status["members"])
    )


def no_step_is_repeated(facts: Mapping[str, Any]) -> bool:
    return all(after["first_step"] == before["last_step"] for before, after in pairwise(facts["generations"]))


def events(folder: Path, kind: str) -> list[Event]:
    return [event for event in read_ledger(Storage(str(folder / "runs" / NAME))) if event.event == kind]


@pytest.mark.chaos
def test_a_live_run_serves_all_requests(
    undisturbed: Mapping[str, Any], connected: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    node = connected.add_node(num_cpus=2, object_store_memory=10**8)
    with controlled_run(connected, folder, "1:3") as run:
        handle = handle_when(run, holds_with(3))
        assert len({member["node_id"] for member in handle.status()["members"]}) == 2
        uri = str(folder / "runs" / NAME)
        follow = [sys.executable, "-m", "elastic_ddp.cli.main", "events", uri, "--follow", "--json"]
        follower = subprocess.Popen(follow, stdout=subprocess.PIPE, text=True)

        def rank_0_stays_at_its_step() -> bool:
            stacks = handle.stacks()
            assert [worker["rank"] for worker in stacks["workers"]] == [0, 1, 2] and not stacks["missing"]
            return "in fault" in stacks["workers"][0]["threads"][0]["stack"]

        until(rank_0_stays_at_its_step, run)  # it may still finish a save

        step = handle.checkpoint()
        assert step > 20
        assert handle.status()["last_commit"] == step
        assert (folder / "runs" / NAME / "checkpoints" / "commits" / f"{step}.json").exists()

        with ThreadPoolExecutor() as pool:
            profiling = pool.submit(handle.profile, num_steps=2, ranks=[0, 2])
            while not profiling.done():
                handle.checkpoint()  # lets the run make a step
        first, other = profiling.result()["ranks"]
        assert (first["rank"], other["rank"]) == (0, 2) and first["first_step"] == other["first_step"]
        for rank in (first, other):
            assert rank["num_steps"] == 2 and rank["communication_s"] > 0 and rank["compute_s"] > 0
            assert json.loads(gzip.decompress((folder / "runs" / NAME / rank["trace"]).read_bytes()))["traceEvents"]

        invoked("resize", NAME, "2")
        until(lambda: holds_with(2)(handle.status()), run)
        with pytest.raises(ConfigError, match="num_workers=4 is not from min_workers=1 to max_workers=3"):
            handle.resize(4)
        handle.resize(3)
        until(lambda: holds_with(3)(handle.status()), run)

        with pytest.raises(ConfigError, match="no worker on node 'elsewhere'"):
            handle.drain("elsewhere")
        assert "2 workers left" in invoked("drain", NAME, node.node_id)
        until(lambda: holds_with(1)(handle.status()), run)
        shown = invoked("status", NAME)
        assert "training" in shown and handle.status()["members"][0]["node_id"] in shown
        watched = invoked("watch", uri)
        assert f"{NAME}  training" in watched and "2 drained" in watched and "▼ drained" in watched
        facts = finish(folder, run)
    assert jobs.same_bits(facts, undisturbed)
    assert no_step_is_repeated(facts)
    assert facts["recoveries"] == 0
    kinds = [event.kind for event in events(folder, "worker_left")]
    assert kinds == ["resize", "drain", "drain"]
    assert not events(folder, "worker_failed")
    followed, _ = follower.communicate(timeout=30)  # it ends with the run
    ledger = read_ledger(Storage(uri))
    assert [json.loads(line)["seq"] for line in followed.splitlines()] == [event.seq for event in ledger]


@pytest.mark.chaos
def test_a_worker_that_receives_sigterm_leaves_between_steps_and_is_replaced(
    undisturbed: Mapping[str, Any], connected: Cluster, folder: Path
) -> None:
    connected.add_node(num_cpus=1, object_store_memory=10**8)
    with controlled_run(connected, folder, "1:2") as run:
        handle = handle_when(run, holds_with(2))
        first = [member["pid"] for member in handle.status()["members"]]
        os.kill(first[1], signal.SIGTERM)
        until(lambda: first[1] not in [member["pid"] for member in handle.status()["members"]], run)
        until(lambda: holds_with(2)(handle.status()), run)
        handle.stop()
        output, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors
        assert "status='stopped'" in output
    facts = jobs.summary(folder, NAME)
    assert no_step_is_repeated(facts)
    assert [event.kind for event in events(folder, "worker_left")] == ["drain"]
    assert not events(folder, "worker_failed")
    done = jobs.drive(str(folder / "data"), str(folder / "runs"), NAME, "1", RAY_ADDRESS=connected.address)
    assert done.returncode == 0, done.stderr
    assert jobs.same_bits(jobs.summary(folder, NAME), undisturbed)


@pytest.mark.chaos
def test_the_last_worker_commits_before_ray_drains_its_node(
    undisturbed: Mapping[str, Any], connected: Cluster, folder: Path
) -> None:
    cluster = connected
    with controlled_run(cluster, folder, "1") as run:
        handle = handle_when(run, holds_with(1))
        (node_id,) = {member["node_id"] for member in handle.status()["members"]}
        drain = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address]
        drain += ["--node-id", node_id, "--deadline-remaining-seconds", "8"]
        drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        subprocess.run(drain, check=True, capture_output=True)
        until(lambda: not handle.status()["members"], run)
        cluster.add_node(num_cpus=1, object_store_memory=10**8)
        until(lambda: holds_with(1)(handle.status()), run)
        assert handle.status()["members"][0]["node_id"] != node_id
        facts = finish(folder, run)
    assert jobs.same_bits(facts, undisturbed)
    assert no_step_is_repeated(facts)
    assert [event.by for event in events(folder, "drain_noticed")] == ["Ray"]
    assert not events(folder, "worker_failed")


@pytest.mark.chaos
def test_a_drained_node_is_not_used_after_a_failure_until_it_is_undrained(
    undisturbed: Mapping[str, Any], connected: Cluster, folder: Path
) -> None:
    connected.add_node(num_cpus=1, object_store_memory=10**8)
    with controlled_run(connected, folder, "1:2") as run:
        handle = handle_when(run, holds_with(2))
        last, drained = handle.status()["members"]
        handle.drain(drained["node_id"])
        until(lambda: holds_with(1)(handle.status()), run)
        handle.checkpoint()
        os.kill(last["pid"], signal.SIGKILL)
        until(lambda: last["pid"] not in [member["pid"] for member in handle.status()["members"]], run)
        until(lambda: holds_with(1)(handle.status()), run)
        connected.add_node(num_cpus=1, object_store_memory=10**8)
        until(lambda: holds_with(2)(handle.status()), run)
        assert drained["node_id"] not in {member["node_id"] for member in handle.status()["members"]}

        assert drained["node_id"] in command(connected, "status", NAME)
        command(connected, "undrain", NAME, drained["node_id"])
        handle.drain(handle.status()["members"][1]["node_id"])
        until(lambda: holds_with(2)(handle.status()), run)
        assert drained["node_id"] in {member["node_id"] for member in handle.status()["members"]}
        facts = finish(folder, run)
    assert jobs.same_bits(facts, undisturbed)
    assert [event.kind for event in events(folder, "worker_left")] == ["drain", "drain"]
