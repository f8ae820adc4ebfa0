"""Figures from a trace of `torch.profiler`: compute, communication and overlap, from intervals and not from sums.

A worker runs this file as a program, in a process of its own: to parse a trace takes Python's lock for seconds. So it
imports the standard library only. Trace files are in Chrome's format: https://ui.perfetto.dev shows them.
"""

from __future__ import annotations

import gzip
import json
import math
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NUM_OPERATORS = 10
"""Number of operators that the figures name."""
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_NOT_COMPUTE = (
    "c10d::",
    "_c10d_functional::",
    "autograd::",
    "torch::autograd::",
    "record_param_comms",
    "gloo:",
    "nccl:",
)
"""Names of operators that start, or wait for, what others do."""
_SECOND = 1e6
"""A trace has microseconds."""

Trace = Sequence[Mapping[str, Any]]
"""The events of a trace, as in `traceEvents`."""
Interval = tuple[float, float]
Thread = tuple[Any, Any]


def union(intervals: Iterable[Interval], window: Interval = (-math.inf, math.inf)) -> list[Interval]:
    """Returns the same points inside the window, as disjoint intervals, sorted."""
    merged: list[Interval] = []
    for start, end in sorted((max(start, window[0]), min(end, window[1])) for start, end in intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Returns the sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def figures_of(trace: Trace) -> dict[str, Any]:
    """Returns where the time of a trace went, in seconds.

    With a GPU, compute and communication are its kernels; without one, they are operators, and the work of gloo.

    Returns:
        A dict with these keys:

        - `window_s`: the duration of the trace.
        - `compute_s`, `communication_s`: the time in which at least one such kernel or operator ran.
        - `overlap_s`: the time in which both did.
        - `idle_s`: the time in which neither did.
        - `device`: `gpu` or `cpu`.
        - `operators`: the ten operators with the longest time of their own: `name`, `seconds` and `calls`.
        - `memory`: None unless the trace has allocations. Otherwise the `peak_bytes` of tensors, and `operators` with
          the `name` and `bytes` of those that allocated most.
    """
    complete = [event for event in trace if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in complete if event.get("cat") in _GPU_WORK]
    spans = [_interval(event) for event in complete if event.get("cat") == "Trace"]
    spans += map(_interval, kernels)  # the last ones may end after the trace
    window = min(start for start, _ in spans), max(end for _, end in spans)
    if kernels:
        compute = [event for event in kernels if not _is_nccl(event)]
        communication = [event for event in kernels if _is_nccl(event)]
    else:
        compute = [event for event in complete if event.get("cat") == "cpu_op" and _is_compute(event["name"])]
        communication = [event for event in complete if _is_gloo(event)]
    computing, communicating, busy = (
        length(union(map(_interval, events), window)) for events in (compute, communication, [*compute, *communication])
    )
    return {
        "window_s": (window[1] - window[0]) / _SECOND,
        "compute_s": computing / _SECOND,
        "communication_s": communicating / _SECOND,
        "overlap_s": max(0.0, computing + communicating - busy) / _SECOND,  # not below 0 by rounding
        "idle_s": (window[1] - window[0] - busy) / _SECOND,
        "device": "gpu" if kernels else "cpu",
        "operators": _operators_of_kernels(complete, kernels) if kernels else _operators(complete),
        "memory": _memory(trace, complete, on_gpu=bool(kernels)),
    }


def _interval(event: Mapping[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _is_nccl(event: Mapping[str, Any]) -> bool:
    return "nccl" in str(event["name"]).lower()


def _is_gloo(event: Mapping[str, Any]) -> bool:
    return event.get("cat") in ("user_annotation", "cpu_op") and str(event["name"]).startswith("gloo:")


def _is_compute(name: str) -> bool:
    """Whether an operator computes. The nodes of the backward only call operators, or wait for communication."""
    return not name.startswith(_NOT_COMPUTE) and not name.rstrip("0123456789").endswith("Backward")


def _nested(operators: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    """Yields the operators of a thread in the order of their start, each with the one that called it."""
    callers: list[tuple[float, Mapping[str, Any]]] = []
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        start, end = _interval(event)
        while callers and callers[-1][0] <= start:
            callers.pop()
        yield event, callers[-1][1] if callers else None
        callers.append((end, event))


def _by_thread(events: Iterable[Mapping[str, Any]]) -> Mapping[Thread, list[Mapping[str, Any]]]:
    threads: defaultdict[Thread, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        threads[event.get("pid"), event.get("tid")].append(event)
    return threads


def _operators(complete: Trace) -> list[dict[str, Any]]:
    """The operators that took longest, without the time of those that they called."""
    own: Counter[str] = Counter()
    for operators in _by_thread(event for event in complete if event.get("cat") == "cpu_op").values():
        for event, caller in _nested(operators):
            own[event["name"]] += event["dur"]
            if caller is not None:
                own[caller["name"]] -= event["dur"]
    return _longest(own, Counter(event["name"] for event in complete if event.get("cat") == "cpu_op"))


def _operators_of_kernels(complete: Trace, kernels: Trace) -> list[dict[str, Any]]:
    """The operators whose kernels took longest. A kernel has the id of the operator that launched it."""
    names = {
        event["args"]["External id"]: event["name"]
        for event in complete
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    own: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for kernel in kernels:
        launched_by = None if _is_nccl(kernel) else names.get(kernel.get("args", {}).get("External id"))
        name = launched_by or kernel["name"]
        own[name] += kernel["dur"]
        calls[name] += 1
    return _longest(own, calls)


def _longest(own: Counter[str], calls: Counter[str]) -> list[dict[str, Any]]:
    longest = own.most_common(NUM_OPERATORS)
    return [{"name": name, "seconds": duration / _SECOND, "calls": calls[name]} for name, duration in longest]


def _memory(trace: Trace, complete: Trace, *, on_gpu: bool) -> dict[str, Any] | None:
    """What `profile_memory` recorded of the tensors on the device; None if the trace has no allocations."""
    changes = [event for event in trace if event.get("name") == "[memory]" and "Bytes" in event.get("args", {})]
    changes = [event for event in changes if (event["args"].get("Device Type") == 0) != on_gpu]
    if not changes:
        return None
    threads = _by_thread(event for event in complete if event.get("cat") == "cpu_op")
    allocated: Counter[str] = Counter()
    for thread, of_thread in _by_thread(changes).items():
        new = [{**event, "dur": 0.0} for event in of_thread if event["args"]["Bytes"] > 0]
        for event, caller in _nested([*threads.get(thread, ()), *new]):
            if event["name"] == "[memory]":
                allocated[caller["name"] if caller is not None else "(no operator)"] += event["args"]["Bytes"]
    return {
        "peak_bytes": max(event["args"]["Total Allocated"] for event in changes),
        "operators": [{"name": name, "bytes": num} for name, num in allocated.most_common(NUM_OPERATORS)],
    }


def main(trace: str, compressed: str) -> None:
    """Prints the figures of a trace file as JSON, and writes the file compressed."""
    print(json.dumps(figures_of(json.loads(Path(trace).read_bytes())["traceEvents"])))
    with open(trace, "rb") as source, gzip.open(compressed, "wb", compresslevel=6) as target:
        shutil.copyfileobj(source, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
