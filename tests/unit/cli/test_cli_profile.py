"""What `elastic-ddp profile` prints."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ddp.cli import profile as cli_profile
from elastic_ddp.errors import ConfigError
from tests.unit.cli.test_cli import invoke

WORKER = {"node": "10.0.0.1", "pid": 7, "id": "a"}
FIGURES = {
    "first_step": 120,
    "num_steps": 5,
    "ended_early": None,
    "device": "gpu",
    "peak_memory_bytes": 3 << 30,
    "window_s": 1.0,
    "compute_s": 0.7,
    "communication_s": 0.5,
    "overlap_s": 0.4,
    "idle_s": 0.2,
    "operators": [{"name": f"aten::{name}", "seconds": 0.05, "calls": 60} for name in ("mm", "b", "c", "d", "e", "f")],
    "memory": {"peak_bytes": 1 << 30, "operators": [{"name": "aten::empty", "bytes": 5 << 20}]},
    "trace": "profiles/20261127T101500Z/rank-0.json.gz",
    "snapshot": "profiles/20261127T101500Z/rank-0-memory.pickle",
}


def live(monkeypatch: pytest.MonkeyPatch, *ranks: dict[str, Any]) -> list[dict[str, Any]]:
    """Makes a run live that answers with `ranks`. Returns the arguments of its requests."""
    requests: list[dict[str, Any]] = []

    def profile(**arguments: Any) -> dict[str, Any]:
        requests.append(arguments)
        return {"uri": "s3://runs/lm", "ranks": ranks}

    monkeypatch.setattr(cli_profile, "get_run", lambda run: SimpleNamespace(profile=profile))
    return requests


def test_each_rank_has_its_times_operators_and_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"rank": 3, **WORKER, "error": "its process exited"}
    requests = live(monkeypatch, {"rank": 0, **WORKER, **FIGURES}, lost)
    shown = invoke("profile", "lm", "--steps", "5", "--ranks", "0,3", "--memory").output
    assert requests == [{"num_steps": 5, "ranks": [0, 3], "memory": True, "timeout_s": 600.0}]
    for fact in ("120-124", "0.2", "70.0 %", "50.0 %", "40.0 %", "20.0 %", "3,072 MiB", "10.000", "aten::mm"):
        assert fact in shown, fact
    assert "aten::f" not in shown, "the longest five"
    assert "1.000  aten::empty" in shown
    assert "rank 3 (10.0.0.1) has no trace: its process exited" in shown
    assert "ui.perfetto.dev" in shown and "s3://runs/lm" in shown and FIGURES["trace"] in shown
    assert "memory_viz" in shown and FIGURES["snapshot"] in shown
    assert json.loads(invoke("profile", "lm", "--json").output)["ranks"][1] == lost


def test_a_trace_that_ended_early_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    early = {**FIGURES, "num_steps": 1, "ended_early": "the run ended", "memory": None, "snapshot": None}
    live(monkeypatch, {"rank": 2, **WORKER, **early})
    shown = invoke("profile", "lm").output
    assert "rank 2: the trace ends after 1 step: the run ended" in shown
    assert "memory_viz" not in shown and "allocated" not in shown


def test_a_profile_without_any_trace_has_the_exit_status_1_and_ranks_that_are_no_numbers_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live(monkeypatch, {"rank": 0, **WORKER, "error": "the run ended"})
    result = invoke("profile", "lm")
    assert result.exit_code == 1 and "rank 0 (10.0.0.1) has no trace: the run ended" in result.output
    with pytest.raises(ConfigError, match=r"--ranks 0-3: this is no list of ranks\. Use numbers with commas"):
        invoke("profile", "lm", "--ranks", "0-3")
