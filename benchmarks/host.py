"""Measures what a step costs on the host: `python benchmarks/host.py` prints a table and writes its figures as JSON.

A model of a few hundred parameters, with rows in memory, is trained by one worker on Ray. In the same process, and in
turns with it, runs a plain loop: a copy of the model in DistributedDataParallel over the same process group, a
DataLoader, clipping, AdamW. The difference is what the engine costs. A step of one micro-batch and a step of `--many`
tell the cost of a step from that of a micro-batch.

In further turns, the functions of each part are timed, exclusive of other parts that they call; the timing makes these
turns slower. `--profile FILE` also writes a cProfile of some steps.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))

from arguments import positive_int
from machine import describe_machine

import elastic_ddp as ed

WIDTH, MICRO_BATCH_SIZE, ROWS, CLIP_NORM = 8, 4, 65_536, 1.0
WARMUP_STEPS, MANY_STEPS = 20, 1_000_000
REDUCTIONS = ("native", "canonical")
TARGETS_US = {"step": 400.0, "micro-batch": 150.0}


class Model(torch.nn.Module):
    """As many modules and parameters as a network, and few operations, which would only add noise."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([parameter.view(-1) for parameter in self.parameters()]) * x.mean()


def parts() -> dict[str, list[tuple[Any, str]]]:
    """Returns the functions of each part, as the object that has them and the name there."""
    from elastic_ddp.data.feed import MicroBatchFeed
    from elastic_ddp.distributed.buffer_sync import StepBuffers
    from elastic_ddp.distributed.ddp import DDPStrategy
    from elastic_ddp.distributed.parameter_guard import ParameterGuard
    from elastic_ddp.distributed.step_agreement import ControlExchange
    from elastic_ddp.rendezvous.hang import Activity
    from elastic_ddp.worker import loop, step, update
    from elastic_ddp.worker.generation import Generation
    from elastic_ddp.worker.phase_clock import PhaseClock
    from elastic_ddp.worker.train_state import TrainState

    def of(owner: Any, *names: str) -> list[tuple[Any, str]]:
        return [(owner, name) for name in names]

    return {
        "seeding": [*of(update, "seed_all"), *of(loop, "seed_all")],
        "data": of(MicroBatchFeed, "step"),
        "activity and phases": [*of(Activity, "enter", "begin"), *of(PhaseClock, "enter", "step_done")],
        "control exchange": of(ControlExchange, "start", "wait"),
        "votes": of(loop.Loop, "_votes"),
        "checks": [
            *of(StepBuffers, "begin", "end_micro_batch", "check_untouched"),
            *of(ParameterGuard, "begin", "check", "end"),
            *of(DDPStrategy, "begin_step", "check_gradients", "check_not_cleared", "clear_gradients"),
            *of(update, "refuse_zero_grad"),
        ],
        "gradients": of(DDPStrategy, "backward"),
        "clipping": of(Generation, "clip_gradients"),
        "optimizer": of(TrainState, "step_optimizers"),
        "events": of(loop.Loop, "_end_step"),
        "the rest of the step": of(step.Step, "__enter__", "__exit__", "optimize"),
    }


class PartTimer:
    """Seconds in each part, exclusive of parts that it calls. For one thread."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._switch()
        self._stack.append(name)
        try:
            yield
        finally:
            self._switch()
            self._stack.pop()

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                result = function(*args, **kwargs)
            return self._timed_items(name, result) if isinstance(result, Iterator) else result

        return call

    def _timed_items(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self.part(name):
                item = next(items, self)
            if item is self:
                return
            yield item

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Times the functions of all parts in the context."""
        replaced = [(owner, name, getattr(owner, name)) for listed in parts().values() for owner, name in listed]
        of_part = {(id(owner), name): part for part, listed in parts().items() for owner, name in listed}
        for owner, name, function in replaced:
            setattr(owner, name, self._timed(of_part[id(owner), name], function))
        try:
            yield
        finally:
            for owner, name, function in replaced:
                setattr(owner, name, function)


class PlainLoop:
    """A careful plain loop over the same rows, with as many micro-batches in a step."""

    def __init__(self, layers: int, micro_batches: int, rows: torch.Tensor) -> None:
        self._model = DistributedDataParallel(Model(layers), gradient_as_bucket_view=True)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, fused=True)
        self._num, dataset = micro_batches, TensorDataset(rows)
        sampler = BatchSampler(RandomSampler(dataset), MICRO_BATCH_SIZE, drop_last=True)
        self._loader = DataLoader(dataset, sampler=sampler, batch_size=None)
        self._batches = iter(self._loader)

    def _next(self) -> torch.Tensor:
        try:
            (x,) = next(self._batches)
        except StopIteration:
            self._batches = iter(self._loader)
            (x,) = next(self._batches)
        return x

    def step(self) -> float:
        total = torch.zeros(())
        for index in range(self._num):
            with nullcontext() if index == self._num - 1 else self._model.no_sync():
                loss = self._model(self._next()).square().mean() / self._num
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(total)


def train(run: ed.Run, options: argparse.Namespace, micro_batches: int, folder: str) -> None:
    """Trains in turns: steps of the engine, steps of the plain loop, and steps whose parts are timed."""
    torch.set_num_threads(1)
    model = run.prepare(Model(options.layers))
    run.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    steps, timer = options.steps, PartTimer()
    turns: dict[str, list[float]] = {"engine": [], "plain": [], "timed": []}
    installed: Any = nullcontext()
    plain: PlainLoop | None = None
    profile = cProfile.Profile()
    num_timed, kind, since = 0, "warm-up", 0.0
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())
            step.optimize()
        position = step.index - WARMUP_STEPS
        if position < 0 or position % steps:
            continue
        if kind in turns:
            turns[kind].append((time.perf_counter() - since) / steps)
        if kind == "timed":
            installed.__exit__(None, None, None)
        profile.disable()
        number = position // steps
        if number >= 2 * options.turns:
            break
        plain = plain or PlainLoop(options.layers, micro_batches, torch.from_numpy(rows_of()))
        if number % 2 == 0:
            plain.step()  # after the engine's steps
            since = time.perf_counter()
            for _ in range(steps):
                plain.step()
            turns["plain"].append((time.perf_counter() - since) / steps)
        kind = "timed" if number % 2 else "engine"
        if kind == "timed":
            num_timed += steps
            if options.profile is not None:
                profile.enable()
            else:
                installed = timer.installed()
                installed.__enter__()
            installed = installed if options.profile is None else nullcontext()
        since = time.perf_counter()
    if options.profile is not None:
        profile.dump_stats(options.profile)
    per_step = {name: seconds / max(1, num_timed) for name, seconds in timer.seconds.items()}
    Path(folder, "turns.json").write_text(json.dumps({"turns": turns, "parts": per_step}))


def rows_of() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, WIDTH), dtype=np.float32)


def measure(options: argparse.Namespace, reduction: str, micro_batches: int) -> dict[str, Any]:
    """Returns medians of seconds per step of the plain loop, of what the engine takes in addition, and of its parts."""
    with tempfile.TemporaryDirectory() as folder:
        config = ed.RunConfig(
            name="host",
            storage=folder,
            steps=WARMUP_STEPS + 2 * options.turns * options.steps + 1,
            global_batch_size=MICRO_BATCH_SIZE * micro_batches,
            micro_batch_size=MICRO_BATCH_SIZE,
            max_workers=1,
            reduction=reduction,
            clip_grad_norm=CLIP_NORM,
            checkpoint=ed.CheckpointConfig(every_steps=MANY_STEPS),  # the plain loop writes no checkpoints
        )
        ed.ElasticTrainer(lambda run: train(run, options, micro_batches, folder), {"x": rows_of()}, config).fit()
        measured = json.loads(Path(folder, "turns.json").read_text())
    turns = measured["turns"]
    extra = [engine - plain for engine, plain in zip(turns["engine"], turns["plain"], strict=False)]
    return {
        "plain_s": statistics.median(turns["plain"]),
        "extra_s": statistics.median(extra),
        "extra_quartiles_s": statistics.quantiles(extra, n=4) if len(extra) > 1 else extra,
        "parts_s": measured["parts"],
        "turns_s": turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/host.json"))
    parser.add_argument("--turns", type=positive_int, default=12, help="turns of each kind")
    parser.add_argument("--steps", type=positive_int, default=25, help="steps of a turn")
    parser.add_argument("--layers", type=positive_int, default=100, help="layers with two parameters each")
    parser.add_argument("--many", type=positive_int, default=5, help="micro-batches of the longer step; above 1")
    parser.add_argument("--reductions", nargs="+", choices=REDUCTIONS, default=REDUCTIONS)
    parser.add_argument("--profile", type=Path, help="in place of timing parts, profile the last run into this file")
    options = parser.parse_args()
    if options.profile is not None:
        options.profile = options.profile.absolute()
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init("local", num_cpus=1, include_dashboard=False, logging_level="warning")
    results: dict[str, Any] = {"machine": describe_machine(), "parameters": 2 * options.layers, "reductions": {}}
    for reduction in options.reductions:
        one, many = (measure(options, reduction, number) for number in (1, options.many))
        micro_batch_s = (many["extra_s"] - one["extra_s"]) / (options.many - 1)
        results["reductions"][reduction] = {
            "us": {"step": 1e6 * (one["extra_s"] - micro_batch_s), "micro-batch": 1e6 * micro_batch_s},
            "one": one,
            "many": many,
        }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print_tables(results, options)


def print_tables(results: dict[str, Any], options: argparse.Namespace) -> None:
    console = Console()
    table = Table(title=f"{results['parameters']} parameters: microseconds beyond a plain loop", title_justify="left")
    for heading in ("", "step", "micro-batch", "plain, 1", f"plain, {options.many}"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("target", *(f"{value:.0f}" for value in TARGETS_US.values()))
    for reduction, found in results["reductions"].items():
        plain = (found[size]["plain_s"] for size in ("one", "many"))
        values = (*found["us"].values(), *(1e6 * each for each in plain))
        table.add_row(reduction, *(f"{value:.0f}" for value in values))
    console.print(table)
    table = Table(title="parts, timed, in microseconds per step", title_justify="left")
    table.add_column("")
    columns = [(name, size) for name in results["reductions"] for size in ("one", "many")]
    for reduction, size in columns:
        table.add_column(f"{reduction}, {1 if size == 'one' else options.many}", justify="right")
    for part in parts():
        found = [results["reductions"][reduction][size]["parts_s"].get(part, 0.0) for reduction, size in columns]
        table.add_row(part, *(f"{1e6 * value:.0f}" for value in found))
    console.print(table)


if __name__ == "__main__":
    main()
