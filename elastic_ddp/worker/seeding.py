"""Random states that follow from the run's seed and a place in the run, never from who computes it."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(seed: int, *place: int | str) -> int:
    """63 bits that depend on the run's seed and on every part of `place`, through SHA-256."""
    digest = hashlib.sha256(repr((seed, *place)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def seed_all(seed: int, *place: int | str) -> None:
    """Seeds torch (CPU and every device), NumPy's global generator and Python's, for one place in the run.

    Places in use: `("init",)` before the user's function runs, `(step, "begin")` before a step, `(step, m)` before its
    micro-batch m, `(step, "end")` after the last one, `(step, "optimize")` before the optimizer, and
    `("evaluate", step, m)` before micro-batch m of a step of an evaluation. So whatever is drawn anywhere in the loop
    follows from the seed and the step.
    """
    value = derive_seed(seed, *place)
    if _has_accelerator():
        torch.manual_seed(value)
    else:
        # The same for the CPU. That would also format a traceback for every kind of device which might yet be
        # initialized: 3 ms, before every micro-batch.
        torch.default_generator.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


@contextmanager
def as_before(device: torch.device) -> Iterator[None]:
    """Leaves all of these generators as it found them."""
    devices = [device] if device.type != "cpu" else []
    numpys, pythons = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        try:
            yield
        finally:
            np.random.set_state(numpys)
            random.setstate(pythons)
