"""Seeds of the random generators, from the run's seed and the place in the run, never from the rank."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive_seed(seed: int, *place: int | str) -> int:
    """Returns 63 bits of the SHA-256 of the run's seed and `place`."""
    digest = hashlib.sha256(repr((seed, *place)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_all(seed: int, *place: int | str) -> None:
    """Seeds torch (CPU and all devices), NumPy's global generator, and Python's, for one place in the run.

    Places are `("init",)` before the training function, `(step, "begin")` before a step, `(step, m)` before its
    micro-batch m, `(step, "end")` after the last one, `(step, "optimize")` before the optimizer,
    `("evaluate", step, m)` before micro-batch m of an evaluation, and `("transform", epoch, lane, chunk)` before a call
    of a transform. Does not import torch: processes that read data start without it.
    """
    value = derive_seed(seed, *place)
    if "torch" in sys.modules:
        _seed_torch(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


def _seed_torch(value: int) -> None:
    import torch

    # Equal to manual_seed, which formats a traceback for each kind of device that this machine lacks: 0.1 to 3 ms each.
    torch.default_generator.manual_seed(value)
    seed_devices = _device_seeder()
    if seed_devices is not None:
        seed_devices(value)


@functools.cache
def _device_seeder() -> Callable[[int], None] | None:
    """Returns the function that seeds all accelerators of this process, or None if it has none."""
    import torch

    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    seeder: Callable[[int], None] = getattr(module, "manual_seed_all", None) or module.manual_seed  # MPS has one device
    return seeder


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Restores the state of all of these generators at the end of the context."""
    import torch

    devices = [device] if device.type != "cpu" else []
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
