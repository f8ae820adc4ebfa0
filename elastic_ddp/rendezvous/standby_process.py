"""The place of this process in its run. A standby has none until it takes the place of a worker that failed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

GPU_RELEASE_TIMEOUT_S = 30.0
"""How long the killed process of a failed worker may take to end and free its GPU memory."""

_has_place = threading.Event()
_has_place.set()
_predecessor: int | None = None
"""The process that had the place before."""
_shown: Callable[[], AbstractContextManager[None]] = nullcontext


def stand_by(gpus: Sequence[int | str] = ()) -> None:
    """Makes this process a standby. Call it before CUDA is used; any use of CUDA then waits for the place.

    Until then, torch reports GPUs as if the process had `gpus`, so that the training function builds the same model.
    """
    _has_place.clear()
    if gpus:
        from elastic_ddp.torch_internals import delay_cuda

        os.environ["CUDA_VISIBLE_DEVICES"] = _shown_as(gpus)
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else `torch.cuda.is_available` fixes the visible GPUs
        delay_cuda(_wait_for_gpus)


def take_place(gpus: Sequence[int | str], predecessor: int) -> bool:
    """Gives this process a place, with these GPUs, which process `predecessor` of this node has used.

    Returns False if this process has used CUDA already, on another GPU.
    """
    global _predecessor
    if gpus:
        from elastic_ddp.torch_internals import has_used_cuda

        if os.environ.get("CUDA_VISIBLE_DEVICES") != _shown_as(gpus) and has_used_cuda():
            return False
        os.environ["CUDA_VISIBLE_DEVICES"] = _shown_as(gpus)
    _predecessor = predecessor
    _has_place.set()
    return True


def has_place() -> bool:
    """Whether this process may train."""
    return _has_place.is_set()


def wait_for_place() -> None:
    """Returns when this process has a place. The controller kills a standby that is not needed any more."""
    if not has_place():
        with _shown():
            _has_place.wait()


def _wait_for_gpus() -> None:
    wait_for_place()
    end = time.monotonic() + GPU_RELEASE_TIMEOUT_S
    while _predecessor is not None and not has_ended(_predecessor) and time.monotonic() < end:
        time.sleep(0.01)


def process_state(pid: int) -> str:
    """Returns the state of a process as in `ps`: T and t if it is stopped, Z and X if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def has_ended(pid: int) -> bool:
    """Returns whether a process has ended. An ended process stays in /proc until its parent waits for it."""
    return process_state(pid) in "ZX"


def show_wait(shown: Callable[[], AbstractContextManager[None]]) -> None:
    """Enters a context for each wait from now on."""
    global _shown
    _shown = shown


def _shown_as(gpus: Sequence[int | str]) -> str:
    return ",".join(map(str, gpus))
