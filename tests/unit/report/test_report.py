"""The report of runs: what it says about them, and that it shows text of a ledger as text."""

from __future__ import annotations

import math
import re
import sys
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elastic_ddp.cli.watch import frame
from elastic_ddp.errors import ConfigError, StorageError
from elastic_ddp.formatting import duration
from elastic_ddp.report import curves
from elastic_ddp.report.history import Point, read_history, slowdown, thin, throughput, with_dead_driver
from elastic_ddp.report.marks import LOOKS
from elastic_ddp.report.page import charts, headline, render_page
from elastic_ddp.telemetry import Ledger
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.phases import PHASE_COLORS, STEP_PHASES
from tests.unit.cli.test_cli import invoke
from tests.unit.ledger_events import ledger_event
from tests.unit.report_runs import Recorder, calm, eventful

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[0m"


LM = read_history(eventful())
CALM = read_history(calm(max_workers=2))


@cache
def charts_of(*labels: str) -> dict[str, Any]:
    """The charts of `LM`, `CALM` or both, by title."""
    return {chart.title: chart for chart in charts([{"lm": LM, "calm": CALM}[label] for label in labels])}


def test_the_headline_says_what_happened() -> None:
    assert headline(LM.summary) == (
        "Finished at step 480 after 2 min 8 s on 2 to 3 workers; 2 failed, 1 drained; resumed once; goodput 87.1%."
    )
    undisturbed = "Finished at step 480 after 2 min 32 s on 2 workers; no worker failed or drained; goodput 95.2%."
    assert headline(CALM.summary) == undisturbed
    stopped = read_history([event for event in eventful() if event.session == "s1"]).summary
    assert headline(stopped).startswith("Stopped at step 345 of 480 after 1 min 33 s")
    assert headline(stopped | {"status": "running", "total_steps": None}).startswith("Running at step 345 after ")
    nothing = "Running or unfinished after 0 s; no worker failed or drained."
    assert headline(read_history([]).summary) == nothing


def test_marks_are_what_changed_the_run_in_order() -> None:
    assert [(mark.kind, mark.step, mark.text) for mark in LM.marks] == [
        ("failed", 120, "rank 1 (n1, pid 12) failed: its process ended: exit signal SIGKILL"),
        ("joined", 160, "rank 2 (n1, pid 14) joined: 3 train now"),
        ("failed", 240, "rank 0 (n1, pid 11) failed: its process ended: exit signal SIGKILL"),
        ("joined", 290, "rank 2 (n1, pid 15) joined: 3 train now"),
        ("drained", 330, "rank 1 (n1, pid 14) drained: its node or process was to stop"),
        ("stopped", 345, "the run was stopped"),
        ("resumed", 345, "resumed from step 345: the driver started 1 h after the session before"),
    ]


def test_workers_that_fail_together_are_one_mark() -> None:
    run = Recorder("lm")
    run.start()
    run.form("abc", "start")
    run.train(10)
    run.lose("a")
    run.lose("b")
    run.record("worker_failed", generation=1, member=None, error="a connection broke", reported_by="c")
    run.record("hang_detected", generation=1, seconds=600.0, places={}, culprits=[])
    run.record("run_failed", error="boom\nand more")
    texts = [mark.text for mark in read_history(run.events).marks]
    assert texts[0].startswith("rank 0 (n1, pid 11) and rank 1 (n1, pid 12) failed: ")
    assert texts[1:] == ["hang: no worker made progress for 10 min", "the run failed: boom"]


def test_a_session_ends_at_its_mark_and_the_next_one_resumes_where_training_starts() -> None:
    *_, stopped, resumed = LM.marks
    (_, began), (paused, trained) = LM.start_ups
    assert (stopped.at, stopped.world_size, resumed.at, resumed.world_size) == (paused, 2, trained, 3)
    assert began == pytest.approx(6.0) and trained - paused == pytest.approx(6.0)
    killed = [
        event for event in eventful() if event.session == "s2" or event.event not in ("run_finished", "session_ended")
    ]
    assert [mark.kind for mark in read_history(killed).marks[-2:]] == ["driver died", "resumed"]
    cut = with_dead_driver(read_history(calm()[:-3]))
    assert [(mark.kind, mark.at, mark.world_size) for mark in cut.marks] == [("driver died", cut.seconds, 2)]


def test_a_session_that_begins_anew_is_marked_at_step_0() -> None:
    run = Recorder("lm")
    run.start()
    run.form("ab", "start")
    run.train(36)
    run.start(pause_s=60.0)
    run.record("generation_formed", generation=1, world_size=2, reason="start", members=[])
    died, begun = read_history(run.events).marks
    assert (died.kind, died.step) == ("driver died", 36)
    assert (begun.step, begun.text) == (
        0,
        "resumed from the start: the driver started 1 min after the session before",
    )


def test_each_kind_of_mark_has_a_symbol_of_its_own() -> None:
    assert len({look.symbol for look in LOOKS.values()}) == len({look.glyph for look in LOOKS.values()}) == len(LOOKS)


def test_the_time_between_sessions_is_left_out() -> None:
    assert LM.seconds == pytest.approx(128, abs=1)
    assert max(point.at for point in LM.points) < LM.seconds
    assert [size for _, size in LM.sizes] == [0, 3, 2, 3, 2, 3, 2, 0, 0, 3, 0]


def test_workers_that_wait_for_others_do_not_train() -> None:
    run = Recorder("lm")
    run.start()
    run.form("ab", "start")
    run.train(10)
    run.lose("a")
    run._at += 30.0
    run.record("generation_formed", generation=2, world_size=2, reason="worker failed", first_step=10, waited_s=25.0)
    run.record("run_finished", status="stopped")
    sizes = read_history(run.events).sizes
    assert [size for _, size in sizes] == [0, 2, 0, 2, 0]
    assert sizes[3][0] - sizes[2][0] == pytest.approx(25.0)


def point(session: int, at: float, **values: Any) -> Point[Any]:
    return Point(session, at, ledger_event("steps_completed", **values))


def test_throughput_has_stalls_and_stops_between_sessions() -> None:
    points = [point(session=0, at=float(at), samples=10 * at) for at in range(5)]
    points.append(point(session=0, at=14.0, samples=50))
    points += [point(session=1, at=20.0, samples=30), point(session=1, at=22.0, samples=50)]
    rates = throughput(points, 22.0, 11)
    assert rates[:2] == pytest.approx([10, 10]) and rates[2:7] == pytest.approx([1] * 5)
    assert all(map(math.isnan, rates[7:10])) and rates[10] == pytest.approx(10)
    assert all(map(math.isnan, throughput([], 1.0, 3)))
    went_back = [point(session=0, at=at, samples=n) for at, n in ((0, 0), (10, 80), (15, 40), (20, 80))]
    assert throughput(went_back, 20.0, 4) == pytest.approx([8, 8, 0, 8])


def test_a_thinned_line_keeps_its_peaks() -> None:
    losses = {step: 1.0 + step % 2 for step in range(5000)} | {3001: 99.0}
    kept = thin([point(session=0, at=step, loss=loss) for step, loss in losses.items()], "loss")
    assert len(kept) <= 2000 and max(each.event.loss for each in kept) == 99.0
    assert [each.at for each in kept] == sorted(each.at for each in kept)


def test_charts_show_what_the_ledger_has() -> None:
    titles = ["What happened", "Loss and metrics", "Phases of a step", "Goodput: where the time went"]
    titles += ["Stalls", "Commits", "GPUs"]
    assert [*charts_of("lm")] == titles
    old = [event for event in eventful(gpus=False) if event.event != "phases_measured"]
    assert {chart.title for chart in charts([read_history(old)])} == {*titles} - {"Phases of a step", "GPUs"}
    assert charts([read_history([])]) == []
    begun = charts([read_history(calm()[:4])])
    assert all(trace["x"] for chart in begun for trace in chart.figure.data) and begun[0].title == "What happened"


def test_the_timeline_marks_each_join_loss_drain_and_commit() -> None:
    timeline = charts_of("lm")["What happened"]
    symbols = {trace["name"]: len(trace["x"]) for trace in timeline.figure.data if trace.mode == "markers"}
    assert symbols == {
        "joined": 2, "failed": 2, "drained": 1, "stopped": 1, "resumed": 1, "commit": 12
    }  # fmt: skip
    kinds = [shape["type"] for shape in timeline.figure.layout["shapes"]]
    assert kinds == ["line"] * 5 + ["rect"] * 2, "changes, and the start-up of each session"
    both = charts_of("lm", "calm")["What happened"].caption
    for symbol in ("▲ joined", "✕ failed", "▼ drained", "■ stopped", "◆ resumed", "| commit"):
        assert symbol.replace(" ", "\N{NO-BREAK SPACE}", 1) in both


def test_phases_stack_up_to_a_step_and_name_the_slowest_rank() -> None:
    phases = charts_of("lm")["Phases of a step"]
    areas = [trace for trace in phases.figure.data if trace.stackgroup]
    stacked = [trace for trace in areas if trace["stackgroup"] == areas[0]["stackgroup"]]
    assert len(areas) == 2 * len(stacked), "each session has its own, with a gap between them"
    assert [trace["name"] for trace in areas if trace["showlegend"]] == [trace["name"] for trace in stacked]
    assert [trace["name"] for trace in stacked] == [
        "data",
        "forward",
        "backward",
        "communication",
        "optimizer",
        "other",
    ]
    assert sum(trace["y"][0] for trace in stacked) == pytest.approx(200.0), "ms per step on three workers"
    (slowest,) = (trace for trace in phases.figure.data if not trace.stackgroup)
    assert "bound by compute: forward, backward and optimizer take 80 %" in phases.caption
    assert slowest["y"][0] == pytest.approx(1.3) and slowest["text"][0] == "2 at step 20"


def test_each_phase_has_one_color_in_the_report_and_on_the_terminal() -> None:
    assert [*PHASE_COLORS] == [*STEP_PHASES] and len(set(PHASE_COLORS.values())) == len(STEP_PHASES)
    traces = charts_of("lm")["Phases of a step"].figure.data
    assert {trace["name"]: trace["fillcolor"] for trace in traces if trace.stackgroup} == PHASE_COLORS
    segments = Console().render(frame(eventful(), LM.ended))
    named = {after.text.split()[0]: mark.style for mark, after in pairwise(segments) if mark.text == "█"}
    assert {name: str(style) for name, style in named.items()} == PHASE_COLORS


def test_many_measurements_are_averaged() -> None:
    run = Recorder("lm")
    run.start()
    run.form("ab", "start")
    for number in range(2000):
        run._at += 1.0
        phases, work_s = {"data": 1.0 + number % 2}, [1.0, 3.0 if number == 1234 else 1.0]
        figures = {"phases": phases, "work_s": work_s, "micro_batches": [2, 2], "slowest_rank": int(number == 1234)}
        run.record("phases_measured", generation=1, step=number + 1, num_steps=1, **figures)
    measurements = [each.event for each in read_history(run.events).measurements]
    assert len(measurements) == 500 and {event.phases["data"] for event in measurements} == {1.5}
    slow = [(event.step, event.slowest_rank) for event in measurements if slowdown(event) != 1.0]
    assert slow == [(1235, 1)]


def test_a_rank_with_more_micro_batches_is_not_slow() -> None:
    event: Any = ledger_event("phases_measured", work_s=[0.4, 0.2, 0.2], micro_batches=[2, 1, 1])
    assert slowdown(event) == 1.0


def test_goodput_stalls_and_commits_have_their_cost() -> None:
    (parts,) = charts_of("lm")["Goodput: where the time went"].figure.data
    assert parts["y"][0] == "useful" and parts["text"][0] == "87.1 % · 1 min 52 s"
    stalls = charts_of("lm")["Stalls"]
    assert stalls.figure.layout["yaxis"]["ticktext"][0] == "step 120, failed"
    parts = {trace["name"]: trace["x"][0] for trace in stalls.figure.data}
    assert parts["detection"] == pytest.approx(0.2)
    assert parts["first step, beyond a usual one"] == pytest.approx(1 - 0.220833), "it takes 1 s"
    assert "median 1.1 s until training continued. A usual step takes 0.22 s." in stalls.caption
    assert charts_of("lm")["Commits"].caption.startswith("12 commits of 3.1 MB, each durable in 0.13 s (median).")


def test_a_metric_with_one_value_is_in_the_table_only() -> None:
    run = Recorder("lm")
    run.start()
    run.form("ab", "start")
    run.train(36)
    run.record("evaluation_finished", step=36, name="test_loss", value=2.125)
    history = read_history(run.events)
    chart = curves.metrics([history])
    assert chart is not None
    assert {note["text"] for note in chart.figure.layout["annotations"]} == {"loss", "grad_norm"}
    assert "<td>test_loss</td><td>2.125</td>" in render_page([history])


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> str:
    """The page of two runs."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    return render_page([LM, CALM])


def test_the_page_says_when_and_where_each_run_trained_how_it_ended_and_how_they_differ(page: str) -> None:
    before, _, _ = page.partition("<script>")
    assert "1970-01-12 13:46:40 UTC to 1970-01-12 14:48:48 UTC; 1 node: n1" in before
    assert "<tr><td>commits</td><td>12</td><td>12</td></tr>" in before
    assert "<tr><td>13:47:11</td><td>31 s</td><td>120</td><td>rank 1 (n1, pid 12) failed: " in before
    assert "<h3>calm</h3><p>No worker joined, failed or left.</p>" in before
    assert "▲\N{NO-BREAK SPACE}joined" in before and "\N{REPLACEMENT CHARACTER}" not in before
    differing, _, same = before.partition("<details>")
    assert "<td>max_workers</td><td></td><td>2</td>" in differing
    assert "checkpoint.every_steps" in same and "checkpoint.every_steps" not in differing


def test_the_page_may_run_its_own_scripts_only_and_load_nothing(page: str) -> None:
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    assert "default-src" in policy and policy.count("sha256-") == page.count("<script>") == 3
    assert "unsafe-inline" not in policy.partition("script-src")[2]
    assert not re.search(r'(src|href)="', page.partition("<script>")[0])


def test_several_runs_have_a_color_each() -> None:
    timeline = charts_of("lm", "calm")["What happened"]
    colors = {trace.name: trace.marker.color for trace in timeline.figure.data if trace.mode != "markers"}
    assert set(colors) == {"lm", "calm"} and len(set(colors.values())) == 2
    assert [title for title in charts_of("lm", "calm") if "Stalls" in title] == ["Stalls of lm"]


def test_values_that_are_not_numbers_leave_a_gap() -> None:
    events = [replace(event, loss="NaN") if event.event == "steps_completed" else event for event in calm()]  # type: ignore[call-arg]
    for chart in charts([read_history(events)]):
        assert "NaN" not in chart.figure.to_json()


def evil_run() -> list[Event]:
    run = Recorder(EVIL, note=EVIL)
    run.start()
    run.form("ab", EVIL)
    run.train(60)
    run.lose("a", EVIL)
    run.form("b", EVIL)
    run.train(80)
    run.record("evaluation_finished", step=80, name=EVIL, value=1.0)
    measured = {"phases": {EVIL: 0.1}, "work_s": [0.1], "micro_batches": [2]}
    run.record("phases_measured", generation=2, step=80, num_steps=1, **measured)
    run.record("commit_failed", generation=2, step=80, seconds=1.0, error=EVIL)
    run.record("run_failed", error=EVIL)
    run.record("run_finished", status="failed", error=EVIL)
    return run.events


def test_no_text_of_a_ledger_becomes_html() -> None:
    one, other = read_history(evil_run()), read_history(evil_run())
    for histories in ([one], [one, replace(other, label=f"{EVIL} again")]):
        page = render_page(histories)
        assert not re.search(r"<script>alert|<img src=x|\x1b", page)
        assert "&lt;script&gt;alert(1)" in page
        for chart in charts(histories):
            assert not re.search(r"<script|<img|\\x1b", str(chart.figure.to_dict()))
        assert page.count("<script>") == 3


def write_run(folder: Path, events: list[Event]) -> str:
    from elastic_ddp.storage.storage import Storage

    for session in dict.fromkeys(event.session for event in events):
        ledger = Ledger(Storage(folder), session, lambda: 1.0)
        for event in events:
            if event.session == session:
                ledger._clock = lambda event=event: event.time  # type: ignore[misc]
                ledger.append(event)
        ledger.close()
    return str(folder)


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, eventful()) for name in ("a", "b")]
    page = tmp_path / "report.html"
    assert f"written to {page}" in invoke("report", *runs, "-o", str(page)).output
    assert "2 failed, 1 drained; resumed once" in page.read_text()
    assert "<h2><span class" in page.read_text() and runs[1] in page.read_text(), "named by their folders"


def test_the_command_refuses_what_it_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "a", calm())
    with pytest.raises(ConfigError, match=r"report\.pdf: unknown suffix\. Use \.html"):
        invoke("report", run, "-o", "report.pdf")
    with pytest.raises(ConfigError, match="there is no run in this folder"):
        invoke("report", str(tmp_path / "nothing"))
    with pytest.raises(StorageError, match=r"cannot write .*/no/report\.html: No such file"):
        invoke("report", run, "-o", str(tmp_path / "no" / "report.html"))
    for module in ("page", "costs", "curves", "figure", "timeline"):
        monkeypatch.delitem(sys.modules, f"elastic_ddp.report.{module}")
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'plotly>=6'")):
        invoke("report", run, "-o", str(tmp_path / "report.html"))


def test_durations_are_rounded_for_people() -> None:
    assert [duration(seconds) for seconds in (0.0, 0.314, 9.5, 38.4, 60, 151, 3600, 11_530, 187_300)] == [
        "0 s", "0.31 s", "9.5 s", "38 s", "1 min", "2 min 31 s", "1 h", "3 h 12 min", "2 d 4 h",
    ]  # fmt: skip
