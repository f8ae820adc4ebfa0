"""What benchmarks/startup.py notes in the processes of a run, and the parts that it reads out of that."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from functools import reduce
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import standby
import startup as benchmark
from startup_parts import sitecustomize as notes

FOLDER = Path(benchmark.__file__).parent


@pytest.mark.parametrize("module", notes.CALLS)
def test_what_the_startup_benchmark_notes_exists(module: str) -> None:
    for name in notes.CALLS[module]:
        assert callable(reduce(getattr, name.split("."), importlib.import_module(module)))


def test_imports_and_calls_of_a_process_are_noted_with_their_times(tmp_path: Path) -> None:
    program = "import ray; from elastic_ddp.data import pipeline as p; p.record_calls = print; p._begin_task('')"
    environment = {**os.environ, "STARTUP_TRACE": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER / "startup_parts"), str(FOLDER.parent)])
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=tmp_path)
    spans = benchmark.read_spans(tmp_path, 0.0)
    assert {span.role for span in spans} == {"reader"}
    assert [span.name for span in spans] == ["process", "import ray", "import ray.data", "_begin_task"]
    assert all(before.start < after.start for before, after in pairwise(spans))
    imported = benchmark.part(spans, "reader", "process", "import ray.data")
    assert imported == (spans[0].start, spans[2].start)


def test_parts_run_from_the_first_start_to_the_last_end_of_processes() -> None:
    spans = [
        benchmark.Span(1, "worker", "process", 1.0, 1.1, 0.1),
        benchmark.Span(2, "worker", "process", 1.5, 1.6, 0.1),
        benchmark.Span(1, "worker", "import torch", 2.0, 3.0, 0.9),
        benchmark.Span(2, "worker", "import torch", 2.2, 3.4, 0.9),
        benchmark.Span(3, "driver", "import torch", 0.1, 9.0, 0.9),
    ]
    assert benchmark.part(spans, "worker", "import torch") == (2.0, 3.4)
    assert benchmark.part(spans, "worker", "process", "import torch") == (1.0, 2.2)
    assert benchmark.cpu_of_imports(spans) == {"driver: import torch": 0.9, "worker: import torch": 0.9}
    rounds = [{"first_step_s": at, "parts": {"a": (0.0, at), "b": (at, 2 * at)}} for at in (1.0, 3.0, 2.0)]
    median = benchmark.medians(rounds)
    assert median == {"first_step_s": 2.0, "parts": {"a": (0.0, 2.0), "b": (2.0, 4.0)}}


def test_the_docs_have_the_parts_that_the_startup_benchmark_prints() -> None:
    section = (FOLDER.parent / "docs" / "benchmarks.md").read_text().partition("## Start-up")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| [\d.]+ \| [\d.]+ \|$", section, re.MULTILINE)
    source = "".join(inspect.getsource(part) for part in (benchmark.parts_of_start, benchmark.parts_of_worker))
    assert sorted(rows) == sorted(re.findall(r'^ +"([^"]+)": ', source, re.MULTILINE))


@pytest.mark.parametrize(("module", "option"), [(benchmark, "--rounds"), (standby, "--repeats"), (standby, "--kills")])
def test_benchmarks_refuse_to_measure_zero_times(
    module: ModuleType, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", option, "0"])
    with pytest.raises(SystemExit):
        module.main()
    assert f"argument {option}: '0' is not a whole number of at least 1" in capsys.readouterr().err


def test_the_benchmark_of_standbys_reports_that_no_kill_recovered() -> None:
    failed = {"recovered": False, "outcome": "no step for 120 s"}
    with pytest.raises(SystemExit, match=r"^With standby_workers = 0, the run recovered from no kill within 120 s\."):
        standby.print_table({"0": [failed], "1": []}, 120.0)
