"""What `status` and `show` print about the phases of a run's steps."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.rendezvous.event_log import EventLog
from elastic_ddp.rendezvous.snapshot import Snapshot
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import GenerationFormed, GenerationStarted, PhasesMeasured
from elastic_ddp.telemetry.ledger import Ledger
from tests.unit.cli.test_cli import LONG_STATUS, invoke, live
from tests.unit.ledger_events import ledger_event
from tests.unit.telemetry.test_bottleneck import measure

SLOW = {"forward": 0.9}
MEMBERS = [{"rank": rank, "node": f"10.0.0.{rank}", "pid": 100 + rank, "id": f"w{rank}"} for rank in range(3)]
ON_GPU = {"memory_bytes": 3 * 2**30, "utilization": 0.75}


def ledger_of(*measured: PhasesMeasured) -> list[Event]:
    formed = GenerationFormed(generation=1, world_size=3, reason="start", first_step=0, members=MEMBERS)
    started = GenerationStarted(generation=1, world_size=3, first_step=0, reason="start")
    return [formed, started, *measured]


def status_of(events: list[Event]) -> dict[str, Any]:
    """What the rendezvous of a run with these events returns."""
    log = EventLog(Snapshot(None))
    for event in events:
        log.add(event)
    return log.status()


def shown(monkeypatch: pytest.MonkeyPatch, status: dict[str, Any]) -> str:
    members = [{**member, "node_id": "f"} for member in MEMBERS]
    live(monkeypatch, {**LONG_STATUS, **status, "members": members, "last_worker_failure": None})
    return str(invoke("status", "lm").output)


def test_status_names_what_bounds_a_run_and_each_ranks_work(monkeypatch: pytest.MonkeyPatch) -> None:
    status = status_of(ledger_of(*(measure({}, {}, SLOW, num_steps=10, step=step) for step in (90, 100))))
    assert status["bottleneck"]["kind"] == "slow rank" and status["bottleneck"]["ranks"] == [2]
    text = shown(monkeypatch, status)
    assert "bound by slow rank: the work of rank 2 (node 10.0.0.2) takes 1.7 times" in text
    assert "elastic-ddp drain RUN 10.0.0.2" in text
    assert "step 1.6 s: " in text and "forward 31 %" in text and "communication 31 %" in text
    assert "work" in text and "1.5 s" in text and "900 ms" in text
    assert "GPU" not in text


def test_status_has_the_memory_and_utilization_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, status_of(ledger_of(measure({}, {}, {}, **ON_GPU))))
    assert "GPU memory" in text and text.count("3.0 GiB") == 3 and text.count("75 %") == 3


def test_status_of_a_new_generation_tells_when_phases_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = GenerationStarted(generation=2, world_size=2, first_step=100, reason="workers joined")
    status = status_of([*ledger_of(measure({}, {}, SLOW)), joined])
    assert status["phases"] is None and status["bottleneck"] is None, "the former ones are of another generation"
    assert "phases: known after 20 steps of this generation" in shown(monkeypatch, status)
    assert "phases" not in shown(monkeypatch, {**status, "state": "starting"})


def test_status_gives_no_verdict_before_twenty_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    status = status_of(ledger_of(measure({}, {}, {}, num_steps=19)))
    assert status["phases"] is not None and status["bottleneck"] is None
    assert "bound by" not in shown(monkeypatch, status)


def test_show_has_the_phases_of_the_whole_run_and_what_bound_it(tmp_path: Path) -> None:
    with closing(Ledger(Storage(tmp_path), "s1")) as ledger:
        measured = [measure({"data": 0.4}, {"data": 0.4}, {"data": 0.4}, num_steps=40, **ON_GPU)] * 2
        steps = ledger_event("steps_completed", generation=1, step=100, samples=400, world_size=3, loss=1.0)
        for event in [*ledger_of(measure({}, {}, {}, num_steps=80)), *measured, steps]:
            ledger.append(event)
    raw = invoke("show", str(tmp_path)).output
    text = " ".join(raw.split())
    assert "1.19 s: backward 42 %" in text, "the mean over all steps"
    assert "last 40 steps bound by data: ranks wait for data 29 % of the time." in text
    assert "whole run step 1.19 s" in text and "3.0 GiB peak" in text
    assert all(line == line.rstrip() for line in raw.splitlines()), "where there is no terminal"
