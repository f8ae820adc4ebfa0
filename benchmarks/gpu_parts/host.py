"""What the host does in a step, without a trace: the time in chosen functions, and the CPU time of each thread."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from elastic_ddp.distributed import cublas

Place = tuple[Any, str]
"""A class or module, and the name of a function in it."""
MODES = ("off", "strict")


@contextmanager
def timed(places: Sequence[Place]) -> Iterator[dict[str, list[float]]]:
    """Times the calls of functions in the context. Yields the seconds of each call, by the function's name.

    Nested functions count in each other. Waits for the device count where they happen.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]
    inherited = [(owner, name) for owner, name in places if name not in owner.__dict__]

    def timing(function: Any, label: str) -> Any:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                seconds[label].append(time.perf_counter() - begin)

        return call

    for owner, name, function in originals:
        setattr(owner, name, timing(function, f"{owner.__name__.rpartition('.')[2]}.{name}"))
    try:
        yield seconds
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)
        for owner, name in inherited:
            delattr(owner, name)


def thread_seconds() -> dict[str, float]:
    """Returns the CPU seconds of this process's threads by name, without the digits in it. Needs Linux."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    seconds: dict[str, float] = defaultdict(float)
    for folder in Path("/proc/self/task").glob("*"):
        try:
            on_cpu = int((folder / "schedstat").read_text().split()[0]) / 1e9
            name = names.get(int(folder.name)) or (folder / "comm").read_text().strip()
        except (OSError, ValueError, IndexError):  # the thread ended, or the kernel does not count
            continue
        seconds[re.sub(r"\d+", "", name)] += on_cpu
    return dict(seconds)


def use_deterministic_algorithms(device: torch.device, model: torch.nn.Module, *, keeps_variable: bool) -> None:
    """Sets what a worker sets for `reduction = "canonical"`; or all of it but the removal of cuBLAS's variable."""
    os.environ.setdefault(cublas.VARIABLE, cublas.VALUE)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    removed = not keeps_variable and cublas.settle(device, model)
    print(f"{cublas.VARIABLE} {'removed' if removed else 'kept'}, torch {torch.__version__}", flush=True)


@contextmanager
def deterministic(mode: str | None) -> Iterator[None]:
    """Switches torch's deterministic algorithms `off`, or to `strict` as `reduction = "canonical"` does."""
    if mode is None:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode == "strict")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
