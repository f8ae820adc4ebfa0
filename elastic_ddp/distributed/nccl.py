"""NCCL: the version in use, whether ranks may share a GPU, and the settings of torch that let ranks survive a peer."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

SHARING_SINCE = (2, 30)
"""The first version that lets several ranks use one GPU, if `SHARING_VARIABLE` is 1."""
SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"

_TORCH_SETTINGS = {
    # By default torch ends the process when a collective fails.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Torch's monitor ends the process after eight minutes without progress. The rendezvous detects hangs.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # After an error, a rank leaves a key in the store that makes the monitors of later generations end their process.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # After an error, torch's watchdog sleeps for four times this, and closing the group waits for it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}


def set_up() -> None:
    """Sets the environment variables that torch reads when it creates a process group. The user's values take
    precedence."""
    for name, value in _TORCH_SETTINGS.items():
        os.environ.setdefault(name, value)


def version() -> tuple[int, int] | None:
    """Returns the version of the NCCL library in use, or None if there is none.

    `torch.cuda.nccl.version` returns the version that torch was built with. `LD_PRELOAD` can replace it.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return None
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return number.value // 10_000, number.value // 100 % 100


def why_not_share_gpus(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns why ranks that share a GPU cannot use NCCL; None if they can."""
    if environment.get(SHARING_VARIABLE) != "1":
        return f"{SHARING_VARIABLE} is not 1"
    found = version()
    if found is None:
        return "no NCCL library is loaded"
    return None if found >= SHARING_SINCE else f"NCCL {found[0]}.{found[1]} is loaded, and 2.30 or newer is needed"
