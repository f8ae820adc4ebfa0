"""The program whose start is measured: a small GPT on two workers, as in examples/train.py."""

import sys

import torch
from gpt import GPT, next_byte_loss

import elastic_ddp as ed

folder, steps, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def train(run: ed.Run) -> None:
    model = run.prepare(GPT(context=64, width=128, layers=4, heads=4))
    run.prepare(torch.optim.AdamW(model.parameters(), lr=2e-3))
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(next_byte_loss(model, batch))
            step.optimize()


config = ed.RunConfig(
    name="startup",
    storage=f"{folder}/runs",
    steps=steps,
    global_batch_size=32,
    micro_batch_size=8,
    max_workers=workers,
)
ed.ElasticTrainer(train, f"{folder}/data", config).fit()
