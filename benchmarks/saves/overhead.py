"""What a save every 20 steps costs the example job: one run on two workers, in which stretches with and without saves
alternate."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, next_byte_loss
from text import text_windows

import elastic_ddp as ed
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger

WORKERS = 2
EVERY_STEPS = 20
STRETCH_STEPS = 2 * EVERY_STEPS
GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, CONTEXT = 32, 8, 128
"""As in examples/train.py."""


def has_saves(step: int) -> bool:
    """Whether a step is in a stretch with saves."""
    return step // STRETCH_STEPS % 2 == 1


def train_in_turns(folder: str) -> Any:
    def train(run: ed.Run) -> None:
        from elastic_ddp.worker.commit_schedule import CommitSchedule

        def should_commit(self: CommitSchedule, steps_done: int) -> bool:
            # The step that begins a stretch is the one after this many.
            return has_saves(steps_done) and steps_done % EVERY_STEPS == 0

        CommitSchedule.should_commit = should_commit  # type: ignore[method-assign]
        model = run.prepare(GPT(context=CONTEXT, width=128, layers=4, heads=4))
        run.prepare(torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05))
        ends = []
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    step.backward(next_byte_loss(model, batch))
                step.optimize()
            ends.append((step.index, time.monotonic()))
        if run.rank == 0:
            Path(folder, "ends.json").write_text(json.dumps(ends))

    return train


def measure(storage: str, *, rounds: int) -> dict[str, Any]:
    """Returns samples/s of neighboring stretches, with and without saves, and the number of commits."""
    with tempfile.TemporaryDirectory() as folder:
        data, _ = text_windows(None, CONTEXT, folder)
        config = ed.RunConfig(
            name="overhead",
            storage=storage,
            steps=2 * STRETCH_STEPS * (rounds + 1),
            global_batch_size=GLOBAL_BATCH_SIZE,
            micro_batch_size=MICRO_BATCH_SIZE,
            min_workers=WORKERS,
            max_workers=WORKERS,
            clip_grad_norm=1.0,
            checkpoint=ed.CheckpointConfig(every_steps=EVERY_STEPS),
        )
        with redirect_stdout(sys.stderr):  # stdout is for the table
            result = ed.ElasticTrainer(train_in_turns(folder), data, config).fit()
        ends = dict(json.loads(Path(folder, "ends.json").read_text()))
    events = read_ledger(Storage(result.uri))
    rates: dict[bool, list[float]] = {True: [], False: []}
    for first in range(2 * STRETCH_STEPS, len(ends), STRETCH_STEPS):  # the first two warm up
        seconds = ends[first + STRETCH_STEPS - 1] - ends[first - 1]
        rates[has_saves(first)].append(STRETCH_STEPS * GLOBAL_BATCH_SIZE / seconds)
    return {
        "without": rates[False],
        "with": rates[True],
        "commits": sum(event.event == "commit_succeeded" for event in events),
        "skipped": sum(event.event == "commit_skipped" for event in events),
    }
