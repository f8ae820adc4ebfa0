"""`PhaseClock`: the time that one rank spends in each phase of its steps, also as ranges in traces of profilers."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Protocol, cast

import torch

from elastic_ddp.rendezvous.hang import Place
from elastic_ddp.telemetry.phases import STEP_PHASES, StepPhase
from elastic_ddp.torch_internals import is_profiling, listen_to_profilers

_Phase = StepPhase | Literal["evaluation", "commit"]
"""`evaluation` and `commit` are reported as parts of `other`. A rank that waits for a commit is not slow."""
_IN_OTHER: tuple[_Phase, ...] = ("evaluation", "commit")
_PHASES: dict[Place, _Phase] = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "reduction": "backward",  # the last one; the strategy enters "communication" when its own gradients are computed
    "collective": "communication",
    "optimizer": "optimizer",
    "commit": "commit",
    "shares": "commit",
    "evaluation": "evaluation",
}
"""The phases of places; all other places are `other`."""
_FIRST_STEPS = 2
"""Steps of a generation that are not typical."""
_CPU = torch.device("cpu")


class Timer(Protocol):
    """Marks moments, and measures the time between two of them later."""

    def mark(self) -> Any:
        """Returns a mark of this moment."""

    def is_past(self, mark: Any) -> bool:
        """Whether the moment of a mark has come. Earlier marks are past as well."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the seconds between two marks that are past."""

    def release(self, mark: Any) -> None:
        """The mark is not used any more."""


class HostTimer:
    """The clock of this process."""

    def mark(self) -> float:
        return time.perf_counter()

    def is_past(self, mark: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def release(self, mark: float) -> None: ...


class DeviceTimer:
    """CUDA events on the current stream. An interval between two includes waits of the stream.

    Communication, copies, and host time count only while the stream waits for this work. Never synchronizes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unused: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_past(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1000

    def release(self, mark: torch.cuda.Event) -> None:
        self._unused.append(mark)


class TraceRange:
    """A range in traces that ends when the next range begins. An active `torch.profiler` records it, and NVTX on a GPU.

    Args:
        on_gpu: whether it is an NVTX range as well, which costs next to nothing without a tool that records it.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._recorded: Any = None
        self._nvtx: Any = None
        listen_to_profilers(self)

    def switch(self, name: str | None) -> None:
        """Ends the range, and begins one with this name; none for None."""
        self._end_recorded()
        if self._nvtx is not None:
            torch.cuda.nvtx.range_end(self._nvtx)
            self._nvtx = None
        if name is None:
            return
        if self._on_gpu:
            # Not push and pop: these are per thread, and a thread of autograd may end the range.
            self._nvtx = torch.cuda.nvtx.range_start(name)
        if is_profiling():
            self._recorded = torch.profiler.record_function(name)
            self._recorded.__enter__()

    def session_changes(self, *, begins: bool) -> None:
        """Ends the range of `record_function`: torch crashes if it ends in another session than it began in."""
        self._end_recorded()

    def _end_recorded(self) -> None:
        if self._recorded is not None:
            recorded = self._recorded
            self._recorded = None
            recorded.__exit__(None, None, None)


class Utilization:
    """Reads a GPU's utilization in a thread of its own, because NVML may take milliseconds.

    It needs the package `nvidia-ml-py` on the worker.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpu-utilization")
        self._reading: Future[float | None] | None = None
        self._is_available = True

    def newest(self) -> float | None:
        """Returns the share of the time, from 0 to 1, in which the GPU was busy just before the last call, or None.

        Never waits: it starts to read the value that the next call returns.
        """
        value = None
        if self._reading is not None and self._reading.done():
            value = self._reading.result()
            self._reading = None
        if self._reading is None and self._is_available:
            self._reading = self._reader.submit(self._read)
        return value

    def _read(self) -> float | None:
        try:
            return torch.cuda.utilization(self._device) / 100
        except Exception:  # no nvidia-ml-py, no NVML, or a GPU without the figure: each has an error of its own
            self._is_available = False
            return None


class PhaseClock:
    """Measures the phases of steps. The clock is always in one phase, so the phases add up to the time between steps.

    The worker calls `begin` in each generation, `follow` with each place that it enters, `step_done`, and `end`. The
    first two steps of a generation are not measured: the rank waits for its first rows, and DDP arranges its buckets.

    While a `torch.profiler` is active in this process, each step and phase is a range in its trace. On a GPU, they are
    NVTX ranges too.

    Args:
        device: the device of the model.
        timer: by default CUDA events on a GPU, else the clock of this process.
    """

    def __init__(self, device: torch.device = _CPU, timer: Timer | None = None) -> None:
        is_gpu = device.type == "cuda"
        self._device = device if is_gpu else None
        self._timer: Timer = timer or (DeviceTimer(device) if is_gpu else HostTimer())
        self._utilization = Utilization(device) if is_gpu else None
        self._step_range, self._phase_range = TraceRange(on_gpu=is_gpu), TraceRange(on_gpu=is_gpu)
        self._phase: _Phase = "other"
        self._current: list[tuple[_Phase, Any]] | None = None
        """The phases of the current step so far, with marks of their beginnings; None outside of a generation."""
        self._num_unmeasured = 0
        self._done: deque[tuple[int, list[tuple[_Phase, Any]], Any]] = deque()
        """Steps whose end the device may not have reached: number of steps done, phases, and the mark of the end."""
        self._clear()

    def _clear(self) -> None:
        self._step = self._num_steps = 0
        self._seconds: dict[_Phase, float] = dict.fromkeys((*STEP_PHASES, *_IN_OTHER), 0.0)
        self._data_s: dict[str, float] = {}

    def begin(self, step: int) -> None:
        """A generation begins, with this number of steps done. Forgets earlier measurements."""
        self.end()
        self._clear()
        self._num_unmeasured = _FIRST_STEPS
        self._current = [(self._phase, self._timer.mark())]
        self._switch_step(f"step {step}")

    def end(self) -> None:
        """The generation ends. Steps that `take` has not returned are forgotten."""
        self._current = None
        self._done.clear()  # with their marks: after a failure the device may never reach them
        self._phase_range.switch(None)
        self._step_range.switch(None)

    def follow(self, place: Place) -> None:
        """Enters the phase of a place of the worker's `Activity`."""
        self.enter(_PHASES.get(place, "other"))

    def enter(self, phase: str) -> str:
        """Enters a phase, and returns the previous phase. The training thread calls it, or a thread of autograd for
        which the training thread waits."""
        before = self._phase
        self._phase = cast(_Phase, phase)
        if phase != before and self._current is not None:
            self._current.append((self._phase, self._timer.mark()))
            self._phase_range.switch(phase)
        return before

    def step_done(self, step: int) -> None:
        """A step is done; `step` is the number of steps done."""
        if self._current is None:
            return
        phases = self._current
        end = self._timer.mark()
        self._current = [(self._phase, end)]
        if self._num_unmeasured:
            self._num_unmeasured -= 1
        else:
            self._done.append((step, phases, end))
        self._switch_step(f"step {step}")
        self._collect()

    def _switch_step(self, name: str) -> None:
        self._phase_range.switch(None)
        self._step_range.switch(name)
        self._phase_range.switch(self._phase)

    def _collect(self) -> None:
        """Adds up the phases of steps whose end the device has reached."""
        while self._done and self._timer.is_past(self._done[0][2]):
            self._step, phases, end = self._done.popleft()
            before_s = self._seconds["data"]
            ends = [*(begin for _, begin in phases[1:]), end]
            for (phase, begin), until in zip(phases, ends, strict=True):
                self._seconds[phase] += self._timer.seconds(begin, until)
                self._timer.release(begin)
            self._data_s[str(self._step)] = round(self._seconds["data"] - before_s, 6)
            self._num_steps += 1

    def take(self) -> dict[str, Any]:
        """Returns the measurements since the last call, and forgets them.

        Returns:
            JSON values: step (the number of steps done up to the last step measured), num_steps (steps measured),
            phases (seconds of each in one step), data_s (seconds of the phase `data` in each step, by the number of
            steps done), in_other (seconds of the known parts of `other`), work_s (seconds of a step without
            communication and commits), memory_bytes (peak of the process), utilization (from 0 to 1). Unknown values
            are None.
        """
        per_step = {phase: seconds / max(1, self._num_steps) for phase, seconds in self._seconds.items()}
        work_s = sum(per_step.values()) - per_step["communication"] - per_step["commit"]
        in_other = {name: per_step.pop(name) for name in _IN_OTHER}
        per_step["other"] += sum(in_other.values())
        taken = {
            "step": self._step,
            "num_steps": self._num_steps,
            "phases": {phase: round(seconds, 6) for phase, seconds in per_step.items()},
            "data_s": self._data_s,
            "in_other": {name: round(seconds, 6) for name, seconds in in_other.items()},
            "work_s": round(work_s, 6),
            "memory_bytes": torch.cuda.max_memory_allocated(self._device) if self._device is not None else None,
            "utilization": self._utilization.newest() if self._utilization is not None else None,
        }
        self._clear()
        return taken
