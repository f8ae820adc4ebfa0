"""Measures how throughput grows with the number of workers: `python benchmarks/scaling.py --workers 1,2,4 --strong`.

Each world size is a run of its own, of the same GPT on the same rows, with a warm-up that does not count. The figures
are those that `elastic-ddp show` has: samples in the phase `useful`.

    --strong    the global batch is the same at each world size: `--micro-batches` for each of the most workers
    --weak      the global batch grows with the workers: `--micro-batches` for each worker

The speed-up is the throughput relative to the fewest workers, and the efficiency is the throughput per worker relative
to theirs. `--gpu` trains a larger GPT in bf16, one GPU for each worker. It writes JSON and a plot (SVG); the plot needs
`pip install 'elastic_ddp[bench]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]
sys.path[:0] = FOLDERS

import torch  # noqa: E402
from arguments import positive_int  # noqa: E402
from gpt import GPT, next_byte_loss  # noqa: E402
from machine import busy_seconds, describe_machine, processes_below  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from windows import write_random_windows  # noqa: E402

import elastic_ddp as ed  # noqa: E402
from elastic_ddp.storage.storage import Storage  # noqa: E402
from elastic_ddp.telemetry import read_ledger  # noqa: E402
from elastic_ddp.telemetry.event import Event  # noqa: E402
from elastic_ddp.telemetry.events import FirstStep, StepsCompleted  # noqa: E402
from elastic_ddp.telemetry.goodput import scaling  # noqa: E402
from elastic_ddp.telemetry.sessions import read_sessions  # noqa: E402

CPU = {"context": 64, "width": 320, "layers": 8, "heads": 5, "dropout": 0.0}
GPU = {"context": 1024, "width": 768, "layers": 12, "heads": 12, "dropout": 0.0}
MICRO_BATCH_SIZE = {False: 8, True: 16}
"""Samples of a micro-batch, by whether it is on a GPU."""
ROWS = 16_384
WARMUP_STEPS = 5
"""One of them is logged last: with `log_every_steps = 4`, the steps 1, 5, 9, ... are."""


def fit(folder: Path, setting: dict[str, Any]) -> None:
    """Runs the driver of one world size, in a process of its own."""
    import ray

    workers, gpu = setting["workers"], setting["gpu"]

    def train(run: ed.Run) -> None:
        model = run.prepare(GPT(**(GPU if gpu else CPU)))
        run.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    step.backward(next_byte_loss(model, batch))
                step.optimize()

    size = MICRO_BATCH_SIZE[gpu]
    config = {
        "name": setting["name"],
        "storage": str(folder / "runs"),
        "steps": WARMUP_STEPS + setting["steps"],
        "global_batch_size": size * setting["micro_batches"],
        "micro_batch_size": size,
        "min_workers": workers,
        "max_workers": workers,
        "reduction": setting["reduction"],
        "log_every_steps": WARMUP_STEPS - 1,
        "checkpoint": {"every_steps": 1_000_000},
        **({"precision": "bf16", "resources_per_worker": {"CPU": 1, "GPU": 1}} if gpu else {}),
    }
    num_gpus = workers if gpu else 0
    ray.init("local", num_cpus=workers, num_gpus=num_gpus, include_dashboard=False, logging_level="warning")
    ed.ElasticTrainer(train, str(folder / "data"), config).fit()


def measure(folder: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """Runs one world size. Returns its row of `scaling`, with the global batch size."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--fit", str(folder), "--setting", json.dumps(setting)]
    began, busy, own_s = time.monotonic(), busy_seconds(), 0.0
    with (folder / "log").open("w") as log:
        driver = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    while driver.poll() is None:
        own_s = max(own_s, sum(processes_below(driver.pid).values()))
        time.sleep(0.2)
    foreign_s = busy_seconds() - busy - own_s
    if driver.returncode != 0:
        raise SystemExit(f"{setting['workers']} workers: the run failed:\n{(folder / 'log').read_text()[-4000:]}")
    events = read_ledger(Storage(str(folder / "runs" / setting["name"])))
    (row,) = scaling(read_sessions(event for event in events if not is_of_warm_up(event)))
    return {
        **row,
        "global_batch_size": MICRO_BATCH_SIZE[setting["gpu"]] * setting["micro_batches"],
        "foreign_share": max(0.0, foreign_s / (os.cpu_count() or 1) / (time.monotonic() - began)),
    }


def is_of_warm_up(event: Event) -> bool:
    return isinstance(event, FirstStep) or (isinstance(event, StepsCompleted) and event.step < WARMUP_STEPS)


def with_speed_up(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows with speed-up and efficiency relative to the first."""
    base = rows[0]
    return [
        {
            **row,
            "speed_up": row["samples_per_s"] / base["samples_per_s"],
            "efficiency": row["samples_per_s_per_worker"] / base["samples_per_s_per_worker"],
        }
        for row in rows
    ]


def print_table(results: dict[str, Any]) -> None:
    console = Console()
    console.print(f"{results['model']}; {results['mode']} scaling, {results['reduction']}")
    console.print(f"{results['machine']}")
    table = Table()
    for heading in ("workers", "batch", "samples/s", "per worker", "speed-up", "efficiency", "others"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results["rows"]:
        rates = [f"{row['samples_per_s']:.1f}", f"{row['samples_per_s_per_worker']:.1f}"]
        ratios = [f"{row['speed_up']:.2f}", f"{row['efficiency']:.0%}", f"{row['foreign_share']:.0%}"]
        table.add_row(str(row["world_size"]), str(row["global_batch_size"]), *rates, *ratios)
    console.print(table)
    console.print("others: the share of the machine's CPUs that other programs used meanwhile; repeat above 5 %")


def plot(results: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = results["rows"]
    sizes = [row["world_size"] for row in rows]
    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(sizes, [size / sizes[0] for size in sizes], color="tab:gray", linestyle="--", label="linear")
    axes.plot(sizes, [row["speed_up"] for row in rows], marker="o", label=f"{results['mode']} scaling")
    for row in rows:
        place = (row["world_size"], row["speed_up"])
        axes.annotate(f"{row['efficiency']:.0%}", place, xytext=(6, -12), textcoords="offset points")
    axes.set(xlabel="workers", ylabel="speed-up (efficiency, %)", xticks=sizes, ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def world_sizes(text: str) -> list[int]:
    return sorted({int(size) for size in text.split(",")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=world_sizes, default=[1, 2], help="comma-separated world sizes")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--strong", action="store_const", dest="mode", const="strong", help="the default")
    modes.add_argument("--weak", action="store_const", dest="mode", const="weak")
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--steps", type=positive_int, default=50, help="measured steps of each run")
    parser.add_argument(
        "--micro-batches", type=positive_int, default=2, help="of a worker and step, with the most workers"
    )
    parser.add_argument("--reduction", choices=["canonical", "native"], default="canonical")
    parser.add_argument("--output", type=Path, help="JSON; default benchmarks/results/scaling-MODE.json")
    parser.add_argument("--fit", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--setting", type=json.loads, help=argparse.SUPPRESS)
    parser.set_defaults(mode="strong")
    options = parser.parse_args()
    if options.fit:
        fit(options.fit, options.setting)
        return
    if find_spec("matplotlib") is None:
        parser.error("matplotlib missing. Install it with: pip install 'elastic_ddp[bench]'")
    sizes = options.workers
    model = GPU if options.gpu else CPU
    parameters = sum(parameter.numel() for parameter in GPT(**model).parameters())
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "model": f"GPT of {parameters / 1e6:.1f} M parameters, context {model['context']}",
        **{name: getattr(options, name) for name in ("mode", "gpu", "steps", "micro_batches", "reduction")},
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_random_windows(folder / "data", rows=ROWS, context=model["context"], row_group_rows=256)
        rows = []
        for workers in sizes:
            micro_batches = options.micro_batches * (workers if options.mode == "weak" else sizes[-1])
            setting = {"name": f"workers-{workers}", "workers": workers, "micro_batches": micro_batches}
            setting |= {name: results[name] for name in ("gpu", "steps", "reduction")}
            rows.append(measure(folder, setting))
    results["rows"] = with_speed_up(rows)
    output = options.output or Path(f"benchmarks/results/scaling-{options.mode}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=2) + "\n")
    print_table(results)
    plot(results, output.with_suffix(".svg"))
    print(f"written to {output} and {output.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
