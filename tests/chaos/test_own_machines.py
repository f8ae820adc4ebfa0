"""docs/guides/cluster-machines.md, followed on machines made of namespaces.

`make hosts` runs it and prints how long each stage takes. Each test is a stage: one short run, which must end with the
weights and samples of an undisturbed run. `make hosts ARGS="-k power"` runs one stage.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest

from tests.chaos.machines import ROOT, SHARED, missing, site, until
from tests.chaos.onprem import GCS_PORT, NOTICE_S, ON_A_NODE, Cluster, Supervisor, shell_block, world_sizes
from tests.integration import jobs

pytest.importorskip("ray.dashboard.optional_deps", reason="needs ray[default]", exc_type=ImportError)

Summary = Mapping[str, Any]
WHY_NOT = missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.chaos,
    pytest.mark.timeout(600),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster after `ray up`. Its second worker is off."""
    with site(tmp_path_factory.mktemp("machines") / "site", 3) as machines:
        cluster = Cluster(machines)
        cluster.install_program()
        machines.boot(cluster.head, cluster.workers[0])
        cluster.install()
        cluster.up()
        yield cluster


@pytest.fixture(scope="module")
def calm(cluster: Cluster) -> Summary:
    """The summary of an undisturbed run."""
    run = cluster.start("calm")
    run.release()
    run.driver.finish()
    return jobs.summary(cluster.site.shared, "calm")


@pytest.fixture(autouse=True)
def no_run_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.stop_runs()


@pytest.fixture
def both(cluster: Cluster, calm: Summary) -> Cluster:
    """The cluster with Ray on both workers."""
    cluster.wait_for_nodes()
    return cluster


def test_a_machine_that_is_switched_on_joins_the_run(cluster: Cluster, calm: Summary) -> None:
    cluster.workers[1].kill()
    run = cluster.start("added")
    run.wait_for(1)
    cluster.site.boot(cluster.workers[1])
    run.wait_for(2)
    assert world_sizes(run.finish(calm))[-2:] == [1, 2]


def test_doctor_finds_no_fault(both: Cluster) -> None:
    printed = both.laptop(both.as_written("ray exec cluster/onprem.yaml 'elastic-ddp doctor"))
    text = re.sub(r"\s+", " ", printed)
    assert f"every node reads and writes {SHARED}/runs" in text
    assert "an all-reduce has the expected value, 3 (nodes: 2)" in text and "0 failures" in text


def test_the_two_lines_of_the_readme_train_on_all_machines(cluster: Cluster) -> None:
    """Without a pause between them: the workers join while the driver waits."""
    lines = shell_block((ROOT / "README.md").read_text(), "## On a cluster").replace("cluster.yaml", "onprem.yaml")
    up, train = lines.replace("ray up", "ray up --yes").splitlines()
    cluster.laptop(up, 300)
    printed = cluster.laptop(train, 400)
    check_example(cluster, "gpt", printed)


def test_the_example_trains_as_a_submitted_job(both: Cluster) -> None:
    """The guide's command, with fewer steps."""
    submit = both.as_written("ray exec cluster/onprem.yaml 'elastic-ddp submit")
    check_example(both, "submitted", both.laptop(submit[:-1] + " --steps 60'"))


def check_example(cluster: Cluster, name: str, printed: str) -> None:
    """Checks that examples/train.py has used both workers, and has stored its run where the configuration says."""
    facts = jobs.summary(cluster.site.shared, name)
    assert facts["status"] == "finished" and world_sizes(facts)[-1] == 2
    assert f"{name} finished after {facts['steps']} steps; weights {facts['weights_sha256']}" in printed


def test_workers_leave_a_machine_after_its_spot_notice(both: Cluster, calm: Summary) -> None:
    machine = both.workers[1]
    run = both.start("noticed")
    run.wait_for(2)
    environment = f"{ON_A_NODE} RAY_ADDRESS={both.head.address}:{GCS_PORT}"
    watch = both.site.start(machine, f"cd {SHARED}/job && {environment} python -m tests.metadata_server {NOTICE_S}")
    run.wait_for(1)
    facts = run.finish(calm)
    watch.process.kill()
    assert world_sizes(facts)[-2:] == [2, 1] and facts["workers_failed"] == 0
    both.start_ray_by_hand(machine)


def test_workers_leave_a_node_that_ray_drains_and_no_run_starts_there(both: Cluster, calm: Summary) -> None:
    machine = both.workers[1]
    both.keep_busy(machine, "may-end")  # otherwise the node ends as soon as the run has left it
    run = both.start("drained-by-ray")
    run.wait_for(2)
    (node,) = [member["node_id"] for member in run.status()["members"] if member["node"] == machine.address]
    drain = f"ray drain-node --node-id {node} --reason DRAIN_NODE_REASON_PREEMPTION --reason-message repair"
    both.laptop(f"ray exec cluster/onprem.yaml '{drain} --deadline-remaining-seconds {3 * NOTICE_S}'")
    run.wait_for(1)
    facts = run.finish(calm)
    assert world_sizes(facts)[-2:] == [2, 1] and facts["workers_failed"] == 0
    beside = both.start("beside-a-draining-node")
    beside.wait_for(1)
    assert machine.pids("/raylet/raylet "), "the node still drains"
    assert world_sizes(beside.finish(calm)) == [1]
    (both.site.shared / "may-end").touch()
    both.start_ray_by_hand(machine)


def test_workers_leave_a_machine_that_is_drained_for_the_run(both: Cluster, calm: Summary) -> None:
    run = both.start("drained")
    run.wait_for(2)
    both.laptop(f"ray exec cluster/onprem.yaml 'elastic-ddp drain drained {both.workers[1].address}'")
    run.wait_for(1)
    facts = run.finish(calm)
    assert world_sizes(facts)[-2:] == [2, 1] and facts["workers_failed"] == 0


def test_a_run_survives_a_cut_link_and_uses_the_machine_once_it_is_mended(both: Cluster, calm: Summary) -> None:
    run = both.start("cut")
    run.wait_for(2)
    both.site.cut(both.workers[1])
    run.wait_for(1)
    both.site.mend(both.workers[1])
    run.wait_for(2)
    facts = run.finish(calm)
    assert world_sizes(facts)[-3:] == [2, 1, 2] and facts["workers_failed"] == 1


def test_under_systemd_a_mended_machine_returns_and_a_stopped_one_drains(both: Cluster, calm: Summary) -> None:
    service = Supervisor(both, both.workers[1])
    run = both.start("service")
    run.wait_for(2)
    both.site.cut(both.workers[1])
    run.wait_for(1)
    both.site.mend(both.workers[1])
    run.wait_for(2)
    service.stop()
    run.wait_for(1)
    facts = run.finish(calm)
    assert world_sizes(facts)[-4:] == [2, 1, 2, 1] and facts["workers_failed"] == 1, "only the cut lost a worker"
    both.start_ray_by_hand(both.workers[1])


def test_a_submitted_run_goes_on_while_the_laptop_is_closed(both: Cluster, calm: Summary) -> None:
    run, port = both.submit_through_a_port("laptop")
    run.wait_for(2)
    both.site.close_laptop()
    port.process.wait()
    both.site.open_laptop()
    assert "training" in both.ssh_as_written("log in to the head", both.head, gpt="laptop")
    both.site.close_laptop()
    run.release()
    run.wait_for_end()
    both.site.open_laptop()
    run.check(calm)
    printed = both.laptop(both.as_written("ray exec cluster/cluster.yaml 'elastic-ddp logs", wide="laptop"))
    assert "job program-" in printed and "succeeded" in printed


def test_a_run_whose_gcs_is_gone_commits_and_resumes_after_ray_up(both: Cluster, calm: Summary) -> None:
    run = both.start("gcs-gone")
    run.wait_for(2)
    (gcs,) = both.gcs
    os.kill(gcs, signal.SIGKILL)
    run.driver.wait_until(lambda: not both.head.pids("program.py gcs-gone"), "the driver does not end")
    printed = both.site.run(both.head, "cat /tmp/ray/session_latest/logs/job-driver-program-*.log")
    assert f"Ray's GCS at {both.head.address}:{GCS_PORT} has not responded for 42 s" in printed
    assert "resumes the run from its newest commit" in printed
    assert "Failed to connect to GCS" not in printed, "Ray itself did not end the driver"
    both.up()
    followed = run.driver.finish(succeeds=False)
    assert "does not respond" in followed and "The same command resumes the run" in followed
    both.wait_for_nodes()
    facts = both.start("gcs-gone").finish(calm)
    pairs = pairwise(facts["generations"])
    assert all(after["first_step"] == before["last_step"] for before, after in pairs), "no step is lost"


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs Debian's redis-server")
def test_with_redis_a_submitted_run_survives_a_failure_of_the_head(both: Cluster, calm: Summary) -> None:
    both.use_redis()
    both.wait_for_nodes()
    run = both.start("head", "--restarts 3")
    run.wait_for(2)
    both.head.kill()
    run.driver.finish(succeeds=False)
    both.site.boot(both.head)
    both.start_redis()
    both.up()
    run.release()
    run.wait_for_end()
    facts = run.check(calm)
    assert len(facts["generations"]) >= 2
    printed = both.laptop(both.as_written("ray exec cluster/cluster.yaml 'elastic-ddp logs", wide="head"))
    assert "-1 succeeded" in printed


def test_ray_down_leaves_no_process_and_no_file(both: Cluster, calm: Summary) -> None:
    run = both.start("last")
    run.wait_for(2)
    run.finish(calm)
    both.laptop(both.as_written("ray down", **{"ray down": "ray down --yes"}))
    for machine in both.workers:
        until(lambda machine=machine: not machine.pids("/raylet/raylet "), f"Ray does not leave {machine.name}", 120)
        both.site.run(machine, "bash -ic 'ray stop'")
    both.wait_until_nothing_is_left()
