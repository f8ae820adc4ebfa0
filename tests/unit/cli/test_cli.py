"""The command line: its output, its errors and its exit status."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from typer.testing import CliRunner

from elastic_ddp.cli import main as cli_main
from elastic_ddp.driver import trainer
from elastic_ddp.errors import ConfigError
from elastic_ddp.storage.lease import Driver, DriverLease
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import Ledger, summarize
from elastic_ddp.telemetry.phases import STEP_PHASES
from tests.unit.ledger_events import ledger_event

SETTINGS = """
name = "lm"
storage = "runs"
steps = 10
global_batch_size = 4
micro_batch_size = 2
"""
JOB = """
[job]
train = "job.py:train"
data = "data/"
"""


def write_ledger(folder: Path, session: str, *events: tuple[str, dict[str, Any]]) -> None:
    seconds = itertools.count(1_000_000)
    with closing(Ledger(Storage(folder), session, lambda: float(next(seconds)))) as ledger:
        for name, fields in events:
            ledger.append(ledger_event(name, **fields))


HASH = "ab" * 32


def ledger_of_a_run(folder: Path) -> None:
    write_ledger(
        folder,
        "s1",
        ("session_started", {"config": {"name": "lm"}, "versions": {"torch": "2.13"}}),
        ("generation_started", {"generation": 1, "world_size": 3, "reason": "start"}),
        ("steps_completed", {"step": 40, "loss": 2.5, "samples": 160, "metrics": {"loss": 2.5}}),
        ("commit_succeeded", {"step": 40, "seconds": 0.1}),
        ("generation_ended", {"generation": 1, "last_step": 40, "reason": "the run ended"}),
        ("run_finished", {"status": "finished", "steps": 40, "samples": 160, "weights_sha256": HASH}),
    )


def invoke(*arguments: str) -> Any:
    """Runs a command. Raises its error, as `main` receives it."""
    result = CliRunner().invoke(cli_main.app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The console script: exit status, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["elastic-ddp", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli_main.main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a job. `sys.path` is restored afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "job", raising=False)
    functions = "def train(run): ...\n\ndef transform(rows, rng): ...\n\ndef collate(rows): ...\n\n"
    (tmp_path / "job.py").write_text(f"{functions}number = 3\n")
    (tmp_path / "run.toml").write_text(SETTINGS + JOB)
    return tmp_path / "run.toml"


class FakeTrainer:
    """Records its arguments."""

    made: dict[str, Any]

    def __init__(self, train: Any, **arguments: Any) -> None:
        FakeTrainer.made = {"train": train, **arguments}

    def fit(self) -> Any:
        class Result:
            summary = summarize([], name="lm", storage="runs")

        return Result


def test_show_prints_a_run_also_as_json_that_a_program_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger_of_a_run(tmp_path)
    status, shown, err = main(monkeypatch, capsys, "show", str(tmp_path))
    assert (status, err) == (0, "")
    for fact in ("lm", "finished", "40", "160", "generations", "start", "ended"):
        assert fact in shown
    summary = json.loads(invoke("show", str(tmp_path), "--json").stdout)
    assert (summary["name"], summary["status"], summary["steps"], summary["samples"]) == ("lm", "finished", 40, 160)
    assert (summary["weights_sha256"], summary["storage"]) == (HASH, str(tmp_path))
    assert summary["generations"][0]["world_size"] == 3


def test_show_of_a_stopped_run_has_its_total_steps(tmp_path: Path) -> None:
    ledger_of_a_run(tmp_path / "runs" / "lm")
    write_ledger(
        tmp_path / "runs" / "lm",
        "s2",
        ("session_started", {"resumed_from_step": 40, "total_steps": 2000, "config": {"name": "lm"}}),
        ("generation_started", {"generation": 1, "world_size": 3, "first_step": 40, "reason": "resume"}),
        ("generation_ended", {"generation": 1, "last_step": 50, "reason": "the run ended"}),
        ("run_finished", {"status": "stopped", "steps": 50, "total_steps": 2000, "samples": 200}),
    )
    shown = invoke("show", str(tmp_path / "runs" / "lm")).output
    assert "50 of 2,000" in shown and "the run was stopped" in shown


def test_show_of_a_live_run_has_the_status_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = ("session_started", {"config": {"name": "lm"}})
    write_ledger(tmp_path, "s1", started, ("generation_started", {"generation": 1, "world_size": 3, "reason": "start"}))
    assert "unfinished, its driver died" in invoke("show", str(tmp_path)).output
    with DriverLease(Storage(tmp_path), "lm", lambda _: "s1", print) as lease:
        lease.acquire()
        monkeypatch.setattr(Driver, "is_alive", lambda driver: True)  # seen from another process
        assert "running\n" in invoke("show", str(tmp_path)).output.replace(" ", "")
        monkeypatch.setattr(Driver, "is_alive", lambda driver: None)
        assert "unfinished" in invoke("show", str(tmp_path)).output, "on another machine, this is not known"
    monkeypatch.setattr(Driver, "is_alive", lambda driver: True)
    assert "unfinished" in invoke("show", str(tmp_path)).output


def test_version_prints_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(monkeypatch, capsys, "--version") == (0, f"elastic_ddp {version('elastic_ddp')}\n", "")


def test_the_error_of_a_folder_without_a_run_is_one_line_with_exit_status_1_and_nothing_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "nothing"
    status, out, err = main(monkeypatch, capsys, "show", str(folder))
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {folder}: ") and "<storage>/<name>" in err and err.count("\n") == 1
    assert not folder.exists()


def test_an_address_at_which_no_cluster_responds_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:70000")
    with pytest.raises(ConfigError, match=r"no Ray cluster responds at 127\.0\.0\.1:70000.*RAY_ADDRESS"):
        invoke("status")


def test_status_of_a_run_whose_driver_was_killed_explains_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster that the driver started may be gone as well."""
    driver = Driver.this_process()
    lease = {**asdict(driver), "session": "s1", "ray_address": "127.0.0.1:1", "count": 0, "released": False}
    Storage(tmp_path).write("driver/000001.json", json.dumps(lease).encode())
    with pytest.raises(ConfigError, match=r"no Ray cluster responds at 127\.0\.0\.1:1\..*the same command resumes it"):
        invoke("status", str(tmp_path))
    monkeypatch.setattr(Driver, "is_alive", lambda driver: False)
    with pytest.raises(ConfigError) as caught:
        invoke("status", str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path}: the driver of this run was killed, and the same command resumes")
    assert f"pid {driver.pid} of" in str(caught.value)


def test_status_without_live_runs_explains_how_to_resume_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ddp.driver.run_handle.live_runs", list)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.9:6379"))
    shown = invoke("status").output
    assert shown.startswith("No run is live on this cluster.") and "resumes" in shown


LONG_STATUS: dict[str, Any] = {
    "name": "gpt-large-pretraining-with-a-rather-long-name-2026-11-26",
    "state": "training",
    "step": 12_345_678,
    "total_steps": 100_000_000,
    "loss": 0.0012345678,
    "steps_per_s": 1234.5678,
    "generation": 1234,
    "world_size": 1024,
    "last_commit": 12_345_600,
    "draining": ["f" * 56, "e" * 56],
    "waiting_for": None,
    "driver": {"host": "head", "pid": 1, "uri": "s3://runs/lm", "job": None},
    "last_worker_failure": {"time": 1_795_169_703.0, "error": "exit signal SIGKILL"},
    "phases": {
        "phases": dict.fromkeys(STEP_PHASES, 0.1234567) | {"backward": 123.4567},
        "work_s": [123.4567] * 1024,
        "memory_bytes": [150 * 2**30] * 1024,
        "utilization": [1.0] * 1023 + [None],
    },
    "bottleneck": {
        "kind": "communication",
        "reason": "communication that the backward does not hide takes 55 % of the time.",
        "advice": "Try fewer workers (`elastic-ddp resize`).",
    },
    "standbys": [{"pid": 1}] * 1024,
    "members": [
        {"rank": 1023, "pid": 4_194_304, "node": "2001:0db8:85a3:0000:0000:8a2e:0370:7334", "node_id": "f" * 56}
    ],
}


def live(monkeypatch: pytest.MonkeyPatch, status: Mapping[str, Any]) -> None:
    """Makes `lm` the only live run, with this status."""
    run = SimpleNamespace(status=lambda: status)
    monkeypatch.setattr("elastic_ddp.driver.run_handle.live_runs", lambda: ["lm"])
    monkeypatch.setattr("elastic_ddp.driver.run_handle.get_run", {"lm": run}.__getitem__)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.9:6379"))


@pytest.mark.parametrize("arguments", [["status"], ["status", "lm"]])
def test_status_fits_80_columns_with_long_values(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    live(monkeypatch, LONG_STATUS)
    text = invoke(*arguments).output
    assert all(len(line) <= 80 for line in text.splitlines()) and "…" not in text
    for fact in (
        "12,345,678 of 100,000,000",
        "0.001235",
        "1,024 workers, generation 1,234, 1,024 standbys",
        "commit 12,345,600",
    ):
        assert fact in text
    if arguments == ["status", "lm"]:
        assert "1023  4194304" in text and "SIGKILL" in text
        assert "150.0 GiB" in text
        assert text.replace("\n", "").replace(" ", "").count("f" * 17) >= 3, "the node id is complete, perhaps folded"
        assert "eeee" in text, "a drained node is shown after its workers have left"


def test_status_of_a_run_that_is_starting_has_no_numbers_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = ("step", "loss", "steps_per_s", "generation", "world_size", "last_commit", "phases", "bottleneck")
    starting = {"state": "starting", "members": [], "standbys": [], "driver": {"job": "train-1"}}
    waiting = {"waiting_for": "waiting for resources: in use by run 'gpt' (CPU=4)."}
    live(monkeypatch, LONG_STATUS | dict.fromkeys(numbers) | starting | waiting)
    text = invoke("status", "lm").output
    assert "starting" in text and "step - of 100,000,000" in text and "0 workers" in text
    assert "in use by run 'gpt'" in " ".join(text.split()) and "submitted as job train-1" in text


def test_show_fits_80_columns_with_long_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    generation = {"generation": 123, "world_size": 1024, "first_step": 12_345_000, "reason": "workers joined and left"}
    for session in range(12):
        write_ledger(
            tmp_path,
            f"s{session:02}",
            ("session_started", {"config": {"name": "lm"}, "versions": {"torch": "2.13.0+cu130", "ray": "2.60.0"}}),
            ("generation_started", generation),
            (
                "steps_completed",
                {"generation": 123, "step": 12_345_678, "loss": 2.5, "samples": 10**12, "metrics": {"a" * 90: 1.5}},
            ),
            ("generation_ended", {"generation": 123, "last_step": 12_345_678, "reason": "a worker failed"}),
            ("run_finished", {"status": "stopped", "steps": 12_345_678, "total_steps": 10**8, "weights_sha256": HASH}),
        )
    text = invoke("show", str(tmp_path)).output
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines) and "…" not in text
    assert any(HASH in line for line in lines)
    headings = next(line for line in lines if line.split()[:1] == ["gen"])
    assert headings.split() == ["gen", "workers", "from", "step", "to", "step", "stall", "reason", "ended", "by"]
    assert any(line.split()[:4] == ["12.123", "1024", "12,345,000", "12,345,678"] for line in lines)


@pytest.mark.parametrize(
    ("command", "call", "printed"),
    [
        (["resize", "lm", "1"], ("resize", 1), "run lm: 1 worker requested"),
        (["checkpoint", "lm"], ("checkpoint",), "run lm: committed step 40"),
        (["stop", "lm"], ("stop",), "run lm: stopping"),
        (["drain", "lm", "a", "--deadline-s", "9"], ("drain", "a", 9.0), "run lm: 1 worker left a"),
        (["undrain", "lm", "a"], ("undrain", "a"), "run lm: workers may start on a again"),
    ],
    ids=lambda value: value[0],
)
def test_commands_for_a_live_run_call_its_handle(
    monkeypatch: pytest.MonkeyPatch, command: list[str], call: tuple[Any, ...], printed: str
) -> None:
    calls: list[tuple[Any, ...]] = []
    run = SimpleNamespace(
        resize=lambda num_workers: calls.append(("resize", num_workers)),
        checkpoint=lambda: calls.append(("checkpoint",)) or 40,  # type: ignore[func-returns-value]
        stop=lambda: calls.append(("stop",)),
        drain=lambda node, deadline_s: calls.append(("drain", node, deadline_s)) or 1,  # type: ignore[func-returns-value]
        undrain=lambda node: calls.append(("undrain", node)),
        status=lambda: {"state": "training"},
    )
    monkeypatch.setattr("elastic_ddp.driver.run_handle.get_run", {"lm": run}.__getitem__)
    assert invoke(*command).output.startswith(printed)
    assert calls == [call]


def test_a_command_for_a_live_run_tells_how_the_run_has_ended(tmp_path: Path) -> None:
    ledger_of_a_run(tmp_path)
    with pytest.raises(ConfigError, match=f"this run has finished. `elastic-ddp show {tmp_path}` shows"):
        invoke("status", str(tmp_path))
    write_ledger(tmp_path, "s2", ("session_started", {}), ("run_finished", {"status": "stopped", "steps": 50}))
    with pytest.raises(ConfigError, match="this run was stopped, and the command that started it resumes it"):
        invoke("resize", str(tmp_path), "2")
    with pytest.raises(ConfigError, match="no run is live in this folder"):
        invoke("status", str(tmp_path / "other"))


def test_run_passes_the_job_of_a_file_to_the_trainer(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "ElasticTrainer", FakeTrainer)
    job.write_text(SETTINGS + JOB + 'transform = "job.py:transform"\ncollate_fn = "job.py:collate"')
    invoke("run", str(job))
    import job as loaded  # type: ignore[import-not-found]

    made = FakeTrainer.made
    assert (made["train"], made["transform"]) == (loaded.train, loaded.transform)
    assert made["collate_fn"] is loaded.collate
    assert (made["data"], made["config"].name, made["config"].steps) == ("data/", "lm", 10)


def test_a_function_of_an_installed_module_is_loaded_by_its_name(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "ElasticTrainer", FakeTrainer)
    job.write_text(SETTINGS + JOB.replace("job.py:train", "json:dumps"))
    invoke("run", str(job))
    assert FakeTrainer.made["train"] is json.dumps and "transform" not in FakeTrainer.made


CALLS_WHAT_IT_READS = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(3))"


def test_functions_of_a_job_reach_processes_that_do_not_have_the_file(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as workers on other nodes, with another working directory."""
    monkeypatch.setattr(trainer, "ElasticTrainer", FakeTrainer)
    (job.parent / "job.py").write_text("FACTOR = 2\n\ndef train(run):\n    return run * FACTOR\n")
    invoke("run", str(job))
    sent = ray.cloudpickle.dumps(FakeTrainer.made["train"])
    done = subprocess.run([sys.executable, "-c", CALLS_WHAT_IT_READS], input=sent, capture_output=True, cwd="/")
    assert (done.stdout, done.stderr) == (b"6\n", b"")


def test_a_job_with_the_name_of_an_installed_module_is_loaded_from_its_folder(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "ElasticTrainer", FakeTrainer)
    (job.parent / "json.py").write_text("def train(run): ...\n\ndef transform(rows, rng): ...\n")
    job.write_text(SETTINGS + JOB.replace("job.py", "json.py") + 'transform = "json.py:transform"\n')
    invoke("run", str(job))
    made = FakeTrainer.made
    assert made["train"].__code__.co_filename == str(job.parent / "json.py")
    assert made["train"].__globals__ is made["transform"].__globals__, "the file is imported once"
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("", r"the \[job\] table has the keys \[\]\. It needs train and data.*train = "),
        ('[job]\ntrain = "job.py:train"', r"the \[job\] table has the keys \['train'\]"),
        (JOB + 'model = "gpt"', r"the \[job\] table has the keys \['data', 'model', 'train'\]"),
        (JOB.replace('"job.py:train"', "3"), "3 does not name a function. Use module:function or file.py:function."),
        (JOB.replace("job.py:train", "train"), "'train' does not name a function"),
        (JOB.replace("job.py", "nowhere.py"), "cannot be loaded: FileNotFoundError: .*No such file.*/nowhere.py'"),
        (JOB.replace("py:train", "py:lost"), "cannot be loaded: AttributeError: module 'job' has no attribute 'lost'"),
    ],
    ids=str,
)
def test_a_job_table_that_cannot_be_used_is_refused(job: Path, table: str, message: str) -> None:
    job.write_text(SETTINGS + table)
    with pytest.raises(ConfigError, match=f"^{job}: .*{message}"):
        invoke("run", str(job))


def test_arguments_after_a_toml_file_and_a_missing_file_are_refused(job: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^--steps 5: .*{job}"):
        invoke("run", str(job), "--steps", "5")
    with pytest.raises(ConfigError, match=r"missing\.toml: no such file"):
        invoke("run", str(job.parent / "missing.toml"))


def test_a_script_runs_as_the_main_program_and_can_import_its_neighbours(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, seen = job.parent / "script.py", job.parent / "seen.json"
    script.write_text(
        "import json, sys\nimport job\nfrom pathlib import Path\n"
        f"Path({str(seen)!r}).write_text(json.dumps([__name__, sys.argv, job.number]))\n"
    )
    monkeypatch.setattr(sys, "argv", ["elastic-ddp"])
    invoke("run", str(script), "--help", "1:2", "-v")
    assert json.loads(seen.read_text()) == ["__main__", [str(script), "--help", "1:2", "-v"], 3]


RAY_LOGS_IN_EACH_JSON_COMMAND = """
import os, sys, typer
from elastic_ddp.cli import main, output

def json_commands(command, path):
    for name, child in getattr(command, "commands", {}).items():
        yield from json_commands(child, [*path, name])
    if any("--json" in parameter.opts for parameter in command.params):
        yield command, path

stdout = os.dup(1)
for command, path in json_commands(typer.main.get_command(main.app), []):
    os.dup2(stdout, 1)  # as in a process of its own
    output._for_json.clear()
    words = ["run"] * sum(each.param_type_name == "argument" and each.required for each in command.params)
    command.make_context(path[-1], [*words, "--json"])
    os.write(1, b"[raylet.cc:1] a node died\\n")
    print("a line of Python")
    output.print_json(path)
os.write(1, b"[raylet.cc:1] shutting down\\n")
"""


def test_standard_output_of_json_commands_has_json_and_no_log_of_rays_c_code() -> None:
    line = [sys.executable, "-c", RAY_LOGS_IN_EACH_JSON_COMMAND]
    done = subprocess.run(line, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    commands = [" ".join(json.loads(each)) for each in re.split(r"(?<=\])\n", done.stdout)[:-1]]
    assert {"doctor", "status", "show", "events", "stacks", "checkpoints ls", "checkpoints prune"} <= set(commands)
    assert done.stderr.count("a node died") == len(commands) and "shutting down" in done.stderr
