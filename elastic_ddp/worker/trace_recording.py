"""`TraceRecording`: records a worker with `torch.profiler`, and stores the trace and its figures."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from elastic_ddp.telemetry import trace as trace_program
from elastic_ddp.torch_internals import (
    dump_memory_snapshot,
    is_profiling,
    listen_to_profilers,
    record_memory_history,
    records_memory_history,
)

if TYPE_CHECKING:
    from elastic_ddp.storage.storage import Storage

FIGURES_WITHIN_S = 300.0
"""How long the program that reads a trace may take."""
_KIB = 1024
_TRACE, _COMPRESSED, _SNAPSHOT = "trace.json", "trace.json.gz", "memory.pickle"


class TraceRecording:
    """One recording. Call `start`, and `stop` or `cancel`, in the training thread, and then `export` and `store`.

    Torch has one profiler session at a time. Once another session has replaced this recording's session, stopping the
    old session would stop the new one, and exporting the old session would end the process.

    Args:
        device: the worker's device. The trace of a GPU has its kernels.
        memory: whether to record allocations; on a GPU, also the stacks of all allocations, for a memory snapshot.

    Raises:
        RuntimeError: this process uses torch.profiler already.
    """

    def __init__(self, device: torch.device, *, memory: bool) -> None:
        self._on_gpu, self._device = device.type == "cuda", device
        self._makes_snapshot = memory and self._on_gpu
        self._records_history = self._makes_snapshot and not records_memory_history()  # the user may record it
        self._folder = tempfile.TemporaryDirectory(prefix="elastic_ddp-profile-")
        self._peak_memory_bytes = 0
        if is_profiling():
            raise RuntimeError("the training function uses torch.profiler itself at the moment")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise torch 2.13 prints each start and stop
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if self._on_gpu else []
        self._profile = torch.profiler.profile(activities=activities, profile_memory=memory)
        self._profile.prepare_trace()  # so that the first step is not slow
        self._has_begun = self._is_replaced = self._has_ended = False

    def start(self) -> None:
        """Starts to record. Raises RuntimeError if this process uses torch.profiler itself."""
        self._begin()
        if self._records_history:
            record_memory_history(True)

    def _begin(self) -> None:
        if is_profiling():
            raise RuntimeError("the training function has started torch.profiler itself")
        self._profile.start_trace()
        self._has_begun = True
        listen_to_profilers(self)

    def _end(self) -> None:
        self._has_ended = True
        if not self._is_replaced:
            self._profile.stop_trace()

    def session_changes(self, *, begins: bool) -> None:
        """Notes that another session replaces this one."""
        self._is_replaced |= begins and not self._has_ended

    def stop(self) -> None:
        """Stops recording. Raises RuntimeError if another use of torch.profiler has replaced the recording."""
        try:
            self._end()
            if self._is_replaced:
                raise RuntimeError("the training function has used torch.profiler itself")
            if self._makes_snapshot:
                dump_memory_snapshot(str(self._path(_SNAPSHOT)))
        finally:
            if self._records_history:
                record_memory_history(False)
        if self._on_gpu:  # of tensors, as `torch.cuda` has it
            self._peak_memory_bytes = torch.cuda.max_memory_allocated(self._device)
        else:  # of this process
            self._peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB

    def cancel(self) -> None:
        """Ends the recording without a trace, wherever it is."""
        if not self._has_begun and not is_profiling():
            self._begin()  # torch cannot end a session that it has only prepared
        if self._has_begun and not self._has_ended:
            self._end()
        if self._records_history:
            record_memory_history(False)

    def export(self) -> None:
        """Writes the trace to a local file. Torch holds Python's lock meanwhile."""
        self._profile.export_chrome_trace(str(self._path(_TRACE)))

    def store(self, storage: Storage, prefix: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Stores the trace, a memory snapshot, and figures with these `facts`. Returns the figures with the keys.

        A program in another process reads and compresses the trace, since that would take Python's lock for long.
        """
        files = str(self._path(_TRACE)), str(self._path(_COMPRESSED))
        program = [sys.executable, "-I", "-S", trace_program.__file__, *files]
        output = subprocess.run(program, capture_output=True, check=True, timeout=FIGURES_WITHIN_S).stdout
        figures = facts | json.loads(output) | {"peak_memory_bytes": self._peak_memory_bytes}
        figures |= {"trace": f"{prefix}.json.gz", "snapshot": None}
        storage.write(f"{prefix}.json.gz", self._path(_COMPRESSED).read_bytes())
        if self._makes_snapshot:
            figures["snapshot"] = f"{prefix}-memory.pickle"
            storage.write(f"{prefix}-memory.pickle", self._path(_SNAPSHOT).read_bytes())
        storage.write(f"{prefix}-figures.json", json.dumps(figures, indent=1).encode())
        return figures

    def close(self) -> None:
        """Deletes the local files."""
        self._folder.cleanup()

    def _path(self, name: str) -> Path:
        return Path(self._folder.name, name)
