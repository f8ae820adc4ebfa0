from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ddp.errors import StorageError
from elastic_ddp.report.history import read_history
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry.events import GenerationFormed, Resumed, RunFailed, RunFinished, SessionStarted
from elastic_ddp.telemetry.ledger import Ledger, LedgerReader, new_session, newest_number, read_ledger
from elastic_ddp.telemetry.summary import summarize


class Clock:
    def __init__(self, now: float = 1_795_169_700.0) -> None:
        self.now = now

    def __call__(self) -> float:
        self.now += 1
        return self.now


class Flaky(Storage):
    """Refuses writes while `failing`."""

    failing = False
    writes: tuple[str, ...] = ()

    def write(self, key: str, data: bytes) -> None:
        if self.failing:
            raise StorageError("no space")
        self.writes += (key,)
        super().write(key, data)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path)


def test_a_session_sorts_by_its_number_whatever_its_clock_shows() -> None:
    name = new_session(2, lambda: 1_795_169_700.25)
    assert re.fullmatch(r"s000002-20261120T101500Z-[0-9a-f]{6}", name)
    assert name < new_session(3, lambda: 1_795_169_600.0)


def test_only_flushed_events_are_read_and_in_order(storage: Storage) -> None:
    ledger = Ledger(storage, "s1", Clock())
    ledger.append(SessionStarted(config={"name": "x"}))
    ledger.append(Resumed(step=4))
    assert read_ledger(storage) == []
    ledger.flush()
    ledger.append(Resumed(step=8, at=3.5))
    assert [event.event for event in read_ledger(storage)] == ["session_started", "resumed"]
    ledger.close()
    events = read_ledger(storage)
    assert [event.seq for event in events] == [0, 1, 2]
    assert events[2] == Resumed(step=8, at=3.5, time=1_795_169_703.0, seq=2, session="s1")
    assert storage.list() == ["ledger/s1-000000.jsonl"]


def test_a_long_session_starts_new_segments_and_keeps_old_ones(tmp_path: Path) -> None:
    storage = Flaky(tmp_path)
    ledger = Ledger(storage, "s1", Clock())
    for number in range(50):
        ledger.append(RunFailed(error=f"{number}" + "x" * 4000))
        ledger.flush()
    assert [event.seq for event in read_ledger(storage)] == list(range(50))
    segments = storage.listing("ledger")
    assert [*segments] == [f"ledger/s1-{number:06d}.jsonl" for number in range(4)]
    assert max(entry.size for entry in segments.values()) <= 64 * 1024
    assert list(storage.writes) == sorted(storage.writes)
    written = len(storage.writes)
    ledger.flush()
    assert len(storage.writes) == written, "no new events, no write"


def test_an_event_larger_than_a_segment_is_kept(storage: Storage) -> None:
    ledger = Ledger(storage, "s1", Clock())
    for text in ("a", "b" * 200_000, "c"):
        ledger.append(RunFailed(error=text))
    ledger.close()
    assert [len(event.error) for event in read_ledger(storage)] == [1, 200_000, 1]


def test_events_survive_an_outage_and_only_close_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = Flaky(tmp_path)
    ledger = Ledger(storage, "s1", Clock())
    storage.failing = True
    for number in range(40):
        ledger.append(RunFailed(error=f"{number}" + "x" * 4000))
        ledger.flush()
    assert len(caplog.records) == 1 and "no space" in caplog.text
    with pytest.raises(StorageError, match="no space"):
        ledger.close()
    assert read_ledger(storage) == []
    storage.failing = False
    ledger.close()
    assert [event.seq for event in read_ledger(storage)] == list(range(40))


def test_sessions_are_in_the_order_of_their_numbers_whatever_the_clocks_show(storage: Storage) -> None:
    reader, seen = LedgerReader(storage), list[str]()
    starts = {9: 5000.0, 10: 300.0, 1_000_000: 4000.0}
    names = [new_session(number, Clock(start)) for number, start in starts.items()]
    for session, start in zip(names, starts.values(), strict=True):
        ledger = Ledger(storage, session, Clock(start))
        ledger.append(Resumed(step=1))
        ledger.close()
        seen += [event.session for event in reader.read()]
    assert [event.session for event in read_ledger(storage)] == seen == names
    assert newest_number(storage) == 1_000_000


def test_the_outcome_is_that_of_the_newest_session_also_if_its_clock_is_behind(storage: Storage) -> None:
    for number, steps, start in ((1, 10, 5000.0), (2, 20, 1000.0)):
        ledger = Ledger(storage, new_session(number, Clock(start)), Clock(start))
        ledger.append(SessionStarted(resumed_from_step=steps - 10 or None, config={"name": "x"}))
        ledger.append(GenerationFormed(generation=1, world_size=1, reason="start"))
        ledger.append(RunFinished(status="finished", steps=steps, total_steps=steps, weights_sha256=f"of {steps}"))
        ledger.close()
    summary = summarize(read_ledger(storage))
    assert (summary["steps"], summary["weights_sha256"], summary["sessions"]) == (20, "of 20", 2)
    history = read_history(read_ledger(storage))
    assert [mark.text for mark in history.marks] == ["resumed from step 10"], "the time between them is not known"
    assert history.ended < history.began, "both are only shown"


def test_the_events_of_a_session_are_in_the_order_of_their_numbers(storage: Storage) -> None:
    backwards = Ledger(storage, "s1", clock=iter([400.0, 300.0]).__next__)
    backwards.append(Resumed(step=1))
    backwards.append(Resumed(step=2))
    backwards.close()
    assert [event.step for event in read_ledger(storage)] == [1, 2]


@pytest.mark.parametrize(
    ("data", "warned"),
    [
        (b'{"seq":1,"ti', False),
        (b"nonsense\n", True),
        (b'{"seq":1,"time":1,"event":"of_another_version"}\n', True),
        (b'{"seq":1,"time":1,"event":"resumed"}\n', True),  # without its step
        (b'["resumed"]\n', True),
    ],
)
def test_a_bad_line_is_skipped_with_a_warning_unless_it_is_torn(
    storage: Storage, caplog: pytest.LogCaptureFixture, data: bytes, warned: bool
) -> None:
    storage.write("ledger/s1-000000.jsonl", b'{"seq":0,"time":1,"event":"session_ended"}\n' + data)
    storage.write("ledger/notes.txt", b"not an event")
    with caplog.at_level(logging.WARNING):
        assert [event.event for event in read_ledger(storage)] == ["session_ended"]
    assert bool(caplog.records) == warned


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (torch.tensor(2.5), 2.5),
        (torch.tensor(float("inf")), "Infinity"),
        ((1, [2.0, float("nan")]), [1, [2.0, "NaN"]]),
        ({1: Path("a/b")}, {"1": "a/b"}),
        (ValueError("why"), "why"),
        (True, True),
        (None, None),
    ],
)
def test_values_become_strict_json(storage: Storage, value: Any, kept: Any) -> None:
    ledger = Ledger(storage, "s1", Clock())
    ledger.append(SessionStarted(config={"value": value}))
    ledger.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    [key] = storage.list("ledger")
    assert json.loads(storage.read(key), parse_constant=refuse)["config"] == {"value": kept}
