"""Elastic, fault-tolerant PyTorch training on Ray: the number of workers is an implementation detail of a run."""

from elastic_ddp.config import CheckpointConfig, DataConfig, DDPConfig, RunConfig
from elastic_ddp.control import RunHandle, get_run
from elastic_ddp.errors import ElasticDDPError
from elastic_ddp.run import Run
from elastic_ddp.step import Step
from elastic_ddp.trainer import ElasticTrainer, RunResult

__all__ = [
    "CheckpointConfig",
    "DDPConfig",
    "DataConfig",
    "ElasticDDPError",
    "ElasticTrainer",
    "Run",
    "RunConfig",
    "RunHandle",
    "RunResult",
    "Step",
    "get_run",
]
