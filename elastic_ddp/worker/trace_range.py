"""`TraceRange`: a named range in the traces of profilers."""

from __future__ import annotations

from typing import Any

import torch

from elastic_ddp import torch_internals


class TraceRange:
    """A range that ends when the next one begins: of `record_function` while a `torch.profiler` runs, and of NVTX.

    Args:
        on_gpu: whether it is an NVTX range as well, which costs next to nothing without a tool that records it.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._recorded: Any = None
        self._nvtx: Any = None
        torch_internals.listen_to_profilers(self)

    def switch(self, name: str | None) -> None:
        """Ends the range, and begins one with this name; none for None."""
        self._end_recorded()
        if self._nvtx is not None:
            nvtx, self._nvtx = self._nvtx, None
            torch.cuda.nvtx.range_end(nvtx)
        if name is None:
            return
        if self._on_gpu:
            # Not push and pop: these are per thread, and a thread of autograd may end the range.
            self._nvtx = torch.cuda.nvtx.range_start(name)
        if torch_internals.is_profiling():
            self._recorded = torch.profiler.record_function(name)
            self._recorded.__enter__()

    def session_changes(self, *, begins: bool) -> None:
        """Ends the range of `record_function`: torch crashes if it ends in another session than it began in."""
        self._end_recorded()

    def _end_recorded(self) -> None:
        if self._recorded is not None:
            recorded, self._recorded = self._recorded, None
            recorded.__exit__(None, None, None)
