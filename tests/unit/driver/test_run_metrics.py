"""What a run's metrics show at each event, and that the dashboard shows them."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.util.metrics

from elastic_ddp.driver import metrics
from elastic_ddp.driver.metrics import COUNTERS, FAILURES, GAUGES, PREFIX, RunMetrics
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import PhasesMeasured
from elastic_ddp.telemetry.goodput import goodput
from elastic_ddp.telemetry.sessions import read_sessions
from tests.unit.ledger_events import accounted, formed, ledger_event, started

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "cluster/grafana/elastic_ddp.json").read_text())
GUIDE = ROOT / "docs/guides/prometheus.md"
Values = dict[tuple[str, ...], float]


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> Values:
    """The newest values by name and labels, without the label `run`, which is `gpt`."""
    found: Values = {}

    class Fake:
        def __init__(self, name: str, description: str, labels: tuple[str, ...]) -> None:
            assert name.startswith(PREFIX) and description
            self._name, self._labels = name.removeprefix(PREFIX), labels

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert tuple(tags) == self._labels and tags["run"] == "gpt", "Ray refuses other labels"
            found[self._name, *list(tags.values())[1:]] = value

        def _record(self, value: float, tags: dict[str, str]) -> None:
            assert value == 0
            self.set(value, tags)

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0, "Ray refuses it"
            self.set(found[self._name, *list(tags.values())[1:]] + value, tags)

    monkeypatch.setattr(metrics, "Gauge", Fake)
    monkeypatch.setattr(metrics, "Counter", Fake)
    return found


class Clock:
    """Follows the time of the events."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def play(*events: Event, resume_from: Any = None) -> tuple[RunMetrics, Clock]:
    """Records events at the times at which the driver appends them."""
    clock = Clock()
    recorded = RunMetrics("gpt", resume_from, clock)
    for event in events:
        clock.now = event.time
        recorded.record(event)
    return recorded, clock


def training(generation: int, at: float, world_size: int, step: int) -> Event:
    facts = {"generation": generation, "world_size": world_size, "first_step": step, "reason": "start"}
    return ledger_event("generation_started", at=at, time=at, **facts)


def test_step_loss_samples_and_commits_are_those_of_the_ledger(values: Values) -> None:
    play(
        started(100.0),
        formed(1, 110.0, None),
        training(1, 111.0, 2, 0),
        accounted("steps_completed", 1, 121.0, step=10, samples=480, loss=2.5, useful=10.0),
        accounted("commit_succeeded", 1, 122.0, step=10, seconds=0.1, useful=10.0),
        accounted("steps_completed", 1, 131.0, step=20, samples=960, loss=2.0, useful=20.0),
    )
    assert values["step",] == values["steps_total",] == 20 and values["loss",] == 2.0
    assert values["samples_total",] == 960 and values["world_size",] == 2
    assert values["commits_total",] == 1 and values["last_commit_timestamp_seconds",] == 122.0
    assert {kind: values["failures_total", kind] for kind in FAILURES} == dict.fromkeys(FAILURES, 0)


def test_a_resumed_run_continues_its_step_and_the_age_of_a_commit_begins_anew(values: Values) -> None:
    commit = SimpleNamespace(step=40, record={"samples": 1920, "time": 50.0})
    play(started(100.0, step=40), resume_from=commit)
    assert values["step",] == 40 and values["last_commit_timestamp_seconds",] == 100.0, "an alert would fire at once"
    steps = accounted("steps_completed", 1, 120.0, step=50, samples=2400, useful=9.0)
    play(started(100.0, step=40), training(1, 110.0, 1, 40), steps, resume_from=commit)
    assert values["step",] == 50 and values["steps_total",] == 10 and values["samples_total",] == 480


def test_steps_that_are_repeated_count_again(values: Values) -> None:
    play(
        started(100.0),
        training(1, 110.0, 1, 0),
        accounted("steps_completed", 1, 120.0, step=30, samples=1440, useful=9.0),
        training(2, 130.0, 1, 20),  # all workers had failed; the newest commit is of step 20
        accounted("steps_completed", 2, 140.0, step=30, samples=1440, useful=9.0),
        accounted("steps_completed", 2, 150.0, step=40, samples=1920, useful=18.0),
    )
    assert values["step",] == 40 and values["steps_total",] == 50
    assert values["samples_total",] == 1440 + 480, "how many samples the first of them repeats is not known"


def test_steps_before_a_new_generation_count_though_none_of_them_was_logged(values: Values) -> None:
    play(
        started(100.0),
        training(1, 110.0, 1, 0),
        accounted("steps_completed", 1, 120.0, step=21, samples=168, useful=9.0),
        training(2, 130.0, 2, 29),
        training(3, 140.0, 3, 40),
        accounted("steps_completed", 3, 150.0, step=41, samples=328, useful=9.0),
    )
    assert values["step",] == values["steps_total",] == 41 and values["samples_total",] == 328


def test_a_session_that_is_over_has_no_values_that_an_alert_compares(values: Values) -> None:
    recorded, _ = play(started(100.0), training(1, 110.0, 1, 0), ledger_event("run_finished", time=120.0))
    recorded.end()
    assert math.isnan(values["world_size",]) and math.isnan(values["last_commit_timestamp_seconds",])
    assert values["step",] == 0


def alerts() -> dict[str, dict[str, str]]:
    """The alerts of the guide, by name."""
    rows = re.findall(r"^\| ([^|]+) \| `(.*_elastic_ddp_.*)` \| (?:`(\w+)`)? ?\|$", GUIDE.read_text(), re.MULTILINE)
    return {name: {"alert": name, "expr": expr, **({"for": wait} if wait else {})} for name, expr, wait in rows}


SERIES: dict[str, dict[str, str]] = {
    "starts": {"world_size": "0x4 2x700", "last_commit_timestamp_seconds": "0+15x700"},
    "waits": {"world_size": "2 0x700", "last_commit_timestamp_seconds": "0+15x700"},
    "never commits": {"world_size": "2x700", "last_commit_timestamp_seconds": "0x700"},
    "is over": {"world_size": "2" + 700 * " NaN", "last_commit_timestamp_seconds": "0" + 700 * " NaN"},
    "loses workers": {'failures_total{kind="worker"}': "0+1x700"},
    "cannot commit": {'failures_total{kind="commit"}': "0+1x700"},
}
"""Values by run and metric, every 15 s."""


@pytest.mark.parametrize(
    ("alert", "early", "late"),
    [
        ("nothing trains for ten minutes", [], ["waits"]),
        ("no commit for an hour", [], ["never commits"]),
        ("workers fail often", ["loses workers"], ["loses workers"]),
    ],
)
def test_the_alerts_of_the_guide_fire_for_the_runs_that_they_name(
    tmp_path: Path, alert: str, early: list[str], late: list[str]
) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("needs promtool, of Debian's package prometheus")
    assert len(alerts()) == 4
    (tmp_path / "rules").write_text(json.dumps({"groups": [{"name": "guide", "rules": [alerts()[alert]]}]}))
    series = []
    for run, metrics_of_run in SERIES.items():
        for metric, values in metrics_of_run.items():
            name, _, labels = metric.partition("{")
            selected = f'run="{run}",{labels}' if labels else f'run="{run}"}}'
            series.append({"series": f"ray_{PREFIX}{name}{{{selected}", "values": values})
    expected = [
        {"eval_time": at, "alertname": alert, "exp_alerts": [{"exp_labels": {"run": run}} for run in runs]}
        for at, runs in (("9m", early), ("2h", late))
    ]
    case = {"interval": "15s", "input_series": series, "alert_rule_test": expected}
    tests = {"rule_files": ["rules"], "evaluation_interval": "15s", "tests": [case]}
    (tmp_path / "tests").write_text(json.dumps(tests))
    checked = subprocess.run([promtool, "test", "rules", "tests"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_killed_worker_is_one_failure_and_no_worker_trains_until_it_is_replaced(values: Values) -> None:
    failed = ledger_event("worker_failed", at=112.0, time=112.0, generation=1, member="a", error="SIGKILL")
    recorded, _ = play(started(100.0), training(1, 110.0, 2, 0), failed, failed)
    assert values["failures_total", "worker"] == 1 and values["world_size",] == 0
    recorded.record(training(2, 113.0, 1, 5))
    assert values["world_size",] == 1
    failures = (
        "newcomer_failed start_failed commit_failed hang_detected rendezvous_restarted run_failed corruption_found"
    )
    for name in failures.split():
        recorded.record(ledger_event(name, time=120.0))
    kinds = {kind: values["failures_total", kind] for kind in FAILURES}
    once = dict.fromkeys(("worker", "commit", "hang", "rendezvous", "corruption", "run"), 1)
    assert kinds == {**once, "connection": 0, "start": 2}


def test_phases_and_gpus_are_shown_and_ranks_that_are_gone_use_no_memory(values: Values) -> None:
    of_ranks: Any = {"work_s": [0.1, 0.4], "micro_batches": [1, 2], "memory_bytes": [5, 6], "utilization": [0.9, None]}
    measured = PhasesMeasured(generation=1, step=10, num_steps=10, phases={"data": 0.1}, **of_ranks)
    recorded, _ = play(started(100.0), training(1, 110.0, 2, 0), measured)
    assert values["phase_seconds", "data"] == 0.1 and values["micro_batch_work_seconds", "1"] == 0.2
    assert values["gpu_memory_bytes", "1"] == 6 and values["gpu_utilization_ratio", "0"] == 0.9
    assert ("gpu_utilization_ratio", "1") not in values
    recorded.record(training(2, 113.0, 1, 5))
    assert values["gpu_memory_bytes", "0"] == 5
    assert values["gpu_memory_bytes", "1"] == values["micro_batch_work_seconds", "1"] == 0


def test_the_goodput_is_that_of_the_ledger_and_falls_while_the_run_waits(values: Values) -> None:
    events = [
        started(0.0),
        formed(1, 10.0, None),
        training(1, 11.0, 2, 0),
        *(accounted("steps_completed", 1, 20.0 + at, step=at, useful=9.0 + at) for at in range(1, 60)),
        accounted("commit_succeeded", 1, 80.0, step=59, useful=68.0),
        accounted("steps_completed", 1, 90.0, step=70, useful=78.0),
        ledger_event("worker_failed", at=91.0, time=91.0, generation=1, member="a", error="SIGKILL"),
        ledger_event("worker_failed", at=91.0, time=91.1, generation=1, member="b", error="SIGKILL"),
        formed(2, 100.0, None, reason="worker failed"),
        training(2, 101.0, 2, 59),
        accounted("steps_completed", 2, 120.0, step=70, useful=18.0, hand_over=0.5),
    ]
    events = [replace(each, session="") for each in events]  # the ledger sets it
    recorded, clock = play(*events)
    assert values["goodput_ratio",] == goodput(read_sessions(events))["goodput"]
    recorded.record(ledger_event("worker_failed", at=121.0, time=121.0, generation=2, member="c", error="SIGKILL"))
    shares = []
    for clock.now in (150.0, 151.0, 200.0):
        recorded.refresh()
        shares.append(values["goodput_ratio",])
    assert goodput(read_sessions(events))["goodput"] > shares[0] == shares[1] > shares[2] > 0  # type: ignore[operator]


def test_an_error_in_a_metric_does_not_end_the_run(
    values: Values, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded, _ = play(started(0.0))
    monkeypatch.setattr(metrics, "goodput", lambda events: 1 / 0)
    for _ in range(3):
        recorded.record(formed(1, 10.0, None))
        recorded.refresh()
    assert caplog.text.count("a metric could not be recorded") == 1


def test_without_an_exporter_metrics_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    assert metrics.Gauge is ray.util.metrics.Gauge
    steps = accounted("steps_completed", 1, 121.0, step=10, loss=float("nan"), useful=9.0)
    play(started(100.0), training(1, 110.0, 2, 0), steps)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("page", ["cluster/grafana/elastic_ddp.json", "docs/guides/prometheus.md"])
def test_the_dashboard_and_the_guide_have_each_metric_and_no_other(page: str) -> None:
    shown = set(re.findall(rf"ray_{PREFIX}(\w+)", (ROOT / page).read_text()))
    assert shown == {*GAUGES, *COUNTERS}


def test_the_dashboard_has_variables_and_panels_that_do_not_overlap() -> None:
    variables = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "run": "query"}
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert target["expr"].count('run="$run"') == target["expr"].count(f"ray_{PREFIX}"), target["expr"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
