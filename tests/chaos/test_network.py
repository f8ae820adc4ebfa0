"""Nodes on hosts of their own: one is disconnected while its processes run on, one receives a spot notice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.faults import NOTICE_S, Fault
from tests.chaos.hosts import ADDRESSES, PORT, Hosts, can_be_made, two_hosts
from tests.chaos.runs import Trial
from tests.integration import jobs
from tests.integration.clusters import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chaos,
    pytest.mark.skipif(not can_be_made(), reason="network namespaces need root, and iproute2"),
]


def start(hosts: Hosts, run: Trial) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.chaos.faults", json.dumps(run.command)]
    return hosts.start(0, *command, stdout=subprocess.PIPE)


def finish(run: Trial, driver: subprocess.Popen[str]) -> Mapping[str, Any]:
    output, _ = driver.communicate(timeout=240)
    assert driver.returncode == 0, output
    return jobs.summary(run.folder, run.name)


def test_a_worker_counts_as_failed_after_its_node_was_disconnected(folder: Path) -> None:
    with two_hosts() as hosts:
        calm = Trial(folder, "calm-on-hosts", settings={"max_workers": 1})
        undisturbed = finish(calm, start(hosts, calm))

        # The second fault makes the run wait for a worker on the reconnected node.
        faults = [Fault(1, 10, "reduction", "cut"), Fault(1, 30, "reduction", "SIGKILL")]
        run = Trial(folder, "cut", faults, {"max_workers": 2, "heartbeat_timeout_s": 3.0})
        driver = start(hosts, run)
        until(
            lambda: [e.world_size for e in run.events("generation_formed")][-1:] == [1] and run.failed_members(),
            driver,
        )
        (failure,) = run.events("worker_failed")[-1:]
        assert "no heartbeat for 3 s" in failure.error
        hosts.reconnect()
        facts = finish(run, driver)
    assert jobs.same_bits(facts, undisturbed)
    assert len(run.happened()) == 2 and facts["workers_failed"] == 2
    assert [generation["world_size"] for generation in facts["generations"]][:3] == [2, 1, 2]
    run.check_steps(facts["generations"])


def test_a_machine_that_is_no_node_of_the_cluster_is_refused_with_the_nodes() -> None:
    """Ray itself would wait for a minute."""
    drive = [sys.executable, "-c", "from elastic_ddp.driver.cluster import connect_or_start; connect_or_start(print)"]
    show = [sys.executable, "-m", "elastic_ddp.cli.main", "status"]
    elsewhere = ["unshare", "--pid", "--fork", "--mount-proc"]  # a process of no node is visible there
    message = f"not a node of the Ray cluster at {ADDRESSES[0]}:{PORT}. Its nodes are {', '.join(ADDRESSES)}. Run "
    with two_hosts() as hosts:
        for command in (drive, show):
            output, _ = hosts.start(1, *elsewhere, *command, stdout=subprocess.PIPE).communicate(timeout=40)
            assert message in output
        output, _ = hosts.start(1, *show, stdout=subprocess.PIPE).communicate(timeout=40)
        assert "No run is live" in output


def test_the_workers_of_a_node_leave_it_after_its_spot_interruption_notice(
    folder: Path, calm: Mapping[str, Any]
) -> None:
    with two_hosts() as hosts:
        run = Trial(folder, "noticed", [Fault(1, 10, "reduction", "notice")], {"max_workers": 2})
        facts = finish(run, start(hosts, run))
    (notice,) = run.events("drain_noticed")
    assert notice.by == "Ray" and 0 < notice.within_s <= NOTICE_S
    assert [generation["world_size"] for generation in facts["generations"]] == [2, 1]
    run.check(facts, calm)
