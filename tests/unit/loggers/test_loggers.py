"""Loggers get each step once, in order, whatever fails: the driver, the logger, or the ledger's storage."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import elastic_ddp as ed
from elastic_ddp.errors import ConfigError, StorageError
from elastic_ddp.loggers import delivery, run_loggers
from elastic_ddp.loggers.run_loggers import open_loggers
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import CommitSucceeded, RunFinished, SessionStarted, StepsCompleted
from elastic_ddp.telemetry.ledger import LedgerReader
from elastic_ddp.telemetry.step_values import StepValues
from tests.unit.logged_runs import LAST, Keeper, driver, newest_commit, session_events, step_events, until

ALL = list(range(1, LAST + 1))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "READ_EVERY_S", 0.01)
    monkeypatch.setattr(delivery, "RETRY_S", 0.01)
    monkeypatch.setattr(run_loggers, "_POLL_S", 0.01)


def test_each_step_is_logged_once_if_the_driver_dies_at_any_event(tmp_path: Path) -> None:
    events = session_events()
    expected = None
    for number in range(len(events), 0, -1):
        folder = tmp_path / f"run{number}"
        before, steps = events[:number], StepValues()
        logged = sum(steps.add(event) is not None for event in before)
        has_time, has_none = Keeper(), Keeper()
        with driver(folder, "s000001-a", has_time) as first:
            first.record(*before)
            until(lambda keeper=has_time, logged=logged: keeper.runs and len(keeper.kept) == logged)
        commit = newest_commit(before)
        loggers = [Keeper(has_time.kept if commit else None), has_none]
        with driver(folder, "s000002-a", *loggers) as second:
            second.record(*session_events(commit))
            second.loggers.finish("finished")
        for keeper in loggers:
            assert keeper.steps == ALL and keeper.status == "finished", number
            expected = expected or keeper.kept
            for (_, values), (_, others) in zip(keeper.kept, expected, strict=True):
                names = ("loss", "grad_norm", "accuracy", "samples")
                assert [values.get(name) for name in names] == [others.get(name) for name in names], number
        assert has_none.runs[0].session_number == 2
        assert (has_none.runs[0].id == has_time.runs[0].id) is bool(commit)


def test_a_session_that_begins_anew_has_another_id_and_its_own_values(tmp_path: Path) -> None:
    first, second = Keeper(), Keeper()
    with driver(tmp_path, "s000001-a", first) as this:
        this.record(SessionStarted(), *step_events(1), *step_events(3))
        until(lambda: first.steps == [1])
    other = [replace(event, loss=9.0) if isinstance(event, StepsCompleted) else event for event in session_events()]
    with driver(tmp_path, "s000002-a", second) as this:
        this.record(*other)
        this.loggers.finish("finished")
    assert second.runs[0].id != first.runs[0].id
    assert second.steps == ALL and {values["loss"] for _, values in second.kept} == {9.0}


def test_a_session_whose_start_reaches_the_storage_late_has_its_own_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Keeper(), Keeper()
    with driver(tmp_path, "s000001-a", first) as this:
        this.record(SessionStarted(), *step_events(1), *step_events(3))
        until(lambda: first.steps == [1])
    with driver(tmp_path, "s000002-a", second) as this:
        reads, read = [], LedgerReader.read
        monkeypatch.setattr(LedgerReader, "read", lambda reader: reads.append(1) or read(reader))
        this.start()  # the first flush has failed
        this.loggers.notify()
        until(lambda: len(reads) >= 2)
        this.record(*session_events())
        this.loggers.finish("finished")
    assert [run.id for run in second.runs] == ["s000002-a"]
    assert second.steps == ALL


class Failing(Keeper):
    """Fails once at each step, before or after it has stored the step, and at the first two starts."""

    def __init__(self, *, after: bool) -> None:
        super().__init__()
        self.failed: set[int] = set()
        self.after = after

    def start(self, run: ed.LoggedRun) -> int | None:
        newest = super().start(run)
        if len(self.runs) < 3:
            raise ConnectionError("http://me:secret@host is away.\nRetry later")
        self.destination = "https://me:secret@host/runs/1"
        return newest

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        if step not in self.failed:
            self.failed.add(step)
            if self.after:
                super().log(step, values, time)
            raise SystemExit("gone")
        super().log(step, values, time)


@pytest.mark.parametrize("after", [False, True])
def test_a_logger_that_fails_gets_what_it_lacks_and_one_line_says_so_and_where_it_writes(
    tmp_path: Path, after: bool
) -> None:
    failing, healthy = Failing(after=after), Keeper()
    with driver(tmp_path, "s000001-a", failing, healthy) as this:
        this.record(*session_events())
        this.loggers.finish("finished")
    assert failing.steps == healthy.steps == ALL
    assert this.notes[0] == (
        "logger Failing0 failed, and training continues: ConnectionError: http://…@host is away. Check it; the driver "
        "retries, and sends the steps that it lacks once it works"
    )
    assert [note for note in this.notes if "logging to" in note] == ["logging to https://…@host/runs/1"]


def test_the_logger_in_the_guide_survives_a_kill_within_a_line(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/loggers.md").read_text()
    program = guide.partition("```python\nimport json\n")[2].partition("\n\n\ntrainer = ")[0]
    defined: dict[str, Any] = {}
    exec(f"import json\n{program}", defined)
    file = tmp_path / "steps.jsonl"
    logger = defined["JsonLines"](file)
    assert logger.start(None) is None
    logger.log(1, {"loss": 0.5}, 100.0)
    logger.log(11, {"loss": 0.4}, 101.0)
    file.write_bytes(file.read_bytes()[:-9])
    assert logger.start(None) == 1
    logger.log(11, {"loss": 0.4}, 101.0)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 11]


class Away(Keeper):
    """Fails until it is back."""

    def __init__(self) -> None:
        super().__init__()
        self.is_back = threading.Event()

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        if not self.is_back.is_set():
            raise OSError("no space left on device")
        super().log(step, values, time)


def test_a_logger_that_was_away_for_long_is_named_once_and_when_it_works_again(tmp_path: Path) -> None:
    away = Away()
    with driver(tmp_path, "s000001-a", away) as this:
        this.record(*session_events())
        until(lambda: len(away.runs) > 5)
        assert len(this.notes) == 1 and away.steps == []
        away.is_back.set()
        this.loggers.finish("finished")
    assert away.steps == ALL
    assert this.notes[1:] == ["logger Away0 works again"]


class Stuck(Keeper):
    """Blocks in `log` until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.released = threading.Event(), threading.Event()

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self.entered.set()
        assert self.released.wait(20.0)
        super().log(step, values, time)


def test_a_slow_logger_does_not_hold_up_the_driver_and_catches_up(tmp_path: Path) -> None:
    slow, quick = Stuck(), Keeper()
    with driver(tmp_path, "s000001-a", slow, quick) as this:
        this.record(SessionStarted(), *step_events(1), *step_events(2))
        assert slow.entered.wait(20.0)
        for step in range(3, 40):
            this.record(*step_events(step))
        slow.released.set()
        until(lambda: slow.steps == quick.steps == list(range(1, 39)))
    assert this.notes == []


def test_an_event_that_comes_while_the_ledger_is_read_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Keeper()
    commit = CommitSucceeded(generation=1, step=1, seconds=0.5, num_bytes=9)

    class Reader(LedgerReader):
        def read(self) -> list[Event]:
            if not keeper.runs:
                this.record(SessionStarted(), *step_events(1), *step_events(2), commit, *step_events(3))
            return super().read()

    monkeypatch.setattr(delivery, "LedgerReader", Reader)
    with driver(tmp_path, "s000001-a", keeper) as this:
        this.start()
        until(lambda: keeper.steps == [1, 2])
        this.record(RunFinished(status="finished"))
        this.loggers.finish("finished")
    assert [values.get("commit/seconds") for _, values in keeper.kept] == [None, 0.5, None]


def test_the_end_waits_for_a_stuck_logger_for_a_bounded_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_loggers, "FINISH_TIMEOUT_S", 0.2)
    stuck, healthy = Stuck(), Keeper()
    with driver(tmp_path, "s000001-a", stuck, healthy) as this:
        this.record(*session_events())
        begun = time.monotonic()
        this.loggers.finish("finished", lambda: False)
        assert time.monotonic() - begun < 10.0
    assert healthy.steps == ALL
    assert this.notes == [
        "logger Stuck0 did not finish within 0.2 s and has no step. The same command gives it the others"
    ]
    stuck.released.set()


def test_a_session_that_raises_closes_its_loggers_as_failed(tmp_path: Path) -> None:
    keeper = Keeper()
    with pytest.raises(KeyboardInterrupt), driver(tmp_path, "s000001-a", keeper) as this:
        this.record(SessionStarted(), *step_events(1), *step_events(2))
        raise KeyboardInterrupt
    assert keeper.status == "failed" and keeper.steps == [1]


class Slow(Keeper):
    """Takes a while for each step."""

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        threading.Event().wait(0.05)
        super().log(step, values, time)


def test_a_finished_run_waits_for_a_logger_that_works_and_not_for_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_loggers, "FINISH_TIMEOUT_S", 0.1)
    slow, away = Slow(), Away()
    with driver(tmp_path, "s000001-a", slow, away) as this:
        this.record(*session_events())
        this.loggers.complete()
    assert slow.steps == ALL and away.steps == []
    assert "logger Slow0 still gets the steps that it lacks. Ctrl-C ends this" in this.notes
    assert this.notes[-1].startswith("logger Away1 did not finish within 0.1 s and has no step.")


def test_a_driver_that_was_replaced_logs_nothing_more(tmp_path: Path) -> None:
    stuck = Stuck()
    with driver(tmp_path, "s000001-a", stuck) as this:
        this.record(*session_events())
        assert stuck.entered.wait(20.0)
        this.replaced.set()
        stuck.released.set()
        this.loggers.finish("finished")
    assert stuck.steps == [1]


def test_steps_reach_loggers_only_after_the_ledger_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper()
    with driver(tmp_path, "s000001-a", keeper) as this:
        this.record(SessionStarted(), *step_events(1))
        write, failing = this.storage.write, [True]

        def fail(key: str, data: bytes) -> None:
            if failing:
                raise StorageError("no space")
            write(key, data)

        monkeypatch.setattr(this.storage, "write", fail)
        this.record(*step_events(2))
        this.record(*step_events(3))
        assert keeper.steps == []
        failing.clear()
        this.record(*step_events(4))
        until(lambda: keeper.steps == [1, 2, 3])


def test_a_ledger_that_cannot_be_read_is_no_failure_of_the_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, failing = Keeper(), threading.Event()

    class Reader(LedgerReader):
        def read(self) -> list[Event]:
            if failing.is_set():
                raise StorageError("no route to host")
            return super().read()

    monkeypatch.setattr(delivery, "LedgerReader", Reader)
    events = session_events()
    with driver(tmp_path, "s000001-a", keeper) as this:
        for outage, (new, last) in enumerate(((events[:4], 1), (events[4:], LAST)), start=1):
            failing.set()
            this.record(*new)
            until(lambda outage=outage: len(this.notes) == outage)
            failing.clear()
            until(lambda last=last: last in keeper.steps)
        this.loggers.finish("finished")
    assert keeper.steps == ALL and len(keeper.runs) == 1
    assert this.notes == 2 * [
        "logger Keeper0 waits, and training continues: the driver cannot read the ledger, and retries: "
        "StorageError: no route to host"
    ]


@pytest.mark.parametrize(
    ("logger", "problem"),
    [
        (Keeper, r"loggers\[0\]=<class .*Keeper'> is no logger. Give objects"),
        ("wandb", r"loggers\[0\]='wandb' is no logger.*names such as 'wandb' belong into the setting loggers"),
    ],
)
def test_an_object_that_is_no_logger_is_refused(logger: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_loggers([], [logger])


def test_a_logger_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_loggers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"loggers='tensorboard' needs a package .*: pip install tensorboardX"):
        open_loggers(["tensorboard"], [])
