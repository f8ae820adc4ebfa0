"""Numbers on their way from the device to the host, which reads them late: while it does not wait, the device works."""

from __future__ import annotations

import torch


def to_host(number: torch.Tensor) -> torch.Tensor:
    """Starts to copy one number to the host. `read` waits for what the device was given before the copy only.

    For the loss of a micro-batch, that is its forward, and not the backward after it.
    """
    if number.device.type != "cuda":
        return number
    host = torch.empty(1, dtype=number.dtype, pin_memory=True)
    host.copy_(number.reshape(1), non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    host.copied = copied  # type: ignore[attr-defined]
    return host


def read(host: torch.Tensor) -> float:
    """Returns a number that `to_host` copies, once it is there."""
    if hasattr(host, "copied"):
        host.copied.synchronize()
    return float(host)
