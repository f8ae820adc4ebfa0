"""A training function that leaves its loop before the last step is called again by the same command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.driver.trainer import ElasticTrainer
from elastic_ddp.report.history import read_history
from elastic_ddp.report.page import headline
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry.goodput import goodput
from elastic_ddp.telemetry.sessions import read_sessions
from tests.unit.cli.test_cli import invoke, write_ledger
from tests.unit.report_runs import Recorder
from tests.unit.single_worker import NewRun, train

SETTINGS = {"name": "run", "steps": 40, "global_batch_size": 8, "micro_batch_size": 8}


def test_some_steps_and_then_the_rest_give_the_weights_of_an_uninterrupted_run(new_run: NewRun) -> None:
    calm = train(new_run(folder="calm", steps=8))
    left = train(new_run(folder="left", steps=8), last=2)
    rest = train(new_run(folder="left", steps=8))
    assert (left["steps"], left["total_steps"]) == (3, 8)
    assert rest == calm and left["weights_sha256"] != rest["weights_sha256"]


@pytest.mark.parametrize(
    ("summary", "is_finished"),
    [
        ({"status": "left", "steps": 10, "total_steps": 40}, False),
        ({"status": "finished", "steps": 40, "total_steps": 40}, True),
        ({"status": "finished", "steps": 30, "total_steps": 30}, False),  # it now gets more steps
    ],
)
def test_only_a_run_that_has_done_all_its_steps_is_finished(
    tmp_path: Path, summary: dict[str, Any], is_finished: bool
) -> None:
    Storage(tmp_path / "run").write("summary.json", json.dumps(summary).encode())
    trainer = ElasticTrainer(lambda run: None, "data", {**SETTINGS, "storage": str(tmp_path)})
    assert (trainer._finished_result(40) is not None) == is_finished


def test_show_and_watch_say_at_which_step_a_run_left_its_loop(tmp_path: Path) -> None:
    started = ("session_started", {"config": {"name": "lm"}, "total_steps": 40})
    write_ledger(tmp_path, "s1", started, ("run_finished", {"status": "left", "steps": 10, "total_steps": 40}))
    for command in (["show"], ["watch", "--once"]):
        assert "left its loop at step 10 of 40" in invoke(*command, str(tmp_path)).output


def test_the_report_says_at_which_step_a_run_left_its_loop() -> None:
    run = Recorder("lm")
    run.start()
    run.form("ab", "start")
    run.train(120)
    run.finish("left", 480)
    history = read_history(run.events)
    assert headline(history.summary).startswith("Left its loop at step 120 of 480 after")
    [mark] = history.marks
    assert (mark.kind, mark.step, mark.text) == ("stopped", 120, "the run left its loop at step 120 of 480")
    assert goodput(read_sessions(run.events))["waiting"] == 0.0, "no rank waits at the end of the run"
