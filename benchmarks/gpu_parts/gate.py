"""The gate between two steps of a training loop: a side of the benchmark waits there for a command.

The benchmark writes numbered commands into the side's folder, and the side writes an answer to each. So all sides are
started once, keep their process and their memory, and take turns. A command is a generator: it yields wherever the loop
is to run one step, and returns the answer.
"""

from __future__ import annotations

import itertools
import json
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_parts.host import Place, deterministic, thread_seconds, timed

STEP_LABEL = "benchmark step"
"""The annotation of each step in a trace."""
POLL_S = 0.002

Command = Generator[None, None, dict[str, Any]]
Handler = Callable[[dict[str, Any]], Command]


def write_json(path: Path, value: Any) -> None:
    """Writes a file that appears complete."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(value))
    unfinished.replace(path)


class Gate:
    """Runs the commands of a folder. Call it before every step."""

    def __init__(self, folder: str, device: torch.device, places: Sequence[Place] = ()) -> None:
        """`places` are the functions that the command `host` times."""
        self._folder, self._device, self._places = Path(folder), device, places
        self._handlers: dict[str, Handler] = {"steps": self.steps, "host": self.host, "trace": self.trace}
        self._numbers = itertools.count()
        self._number = 0
        self._command: Command | None = None

    def add(self, handlers: dict[str, Handler]) -> None:
        """Adds commands of the side's own, by name."""
        self._handlers |= handlers

    def __call__(self) -> None:
        """Returns when a command wants a step. An error of a command is its answer."""
        while True:
            try:
                if self._command is None:
                    command = self._receive()
                    self._command = self._handlers[command["do"]](command)
                return next(self._command)
            except StopIteration as end:
                answer = end.value
            except Exception:
                answer = {"error": traceback.format_exc()}
            self._command = None
            write_json(self._folder / f"answer-{self._number}.json", answer)

    def _receive(self) -> dict[str, Any]:
        self._number = next(self._numbers)
        path = self._folder / f"command-{self._number}.json"
        while not path.exists():
            time.sleep(POLL_S)
        command: dict[str, Any] = json.loads(path.read_text())
        return command

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def peak_bytes(self) -> int | None:
        """Returns the peak of allocated device memory since the last call of `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def steps(self, command: dict[str, Any]) -> Command:
        """Runs `warmup` steps, then `steps` steps, with `mode` of `deterministic`.

        Answers the seconds of all, of each as the host sees it, and of CPU time by thread.
        """
        with deterministic(command.get("mode")):
            for _ in range(command["warmup"]):
                yield
            self.reset_peak()
            self.synchronize()
            cpu_before, begin = thread_seconds(), time.perf_counter()
            ends = []
            for _ in range(command["steps"]):
                yield
                ends.append(time.perf_counter())
            self.synchronize()
            seconds = time.perf_counter() - begin
        cpu = {name: after - cpu_before.get(name, 0.0) for name, after in thread_seconds().items()}
        each = [end - before for before, end in itertools.pairwise([begin, *ends])]
        reserved = torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else None
        return {
            "seconds": seconds,
            "each_s": each,
            "peak_bytes": self.peak_bytes(),
            "reserved_bytes": reserved,
            "cpu_s": cpu,
        }

    def host(self, command: dict[str, Any]) -> Command:
        """Runs steps as `steps` does. Answers also the seconds of each call of the chosen functions."""
        with timed(self._places) as seconds:
            for _ in range(command["warmup"]):
                yield
            seconds.clear()
            answer = yield from self.steps({**command, "warmup": 0})
            return {**answer, "calls_s": dict(seconds)}

    def trace(self, command: dict[str, Any]) -> Command:
        """Traces `steps` steps into a file, `with_stack` or without. The first steps of a trace are not labeled."""
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        path = self._folder / f"trace-{self._number}.json"
        self.synchronize()
        with profile(activities=activities, with_stack=command["with_stack"]) as profiler:
            for _ in range(command["warmup"]):
                yield
            for _ in range(command["steps"]):
                with record_function(STEP_LABEL):
                    yield
            self.synchronize()
        profiler.export_chrome_trace(str(path))
        return {"path": str(path)}
