"""Figures from traces: unions of intervals, on a trace made by hand and on real ones."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity

from elastic_ddp.telemetry import trace as program
from elastic_ddp.telemetry.trace import Interval, figures_of, length, union
from elastic_ddp.worker.trace_recording import TraceRecording


def event(category: str, name: str, start: float, end: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    """An event from `start` to `end`, in seconds."""
    times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, **times, "args": args}


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GPU_TRACE = [
    event("Trace", "PyTorch Profiler (0)", 0, 9),
    event("cpu_op", "aten::mm", 0, 1, **{"External id": 7}),
    event("cpu_op", "aten::add", 1, 2, **{"External id": 8}),
    event("kernel", "gemm", 1, 4, tid=7, **{"External id": 7}),
    event("kernel", "gemm", 3, 5, tid=8, **{"External id": 7}),  # on another stream
    event("kernel", NCCL, 4, 7, tid=9),
    event("kernel", NCCL, 6, 8, tid=10),
    event("kernel", "elementwise", 9.5, 10, tid=7, **{"External id": 8}),  # launched before the end of the trace
    event("gpu_memcpy", "Memcpy HtoD", 0.5, 1, tid=7),
]


def test_times_on_a_gpu_are_unions_of_the_intervals_of_kernels() -> None:
    figures = figures_of(GPU_TRACE)
    assert figures["device"] == "gpu" and figures["memory"] is None
    assert figures["window_s"] == pytest.approx(10.0)
    assert figures["compute_s"] == pytest.approx(5.0), "0.5 to 5 and 9.5 to 10, not the sum of 6"
    assert figures["communication_s"] == pytest.approx(4.0), "4 to 8"
    assert figures["overlap_s"] == pytest.approx(1.0), "4 to 5"
    assert figures["idle_s"] == pytest.approx(2.0), "0 to 0.5 and 8 to 9.5"
    times = {each["name"]: (each["seconds"], each["calls"]) for each in figures["operators"]}
    assert times["aten::mm"] == (pytest.approx(5.0), 2), "kernels count for the operator that launched them"
    assert times["aten::add"] == (pytest.approx(0.5), 1) and times[NCCL] == (pytest.approx(5.0), 2)


def test_times_on_a_cpu_are_unions_of_operators_and_of_gloos_work() -> None:
    figures = figures_of(
        [
            event("Trace", "PyTorch Profiler (0)", 0, 10),
            event("user_annotation", "step 3", 0, 10),
            event("cpu_op", "aten::linear", 1, 4),
            event("cpu_op", "aten::addmm", 2, 4),
            event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 4, 6, tid=2),
            event("cpu_op", "AddmmBackward0", 4, 6, tid=2),
            event("cpu_op", "aten::mm", 4, 5, tid=2),
            event("user_annotation", "gloo:all_to_all", 3.5, 7, tid=3),
            event("cpu_op", "c10d::allreduce_", 6, 7),
        ]
    )
    assert figures["device"] == "cpu"
    assert (figures["compute_s"], figures["communication_s"]) == (pytest.approx(4.0), pytest.approx(3.5))
    assert (figures["overlap_s"], figures["idle_s"]) == (pytest.approx(1.5), pytest.approx(4.0))
    own = {each["name"]: each["seconds"] for each in figures["operators"]}
    assert own["aten::linear"] == pytest.approx(1.0) and own["aten::addmm"] == pytest.approx(2.0)
    assert own["AddmmBackward0"] == pytest.approx(1.0)


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))))


def points(spans: list[Interval]) -> set[int]:
    return {point for start, end in spans for point in range(int(start), int(end))}


@given(intervals, st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))))
def test_a_union_has_the_points_inside_the_window(spans: list[Interval], window: Interval) -> None:
    for found, expected in ((union(spans), points(spans)), (union(spans, window), points(spans) & points([window]))):
        assert points(found) == expected and length(found) == len(expected)
        assert all(before[1] < after[0] for before, after in pairwise(found))


def real_trace(folder: Path, *, memory: bool) -> tuple[Path, dict[str, Any]]:
    """The trace of three steps on a CPU, and torch's own times of operators in it."""
    recording = TraceRecording(torch.device("cpu"), memory=memory)
    model = torch.nn.Linear(256, 256)
    recording.start()
    for _ in range(3):
        model(torch.ones(64, 256)).square().mean().backward()
    recording.stop()
    recording.export()
    shutil.copy(recording._path("trace.json"), folder)
    return folder / "trace.json", {each.key: each for each in recording._profile.key_averages()}


def test_the_program_prints_the_figures_of_a_real_trace_and_compresses_it(tmp_path: Path) -> None:
    trace, known = real_trace(tmp_path, memory=True)
    line = [sys.executable, "-I", "-S", program.__file__, str(trace), str(tmp_path / "trace.json.gz")]
    figures = json.loads(subprocess.run(line, check=True, capture_output=True).stdout)
    assert 0 < figures["compute_s"] <= figures["window_s"] and figures["communication_s"] == 0.0
    assert figures["compute_s"] + figures["idle_s"] == pytest.approx(figures["window_s"])
    for each in figures["operators"]:
        if each["name"].startswith("aten::"):
            assert each["seconds"] == pytest.approx(known[each["name"]].self_cpu_time_total / 1e6, rel=0.01)
    memory = {each["name"]: each["bytes"] for each in figures["memory"]["operators"]}
    assert memory["aten::addmm"] == 3 * 64 * 256 * 4
    assert figures["memory"]["peak_bytes"] >= 256 * 256 * 4
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes())) == json.loads(trace.read_bytes())


@pytest.mark.parametrize("continues", [False, True])
def test_a_recording_notices_that_another_session_has_replaced_it(continues: bool) -> None:
    recording = TraceRecording(torch.device("cpu"), memory=False)
    recording.start()
    with pytest.raises(RuntimeError, match=r"uses torch\.profiler itself"):
        TraceRecording(torch.device("cpu"), memory=False)
    own = torch.profiler.profile(activities=[ProfilerActivity.CPU])
    own.start()
    torch.ones(3).add(1)
    if not continues:
        own.stop()
    with pytest.raises(RuntimeError, match=r"has used torch\.profiler itself"):
        recording.stop()
    if continues:
        torch.ones(3).mul(2)
        own.stop()
    assert "aten::mul" in {each.key for each in own.key_averages()} or not continues
    again = TraceRecording(torch.device("cpu"), memory=False)
    again.start()
    again.stop()
