"""Part `stalls`: how long a worker's death, a join and a drain hold up a sharded model on up to two workers.

The systems are those of `peers/`, with another model and with the best settings found.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from elasticity import run_system
from peers import report
from peers.ours import ElasticDDP, write_dataset
from peers.ray_train import RayTrainTuned
from peers.system import About, System
from peers.torchrun import TorchrunTuned

from fsdp_parts.ours import MAX_WORKERS

EVENTS = {"add": (1, 2), "kill": (2, 2), "drain": (2, 1)}
"""Number of workers before and after each event, in the order in which they happen."""
TITLES = {
    "kill": "a worker is killed (SIGKILL, 2 and then 2 again)",
    "add": "a worker joins (1, then 2)",
    "drain": "a worker is drained (2, then 1)",
}
CHECKPOINT_STEPS = 10
SETTLED_STEPS = 20
"""Steps after which an event is over: fewer than in `peers/measures.py`, because a step may take more than a second."""


def _with_fsdp(about: About) -> str:
    """Returns the settings of a system of `peers/`, whose first one is how often it writes a checkpoint."""
    return f"a sharded checkpoint on local disk every {CHECKPOINT_STEPS} steps; {about.settings.partition('; ')[2]}"


class Elastic(ElasticDDP):
    about = replace(ElasticDDP.about, settings="strategy fsdp, else defaults; rows from Parquet through Ray Data")
    max_workers = MAX_WORKERS
    parameters: ClassVar[int]
    fsdp: ClassVar[dict[str, Any]] = {}

    def start_driver(self, address: str) -> None:
        write_dataset(self.folder / "data")
        config = {"folder": str(self.folder), "parameters": self.parameters, "fsdp": self.fsdp}
        self.spawn([sys.executable, "-m", "fsdp_parts.ours", json.dumps(config)], RAY_ADDRESS=address)


class ElasticWithoutMirror(Elastic):
    about = replace(Elastic.about, name="elastic_ddp-no-mirror", settings="the same with fsdp.mirror = false")
    fsdp: ClassVar[dict[str, Any]] = {"mirror": False}


class RayTrainFSDP(RayTrainTuned):
    about = replace(RayTrainTuned.about, name="ray-train", settings=_with_fsdp(RayTrainTuned.about))
    max_workers = MAX_WORKERS
    parameters: ClassVar[int]

    def start_driver(self, address: str) -> None:
        config = {**self.config, "folder": str(self.folder), "parameters": self.parameters}
        command = json.dumps(config | {"checkpoint_steps": CHECKPOINT_STEPS})
        self.spawn([sys.executable, "-m", "fsdp_parts.plain", command], RAY_ADDRESS=address, **self.environment)


class TorchrunFSDP(TorchrunTuned):
    about = replace(TorchrunTuned.about, name="torchrun", settings=_with_fsdp(TorchrunTuned.about))
    max_workers = MAX_WORKERS
    program = "fsdp_parts.plain"
    parameters: ClassVar[int]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        config = {"folder": str(folder), "parameters": self.parameters, "checkpoint_steps": CHECKPOINT_STEPS}
        self.environment = {**self.environment, "CONFIG": json.dumps(config)}  # type: ignore[misc]


SYSTEMS: dict[str, type[System]] = {
    system.about.name: system for system in (Elastic, ElasticWithoutMirror, RayTrainFSDP, TorchrunFSDP)
}


def measure_system(name: str, scratch: Path, *, parameters: int, **options: Any) -> dict[str, Any]:
    """Returns what `elasticity.run_system` does, for a model of about this many parameters."""
    system = SYSTEMS[name]
    sized: type[System] = type(system.__name__, (system,), {"parameters": parameters})
    return run_system(sized, scratch, events=list(EVENTS), sizes=EVENTS, settled_steps=SETTLED_STEPS, **options)


def rows_of(results: dict[str, Any]) -> list[list[str]]:
    """Returns the stalls in seconds: for each system its name, and the median and range of each event."""
    rows = []
    for name, facts in results["systems"].items():
        cells = []
        for event in TITLES:
            seconds = report.stalls(results, name, event)
            cells.append(report.spread(seconds) if seconds else "never" if facts["events"][event] else "")
        rows.append([name, *cells])
    return rows
