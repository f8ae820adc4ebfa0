"""A submitted driver on a real job server: it outlives its submitter, a signal, and its node. Needs `ray[default]`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from ray.job_submission import JobStatus, JobSubmissionClient

from elastic_ddp.driver.jobs import all_jobs, find_job
from elastic_ddp.driver.submissions import how_it_died
from elastic_ddp.ray_internals.job_server import connect_to_jobs
from tests.integration import jobs
from tests.integration.clusters import kill, status

pytest.importorskip("ray.dashboard.optional_deps", reason="needs ray[default]", exc_type=ImportError)

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
NAME = "submitted"
PROGRAM = """
from neighbour import main
main()
"""
NEIGHBOUR = "from tests.integration.jobs import main\n"


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, undisturbed: Mapping[str, Any]) -> Iterator[Cluster]:
    """A head with one CPU, which checks a token. Jobs find this Python and `tests`."""
    from ray._raylet import AuthenticationTokenLoader, Config

    (tmp_path / "token").write_text("a" * 64)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), "PATH": path}
    for name, value in {**settings, "PYTHONPATH": paths}.items():
        monkeypatch.setenv(name, value)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    cluster = Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": True, "object_store_memory": 2 * 10**8})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()
    monkeypatch.undo()
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A script that imports a module of its own folder."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "neighbour.py").write_text(NEIGHBOUR)
    program = tmp_path / "code" / "train.py"
    program.write_text(PROGRAM)
    return program


def call(*arguments: str | Path, status: int = 0) -> str:
    """Returns what an `elastic-ddp` command prints."""
    line = [sys.executable, "-m", "elastic_ddp.cli.main", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240, cwd="/")
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def until(condition: Callable[[], Any], client: JobSubmissionClient, timeout_s: float = 180) -> None:
    """Waits for a condition; fails with the logs of all jobs."""
    end = time.monotonic() + timeout_s
    while not condition():
        newest, *_ = (known := all_jobs(client)).values()
        if time.monotonic() > end or (newest.driver_exit_code or 0) > 0:
            pytest.fail("\n".join(f"{id}: {job.status} {job.message}" for id, job in known.items()))
        time.sleep(0.5)


def test_a_submitted_run_survives_a_kill_of_its_driver_and_the_death_of_its_node(
    head: Cluster, folder: Path, program: Path, undisturbed: Mapping[str, Any], tmp_path: Path
) -> None:
    # These nodes share folders, in which one replaces the copy of a working directory that another uses.
    for _ in range(2):
        head.add_node(num_cpus=1, object_store_memory=10**8, resources={"driver": 1})
    marker = tmp_path / "marker"
    arguments = [folder / "data", tmp_path / "runs", NAME, "1:2", "ask", marker, "20"]
    options = ["--no-working-dir", "--restarts", "2", "--entrypoint-resources", '{"driver": 1}']
    shown = call("submit", program, *options, "--", *arguments)
    first = shown.split()[2]
    client = connect_to_jobs()

    def driver() -> Mapping[str, Any]:
        """The driver of the run, once it trains at step 20, where it stays; empty before."""
        facts = status(head, NAME)
        return facts["driver"] if facts["state"] == "training" and facts["last_commit"] == 20 else {}

    until(driver, client)
    assert driver()["job"] == first and f"submitted as job {first}" in call("status", NAME)
    assert "generation 1" in call("logs", NAME)
    os.kill(driver()["pid"], signal.SIGKILL)

    until(lambda: driver().get("job") == f"{first}-1", client)
    assert how_it_died(client.get_job_info(first)) == "SIGKILL ended it"
    node_id = client.get_job_info(f"{first}-1").driver_node_id
    (node,) = [node for node in head.list_all_nodes() if node.node_id == node_id]
    kill(head, node)

    until(lambda: driver().get("job") == f"{first}-2", client)
    marker.touch()
    assert f"job {first}-2 succeeded" in call("logs", NAME, "--follow")
    facts = jobs.summary(tmp_path, NAME)
    assert facts["sessions"] == 3 and jobs.same_bits(facts, undisturbed)
    assert find_job(client, NAME).submission_id == f"{first}-2"


def test_a_failed_program_is_not_restarted_and_a_stopped_one_commits(
    head: Cluster, folder: Path, program: Path, tmp_path: Path
) -> None:
    wrong = [folder / "no-data", tmp_path / "runs", NAME, "1"]
    shown = call("submit", program, "--restarts", "2", "--follow", "--", *wrong, status=1)
    assert "no-data" in shown and "failed: exit status 1" in shown
    client = connect_to_jobs()
    relative = [folder / "data", "runs", NAME, "1"]
    assert "in a copy of the working directory" in call("submit", program, "--follow", "--", *relative, status=1)
    assert len(all_jobs(client)) == 2

    arguments = [folder / "data", tmp_path / "runs", NAME, "1", "ask", tmp_path / "marker", "20"]
    job = call("submit", program, "--restarts", "2", "--", *arguments).split()[2]
    until(lambda: (status(head, NAME)["step"] or 0) >= 20, client)
    client.stop_job(job)  # as `ray job stop` does
    until(lambda: client.get_job_status(job).is_terminal(), client)
    assert client.get_job_status(job) == JobStatus.STOPPED
    facts = jobs.summary(tmp_path, NAME)
    assert facts["status"] == "stopped" and facts["steps"] > 20, "it has committed"
    assert len(all_jobs(client)) == 3


def begin(head: Cluster, client: JobSubmissionClient, program: Path, arguments: list[Any]) -> tuple[str, Any]:
    """Submits a driver with restarts to a new node, and waits until it trains at step 20. Returns its job and node."""
    node = head.add_node(num_cpus=0, object_store_memory=10**8, resources={"driver": 1})
    options = ["--no-working-dir", "--restarts", "2", "--entrypoint-resources", '{"driver": 1}']
    job = call("submit", program, *options, "--", *arguments).split()[2]

    def trains() -> bool:
        facts = status(head, NAME)
        return facts["state"] == "training" and facts["driver"]["job"] == job and facts["last_commit"] == 20

    until(trains, client)
    return job, node


def have_ended(client: JobSubmissionClient) -> bool:
    return all(job.status.is_terminal() for job in all_jobs(client).values())


def test_a_stop_wins_over_the_restarts_of_a_live_run(
    head: Cluster, folder: Path, program: Path, tmp_path: Path
) -> None:
    client, arguments = connect_to_jobs(), [folder / "data", tmp_path / "runs", NAME, "1", "ask", tmp_path / "m", "20"]
    job, _ = begin(head, client, program, arguments)
    assert "stopping" in call("stop", NAME)
    until(lambda: have_ended(client), client)
    assert jobs.summary(tmp_path, NAME)["status"] == "stopped"
    assert all_jobs(client)[f"{job}-1"].message == "It is not restarted: it was stopped."


def test_a_stop_wins_over_a_pending_restart(head: Cluster, folder: Path, program: Path, tmp_path: Path) -> None:
    client, arguments = connect_to_jobs(), [folder / "data", tmp_path / "runs", NAME, "1", "ask", tmp_path / "m", "20"]
    job, node = begin(head, client, program, arguments)
    kill(head, node)
    until(lambda: f"{job}-1" in all_jobs(client), client)  # no node has room for it
    assert "stopping" in call("stop", NAME)
    head.add_node(num_cpus=0, object_store_memory=10**8, resources={"driver": 1})
    until(lambda: have_ended(client), client)
    assert all_jobs(client).keys() == {job, f"{job}-1", f"{job}-2"}
