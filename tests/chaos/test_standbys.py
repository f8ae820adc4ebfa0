"""Standbys take the places of workers that fail, and cost nothing else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

import elastic_ddp as ed
from elastic_ddp.driver.run_handle import RunHandle, get_run
from elastic_ddp.errors import ConfigError
from elastic_ddp.telemetry.description import describe_event
from tests.chaos import faults
from tests.chaos.runs import Trial, until
from tests.inside_run import generation_of
from tests.integration import clusters, jobs

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]

HELD_STEP = 20


def trial(folder: Path, name: str, workers: int, **settings: Any) -> Trial:
    """A run that stays near step 20 until its marker exists, except to change its membership."""
    marker, first_steps = folder / f"{name}.end", dict[int, int]()

    def may_go_on(run: ed.Run, at: int) -> bool:
        generation = generation_of(run)
        if generation is None:  # a standby warms up
            return True
        is_first = at == first_steps.setdefault(generation.number, at)
        return is_first or at < HELD_STEP or marker.exists()

    settings = {"max_workers": workers, "standby_workers": 1, **settings}
    return Trial(folder, name, settings=settings, hold=faults.hold(may_go_on))


def end(run: Trial) -> None:
    (run.folder / f"{run.name}.end").touch()


def pids(handle: RunHandle, of: str) -> list[int]:
    return [each["pid"] for each in handle.status()[of]]


def is_complete(handle: RunHandle, workers: int, num_standbys: int = 1) -> Callable[[], bool]:
    """Whether the run has all its workers, and all standbys wait."""

    def check() -> bool:
        status = handle.status()
        return (
            status["state"] == "training"
            and (status["step"] or 0) >= HELD_STEP
            and len(status["members"]) == workers == status["world_size"]
            and len(status["standbys"]) == num_standbys
        )

    return check


def has_replaced(handle: RunHandle, standby: int) -> bool:
    members = pids(handle, "members")
    return len(members) == 2 and standby in members


def has_other_standby(handle: RunHandle, standby: int) -> bool:
    standbys = pids(handle, "standbys")
    return len(standbys) == 1 and standby not in standbys


def all_end(processes: set[int], timeout_s: float = 20.0) -> bool:
    end = time.monotonic() + timeout_s
    while any(Path(f"/proc/{pid}").exists() for pid in processes):
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.usefixtures("one_node")
def test_a_standby_takes_the_place_of_each_killed_worker(folder: Path, calm: Mapping[str, Any]) -> None:
    run, processes = trial(folder, "standby", 2), set[int]()
    with run.live() as (handle, result):
        for victim in (1, 0):
            until(is_complete(handle, 2), result)
            members, [standby] = pids(handle, "members"), pids(handle, "standbys")
            os.kill(members[victim], signal.SIGKILL)
            until(partial(has_replaced, handle, standby), result)
            processes |= {*members, standby}
        end(run)
        summary = result.result().summary
    run.check_results(summary, calm)
    run.check_steps(summary["generations"])
    assert summary["recoveries"] == 2
    assert len(run.events("worker_failed")) == 2 and not run.events("newcomer_failed")
    assert all_end(processes)


@pytest.mark.usefixtures("one_node")
def test_a_standby_that_a_signal_ends_is_replaced_and_does_not_count(folder: Path, calm: Mapping[str, Any]) -> None:
    run, killed = trial(folder, "killed-standby", 2), list[int]()
    with run.live() as (handle, result):
        until(is_complete(handle, 2), result)
        members = pids(handle, "members")
        for number in (signal.SIGKILL, signal.SIGTERM):
            [standby] = pids(handle, "standbys")
            os.kill(standby, number)
            until(partial(has_other_standby, handle, standby), result)
            killed.append(standby)
        assert pids(handle, "members") == members
        processes = {*members, *killed, *pids(handle, "standbys")}
        end(run)
        summary = result.result().summary
    run.check_results(summary, calm)
    assert summary["recoveries"] == 0 and len(summary["generations"]) == 1
    assert [str(describe_event(event)).partition("(")[2] for event in run.events("newcomer_failed")] == [
        f"pid {standby}) failed: its process exited" for standby in killed
    ]
    assert all_end(processes)


@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize(("workers", "resumed_from"), [(1, HELD_STEP), (1, 0), (2, HELD_STEP), (2, 0)])
def test_a_standby_resumes_a_run_whose_workers_were_all_killed(
    folder: Path, calm: Mapping[str, Any], workers: int, resumed_from: int
) -> None:
    """From the newest commit or from the start, alone or with a new worker that waits for it."""
    settings: dict[str, Any] = {"min_workers": workers}
    if not resumed_from:
        settings["checkpoint"] = {"every_steps": 1000}
    run = trial(folder, f"all-killed-{workers}-{resumed_from}", workers, **settings)
    with run.live() as (handle, result):
        until(is_complete(handle, workers), result)
        members, [standby] = pids(handle, "members"), pids(handle, "standbys")
        for worker in members:
            os.kill(worker, signal.SIGKILL)
        until(lambda: [event.generation for event in run.events("first_step")] == [1, 2], result)
        assert standby in pids(handle, "members")
        end(run)
        summary = result.result().summary
    run.check_results(summary, calm)
    # The standby has warmed up, so it restarts the training function, in the place that it got.
    assert [generation["first_step"] for generation in summary["generations"]] == [0, resumed_from]
    assert len(run.events("worker_failed")) == workers
    assert all_end({*members, standby})


@pytest.fixture
def two_nodes() -> Iterator[Cluster]:
    """A head without CPUs, and two nodes with one CPU each."""
    ray.shutdown()  # `one_node` lasts until the end of the module
    with clusters.cluster_of(2) as cluster:
        ray.init(cluster.address, logging_level="ERROR", log_to_driver=False)
        yield cluster
        ray.shutdown()


def test_a_drained_node_loses_its_standbys(two_nodes: Cluster, folder: Path, calm: Mapping[str, Any]) -> None:
    run, nodes = trial(folder, "drained-standby", 2), list(two_nodes.worker_nodes)
    with run.live() as (handle, result):
        until(is_complete(handle, 2, num_standbys=2), result)
        standbys = {standby["node_id"]: standby["pid"] for standby in handle.status()["standbys"]}
        assert standbys.keys() == {node.node_id for node in nodes}
        handle.drain(nodes[1].node_id, deadline_s=20)
        until(lambda: pids(handle, "standbys") == [standbys[nodes[0].node_id]], result)
        assert all_end({standbys[nodes[1].node_id]})
        end(run)
        summary = result.result().summary
    run.check_results(summary, calm)
    assert summary["recoveries"] == 0 and not run.events("newcomer_failed")


def test_standbys_end_with_a_killed_driver(two_nodes: Cluster, folder: Path) -> None:
    hold = ("wait", str(folder / "never"), str(HELD_STEP), "2")
    arguments = (str(folder / "data"), str(folder / "runs"), "driver-killed", "2", *hold)

    def standbys_are_ready() -> bool:
        try:
            return is_complete(get_run("driver-killed"), 2, num_standbys=2)()
        except ConfigError:  # the run is starting
            return False

    with jobs.driver(*arguments, RAY_ADDRESS=two_nodes.address, STANDBY_WORKERS="1") as driver:
        clusters.until(standbys_are_ready, driver)
        handle = get_run("driver-killed")
        processes = {*pids(handle, "members"), *pids(handle, "standbys")}
        driver.kill()
    assert all_end(processes, timeout_s=60)
