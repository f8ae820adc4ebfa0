"""`Utilization`: how busy a GPU is, as NVML has it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch


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
            value, self._reading = self._reading.result(), None
        if self._reading is None and self._is_available:
            self._reading = self._reader.submit(self._read)
        return value

    def _read(self) -> float | None:
        try:
            return torch.cuda.utilization(self._device) / 100
        except Exception:  # no nvidia-ml-py, no NVML, or a GPU without the figure: each has an error of its own
            self._is_available = False
            return None
