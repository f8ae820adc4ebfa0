"""Elastic, fault-tolerant PyTorch training on Ray: the number of workers is an implementation detail of a run.

A name is imported when it is first asked for: a process that only reads data needs neither torch nor Ray Train, which
take seconds to import, and a worker that starts waits for such processes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_ddp.config import CheckpointConfig, DataConfig, DDPConfig, FSDPConfig, RunConfig
    from elastic_ddp.control import RunHandle, get_run
    from elastic_ddp.errors import ElasticDDPError
    from elastic_ddp.run import Run
    from elastic_ddp.step import Step
    from elastic_ddp.trainer import ElasticTrainer, RunResult

_MODULES = {
    "CheckpointConfig": "config",
    "DDPConfig": "config",
    "DataConfig": "config",
    "ElasticDDPError": "errors",
    "ElasticTrainer": "trainer",
    "FSDPConfig": "config",
    "Run": "run",
    "RunConfig": "config",
    "RunHandle": "control",
    "RunResult": "trainer",
    "Step": "step",
    "get_run": "control",
}

__all__ = [
    "CheckpointConfig",
    "DDPConfig",
    "DataConfig",
    "ElasticDDPError",
    "ElasticTrainer",
    "FSDPConfig",
    "Run",
    "RunConfig",
    "RunHandle",
    "RunResult",
    "Step",
    "get_run",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
