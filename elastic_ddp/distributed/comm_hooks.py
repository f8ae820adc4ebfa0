"""Torch's communication hooks for DDP, which compress gradients before the stock all-reduce."""

# No `from __future__ import annotations`: DDP checks a hook's annotations as objects.
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

CommHook = Literal["bf16", "fp16", "powersgd"]

POWERSGD_FIRST_STEP = 10
"""Steps of a generation that PowerSGD leaves uncompressed. It needs two, in which DDP arranges its buckets."""


def register_comm_hook(replica: DistributedDataParallel, name: CommHook) -> None:
    """Registers a hook for the default process group, with a new state. All ranks of a generation do so together."""
    match name:
        case "bf16":
            replica.register_comm_hook(None, _bf16)
        case "fp16":
            replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
        case "powersgd":
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=POWERSGD_FIRST_STEP)
            replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Calls torch's hook. DDP refuses that by its name in builds without NCCL, although gloo supports bfloat16."""
    return default_hooks.bf16_compress_hook(group, bucket)
