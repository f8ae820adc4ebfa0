"""Compares whole steps with plain DDP: `python benchmarks/steps.py` prints a table and writes its figures as JSON.

All sides train the same GPT of 10 M parameters with the same Parquet rows, batches, clipping and AdamW. They use gloo
and two workers (or `--workers`) of one thread each:

    plain        torchrun, DistributedDataParallel with no_sync, DataLoader with a DistributedSampler
    native       ElasticTrainer with `reduction="native"`, the stock all-reduce
    canonical    ElasticTrainer with `reduction="canonical"`, the same bits at every world size

With `--job gan`, they train a GAN of 1.9 M parameters in place of the GPT: two updates in each step, and for plain DDP
two wrapped modules.

With `--strategy fsdp`, each block is a unit of FSDP, and plain is `fully_shard`, which reduces every micro-batch.
It has mirrors, or none with `--no-mirror`.

The load of other programs changes within seconds. So all sides are started and warmed up, and then take turns: one runs
for ten seconds while all processes of the others, including Ray's, are stopped (SIGSTOP). A turn in which other
programs used more than 5 % of the machine is repeated, until `--patience-s` has passed. Each round has one turn of each
side, in rotating order. Figures are medians over rounds, and ratios are medians of the rounds' ratios.

`--phases` compares `canonical` with itself instead, in one run that measures the phases of its steps in every other
turn of four steps. The figure is the median of each such turn relative to its two neighbors. `--verify` does the same
with every second step verified.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

EXAMPLES = str(Path(__file__).resolve().parents[1] / "examples")
sys.path.insert(0, EXAMPLES)

from arguments import positive_int  # noqa: E402
from gpt import GPT, Block, next_byte_loss  # noqa: E402
from machine import busy_seconds, describe_machine, kill_all, processes_below, signal_all  # noqa: E402
from step_gan import GAN, PlainGAN, critic_loss, generator_loss, optimizer_of  # noqa: E402
from windows import endless_batches, write_random_windows  # noqa: E402

MODEL = {"context": 64, "width": 320, "layers": 8, "heads": 5, "dropout": 0.0}
MICRO_BATCH_SIZE = 8
ROWS = 65_536
WARMUP_STEPS = 10
MANY_STEPS = 1_000_000
LOG_EVERY_STEPS = 10
FOREIGN_SHARE = 0.05
SIDES = ("plain", "native", "canonical")
TARGETS = {"ddp": {"native": 0.95, "canonical": 0.85}, "fsdp": {"native": 0.95, "canonical": 0.9}}
TARGETS["gan"] = {"native": 0.93, "canonical": 0.93}


class StepLog:
    """A rank's log file: its process id, then the end time of every step, one per line."""

    def __init__(self, folder: str, rank: int) -> None:
        self._file = open(f"{folder}/rank-{rank}", "w", buffering=1)  # noqa: SIM115 - stays open until the process ends
        self._file.write(f"{os.getpid()}\n")

    def step_ended(self) -> None:
        self._file.write(f"{time.monotonic()}\n")


# elastic_ddp.


def run_elastic(
    side: str, data: str, folder: str, workers: int, accumulate: int, strategy: str, *, mirror: bool, job: str
) -> None:
    import ray

    import elastic_ddp as ed

    def train_gan(run: ed.Run) -> None:
        gan = run.prepare(GAN())
        critic, generator = (run.prepare(optimizer_of(each)) for each in (gan.critic, gan.generator))
        log = None
        for step in run.steps():
            with step:
                for optimizer, loss in ((critic, critic_loss), (generator, generator_loss)):
                    with step.update(optimizer):
                        for batch in step.micro_batches():
                            step.backward(loss(gan.generator, gan.critic, batch))
            log = log or StepLog(folder, run.rank)
            log.step_ended()

    def train(run: ed.Run) -> None:
        model = run.prepare(GPT(**MODEL), shard=Block if strategy == "fsdp" else None)
        run.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
        log = None
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    step.backward(next_byte_loss(model, batch))
                step.optimize()
            log = log or StepLog(folder, run.rank)
            log.step_ended()

    config = ed.RunConfig(
        name="steps",
        storage=folder,
        steps=MANY_STEPS,
        global_batch_size=MICRO_BATCH_SIZE * accumulate * workers,
        micro_batch_size=MICRO_BATCH_SIZE,
        min_workers=workers,
        max_workers=workers,
        strategy=strategy,
        fsdp=ed.FSDPConfig(mirror=mirror),
        reduction=side,
        clip_grad_norm=1.0,
        log_every_steps=LOG_EVERY_STEPS,
        checkpoint=ed.CheckpointConfig(every_steps=MANY_STEPS),  # plain DDP writes no checkpoints
    )
    ray.init("local", num_cpus=workers, include_dashboard=False, logging_level="warning")
    ed.ElasticTrainer(train_gan if job == "gan" else train, data, config).fit()


# Plain DDP, as a careful user would write it.


def run_plain_gan(data: str, folder: str, accumulate: int) -> None:
    gan, batches = PlainGAN(), endless_batches(data, MICRO_BATCH_SIZE, num_workers=1)
    log = StepLog(folder, dist.get_rank())
    for step in range(MANY_STEPS):
        loss = gan.step([next(batches) for _ in range(accumulate)])
        if step % LOG_EVERY_STEPS == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        log.step_ended()


def run_plain(data: str, folder: str, accumulate: int, strategy: str, job: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if job == "gan":
        return run_plain_gan(data, folder, accumulate)
    model: torch.nn.Module = GPT(**MODEL)
    if strategy == "fsdp":
        for unit in [*(module for module in model.modules() if isinstance(module, Block)), model]:
            fully_shard(unit)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = endless_batches(data, MICRO_BATCH_SIZE, num_workers=1)
    log = StepLog(folder, dist.get_rank())
    for step in range(MANY_STEPS):
        for micro_batch in range(accumulate):
            batch = next(batches)
            accumulates = isinstance(model, DistributedDataParallel) and micro_batch < accumulate - 1
            with model.no_sync() if accumulates else nullcontext():
                loss = next_byte_loss(model, batch) / accumulate
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY_STEPS == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {accumulate * loss.item():.4f}")
        log.step_ended()


# Turns.


@dataclass(frozen=True)
class Turn:
    steps_per_s: float
    foreign_share: float
    """The share of the machine that other programs than this side used."""


class Side:
    """One of the three ways to train, in processes of its own."""

    def __init__(
        self,
        name: str,
        data: Path,
        folder: Path,
        *,
        workers: int,
        accumulate: int,
        strategy: str,
        mirror: bool,
        job: str,
    ) -> None:
        self.name, self._folder, self._num_workers = name, folder, workers
        folder.mkdir()
        launcher = [sys.executable]
        if name == "plain":
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        arguments = [__file__, "--side", name, "--data", str(data), "--folder", str(folder)]
        arguments += ["--workers", str(workers), "--accumulate", str(accumulate), "--strategy", strategy]
        arguments += [*([] if mirror else ["--no-mirror"]), "--job", job]
        path = os.pathsep.join(filter(None, [EXAMPLES, str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [*launcher, *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )

    def warm_up(self) -> None:
        while len(self.step_ends()) < WARMUP_STEPS:
            self._check()
            time.sleep(0.1)
        self.signal(signal.SIGSTOP)
        self._begin = self._cpu()

    def take_turn(self, seconds: float) -> Turn:
        """Runs for some seconds, and measures from the end of the first step to the end of the last one."""
        self._check()
        begin, own, busy = time.monotonic(), sum(self._cpu()[1:]), busy_seconds()
        self.signal(signal.SIGCONT)
        while sum(end > begin for end in self.step_ends()[-4:]) < 4 or time.monotonic() - begin < seconds:
            self._check()
            time.sleep(0.1)
        self.signal(signal.SIGSTOP)
        foreign = (busy_seconds() - busy) - (sum(self._cpu()[1:]) - own)
        ends = [end for end in self.step_ends() if end > begin]
        machine = (os.cpu_count() or 1) * (time.monotonic() - begin)
        return Turn((len(ends) - 1) / (ends[-1] - ends[0]), foreign / machine)

    def figures(self) -> dict[str, float]:
        """Returns CPU seconds per step since the warm-up, and peak memory."""
        (steps, workers, others), end = self._begin, self._cpu()
        status = Path(f"/proc/{self._workers()[0]}/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return {
            "worker_cpu_s_per_step": (end[1] - workers) / (end[0] - steps) / self._num_workers,
            "other_cpu_s_per_step": (end[2] - others) / (end[0] - steps),
            "worker_peak_mib": int(peak.split()[1]) / 1024,
        }

    def step_ends(self) -> list[float]:
        path = self._folder / "rank-0"
        return [float(line) for line in path.read_text().splitlines()[1:]] if path.exists() else []

    def _workers(self) -> list[int]:
        return [int((self._folder / f"rank-{rank}").read_text().split()[0]) for rank in range(self._num_workers)]

    def _cpu(self) -> tuple[int, float, float]:
        """Returns the number of steps, the CPU seconds of the workers, and those of this side's other processes."""
        seconds = processes_below(self._process.pid)
        workers = sum(seconds.pop(pid) for pid in self._workers())
        return len(self.step_ends()), workers, sum(seconds.values())

    def _check(self) -> None:
        if self._process.poll() is not None:
            raise SystemExit(f"the {self.name} side ended unexpectedly:\n{(self._folder / 'log').read_text()[-4000:]}")

    def signal(self, number: signal.Signals) -> None:
        signal_all(self._process.pid, number)

    def close(self) -> None:
        if self._process.poll() is None:
            kill_all(self._process.pid)
            self._process.wait()


def measure(
    data: Path,
    scratch: Path,
    *,
    workers: int,
    accumulate: int,
    strategy: str,
    mirror: bool,
    job: str,
    rounds: int,
    turn_s: float,
    patience_s: float,
) -> dict[str, Any]:
    sides: list[Side] = []
    turns: dict[str, list[Turn]] = {name: [] for name in SIDES}
    repeated = 0
    try:
        with Progress(transient=True) as progress:
            title = f"{accumulate} micro-batches per worker and step"
            task = progress.add_task(title, total=len(SIDES) * (1 + rounds))
            for name in SIDES:
                folder = scratch / f"{name}-{accumulate}"
                options: dict[str, Any] = {"accumulate": accumulate, "strategy": strategy, "mirror": mirror, "job": job}
                sides.append(Side(name, data, folder, workers=workers, **options))
                sides[-1].warm_up()
                progress.advance(task)
            deadline = time.monotonic() + patience_s
            for number in range(rounds):
                first = number % len(sides)
                for side in sides[first:] + sides[:first]:
                    while (turn := side.take_turn(turn_s)).foreign_share > FOREIGN_SHARE:
                        if time.monotonic() > deadline:
                            break
                        repeated += 1
                    turns[side.name].append(turn)
                    progress.advance(task)
        figures = {side.name: side.figures() for side in sides}
    finally:
        for side in sides:
            side.close()
    global_batch_size = MICRO_BATCH_SIZE * accumulate * workers
    for name, taken in turns.items():
        rates = [global_batch_size * turn.steps_per_s for turn in taken]
        ratios = [turn.steps_per_s / plain.steps_per_s for turn, plain in zip(taken, turns["plain"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        figures[name] |= {
            "samples_per_s": statistics.median(rates),
            "ratio": statistics.median(ratios),
            "ratio_quartiles": [low, high],
            "samples_per_s_by_round": rates,
            "foreign_share_by_round": [turn.foreign_share for turn in taken],
        }
    return {
        "micro_batches_per_worker": accumulate,
        "global_batch_size": global_batch_size,
        "turns_repeated": repeated,
        "turns_disturbed": sum(turn.foreign_share > FOREIGN_SHARE for taken in turns.values() for turn in taken),
        "sides": figures,
    }


def print_table(results: dict[str, Any], output: Path) -> None:
    console, targets = Console(), TARGETS["gan" if results["job"] == "gan" else results["strategy"]]
    console.print(f"{results['model']}; {results['strategy']}, {results['workers']} workers, one thread each, gloo")
    console.print(f"{results['machine']}")
    for setting in results["settings"]:
        title = f"M/W = {setting['micro_batches_per_worker']}, global batch {setting['global_batch_size']}"
        table = Table(title=title, title_justify="left", caption_justify="left")
        table.caption = f"other programs disturbed {setting['turns_disturbed']} of {3 * results['rounds']} turns"
        table.add_column("", no_wrap=True)
        for heading in ("samples/s", "of plain", "quartiles", "target", "CPU ms", "other ms", "MiB"):
            table.add_column(heading, justify="right", no_wrap=True)
        for side, figures in setting["sides"].items():
            compared = [f"{figures['ratio']:.3f}", "{:.2f}-{:.2f}".format(*figures["ratio_quartiles"])]
            table.add_row(
                side,
                f"{figures['samples_per_s']:.1f}",
                *([*compared, f"{targets[side]}"] if side in targets else [""] * 3),
                f"{1000 * figures['worker_cpu_s_per_step']:.0f}",
                f"{1000 * figures['other_cpu_s_per_step']:.0f}",
                f"{figures['worker_peak_mib']:.0f}",
            )
        console.print(table)
    console.print("CPU ms: CPU time per step of one worker; other ms: of all other processes of that side")
    console.print("MiB: peak resident memory of rank 0")
    console.print(f"written to {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="default benchmarks/results/steps.json, or steps-phases.json")
    parser.add_argument("--rounds", type=positive_int, default=12, help="number of turns of each side")
    parser.add_argument("--turn-s", type=float, default=10.0, help="seconds per turn; a turn has at least three steps")
    parser.add_argument(
        "--patience-s", type=float, default=600.0, help="seconds during which disturbed turns are repeated"
    )
    parser.add_argument("--workers", type=positive_int, default=2, help="world size")
    parser.add_argument(
        "--accumulate", type=positive_int, nargs="+", default=[1, 4], help="micro-batches per worker and step, M/W"
    )
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--mirror", action=argparse.BooleanOptionalAction, default=True, help="fsdp.mirror")
    parser.add_argument("--job", choices=("gpt", "gan"), default="gpt", help="what is trained")
    parser.add_argument("--phases", action="store_true", help="what it costs to measure the phases of steps")
    parser.add_argument("--verify", action="store_true", help="what a verified step costs")
    for hidden in ("--side", "--data", "--folder"):  # passed to the processes of a side
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    name = "steps-phases.json" if options.phases else "steps-fsdp.json" if options.strategy == "fsdp" else "steps.json"
    name = "steps-verify.json" if options.verify else "steps-gan.json" if options.job == "gan" else name
    options.output = options.output or Path("benchmarks/results", name)
    if options.side == "plain":
        run_plain(options.data, options.folder, options.accumulate[0], options.strategy, options.job)
    elif options.phases or options.verify:
        report_one_run(options)
    elif options.side:
        job = options.workers, options.accumulate[0], options.strategy
        run_elastic(options.side, options.data, options.folder, *job, mirror=options.mirror, job=options.job)
    else:
        compare(options)


def report_one_run(options: argparse.Namespace) -> None:
    from step_phases import compare_phases
    from step_verify import compare_verified

    figures = (compare_verified if options.verify else compare_phases)(
        MODEL,
        workers=options.workers,
        micro_batch_size=MICRO_BATCH_SIZE,
        rows=ROWS,
        accumulate=options.accumulate,
        rounds=options.rounds,
    )
    write_results({"machine": describe_machine(), "verify" if options.verify else "phases": figures}, options.output)


def compare(options: argparse.Namespace) -> None:
    model = GAN() if options.job == "gan" else GPT(**MODEL)
    kind = "GAN" if options.job == "gan" else f"GPT of context {MODEL['context']}"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "model": f"{kind} with {parameters / 1e6:.1f} M parameters",
        "job": options.job,
        "strategy": options.strategy,
        "mirror": options.mirror,
        "workers": options.workers,
        "micro_batch_size": MICRO_BATCH_SIZE,
        "rounds": options.rounds,
        "turn_s": options.turn_s,
        "settings": [],
    }
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        write_random_windows(data, rows=ROWS, context=MODEL["context"])
        for accumulate in options.accumulate:
            results["settings"].append(
                measure(
                    data,
                    Path(name),
                    workers=options.workers,
                    accumulate=accumulate,
                    strategy=options.strategy,
                    mirror=options.mirror,
                    job=options.job,
                    rounds=options.rounds,
                    turn_s=options.turn_s,
                    patience_s=options.patience_s,
                )
            )
    write_results(results, options.output)
    print_table(results, options.output)


def write_results(results: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
