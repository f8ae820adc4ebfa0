"""Plain FSDP, as the documentation of torch shows it: `fully_shard`, and `torch.distributed.checkpoint` to local disk.

Run as a program, it is the worker of torchrun or, with a configuration as its argument, the driver of Ray Train. Either
restarts all processes after an event, and they load the newest checkpoint.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peers import ray_train
from peers.workload import StepLog, loss_fn, make_rows, share_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from fsdp_parts.model import GLOBAL_BATCH_SIZE, Block, make_model

Write = Callable[[dict[str, Any], int], None]
"""Writes a state after this number of steps. Every rank calls it."""


def train(config: dict[str, Any], checkpoint: Path | None, write: Write) -> None:
    """Trains in a process group that is formed, from a checkpoint or from the beginning."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model(config["parameters"])
    for unit in [*(module for module in model if isinstance(module, Block)), model]:
        fully_shard(unit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    first_step = load(checkpoint, model, optimizer) if checkpoint is not None else 0
    rows, log = make_rows(), StepLog(config["folder"])
    for step in itertools.count(first_step):
        place = {"step": step, "rank": rank, "world_size": world_size}
        loss_fn(model, share_of(rows, **place, global_batch_size=GLOBAL_BATCH_SIZE)).backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step_ended(**place)
        if (step + 1) % config["checkpoint_steps"] == 0:
            write(state_of(model, optimizer, step + 1), step + 1)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps_done: int) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "steps_done": steps_done}


def load(checkpoint: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the number of steps done in the checkpoint."""
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    steps_done: int = state["steps_done"]
    return steps_done


def train_under_torchrun(config: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    folder = Path(config["folder"], "checkpoints")
    # `.metadata` is written last. No process of an earlier round runs, so all ranks find the same ones.
    complete = sorted(path.parent for path in folder.glob("*/.metadata"))

    def write(state: dict[str, Any], steps_done: int) -> None:
        name = f"{steps_done:08}"
        dcp.save(state, checkpoint_id=folder / name)
        if dist.get_rank() == 0:
            for older in folder.iterdir():
                if older.name < name:
                    shutil.rmtree(older)

    train(config, complete[-1] if complete else None, write)


def train_under_ray(config: dict[str, Any]) -> None:
    import ray.train

    def write(state: dict[str, Any], steps_done: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            dcp.save(state, checkpoint_id=folder)
            # Ray merges the folders of all ranks.
            ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))

    if (checkpoint := ray.train.get_checkpoint()) is None:
        train(config, None, write)
    else:
        with checkpoint.as_directory() as folder:
            train(config, Path(folder), write)


if __name__ == "__main__":
    if sys.argv[1:]:
        ray_train.run(json.loads(sys.argv[1]), train_under_ray, max_workers=2)
    else:
        train_under_torchrun(json.loads(os.environ["CONFIG"]))
