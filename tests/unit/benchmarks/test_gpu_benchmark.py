"""What benchmarks/gpu.py reads out of a trace, on a machine without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from gpu_parts.gate import STEP_LABEL
from gpu_parts.trace import Trace

MAIN, FEED, STREAM, EXCHANGE = 1, 2, 7, 9


def event(category: str, name: str, thread: int, begin_ms: float, end_ms: float) -> dict[str, Any]:
    times = {"ts": 1000 * begin_ms, "dur": 1000 * (end_ms - begin_ms)}
    return {"ph": "X", "cat": category, "name": name, "tid": thread, **times}


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """Two steps of 10 ms. In each, kernels run from 1 to 6 and from 8 to 9, and one of NCCL from 5 to 7."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for start in (0.0, 10.0):
        events += [
            event("user_annotation", STEP_LABEL, MAIN, start, start + 10),
            event("python_function", "elastic_ddp/worker/step.py(1): optimize", MAIN, start + 2, start + 9.5),
            event("python_function", "torch/cuda/streams.py(1): synchronize", MAIN, start + 6, start + 7.6),
            event("python_function", "elastic_ddp/worker/step.py(2): _update", MAIN, start + 7.6, start + 9),
            event("cuda_runtime", "cudaStreamSynchronize", MAIN, start + 6.5, start + 7.5),
            event("cuda_runtime", "cudaLaunchKernel", MAIN, start + 7.7, start + 7.8),
            event("cuda_runtime", "cudaEventSynchronize", FEED, start + 2, start + 3),
            event("kernel", "gemm", STREAM, start + 1, start + 6),
            event("kernel", "ncclDevKernel_SendRecv", EXCHANGE, start + 5, start + 7),
            event("kernel", "adam", STREAM, start + 8, start + 9),
        ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return Trace(path)


def test_a_trace_tells_how_long_the_device_idles_in_a_step_and_where_the_host_is(trace: Trace) -> None:
    idle = trace.idle()
    assert (idle["step_ms"], idle["busy_ms"], idle["idle_ms"]) == (10, 7, 3)
    places = {entry["place"]: entry["idle_ms"] for entry in trace.idle_places()}
    # From 9 to 11 and at both ends the host is in none of our functions; from 7 to 8 it is in `optimize`.
    assert places == {"": 2, "elastic_ddp/worker/step.py(1): optimize": 1}


def test_a_trace_tells_what_each_wait_of_the_host_costs_the_device(trace: Trace) -> None:
    main, other = sorted(trace.waits(), key=lambda wait: wait["thread"])
    assert (main["call"], main["per_step"], main["ms"], main["idle_ms"]) == ("cudaStreamSynchronize", 1, 1, 1)
    assert main["place"] == "elastic_ddp/worker/step.py(1): optimize"
    assert (other["call"], other["thread"], other["idle_ms"]) == ("cudaEventSynchronize", "other", 0)


def test_a_call_that_begins_while_the_device_idles_did_not_cause_that(trace: Trace) -> None:
    trace._by_category["cuda_runtime"] = [event("cuda_runtime", "cudaEventSynchronize", MAIN, 7.2, 7.3)]
    assert [wait["idle_ms"] for wait in trace.waits()] == [0]


def test_a_trace_tells_which_kernels_take_longest(trace: Trace) -> None:
    assert trace.kernels() == {"gemm": 5, "ncclDevKernel_SendRecv": 2, "adam": 1}


def test_a_trace_tells_how_much_of_the_exchange_overlaps_other_kernels(trace: Trace) -> None:
    exchange = trace.exchange()
    assert (exchange["exchange_ms"], exchange["compute_ms"], exchange["overlap_ms"]) == (2, 6, 1)
    assert exchange["overlap_share"] == 0.5
