"""The configuration of a run and the checks that need no worker: settings, their error messages, and capacity.

Start with `run_config.py`.
"""

from elastic_ddp.config.run_config import CheckpointConfig, DataConfig, DDPConfig, FSDPConfig, RunConfig

__all__ = ["CheckpointConfig", "DDPConfig", "DataConfig", "FSDPConfig", "RunConfig"]
