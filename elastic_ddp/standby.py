"""Whether this process has a place in its run. A standby has none until it takes the place of a worker that failed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

_has_place = threading.Event()
_has_place.set()
_shown: Callable[[], AbstractContextManager[None]] = nullcontext


def stand_by(gpus: Sequence[int | str] = ()) -> None:
    """Makes this process a standby. Call it before CUDA is used; any use of CUDA then waits for the place.

    Until then, torch reports GPUs as if the process had `gpus`, so that the training function builds the same model.
    """
    _has_place.clear()
    if gpus:
        from elastic_ddp.torch_internals import delay_cuda

        _show_gpus(gpus)
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else `torch.cuda.is_available` fixes the visible GPUs
        delay_cuda(wait_for_place)


def take_place(gpus: Sequence[int | str]) -> bool:
    """Gives this process a place, with these GPUs. Returns False if it has used CUDA already, on another GPU."""
    if gpus:
        from elastic_ddp.torch_internals import has_used_cuda

        if not _sees_gpus(gpus) and has_used_cuda():
            return False
        _show_gpus(gpus)
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


def show_wait(shown: Callable[[], AbstractContextManager[None]]) -> None:
    """Enters a context for each wait from now on."""
    global _shown
    _shown = shown


def _show_gpus(gpus: Sequence[int | str]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))


def _sees_gpus(gpus: Sequence[int | str]) -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES") == ",".join(map(str, gpus))
