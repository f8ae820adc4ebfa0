"""Drivers as jobs of Ray Jobs, against a job server in memory."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from ray.job_submission import JobErrorType, JobStatus
from typer.testing import CliRunner, Result

from elastic_ddp.cli.main import app
from elastic_ddp.driver import jobs
from elastic_ddp.driver.job_restarts import watch
from elastic_ddp.driver.jobs import STOP_WAIT_S, find_job, follow
from elastic_ddp.driver.start_checks import check_is_kept
from elastic_ddp.driver.submissions import FIRST, RESTARTS, how_it_died
from elastic_ddp.errors import ConfigError, ElasticDDPError
from elastic_ddp.ray_internals.this_job import RUN, this_job
from tests.unit.driver.job_server import DIED, EXITED, JobServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    server = JobServer()
    monkeypatch.setattr("elastic_ddp.ray_internals.job_server.connect_to_jobs", lambda: server)
    return server


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    script = tmp_path / "code" / "train.py"
    script.touch()
    return script


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


# Submission.


def test_a_submitted_script_runs_in_a_copy_of_its_folder_with_its_arguments(server: JobServer, script: Path) -> None:
    shown = invoke("submit", script, "--", "--name", "two words", "--workers", "1:8").output
    (request,) = server.submitted
    words = shlex.split(request["entrypoint"])
    assert words == ["exec", "python", "train.py", "--name", "two words", "--workers", "1:8"]
    stops_in_time = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}}
    assert request["runtime_env"] == {"working_dir": str(script.parent), **stops_in_time}
    assert request["submission_id"].startswith("train-") and f"logs {request['submission_id']}" in shown
    assert request["entrypoint_resources"] is None, "the driver runs on the head"


def test_the_path_of_a_script_is_relative_to_the_working_directory_or_one_of_the_nodes(
    server: JobServer, script: Path
) -> None:
    invoke("submit", script, "--working-dir", script.parents[1], "--entrypoint-resources", '{"driver": 1}')
    invoke("submit", "/opt/code/train.py", "--no-working-dir")
    copied, there = server.submitted
    assert copied["entrypoint"] == "exec python code/train.py"
    assert copied["runtime_env"]["working_dir"] == str(script.parents[1])
    assert copied["entrypoint_resources"] == {"driver": 1.0}
    assert there["entrypoint"] == "exec python /opt/code/train.py" and "working_dir" not in there["runtime_env"]


def test_a_toml_file_is_submitted_with_the_command_that_runs_it(server: JobServer, script: Path) -> None:
    job = script.with_suffix(".toml")
    job.touch()
    invoke("submit", job)
    assert server.submitted[0]["entrypoint"] == "exec python -m elastic_ddp.cli.main run train.toml"
    with pytest.raises(ConfigError, match=r"^--steps 2: a TOML file takes no arguments"):
        invoke("submit", job, "--", "--steps", "2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], r"missing\.py: no such file"),
        (["train.py", "--no-working-dir"], "use the absolute path on the cluster's nodes"),
        (["code/train.py", "--working-dir", "other"], r"train\.py is not in --working-dir .*other"),
        (["/opt/train.py", "--no-working-dir", "--working-dir", "."], "use one of them"),
        (["/opt/train.py", "--no-working-dir", "--entrypoint-resources", "[1]"], r"\[1\] is not a JSON object"),
        (["code/train.py", "--", "--storage=sftp://u:hunter2@h/runs"], "^an argument of the job has a credential"),
    ],
)
def test_a_job_that_could_not_run_or_would_show_a_credential_is_refused(
    server: JobServer, script: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(script.parents[1])
    with pytest.raises(ConfigError, match=message) as error:
        invoke("submit", *arguments)
    assert not server.submitted and "hunter2" not in str(error.value)


def test_a_working_directory_that_ray_rejects_is_an_error_with_what_to_change(
    server: JobServer, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit_job(**_: Any) -> str:
        raise ValueError("Package size (612.00MiB) exceeds the maximum size of 500.00MiB.")

    monkeypatch.setattr(server, "submit_job", submit_job)
    with pytest.raises(ConfigError, match=r"612\.00MiB.*--working-dir.*\.rayignore"):
        invoke("submit", script)


def test_storage_in_rays_copy_of_the_working_directory_is_refused() -> None:
    copy = "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/runs/gpt"
    with pytest.raises(ConfigError, match=r"storage='runs' is in a copy of the working directory.*Use a bucket"):
        check_is_kept("runs", copy)
    check_is_kept("/shared/runs", "/shared/runs/gpt")


# Restarts.


def restart(server: Any, first: str, sleep: Any = pytest.fail) -> None:
    """Restarts the driver of a submission until it ends by itself."""
    watch(first, lambda: server, pytest.fail, sleep)


@pytest.mark.parametrize(
    ("error", "code", "how"),
    [
        (EXITED, -signal.SIGKILL, "SIGKILL ended it"),
        (EXITED, 128 + signal.SIGSEGV, "SIGSEGV ended it"),
        (EXITED, -signal.SIGINT, None),
        (EXITED, 1, None),
        (EXITED, 255, None),
        (DIED, None, "its node or its job's supervisor died"),
        (JobErrorType.JOB_SUPERVISOR_ACTOR_START_TIMEOUT, None, "no node had room for it"),
        (JobErrorType.RUNTIME_ENV_SETUP_FAILURE, None, None),
        (None, 0, None),
    ],
)
def test_a_driver_dies_by_a_signal_or_with_its_node_not_by_an_exit_status(
    error: JobErrorType | None, code: int | None, how: str | None
) -> None:
    server = JobServer()
    server.add("train-1")
    assert how_it_died(server.jobs["train-1"]) is None
    server.end("train-1", error, code)
    assert how_it_died(server.jobs["train-1"]) == how


def test_a_stopped_driver_is_not_restarted() -> None:
    server = JobServer()
    server.add("train-1", JobStatus.STOPPED, metadata={FIRST: "train-1", RESTARTS: "3"})
    restart(server, "train-1")
    assert not server.submitted


def test_a_driver_that_dies_is_restarted_until_its_restarts_are_used_up(server: JobServer, script: Path) -> None:
    invoke("submit", script, "--restarts", "2", "--entrypoint-resources", '{"driver": 1}', "--", "--steps", "9")
    first = server.submitted[0]["submission_id"]
    assert server.submitted[0]["entrypoint"].endswith(" && exec python train.py --steps 9")
    server.begin_run(first, "gpt")
    slept = []

    def sleep(_: float) -> None:
        slept.append(len(server.submitted))
        server.end(list(server.jobs)[-1], DIED)

    restart(server, first, sleep)
    assert [request["submission_id"] for request in server.submitted] == [first, f"{first}-1", f"{first}-2"]
    before, *others = [{**request, "submission_id": "", "metadata": {}} for request in server.submitted]
    assert others == [before, before]
    assert RUN + "gpt" not in server.submitted[1]["metadata"], "its driver has not begun the run yet"


def test_restarts_continue_after_a_silent_job_server_and_in_a_new_process(server: JobServer, script: Path) -> None:
    invoke("submit", script, "--restarts", "3")
    first = server.submitted[0]["submission_id"]
    server.end(first, DIED)
    server.is_down = True

    class Killed(BaseException):
        pass

    def comes_back(_: float) -> None:
        if not server.is_down:
            raise Killed
        server.is_down = False

    with pytest.raises(Killed):
        restart(server, first, comes_back)
    server.end(f"{first}-1", DIED)
    with pytest.raises(Killed):
        restart(server, first, comes_back)
    assert list(server.jobs) == [first, f"{first}-1", f"{first}-2"]
    server.end(f"{first}-2")
    restart(server, first)


def test_a_driver_that_died_with_its_head_is_restarted_on_the_new_one(server: JobServer, script: Path) -> None:
    invoke("submit", script, "--restarts", "1")
    first = server.submitted[0]["submission_id"]
    server.dead = [first]

    polls = []

    def sleep(_: float) -> None:
        polls.append(1)
        assert len(polls) < 3, "it is not restarted"
        if f"{first}-1" in server.jobs:
            server.end(f"{first}-1")

    restart(server, first, sleep)
    assert [request["submission_id"] for request in server.submitted] == [first, f"{first}-1"]


# Finding a job again.


def restarted(server: JobServer) -> None:
    """Adds a job of run gpt whose driver has died, the job that restarts it, and an older job of another run."""
    metadata = {FIRST: "train-1", RESTARTS: "1"}
    server.add("old-1", JobStatus.SUCCEEDED, metadata={RUN + "lm": "s3://runs/lm"})
    server.add("train-1", metadata={**metadata})
    server.begin_run("train-1", "gpt")
    server.end("train-1", EXITED, -9)
    server.add("train-1-1", metadata={**metadata})


@pytest.mark.parametrize(
    ("run", "job"),
    [("gpt", "train-1-1"), ("s3://runs/gpt/", "train-1-1"), ("train-1", "train-1"), ("lm", "old-1")],
)
def test_the_newest_job_is_found_by_the_name_of_its_run_or_by_its_id(server: JobServer, run: str, job: str) -> None:
    restarted(server)
    assert find_job(server, run).submission_id == job  # type: ignore[arg-type]


def test_logs_prints_the_log_of_a_run_or_the_reason_why_there_is_none(server: JobServer) -> None:
    restarted(server)
    server.logs = {"train-1-1": [["step 1\n", "step 2\n"]]}
    assert invoke("logs", "gpt").output == "step 1\nstep 2\n"
    with pytest.raises(ConfigError, match=r"no submitted job of run 'bert'.*train-1 \(failed: SIGKILL ended it\)"):
        invoke("logs", "bert")
    with pytest.raises(ConfigError, match=r"log of job train-1 \(failed: SIGKILL ended it\) cannot be read"):
        invoke("logs", "train-1")


def test_a_followed_log_is_complete_over_broken_connections_and_restarts(
    server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarted(server)
    server.jobs["train-1"] = server.jobs["train-1"].model_copy(update={"status": JobStatus.RUNNING})
    server.logs = {"train-1": [["ab"], ["ab", "c"], ["a"], ["abc", "d"]], "train-1-1": [["e"], ["ef"]]}
    sleeps = iter([lambda: None, lambda: None, lambda: server.end("train-1", DIED), lambda: server.end("train-1-1")])
    monkeypatch.setattr(jobs.time, "sleep", lambda _: next(sleeps)())
    written: list[str] = []
    notes: list[str] = []
    last = follow(server, "train-1", written.append, notes.append, lambda _: next(sleeps)())  # type: ignore[arg-type]
    assert "".join(written) == "abcdef"
    assert last.submission_id == "train-1-1" and last.status == JobStatus.SUCCEEDED
    assert notes == ["train-1 failed: its node or its job's supervisor died. train-1-1 restarts it."]


def test_following_ends_with_an_error_if_the_job_server_stays_silent_or_lost_the_job(server: JobServer) -> None:
    with pytest.raises(ElasticDDPError, match=r"does not know job lost any more: .* restarted without Redis"):
        follow(server, "lost", print, print, lambda _: None)  # type: ignore[arg-type]
    restarted(server)
    now = iter(range(0, 1000, 50))
    server.is_down = True
    notes: list[str] = []
    with pytest.raises(ElasticDDPError, match=r"http://head:8265 has not responded for 120 s: refused.*call `ray up`"):
        follow(server, "train-1", print, notes.append, lambda _: None, lambda: next(now))  # type: ignore[arg-type]
    assert notes == ["The dashboard at http://head:8265 does not respond. Waiting for it for 120 s."]


def test_a_job_server_that_restarts_after_hours_of_a_log_is_waited_for(
    server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add("train-1")
    now = 0.0

    def follow_for_hours(*_: Any) -> int:
        nonlocal now
        now += 10_000
        server.is_down = not server.is_down
        return 0

    monkeypatch.setattr(jobs, "follow_log", follow_for_hours)

    def sleep(_: float) -> None:
        server.end("train-1")

    assert follow(server, "train-1", print, print, sleep, lambda: now).status == JobStatus.SUCCEEDED  # type: ignore[arg-type]


@pytest.mark.parametrize(("code", "status"), [(None, 0), (3, 1)])
def test_the_exit_status_of_follow_tells_whether_the_job_succeeded(
    server: JobServer, script: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, status: int
) -> None:
    submit = server.submit_job

    def submit_job(**request: Any) -> str:
        name = submit(**request)
        server.logs[name] = [["done\n"]]
        server.end(name, None if code is None else EXITED, code)
        return name

    monkeypatch.setattr(server, "submit_job", submit_job)
    result = invoke("submit", script, "--follow")
    assert result.exit_code == status
    assert "done\n" in result.output
    assert result.output.rstrip().endswith("succeeded" if status == 0 else "failed: exit status 3")


def test_stop_reaches_a_submitted_run_that_is_not_live_yet(server: JobServer, monkeypatch: pytest.MonkeyPatch) -> None:
    restarted(server)

    def get_run(run: str) -> Any:
        raise ConfigError(f"run {run!r} is not live")

    monkeypatch.setattr("elastic_ddp.driver.run_handle.get_run", get_run)
    assert "run gpt: stopping" in invoke("stop", "gpt").output
    assert "run train-1: stopping" in invoke("stop", "train-1").output
    assert server.stopped == ["train-1-1", "train-1-1"]
    for run in ("lm", "unknown"):
        with pytest.raises(ConfigError, match=f"run '{run}' is not live"):
            invoke("stop", run)


def test_a_driver_knows_the_job_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert this_job() is None
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"job_submission_id": "train-1"}}')
    assert this_job() == "train-1"
