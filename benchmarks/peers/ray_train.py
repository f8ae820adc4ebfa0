"""Ray Train's elastic training: a range of workers; the whole group restarts from checkpoints."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from peers import workload
from peers.ray_cluster import RaySystem
from peers.system import About, module
from peers.workload import StepLog, loss_fn, make_model, make_rows, share_of, wait

NOT_KEPT = (
    "the steps since the last checkpoint, from which all processes restart; the position in the data, which user code "
    "must restore; the bits of an undisturbed run"
)
RESTARTS = "all processes restart"


class RayTrain(RaySystem):
    about = About(
        name="ray-train",
        settings="defaults; a checkpoint on local disk every 20 steps",
        not_kept=NOT_KEPT,
        remarks={
            "add": f"it checks for resources once a minute; {RESTARTS}",
            **dict.fromkeys(("kill", "drain", "node", "silence"), RESTARTS),
        },
    )
    environment: ClassVar[dict[str, str]] = {}
    config: ClassVar[dict[str, Any]] = {"checkpoint_steps": 20, "resize_interval_s": 60.0}

    def start_driver(self, address: str) -> None:
        config = json.dumps({"folder": str(self.folder), **self.config})
        self.spawn(module("ray_train", config), RAY_ADDRESS=address, **self.environment)


class RayTrainTuned(RayTrain):
    about = About(
        name="ray-train-tuned",
        settings=(
            "a checkpoint on local disk every 5 steps; checks for resources every second, and for failed workers and "
            "drained nodes every 0.5 s; groups start within 5 s; Ray's health checks fail within 2 s"
        ),
        not_kept=NOT_KEPT,
        remarks=dict.fromkeys(("add", "kill", "drain", "node", "silence"), RESTARTS),
    )
    environment: ClassVar[dict[str, str]] = {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
    }
    config: ClassVar[dict[str, Any]] = {"checkpoint_steps": 5, "resize_interval_s": 1.0}
    system_config: ClassVar[dict[str, Any]] = {
        "health_check_initial_delay_ms": 1000,
        "health_check_period_ms": 500,
        "health_check_timeout_ms": 1000,
        "health_check_failure_threshold": 3,
    }


def train(config: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch

    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    model = ray.train.torch.prepare_model(make_model())
    plain = model.module if world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first_step = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(f"{folder}/state.pt")
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"]
    rows, log = make_rows(), StepLog(config["folder"])
    for step in itertools.count(first_step):
        wait()
        loss_fn(model, share_of(rows, step=step, rank=rank, world_size=world_size)).backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step_ended(step, rank=rank, world_size=world_size)
        if (step + 1) % config["checkpoint_steps"] == 0:
            with tempfile.TemporaryDirectory() as folder:
                saved = None
                if rank == 0:
                    state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(state, f"{folder}/state.pt")
                    saved = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({}, checkpoint=saved)


def run(config: dict[str, Any], function: Callable[[dict[str, Any]], None] = train, max_workers: int = 3) -> None:
    import ray
    import ray.train
    from ray import cloudpickle
    from ray.train.torch import TorchConfig, TorchTrainer

    cloudpickle.register_pickle_by_value(workload)  # nodes cannot import this folder
    ray.init(logging_level=logging.WARNING)
    TorchTrainer(
        function,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=(1, max_workers), elastic_resize_monitor_interval_s=config["resize_interval_s"]
        ),
        run_config=ray.train.RunConfig(
            name="elasticity",
            storage_path=str(Path(config["folder"]) / "storage"),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(max_failures=-1),
        ),
    ).fit()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
