"""The command line: what it shows, what it refuses, and how it ends."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
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
from elastic_ddp.storage.lease import DriverLease
from elastic_ddp.storage.lease_holder import Driver
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import Ledger, summarize
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


def ledger_of_a_run(folder: Path) -> None:
    seconds = iter(range(1_000_000, 2_000_000))
    ledger = Ledger(Storage(folder), "s1", lambda: float(next(seconds)))
    ledger.append(
        ledger_event("session_started", resumed_from_step=None, config={"name": "lm"}, versions={"torch": "2.13"})
    )
    ledger.append(ledger_event("generation", generation=1, world_size=3, first_step=0, reason="start"))
    ledger.append(ledger_event("steps", step=40, loss=2.5, samples=160, metrics={"loss": 2.5}))
    ledger.append(ledger_event("commit", step=40, seconds=0.1))
    ledger.append(ledger_event("generation_ended", generation=1, last_step=40, reason="the run ended"))
    ledger.append(ledger_event("finished", status="finished", steps=40, samples=160, weights_sha256="ab" * 32))
    ledger.close()


def invoke(*arguments: str) -> Any:
    """Our errors are raised, as `main` gets them."""
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
    """A job's files. What a command adds to the path of modules is gone afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "job", raising=False)
    (tmp_path / "job.py").write_text("def train(run): ...\n\ndef transform(rows, rng): ...\n\nnumber = 3\n")
    (tmp_path / "run.toml").write_text(SETTINGS + JOB)
    return tmp_path / "run.toml"


class FakeTrainer:
    """Remembers what it was made of."""

    made: dict[str, Any]

    def __init__(self, train: Any, **arguments: Any) -> None:
        FakeTrainer.made = {"train": train, **arguments}

    def fit(self) -> Any:
        class Result:
            summary = summarize([], name="lm", storage="runs")

        return Result


def test_show_prints_the_facts_and_the_generations_of_a_run(tmp_path: Path) -> None:
    ledger_of_a_run(tmp_path)
    shown = invoke("show", str(tmp_path)).output
    for fact in ("lm", "finished", "40", "160", "generations", "start", "ended"):
        assert fact in shown


def test_show_of_a_stopped_run_says_what_is_left_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger_of_a_run(tmp_path / "runs" / "lm")
    with closing(Ledger(Storage(tmp_path / "runs" / "lm"), "s2")) as ledger:
        ledger.append(ledger_event("session_started", resumed_from_step=40, config={"name": "lm"}, versions={}))
        ledger.append(ledger_event("generation", generation=1, world_size=3, first_step=40, reason="resume"))
        ledger.append(ledger_event("generation_ended", generation=1, last_step=50, reason="the run ended"))
        ledger.append(ledger_event("finished", status="stopped", steps=50, total_steps=2000, samples=200))
    shown = invoke("show", str(tmp_path / "runs" / "lm")).output
    assert "50 of 2,000" in shown and "the run was stopped" in shown
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^lm: there is no run here; give {re.escape(str(Path('runs', 'lm')))}$"):
        invoke("show", "lm")


def test_show_prints_json_that_a_program_can_read(tmp_path: Path) -> None:
    ledger_of_a_run(tmp_path)
    summary = json.loads(invoke("show", str(tmp_path), "--json").stdout)
    assert (summary["name"], summary["status"], summary["steps"], summary["samples"]) == ("lm", "finished", 40, 160)
    assert summary["weights_sha256"] == "ab" * 32
    assert summary["generations"][0]["world_size"] == 3
    assert summary["storage"] == str(tmp_path)


def test_show_of_a_live_run_says_that_it_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(Storage(tmp_path), "s1")
    ledger.append(ledger_event("session_started", resumed_from_step=None, config={"name": "lm"}, versions={}))
    ledger.append(ledger_event("generation", generation=1, world_size=3, first_step=0, reason="start"))
    ledger.close()
    assert "unfinished" in (killed := invoke("show", str(tmp_path)).output) and "nothing that was logged" in killed
    with DriverLease(Storage(tmp_path), "lm", "s1", print) as lease:
        lease.acquire()
        monkeypatch.setattr(Driver, "is_alive", lambda driver: True)  # as another process sees it
        live = invoke("show", str(tmp_path)).output
        assert "running" in live and "nothing that was logged" not in live
        with closing(Ledger(Storage(tmp_path), "s2")) as again:  # resumed, and nobody trains yet
            again.append(ledger_event("session_started", resumed_from_step=None, config={"name": "lm"}, versions={}))
        live = invoke("show", str(tmp_path)).output
        assert "running" in live and "nothing that was logged" in live
        monkeypatch.setattr(Driver, "is_alive", lambda driver: None)
        assert "unfinished" in invoke("show", str(tmp_path)).output, "on another machine, it cannot be told"
    monkeypatch.setattr(Driver, "is_alive", lambda driver: True)
    assert "unfinished" in invoke("show", str(tmp_path)).output


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(monkeypatch, capsys, "--version") == (0, f"elastic_ddp {version('elastic_ddp')}\n", "")


def test_show_of_nothing_says_what_to_give_and_makes_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "nothing"
    with pytest.raises(ConfigError) as caught:
        invoke("show", str(folder))
    assert str(caught.value) == f"{folder}: there is no run here; give <storage>/<name>"
    assert not folder.exists()


def test_our_errors_are_one_line_and_a_failed_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = main(monkeypatch, capsys, "show", str(tmp_path))
    assert (status, out) == (1, "")
    assert err == f"error: {tmp_path}: there is no run here; give <storage>/<name>\n"


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "[::1]:{port}", "127.0.0.1:70000", "no-such-host.invalid:1"])
def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        address = address.format(port=bound.getsockname()[1])
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=f"no Ray cluster at {re.escape(address)} to ask; set RAY_ADDRESS"):
            invoke("status")


def test_a_run_whose_driver_was_killed_is_resumed_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster that it started may be gone as well: nobody is to look for that."""
    driver = Driver.this_process("s1")
    lease = {**asdict(driver), "ray_address": "127.0.0.1:1", "count": 0, "released": False}
    Storage(tmp_path).write("driver/000001.json", json.dumps(lease).encode())
    with pytest.raises(ConfigError, match=r"no Ray cluster at 127\.0\.0\.1:1 .* the same command resumes it from"):
        invoke("status", str(tmp_path))
    monkeypatch.setattr(Driver, "is_alive", lambda driver: False)
    with pytest.raises(ConfigError) as caught:
        invoke("status", str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path}: the driver of this run was killed, and the same command resumes")
    assert f"It was pid {driver.pid} of" in str(caught.value)


def test_status_of_no_run_says_what_becomes_of_an_interrupted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ddp.driver.run_handle.live_runs", list)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.9:6379"))
    shown = invoke("status").output
    assert shown.startswith("no run is live on this cluster; the command of an interrupted one resumes it\n")


@pytest.mark.parametrize(
    ("command", "asked", "said"),
    [
        (
            ["resize", "lm", "1"],
            ("resize", 1),
            "run lm is to have 1 worker: `elastic-ddp status` tells how many it has",
        ),
        (["checkpoint", "lm"], ("checkpoint",), "run lm committed step 40"),
        (["stop", "lm"], ("stop",), "run lm commits and stops at its next step boundary; its own command resumes it"),
        (
            ["drain", "lm", "10.0.0.1", "--deadline-s", "9"],
            ("drain", "10.0.0.1", 9.0),
            "1 worker of run lm left 10.0.0.1",
        ),
    ],
    ids=lambda value: value[0],
)
def test_a_live_run_is_asked_for_what_was_typed(
    monkeypatch: pytest.MonkeyPatch, command: list[str], asked: tuple[Any, ...], said: str
) -> None:
    heard: list[tuple[Any, ...]] = []
    run = SimpleNamespace(
        resize=lambda num_workers: heard.append(("resize", num_workers)),
        checkpoint=lambda: heard.append(("checkpoint",)) or 40,  # type: ignore[func-returns-value]
        stop=lambda: heard.append(("stop",)),
        drain=lambda node, deadline_s: heard.append(("drain", node, deadline_s)) or 1,  # type: ignore[func-returns-value]
        status=lambda: {"state": "training"},
    )
    monkeypatch.setattr("elastic_ddp.driver.run_handle.get_run", {"lm": run}.__getitem__)
    assert invoke(*command).output.strip() == said
    assert heard == [asked]


def test_a_command_that_succeeds_exits_with_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger_of_a_run(tmp_path)
    status, out, err = main(monkeypatch, capsys, "show", str(tmp_path))
    assert (status, err) == (0, "")
    assert "finished" in out


def test_run_hands_the_job_of_a_file_to_the_trainer(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "ElasticTrainer", FakeTrainer)
    job.write_text(SETTINGS + JOB + 'transform = "job.py:transform"')
    invoke("run", str(job))
    import job as loaded  # type: ignore[import-not-found]

    made = FakeTrainer.made
    assert (made["train"], made["transform"]) == (loaded.train, loaded.transform)
    assert (made["data"], made["config"].name, made["config"].steps) == ("data/", "lm", 10)


def test_a_function_of_an_installed_module_is_loaded_by_its_name(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "ElasticTrainer", FakeTrainer)
    job.write_text(SETTINGS + JOB.replace("job.py:train", "json:dumps"))
    invoke("run", str(job))
    assert FakeTrainer.made["train"] is json.dumps


CALLS_WHAT_IT_READS = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(3))"


def test_functions_beside_a_job_reach_processes_that_do_not_have_their_file(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As workers on other nodes, whose folder is another one too."""
    monkeypatch.setattr(trainer, "ElasticTrainer", FakeTrainer)
    (job.parent / "job.py").write_text("FACTOR = 2\n\ndef train(run):\n    return run * FACTOR\n")
    invoke("run", str(job))
    sent = ray.cloudpickle.dumps(FakeTrainer.made["train"])
    done = subprocess.run([sys.executable, "-c", CALLS_WHAT_IT_READS], input=sent, capture_output=True, cwd="/")
    assert (done.stdout, done.stderr) == (b"6\n", b"")


def test_a_job_is_found_beside_its_file_whatever_else_has_its_name(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "ElasticTrainer", FakeTrainer)
    (job.parent / "json.py").write_text("def train(run): ...\n\ndef transform(rows, rng): ...\n")
    job.write_text(SETTINGS + JOB.replace("job.py", "json.py") + 'transform = "json.py:transform"\n')
    invoke("run", str(job))
    made = FakeTrainer.made
    assert made["train"].__code__.co_filename == str(job.parent / "json.py")
    assert made["train"].__globals__ is made["transform"].__globals__, "the file is read once"
    assert sys.modules["json"] is json


def test_what_follows_a_script_is_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv[1:])\n")
    assert invoke("run", str(tmp_path / "script.py"), "--help", "-x", "1").output == "['--help', '-x', '1']\n"


def test_run_needs_no_transform(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "ElasticTrainer", FakeTrainer)
    invoke("run", str(job))
    assert FakeTrainer.made["transform"] is None


@pytest.mark.parametrize(
    ("table", "held"),
    [
        ('[job]\ntrain = "job.py:train"', "['train']"),
        ('[job]\ntrain = "job.py:train"\ndata = "data/"\nmodel = "gpt"', "['data', 'model', 'train']"),
    ],
    ids=["data-missing", "unknown-key"],
)
def test_a_job_table_with_other_keys_is_refused_with_those_it_takes(job: Path, table: str, held: str) -> None:
    job.write_text(SETTINGS + table)
    with pytest.raises(ConfigError) as caught:
        invoke("run", str(job))
    assert str(caught.value) == (
        f"{job}: [job] holds {held}; it takes train and data, and may have transform: "
        'train = "file.py:function", data = "s3://bucket/train/"'
    )


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("train", "'train' names no function; write module:function or file.py:function"),
        (
            "nowhere.py:train",
            "'nowhere.py:train' cannot be loaded: FileNotFoundError: [Errno 2] No such file or directory: "
            "'{folder}/nowhere.py'",
        ),
        (
            "job.py:missing",
            "'job.py:missing' cannot be loaded: AttributeError: module 'job' has no attribute 'missing'",
        ),
        ("job.py:number", "'job.py:number' is a int, not a function"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused(job: Path, reference: str, message: str) -> None:
    job.write_text(SETTINGS + JOB.replace("job.py:train", reference))
    with pytest.raises(ConfigError) as caught:
        invoke("run", str(job))
    assert str(caught.value) == f"{job}: {message}".replace("{folder}", str(job.parent))


def test_a_job_without_a_table_or_with_a_number_for_a_function_is_refused(job: Path) -> None:
    job.write_text(SETTINGS)
    with pytest.raises(ConfigError, match=r"there is no \[job\] table; it says what to run: train = "):
        invoke("run", str(job))
    job.write_text(SETTINGS + '[job]\ntrain = 3\ndata = "data/"')
    with pytest.raises(ConfigError, match=r"3 names no function; write module:function or file.py:function"):
        invoke("run", str(job))


def test_a_setting_that_is_wrong_is_refused_before_anything_starts(job: Path) -> None:
    job.write_text(SETTINGS.replace("steps = 10", "stepz = 10") + JOB)
    with pytest.raises(ConfigError, match=r"stepz=10: .*did you mean steps"):
        invoke("run", str(job))


def test_a_file_takes_no_further_arguments(job: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        invoke("run", str(job), "--steps", "5")
    assert str(caught.value) == f"--steps 5: a TOML file takes no further arguments; put them into {job}"


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: there is no such file; give a Python script or a TOML file"):
        invoke("run", str(tmp_path / "missing.toml"))


def test_a_script_runs_as_the_main_program_with_its_arguments_and_neighbours(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, seen = job.parent / "script.py", job.parent / "seen.json"
    script.write_text(
        "import json, sys\nimport job\nfrom pathlib import Path\n"
        f"Path({str(seen)!r}).write_text(json.dumps([__name__, sys.argv, job.number]))\n"
    )
    monkeypatch.setattr(sys, "argv", ["elastic-ddp"])
    invoke("run", str(script), "--workers", "1:2", "extra", "-v")
    assert json.loads(seen.read_text()) == ["__main__", [str(script), "--workers", "1:2", "extra", "-v"], 3]
