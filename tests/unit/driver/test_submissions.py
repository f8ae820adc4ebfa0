"""A request to stop wins over the restart of a submitted driver, and a restart that cannot come is reported."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from typer.testing import CliRunner, Result

from elastic_ddp.cli.main import app
from elastic_ddp.driver.job_restarts import GIVE_UP_S, POLL_S, give_up, watch
from elastic_ddp.driver.jobs import stop_job
from elastic_ddp.driver.run_handle import RunHandle
from elastic_ddp.driver.submissions import FIRST, RESOURCES, RESTARTS, dead_drivers, forbid_restart, jobs_here
from elastic_ddp.errors import ConfigError, ElasticDDPError
from tests.unit.driver.job_server import DIED, EXITED, Gcs, JobServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The job server, and the GCS of the same cluster. Run gpt is submitted with two restarts, and not live."""
    server = JobServer()
    server.add("train", metadata={FIRST: "train", RESTARTS: "2", RESOURCES: "null"}, runtime_env={})
    server.begin_run("train", "gpt")
    monkeypatch.setattr("elastic_ddp.ray_internals.job_server.connect_to_jobs", lambda: server)
    monkeypatch.setattr("elastic_ddp.ray_internals.this_job._gcs", lambda: Gcs(server))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.9:6379"))

    def get_run(run: str) -> Any:
        raise ConfigError(f"run {run!r} is not live")

    monkeypatch.setattr("elastic_ddp.driver.run_handle.get_run", get_run)
    monkeypatch.setattr("elastic_ddp.driver.run_handle.live_runs", list)
    return server


class Handle(RunHandle):
    """A handle to the live run of a job. Its calls are recorded."""

    def __init__(self, job: str | None) -> None:
        super().__init__("gpt", None)
        self.job, self.calls = job, []

    def _call(self, method: str, *_: Any) -> Any:
        self.calls.append(method)
        return {"driver": {"job": self.job}} if method == "status" else None


def watched(server: JobServer) -> list[str]:
    """Returns the jobs that the watcher submits now, until it ends or all jobs run."""

    class Sleeps(BaseException):
        pass

    def sleep(_: float) -> None:
        raise Sleeps

    before = len(server.submitted)
    with suppress(Sleeps):
        watch("train", lambda: server, pytest.fail, sleep)  # type: ignore[arg-type, return-value]
    return [request["submission_id"] for request in server.submitted[before:]]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


# Stop.


def test_a_stop_while_a_restart_is_pending_wins(server: JobServer) -> None:
    server.end("train", DIED)
    assert "run gpt: stopping" in invoke("stop", "gpt").output
    assert not server.stopped and watched(server) == []


def test_a_stop_wins_if_the_driver_dies_before_it_has_committed(server: JobServer) -> None:
    invoke("stop", "gpt")
    invoke("stop", "gpt")
    assert server.stopped == ["train", "train"]
    server.end("train", DIED)
    assert watched(server) == []


def test_a_stop_wins_over_a_restart_that_comes_at_the_same_time(
    server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.end("train", DIED)
    submit_job = server.submit_job

    def restarted_before(**request: Any) -> str:
        monkeypatch.setattr(server, "submit_job", submit_job)
        assert watched(server) == ["train-1"]
        return submit_job(**request)

    monkeypatch.setattr(server, "submit_job", restarted_before)
    assert stop_job(server, "gpt") == "train-1"
    assert server.stopped == ["train-1"]
    server.end("train-1", EXITED, -9)
    assert watched(server) == []


def test_a_stop_that_the_job_server_rejects_is_an_error(server: JobServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit_job(**_: Any) -> str:
        raise RuntimeError("Request failed with status code 500: Traceback\nOSError: disk full\n")

    monkeypatch.setattr(server, "submit_job", submit_job)
    with pytest.raises(ElasticDDPError, match=r"does not accept the request: OSError: disk full"):
        stop_job(server, "gpt")
    assert not server.stopped


def test_a_stop_of_a_live_run_wins_if_its_driver_dies(server: JobServer) -> None:
    handle = Handle("train")
    handle.stop()
    handle.stop()
    assert handle.calls == ["status", "stop"] * 2
    server.end("train", DIED)
    assert watched(server) == []
    interactive = Handle(None)
    interactive.stop()
    assert interactive.calls == ["status", "stop"]


def test_a_stop_of_a_live_run_whose_driver_was_just_restarted_stops_the_new_driver(
    server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Handle("train")
    server.end("train", DIED)
    assert watched(server) == ["train-1"]
    with pytest.raises(ElasticDDPError, match="job train has died, and job train-1 restarts it"):
        handle.stop()
    assert handle.calls == ["status"]
    monkeypatch.setattr("elastic_ddp.driver.run_handle.get_run", lambda run: handle)
    invoke("stop", "gpt")
    assert server.stopped == ["train-1"]


def test_a_pending_restart_is_stopped_from_a_node_that_does_not_reach_the_job_server(
    server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect() -> Any:
        raise ConfigError("it listens on the head only")

    monkeypatch.setattr("elastic_ddp.ray_internals.job_server.connect_to_jobs", connect)
    with pytest.raises(ConfigError, match="not live"):  # the driver is starting
        invoke("stop", "gpt")
    server.end("train", DIED)
    assert "run gpt: stopping" in invoke("stop", "gpt").output
    assert watched(server) == []


# No restart.


def failing(server: JobServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Lets the server reject jobs from now on. Returns a clock that goes on by `POLL_S` for each attempt."""
    attempts: list[str] = []

    def submit_job(**request: Any) -> str:
        attempts.append(request["submission_id"])
        raise RuntimeError("Request failed with status code 500: Traceback\nOSError: disk full\n")

    monkeypatch.setattr(server, "submit_job", submit_job)
    return lambda: len(attempts) * POLL_S


def test_a_restart_that_is_always_rejected_is_given_up_and_reported(
    server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.end("train", DIED)
    clock = failing(server, monkeypatch)
    watch("train", lambda: server, lambda why: give_up("train", why), lambda _: None, clock)
    assert GIVE_UP_S < clock() < GIVE_UP_S + 3 * POLL_S
    line = "It is not restarted: the job server has accepted no request for 30 minutes: OSError: disk full."
    assert line in " ".join(invoke("status").output.split())
    with pytest.raises(ConfigError, match=f"run 'gpt' is not live: job train failed: .*{line}"):
        invoke("status", "gpt")
    server.logs = {"train": [["step 1\n"]]}
    assert line in " ".join(invoke("logs", "gpt").output.split())
    monkeypatch.undo()
    assert watched(server) == []


def test_status_tells_whether_a_dead_driver_is_restarted(server: JobServer) -> None:
    assert dead_drivers(jobs_here(), ()) == {}
    server.end("train", EXITED, -9)
    assert "SIGKILL ended it. Job train-1 is going to restart it." in invoke("status").output
    assert dead_drivers(jobs_here(), ["gpt"]) == {}
    forbid_restart("train", "it was stopped")
    assert "It is not restarted: it was stopped." in dead_drivers(jobs_here(), ())["gpt"]
    server.add("again", metadata={FIRST: "again", RESTARTS: "0"})
    server.begin_run("again", "gpt")
    assert dead_drivers(jobs_here(), ()) == {}, "the user has submitted the run again"
    server.end("again", DIED)
    assert "It is not restarted: it was submitted without --restarts." in dead_drivers(jobs_here(), ())["gpt"]
