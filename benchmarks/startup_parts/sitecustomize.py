"""Notes when a process of Python starts, imports and calls what `startup.py` measures; Python imports it at its start.

Each process appends JSON lines to a file of its own in the folder STARTUP_TRACE: the name, the Unix times of the start
and the end, and the CPU seconds of the process meanwhile.
"""

from __future__ import annotations

import functools
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

IMPORTS = {
    "torch",
    "torch._dynamo",
    "ray",
    "ray.data",
    "ray.train",
    "elastic_ddp.driver.trainer",
    "elastic_ddp.driver.session",
}
"""Modules whose import is noted."""
CALLS = {
    "elastic_ddp.driver.trainer": ["ElasticTrainer.fit", "ElasticTrainer._create_job"],
    "elastic_ddp.driver.cluster": ["connect_or_start"],
    "elastic_ddp.ray_internals.controller": ["ElasticController.__init__"],
    "elastic_ddp.ray_internals.worker_group": ["ElasticWorker.__init__"],
    "elastic_ddp.rendezvous.actor": ["Rendezvous.__init__"],
    "elastic_ddp.worker.main": ["work", "_train"],
    "elastic_ddp.worker.worker_membership": ["WorkerMembership.warm_up", "WorkerMembership.join"],
    "elastic_ddp.data.pipeline": ["_begin_task"],
}
"""Functions whose calls are noted, by module."""


def _note(name: str, start: float, cpu: float) -> None:
    line = {"name": name, "start": start, "end": time.time(), "cpu": time.process_time() - cpu}
    os.write(_file, (json.dumps(line) + "\n").encode())


def _noted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        start, cpu = time.time(), time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            _note(name, start, cpu)

    return call


class _Finder(importlib.machinery.PathFinder):
    """Finds the modules above, and notes their imports and calls."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in IMPORTS and fullname not in CALLS:
            return None
        spec: Any = super().find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def noted(module: ModuleType) -> None:
            start, cpu = time.time(), time.process_time()
            execute(module)
            for name in CALLS.get(fullname, ()):
                *owners, attribute = name.split(".")
                owner: Any = functools.reduce(getattr, owners, module)
                setattr(owner, attribute, _noted(getattr(owner, attribute), name))
            if fullname in IMPORTS:
                _note(f"import {fullname}", start, cpu)

        spec.loader.exec_module = noted
        return spec


def _process_start() -> float:
    """Returns the Unix time at which this process started, in hundredths of a second."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        ticks, now = int(stat.read().rpartition(")")[2].split()[19]), float(uptime.read().split()[0])
    return time.time() - now + ticks / os.sysconf("SC_CLK_TCK")


if folder := os.environ.get("STARTUP_TRACE"):
    _file = os.open(f"{folder}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _note("process", _process_start(), 0.0)
    sys.meta_path.insert(0, _Finder)
