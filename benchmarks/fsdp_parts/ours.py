"""The driver of elastic_ddp in the part `stalls`."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from peers.workload import StepLog, loss_fn

import elastic_ddp as ed
from fsdp_parts.model import GLOBAL_BATCH_SIZE, Block, make_model

NAME = "fsdp"
MAX_WORKERS = 2


def run(config: dict[str, Any]) -> None:
    folder, parameters = config["folder"], config["parameters"]

    def train(run: ed.Run) -> None:
        model = run.prepare(make_model(parameters), shard=Block)
        run.prepare(torch.optim.AdamW(model.parameters(), lr=1e-4))
        log = StepLog(folder)
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    step.backward(loss_fn(model, batch["x"]))
                step.optimize()
            if step.outcome.is_done:
                log.step_ended(step.index, rank=run.rank, world_size=run.world_size)

    settings = ed.RunConfig(
        name=NAME,
        storage=folder,
        steps=10**6,
        global_batch_size=GLOBAL_BATCH_SIZE,
        micro_batch_size=GLOBAL_BATCH_SIZE // MAX_WORKERS,
        max_workers=MAX_WORKERS,
        strategy="fsdp",
        fsdp=config["fsdp"],
    )
    ed.ElasticTrainer(train, f"{folder}/data", settings).fit()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
