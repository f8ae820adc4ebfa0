"""Ray Train with torchft: a replica for each worker, of which Ray Train replaces those that fail.

Ray 2.60 has `TorchftConfig` and an example of it, and exports neither. It replaces a worker only while the number of
workers that fit is the same. In all other events, the group restarts from a checkpoint, as in Ray Train's elastic
training.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from peers import torch_ft, workload
from peers.ray_cluster import RaySystem
from peers.system import About, module
from peers.workload import StepLog, loss_fn, wait

LIGHTHOUSE = {"min_replicas": 1, "quorum_tick_ms": 50, "join_timeout_ms": 1000, "heartbeat_timeout_ms": 1000}
RESTARTS = "all processes restart"


class RayTrainTorchFT(RaySystem):
    about = About(
        name="ray-train-torchft",
        settings=(
            "TorchftConfig with torchft 0.2.0, its DDP hook fixed for gloo and the lighthouse's settings as above; "
            "one to three workers; a checkpoint on local disk every 20 steps"
        ),
        not_kept=(
            "the samples in flight, and those of a missing replica; the batch size, which follows the number of "
            "workers; where all processes restart, the steps since the last checkpoint; the bits of an undisturbed run"
        ),
        remarks={
            "add": f"it checks for resources once a minute; {RESTARTS}",
            "kill": "Ray Train starts one new worker",
            **dict.fromkeys(("drain", "node", "silence"), RESTARTS),
        },
    )

    def start_driver(self, address: str) -> None:
        self.spawn(module("ray_torch_ft", json.dumps({"folder": str(self.folder)})), RAY_ADDRESS=address)


def train(config: dict[str, Any]) -> None:
    import ray.train

    context = ray.train.get_context()
    replica = context.get_world_rank()
    manager, model, optimizer = torch_ft.prepare(replica, rank=0, world_size=1)  # each worker is a group of its own
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(f"{folder}/state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        manager.load_state_dict(state["manager"])
    log, steps_done = StepLog(config["folder"]), manager.current_step()
    while True:
        for (x,) in torch_ft.make_loader(replica):
            optimizer.zero_grad()
            wait()
            loss_fn(model, x).backward()
            optimizer.step()
            before, steps_done = steps_done, torch_ft.step_ended(log, manager, steps_done)
            if steps_done > before and steps_done % config["checkpoint_steps"] == 0:
                with tempfile.TemporaryDirectory() as folder:
                    saved = None
                    if replica == 0:
                        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                        torch.save({**state, "manager": manager.state_dict()}, f"{folder}/state.pt")
                        saved = ray.train.Checkpoint.from_directory(folder)
                    ray.train.report({}, checkpoint=saved)


def run(config: dict[str, Any]) -> None:
    import ray
    import ray.train
    from ray import cloudpickle
    from ray.train.torch import TorchTrainer
    from ray.train.v2.torch.torchft_config import TorchftConfig

    for each in (workload, torch_ft):  # nodes cannot import this folder
        cloudpickle.register_pickle_by_value(each)
    ray.init(logging_level=logging.WARNING)
    TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=TorchftConfig(LIGHTHOUSE, backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 3)),
        run_config=ray.train.RunConfig(
            name="elasticity",
            storage_path=str(Path(config["folder"]) / "storage"),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(max_failures=-1),
        ),
    ).fit()


if __name__ == "__main__":
    run({"checkpoint_steps": 20, **json.loads(sys.argv[1])})
