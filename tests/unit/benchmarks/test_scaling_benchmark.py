"""The table and the plot of benchmarks/scaling.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import scaling as benchmark

ROWS = [
    {"world_size": 2, "samples_per_s": 80.0, "samples_per_s_per_worker": 40.0, "global_batch_size": 32},
    {"world_size": 8, "samples_per_s": 240.0, "samples_per_s_per_worker": 30.0, "global_batch_size": 128},
]


def test_speed_up_and_efficiency_are_relative_to_the_fewest_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = benchmark.with_speed_up([{**row, "foreign_share": 0.0} for row in ROWS])
    assert [(row["speed_up"], row["efficiency"]) for row in rows] == [(1.0, 1.0), (3.0, 0.75)]
    results: dict[str, Any] = {"machine": {}, "model": "GPT", "mode": "weak", "reduction": "canonical", "rows": rows}
    benchmark.print_table(results)
    printed = capsys.readouterr().out
    assert "3.00" in printed and "75%" in printed
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; the extra `bench` has it")
    benchmark.plot(results, tmp_path / "scaling.svg")
    assert "<svg" in (tmp_path / "scaling.svg").read_text()
