"""Figures about the device from a trace of torch.profiler: when it was idle, and where the host waited for it.

It reads the Chrome trace format. Times in it are microseconds; intervals are pairs of them.
"""

from __future__ import annotations

import bisect
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_ddp.telemetry.trace import Interval, length, union
from gpu_parts.gate import STEP_LABEL

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver")
WAITS = re.compile(r"Synchronize$|^cudaMemcpy$|^cudaFree|^cudaMalloc$|^cudaHostAlloc$|^cudaMallocHost$|WaitEvent$")
"""Calls of the CUDA runtime in which the host may wait. Allocations may wait for the whole device."""
NO_HOST_WAIT = re.compile(r"WaitEvent$")  # the stream waits, and not the host
OURS = ("elastic_ddp/", "examples/", "gpt.py", "gpu_parts/train.py")
"""Parts of the names of the functions that a place consists of."""
GAP_US = 10.0
"""Gaps between two kernels below this are launches."""


def gaps_between(busy: Sequence[Interval], window: Interval) -> list[Interval]:
    """Returns the rest of the window. `busy` is disjoint, in order, and inside the window."""
    edges = [window[0], *(time for interval in busy for time in interval), window[1]]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


def interval_of(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))


class Trace:
    """A trace of labeled steps. `window` is from the first labeled step to the end of the last, on the host."""

    def __init__(self, path: str | Path) -> None:
        with open(path) as file:
            events = json.load(file)["traceEvents"]
        self._by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            if event.get("ph") == "X":
                self._by_category[event.get("cat", "").lower()].append(event)
        labels = [event for event in self._by_category["user_annotation"] if event["name"] == STEP_LABEL]
        if not labels:
            raise ValueError(f"{path} has no event {STEP_LABEL!r}")
        self.steps = sorted(interval_of(event) for event in labels)
        self.window = self.steps[0][0], self.steps[-1][1]
        self.main_thread = labels[0]["tid"]
        self.device = [event for category in DEVICE for event in self._by_category[category]]
        self.busy = self._within(self.device)

    def _within(self, events: Sequence[dict[str, Any]]) -> list[Interval]:
        """Returns the union of the times of events, inside the window."""
        return union(map(interval_of, events), self.window)

    def places(self, times: Sequence[float], thread: Any) -> list[str]:
        """Returns the Python functions that a thread was in at each time: the innermost three of ours, or of any."""
        calls = [event for event in self._by_category["python_function"] if event["tid"] == thread]
        calls.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
        places, position = [""] * len(times), 0
        stack: list[tuple[float, str]] = []
        for index in sorted(range(len(times)), key=lambda index: times[index]):
            while position < len(calls) and calls[position]["ts"] <= times[index]:
                begin, end = interval_of(calls[position])
                while stack and stack[-1][0] <= begin:
                    stack.pop()
                stack.append((end, calls[position]["name"]))
                position += 1
            while stack and stack[-1][0] <= times[index]:
                stack.pop()
            names = [name for _, name in stack]
            ours = [name for name in names if any(part in name for part in OURS)]
            places[index] = " > ".join((ours or names)[-3:])
        return places

    def idle(self) -> dict[str, Any]:
        """Returns device time per step: the step, and how much of it no kernel and no copy ran. In milliseconds."""
        count, gaps = len(self.steps), gaps_between(self.busy, self.window)
        period = (self.window[1] - self.window[0]) / count
        idle = length(gaps) / count if self.device else None
        busy = length(self.busy) / count if self.device else None
        return {
            "steps": count,
            "step_ms": period / 1000,
            "busy_ms": None if busy is None else busy / 1000,
            "idle_ms": None if idle is None else idle / 1000,
            "idle_share": None if idle is None else idle / period,
            "kernels": len(self.device) / count,
            "longest_gaps_ms": sorted((round((end - begin) / 1000, 3) for begin, end in gaps), reverse=True)[:10],
        }

    def kernels(self, most: int = 40) -> dict[str, float]:
        """Returns the milliseconds per step of the kernels, copies and fills that take longest, by name."""
        totals: dict[str, float] = defaultdict(float)
        for event in self.device:
            totals[event["name"]] += length(self._within([event]))
        longest = sorted(totals.items(), key=lambda item: -item[1])[:most]
        return {name: total / len(self.steps) / 1000 for name, total in longest}

    def idle_places(self, most: int = 12) -> list[dict[str, Any]]:
        """Returns where the host was, in the middle of each gap of the device, with the idle milliseconds per step."""
        gaps = [gap for gap in gaps_between(self.busy, self.window) if gap[1] - gap[0] > GAP_US]
        totals: dict[str, list[float]] = defaultdict(list)
        if self.device:
            middles = [(begin + end) / 2 for begin, end in gaps]
            for gap, place in zip(gaps, self.places(middles, self.main_thread), strict=True):
                totals[place].append(gap[1] - gap[0])
        count = len(self.steps)
        ordered = sorted(totals.items(), key=lambda item: -sum(item[1]))[:most]
        return [
            {"place": place, "gaps": len(each) / count, "idle_ms": sum(each) / count / 1000} for place, each in ordered
        ]

    def waits(self) -> list[dict[str, Any]]:
        """Returns the calls in which the host may wait, by name, thread and place, per step.

        `ms` is the time in the call. `idle_ms` is the length of the device's gap that began during the call: from the
        last kernel before its return to the first one after. That is what the wait costs the device.
        """
        calls = [
            event
            for category in RUNTIME
            for event in self._by_category[category]
            if WAITS.search(event["name"])
            and not NO_HOST_WAIT.search(event["name"])
            and self.window[0] <= event["ts"] < self.window[1]
        ]
        places: dict[int, str] = {}
        for thread in {event["tid"] for event in calls}:
            own = [event for event in calls if event["tid"] == thread]
            found = self.places([float(event["ts"]) for event in own], thread)
            places |= {id(event): place for event, place in zip(own, found, strict=True)}
        totals: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
        for event in calls:
            begin, end = interval_of(event)
            thread = "main" if event["tid"] == self.main_thread else "other"
            totals[event["name"], thread, places[id(event)]].append((end - begin, self._gap_since(begin, end)))
        count = len(self.steps)
        return [
            {
                "call": name,
                "thread": thread,
                "place": place,
                "per_step": len(each) / count,
                "ms": sum(duration for duration, _ in each) / count / 1000,
                "idle_ms": sum(gap for _, gap in each) / count / 1000,
            }
            for (name, thread, place), each in sorted(totals.items(), key=lambda item: -sum(d for d, _ in item[1]))
        ]

    def _gap_since(self, begin: float, time: float) -> float:
        """Returns the length of the device's gap at a time; 0 if it is busy then, or was idle at `begin`."""
        index = bisect.bisect_right(self.busy, (time, float("inf")))
        idle_from = self.busy[index - 1][1] if index else self.window[0]
        idle_to = self.busy[index][0] if index < len(self.busy) else self.window[1]
        return idle_to - idle_from if begin <= idle_from <= time else 0.0

    def exchange(self) -> dict[str, Any]:
        """Returns, per step, how long kernels of NCCL ran, and for how much of that other kernels ran as well."""
        nccl = [event for event in self.device if "nccl" in event["name"].lower()]
        others = [event for event in self.device if event["cat"] == "kernel" and "nccl" not in event["name"].lower()]
        exchange, compute = self._within(nccl), self._within(others)
        both = length(exchange) + length(compute) - length(union([*exchange, *compute]))
        count, total = len(self.steps), length(exchange)
        return {
            "step_ms": statistics.median((end - begin) / 1000 for begin, end in self.steps),
            "exchange_ms": total / count / 1000,
            "compute_ms": length(compute) / count / 1000,
            "overlap_ms": both / count / 1000,
            "overlap_share": both / total if total else None,
            "exchange_kernels": len(nccl) / count,
            "idle_ms": length(gaps_between(self.busy, self.window)) / count / 1000 if self.device else None,
        }
