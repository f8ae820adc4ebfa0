"""Elastic, fault-tolerant PyTorch training on Ray.

Names are imported on first use, so that processes that only read data do not import torch and Ray Train.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_ddp.config.run_config import (
        CheckpointConfig,
        DataConfig,
        DDPConfig,
        FSDPConfig,
        RunConfig,
        VerifyConfig,
    )
    from elastic_ddp.driver.cluster import cluster_has_gpus
    from elastic_ddp.driver.run_handle import RunHandle, get_run
    from elastic_ddp.driver.trainer import ElasticTrainer, RunResult
    from elastic_ddp.errors import ElasticDDPError
    from elastic_ddp.loggers.logger import LoggedRun, Logger
    from elastic_ddp.worker.run import Run
    from elastic_ddp.worker.step import Step
    from elastic_ddp.worker.update import Update

_MODULES = {
    "CheckpointConfig": "config.run_config",
    "DDPConfig": "config.run_config",
    "DataConfig": "config.run_config",
    "ElasticDDPError": "errors",
    "ElasticTrainer": "driver.trainer",
    "FSDPConfig": "config.run_config",
    "LoggedRun": "loggers.logger",
    "Logger": "loggers.logger",
    "Run": "worker.run",
    "RunConfig": "config.run_config",
    "RunHandle": "driver.run_handle",
    "RunResult": "driver.trainer",
    "Step": "worker.step",
    "Update": "worker.update",
    "VerifyConfig": "config.run_config",
    "cluster_has_gpus": "driver.cluster",
    "get_run": "driver.run_handle",
}

__all__ = [
    "CheckpointConfig",
    "DDPConfig",
    "DataConfig",
    "ElasticDDPError",
    "ElasticTrainer",
    "FSDPConfig",
    "LoggedRun",
    "Logger",
    "Run",
    "RunConfig",
    "RunHandle",
    "RunResult",
    "Step",
    "Update",
    "VerifyConfig",
    "cluster_has_gpus",
    "get_run",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
