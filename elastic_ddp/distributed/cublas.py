"""Keeps `CUBLAS_WORKSPACE_CONFIG` out of the steps: torch up to 2.12 parses it at every call of cuBLAS.

The parsing takes the host tens of microseconds, more than the launch of a kernel. Torch checks only once, at the first
call, that the variable allows deterministic results. Afterwards, it only sets the size of the workspace that torch
gives to cuBLAS. On Hopper, this size is 32 MiB with and without `:4096:8`, so removing the variable changes no bit. The
variable stays for models with recurrent layers, for which cuDNN calls cuBLAS itself, without torch's workspace.

Sources: `getChosenWorkspaceSize` and `alertCuBLASConfigNotDeterministic` of torch 2.11; torch 2.13 keeps the size
(https://github.com/pytorch/pytorch/pull/177912).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

VARIABLE, VALUE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
_HOPPER = 9
"""Hopper's major compute capability. On other GPUs, the size of the workspace would change, and perhaps the bits."""


def multiply(device: torch.device) -> None:
    """Calls cuBLAS."""
    ones = torch.ones(16, 16, device=device)
    torch.mm(ones, ones)


def settle(device: torch.device, module: torch.nn.Module, multiply: Callable[[torch.device], None] = multiply) -> bool:
    """Removes the variable from the environment, if that changes no bits and saves time. Returns whether it did.

    Call it with deterministic algorithms on, when this process may use the device. `module` is the model.
    """
    keeps_the_size = hasattr(torch.backends.cuda, "cublas_workspace_size")  # since torch 2.13
    if device.type != "cuda" or keeps_the_size or os.environ.get(VARIABLE) != VALUE:
        return False
    is_recurrent = any(isinstance(each, torch.nn.RNNBase) for each in module.modules())
    if is_recurrent or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return False
    multiply(device)
    del os.environ[VARIABLE]
    try:
        multiply(device)
    except RuntimeError:  # this torch checks the variable again
        os.environ[VARIABLE] = VALUE
        return False
    return True
