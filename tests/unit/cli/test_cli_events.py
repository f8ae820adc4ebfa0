"""The commands that read a ledger while it grows: `elastic-ddp events` and `elastic-ddp watch`."""

from __future__ import annotations

import io
import json
import math
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elastic_ddp.cli.runs import RunLedger
from elastic_ddp.cli.terminal_curves import Timeline, sparkline
from elastic_ddp.cli.watch import frame
from elastic_ddp.errors import ConfigError, StorageError
from elastic_ddp.report.history import read_history
from elastic_ddp.storage.lease import DriverLease
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import Ledger, LedgerReader, read_ledger
from elastic_ddp.telemetry.description import state_of
from tests.unit.cli.test_cli import invoke, ledger_of_a_run
from tests.unit.ledger_events import ledger_event

MEMBERS = [{"rank": rank, "node": f"10.0.0.{1 + rank // 2}", "pid": rank, "id": f"w{rank}"} for rank in range(4)]


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> Iterator[Ledger]:
    with closing(Ledger(Storage(tmp_path), "s1", clock)) as ledger:
        yield ledger


def write(ledger: Ledger, event: str, **fields: Any) -> None:
    ledger.append(ledger_event(event, **fields))
    ledger.flush()


def train(ledger: Ledger, clock: Clock, *, workers: int, steps: range, seconds: float, generation: int = 1) -> None:
    """A generation of a run that takes 16 samples in each step, and so many seconds for ten steps."""
    formed = {"generation": generation, "world_size": workers}
    write(ledger, "generation_formed", **formed, reason="start", members=MEMBERS[:workers])
    write(ledger, "generation_started", **formed, first_step=steps.start, reason="start")
    for step in range(steps.start, steps.stop + 1, 10):
        facts = {"step": step, "loss": 100.0 / (1 + step), "samples": 16 * step, "world_size": workers}
        write(ledger, "steps_completed", generation=generation, **facts)
        clock.now += seconds


def shown(events: list[Any], now: float, width: int = 100) -> str:
    """A frame as text, which fits this many columns."""
    out = Console(file=io.StringIO(), width=width, legacy_windows=False)
    out.print(frame(events, now, width=width))
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    return text


def test_a_reader_returns_each_event_once_and_reads_older_segments_and_sessions_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(tmp_path)
    reader, found = LedgerReader(storage), []
    for session in ("s1", "s2"):
        with closing(Ledger(storage, session)) as ledger:
            for number in range(400):  # several segments
                ledger.append(ledger_event("warned", text=f"{session} {number} {'x' * 500}"))
                if number % 70 == 0:
                    ledger.flush()
                    found += reader.read()
    found += reader.read()
    expected = [[session, str(number)] for session in ("s1", "s2") for number in range(400)]
    assert [event.text.split()[:2] for event in found] == expected
    read: list[str] = []
    original = Storage.read
    monkeypatch.setattr(Storage, "read", lambda storage, key: read.append(key) or original(storage, key))
    assert reader.read() == [] and read == [max(storage.list("ledger"))], "it may grow"


def test_events_prints_a_line_for_each_event_with_its_session_and_fields(tmp_path: Path) -> None:
    ledger_of_a_run(tmp_path)
    with closing(Ledger(Storage(tmp_path), "s2")) as ledger:
        write(ledger, "session_started")
    lines = [line.split() for line in invoke("events", str(tmp_path)).output.splitlines()]
    assert " ".join(line[2] for line in lines) == (
        "session_started generation_started steps_completed commit_succeeded generation_ended run_finished "
        "session_started"
    )
    assert [line[1] for line in lines] == ["1"] * 6 + ["2"]
    assert datetime.fromisoformat(lines[0][0]).tzinfo is not None
    assert {"step=40", "loss=2.5", "metrics={loss=2.5}"} <= set(lines[2])
    last = invoke("events", str(tmp_path), "--last", "2", "--kind", "run_finished", "--kind", "session_started").output
    assert [line.split() for line in last.splitlines()] == lines[-2:]


def test_events_of_one_kind_as_json_have_all_fields_of_the_ledger(tmp_path: Path) -> None:
    ledger_of_a_run(tmp_path)
    shown = invoke("events", str(tmp_path), "--kind", "commit_succeeded", "--kind", "run_finished", "--json").stdout
    entries = [json.loads(line) for line in shown.splitlines()]
    in_ledger = [json.loads(line) for path in tmp_path.glob("ledger/*") for line in path.read_text().splitlines()]
    by_name = {entry["event"]: entry for entry in in_ledger}
    assert [entry["event"] for entry in entries] == ["commit_succeeded", "run_finished"]
    assert all(entry.items() >= by_name[entry["event"]].items() for entry in entries)


def test_the_name_of_a_run_is_enough_if_one_folder_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger_of_a_run(tmp_path / "runs" / "lm")
    monkeypatch.chdir(tmp_path)
    for command in ("events", "watch", "show"):
        assert "finished" in invoke(command, "lm").output
    with pytest.raises(ConfigError, match="its ledger has no hang"):
        invoke("stacks", "lm", "--last-hang")
    ledger_of_a_run(tmp_path / "others" / "lm")
    with pytest.raises(ConfigError, match=r"^lm: .* Use others.lm or runs.lm\.$"):
        invoke("show", "lm")


def test_events_refuses_an_unknown_kind_and_a_folder_without_a_run(tmp_path: Path) -> None:
    ledger_of_a_run(tmp_path / "lm")
    with pytest.raises(ConfigError, match=r"^--kind comit: .*commit_started"):
        invoke("events", str(tmp_path / "lm"), "--kind", "comit")
    for command in ("events", "watch"):
        with pytest.raises(ConfigError, match="there is no run in this folder"):
            invoke(command, str(tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()


def test_a_text_of_several_words_stays_whole_and_a_long_one_is_cut_to_a_line(tmp_path: Path, ledger: Ledger) -> None:
    write(ledger, "session_started", config={"note": "two words", "steps": 5})
    write(ledger, "stacks_recorded", member="m", place="p", stacks="File a.py\n" + "x" * 1000)
    [started, recorded] = invoke("events", str(tmp_path)).output.splitlines()
    assert "config={note=two words, steps=5}" in started and "stacks=File a.py …" in recorded


def test_events_follows_a_run_until_its_session_ends(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the driver known to be alive: this process holds the lease, which another one would see as alive."""
    monkeypatch.setattr("elastic_ddp.cli.events._POLL_S", 0.01)
    write(ledger, "session_started")
    assert "session_started" in invoke("events", str(tmp_path), "--follow").output  # no driver holds the lease
    printed = threading.Event()
    result: list[str] = []

    def follow() -> None:
        result.append(invoke("events", str(tmp_path), "--follow", "--json").stdout)
        printed.set()

    with DriverLease(Storage(tmp_path), "lm", lambda _: "s1", print) as lease:
        lease.acquire()
        thread = threading.Thread(target=follow)
        thread.start()
        write(ledger, "commit_succeeded", step=3)
        assert not printed.wait(0.1)
        write(ledger, "session_ended")
        assert not printed.wait(0.1), "another driver may resume the run before it lets go"
    thread.join(30)
    names = [json.loads(line)["event"] for line in result[0].splitlines()]
    assert names == ["session_started", "commit_succeeded", "session_ended"]


def test_watch_shows_what_happened_to_a_run(ledger: Ledger, clock: Clock, tmp_path: Path) -> None:
    write(ledger, "session_started", total_steps=200, config={"name": "lm"})
    train(ledger, clock, workers=4, steps=range(50), seconds=2.0)
    write(ledger, "commit_succeeded", step=50, seconds=0.4, num_bytes=3 << 20, generation=1)
    write(ledger, "worker_failed", generation=1, member="m", error="its process exited")
    train(ledger, clock, workers=3, steps=range(50, 100), seconds=3.0, generation=2)
    phases = {"data": 0.03, "forward": 0.09, "backward": 0.18}
    memory = [2 << 30, 3 << 30, 1 << 30]
    write(
        ledger,
        "phases_measured",
        generation=2,
        step=100,
        num_steps=20,
        phases=phases,
        work_s=[0.25] * 3,
        micro_batches=[2] * 3,
        memory_bytes=memory,
        utilization=[0.5] * 3,
    )
    text = shown(read_ledger(Storage(tmp_path)), clock.now + 60.0)
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    [workers, _] = [line for line in text.splitlines() if line.startswith("workers")]
    assert "training" in text.splitlines()[0] and "step 100 of 200" in text and "left" in text
    assert workers.split()[1] == "3" and "▇" in workers
    assert lines["samples/s"].split()[1] == "59.3"  # 1600 samples in 27 s, over both generations
    assert lines["loss"].split()[1] == "0.9901"
    assert "bound by     compute: forward, backward" in text
    assert "300.0 ms" in text and "data 10 %" in text and "backward 60 %" in text
    assert "newest at step 50" in lines["commits"] and "0.40 s, 3.1 MB" in lines["commits"]
    assert lines["workers"].split()[1:] == ["1", "failed"] and "✕ failed" in text and "▲" not in text
    assert "2 workers, rank 0-1" in lines["10.0.0.1"] and "GPU memory 3.0 GiB" in lines["10.0.0.1"]
    assert "1 worker, rank 2" in lines["10.0.0.2"] and "GPU busy 50 %" in lines["10.0.0.2"]
    assert "generation 1: a worker failed: its process exited" in text


def test_watch_shows_values_that_are_not_finite_and_the_end_of_epochs(
    ledger: Ledger, clock: Clock, tmp_path: Path
) -> None:
    write(ledger, "session_started", config={"name": "lm", "epochs": 3}, total_steps=90)
    train(ledger, clock, workers=2, steps=range(30), seconds=2.0)
    write(ledger, "evaluation_finished", generation=1, name="validation_loss", value=math.nan)
    write(ledger, "step_skipped", generation=1, step=30, reason="a loss is NaN", loss_scale=math.inf)
    text = shown(read_ledger(Storage(tmp_path)), clock.now)
    assert "validation_loss nan" in text and "scale is now inf" in text
    assert "step 30 of 90" in text


def test_a_failed_request_to_the_storage_loses_no_event(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(ledger, "session_started")
    run = RunLedger(str(tmp_path))
    assert [event.event for event in run.read()] == ["session_started"]
    write(ledger, "commit_succeeded", step=1)
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "read", lambda storage, key: (_ for _ in ()).throw(StorageError("503 Slow Down")))
        assert run.poll() == ([], False)
    with DriverLease(Storage(tmp_path), "lm", lambda _: "s1", print) as lease:
        lease.acquire()
        events, is_over = run.poll()
    assert [event.event for event in events] == ["commit_succeeded"] and not is_over


def test_watch_shows_a_run_that_has_just_started(ledger: Ledger, clock: Clock, tmp_path: Path) -> None:
    write(ledger, "session_started", config={"name": "a-run-with-a-long-name", "epochs": 3})
    text = shown(read_ledger(Storage(tmp_path)), clock.now, width=80)
    assert "starting" in text and "step 0" in text


def test_watch_of_an_ended_run_has_its_sessions_and_no_members(ledger: Ledger, clock: Clock, tmp_path: Path) -> None:
    write(ledger, "session_started", total_steps=200, config={"name": "lm"})
    train(ledger, clock, workers=2, steps=range(50), seconds=2.0)
    account = {"rendezvous": 0.0, "useful": 10.0}
    write(ledger, "generation_ended", generation=1, last_step=50, reason="the run ended", account=account)
    write(ledger, "run_finished", status="stopped", steps=50, samples=800)
    write(ledger, "session_ended")
    clock.now += 90_000
    with closing(Ledger(Storage(tmp_path), "s2", clock)) as second:
        write(second, "session_started", resumed_from_step=50, total_steps=200, config={"name": "lm"})
        train(second, clock, workers=3, steps=range(50, 90), seconds=2.0)
        write(second, "run_finished", status="failed", steps=90, error="RuntimeError: boom")
        write(second, "session_ended")
    text = shown(read_ledger(Storage(tmp_path)), clock.now)
    assert "left" not in text and "rank" not in text
    lines = text.splitlines()
    assert any(line.startswith("samples/s  ") and "mean " in line for line in lines)
    recent = [line.strip() for line in lines[-6:]]
    assert recent[0].endswith("session 1 starts") and len(recent[0].split()[0]) == len("2026-11-27")
    assert "generation 1.1 (start)" in recent[1] and recent[2].endswith("stopped at step 50")
    assert recent[3].endswith("session 2 resumes from step 50") and len(recent[3].split()[0]) == len("12:00:00")
    assert "generation 2.1 (start)" in recent[4] and recent[5].endswith("failed at step 90: RuntimeError: boom")


def test_curves_are_blank_where_nothing_is_known_and_span_generations(
    ledger: Ledger, clock: Clock, tmp_path: Path
) -> None:
    write(ledger, "session_started")
    clock.now += 10.0
    train(ledger, clock, workers=2, steps=range(10), seconds=10.0)  # at 10 s and 20 s; ends at 30 s
    train(ledger, clock, workers=1, steps=range(10, 10), seconds=10.0, generation=2)  # at 30 s
    timeline = Timeline(read_history(read_ledger(Storage(tmp_path))), 20.0)
    assert timeline.length_s == pytest.approx(50.0)
    assert sparkline(timeline.samples_per_s(10), floor=0.0) == "  ▇▇▁▁    "
    assert sparkline(timeline.losses(10)) == "  ▇▇▁▁▁   "


def test_watch_fits_40_columns_with_all_marks_and_bars(ledger: Ledger, clock: Clock, tmp_path: Path) -> None:
    write(ledger, "session_started", total_steps=200, config={"name": "lm"})
    train(ledger, clock, workers=4, steps=range(50), seconds=2.0)
    write(ledger, "worker_failed", generation=1, member="m", error="its process exited")
    clock.now += 10.0
    write(ledger, "worker_left", generation=1, member="n", kind="drain")
    train(ledger, clock, workers=2, steps=range(50, 100), seconds=3.0, generation=2)
    write(ledger, "commit_succeeded", step=50, seconds=0.4, num_bytes=3 << 10, generation=2)
    lines = shown(read_ledger(Storage(tmp_path)), clock.now, width=40).splitlines()
    [axis] = [line for line in lines if line.strip().startswith("0:00 ")]
    [workers, _] = [line.rstrip() for line in lines if line.startswith("workers")]
    assert workers.split()[1] == "2" and len(workers) == len(axis.rstrip()), "the curve is as long as the axis"
    assert any("━" in line and "step 100 of 200" in line for line in lines)
    assert any("✕ failed" in line for line in lines) and any("▼ drained" in line for line in lines)
    words = " ".join(" ".join(lines).split())
    assert "3.1 kB" in words and "a worker was drained: it or its node is to stop" in words and "…" not in words


def test_watch_prints_one_view_where_there_is_no_terminal(tmp_path: Path) -> None:
    ledger_of_a_run(tmp_path)
    text = invoke("watch", str(tmp_path)).output
    assert "lm  finished" in text and "step 40" in text
    assert all(line == line.rstrip() and len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize(
    ("events", "text"),
    [
        (["session_started"], "starting"),
        (["session_started", "generation_started"], "training"),
        (["generation_started", "worker_failed"], "a worker failed"),
        (["generation_started", "evaluation_started"], "evaluating ()"),
        (["generation_started", "evaluation_started", "evaluation_finished"], "training"),
        (["session_started", "generation_started", "run_finished", "session_started"], "starting"),
    ],
)
def test_the_state_is_that_of_the_newest_events(events: list[str], text: str) -> None:
    assert state_of([ledger_event(event) for event in events]) == (text, True)


def test_a_run_whose_driver_died_is_not_live() -> None:
    events = [ledger_event("session_started"), ledger_event("generation_started")]
    state = state_of(events, driver_is_dead=True)
    assert not state.is_live and "driver died" in state.text
    events.append(ledger_event("run_finished", status="stopped"))
    assert state_of(events, driver_is_dead=True) == ("stopped", False)


def test_a_sparkline_has_a_bar_for_each_value() -> None:
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ ▇"
    assert sparkline([3.0, 3.0]) == "▁▁" and sparkline([float("nan")]) == ""
    assert sparkline([4.0, 8.0], floor=0.0) == "▄▇"
