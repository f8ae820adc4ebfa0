"""Measures where the time goes from the command to the end of the first step: `python benchmarks/startup.py`.

Each round starts a small run in a fresh process, on a Ray cluster that the run starts on this machine, with `--cores`
cores. A table has the start and the end of each part in seconds after the command, so parts that run side by side
overlap. A second table has the parts of a replacement, in seconds after a worker is killed (SIGKILL). Figures are
medians over rounds; of processes that start together, the first start and the last end count.

A round takes about a minute on two cores, and the default is five rounds. Run it on an idle machine: other programs
make each part longer. On a machine with other work, compare the CPU time until the first step, of all processes of the
run together. `startup_parts/sitecustomize.py` notes the times in all processes of Python.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PARTS_FOLDER = ROOT / "benchmarks" / "startup_parts"
FOLDERS = [str(PARTS_FOLDER), str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]
sys.path[:0] = FOLDERS[1:]

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from arguments import positive_int  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from steps import busy_seconds, describe_machine, processes_below  # noqa: E402

from elastic_ddp.storage.storage import Storage  # noqa: E402
from elastic_ddp.telemetry import read_ledger  # noqa: E402
from elastic_ddp.telemetry.event import Event  # noqa: E402

CONTEXT, ROWS = 64, 4096
STEPS, MANY_STEPS = 20, 1_000_000
TARGET_S, TIMEOUT_S = 10.0, 120.0
ROLES = {
    "ElasticTrainer.fit": "driver",
    "Rendezvous.__init__": "rendezvous",
    "ElasticController.__init__": "controller",
    "_train": "worker",
    "_begin_task": "reader",
}
"""What a process is, by a call that it makes."""


class Span(NamedTuple):
    """An import or a call in a process. Times are in seconds after the command, or after the kill."""

    pid: int
    role: str
    name: str
    start: float
    end: float
    cpu: float


def read_spans(folder: Path, at: float) -> list[Span]:
    """Returns what all processes noted, by time. `at` is the Unix time that counts as 0."""
    spans = []
    for file in folder.iterdir():
        notes = [json.loads(line) for line in file.read_text().splitlines()]
        role = next((ROLES[note["name"]] for note in notes if note["name"] in ROLES), "")
        times = ((note["name"], note["start"] - at, note["end"] - at, note["cpu"]) for note in notes)
        spans += [Span(int(file.name), role, *each) for each in times]
    return sorted(spans, key=lambda span: span.start)


def part(spans: Iterable[Span], role: str, begin: str, end: str | None = None) -> tuple[float, float]:
    """Returns from the first start of `begin` to the last end of it, or to the last start of `end`, on a role."""
    of_role = [span for span in spans if span.role == role]
    start = min(span.start for span in of_role if span.name == begin)
    firsts: dict[int, float] = {}
    for span in of_role:
        if span.name == (end or begin):
            firsts.setdefault(span.pid, span.start if end else span.end)
    return start, max(firsts.values())


def cpu_of_imports(spans: Iterable[Span]) -> dict[str, float]:
    """Returns the CPU seconds of imports in one process of each role. An import includes those that it starts."""
    roles = {"driver", "rendezvous", "controller", "worker", "reader"}
    of_roles = [span for span in spans if span.role in roles and span.name.startswith("import ")]
    return {f"{span.role}: {span.name}": span.cpu for span in sorted(of_roles, key=lambda span: (span.role, span.cpu))}


def parts_of_start(spans: list[Span], events: list[Event], at: float) -> dict[str, tuple[float, float]]:
    """Returns the start and the end of each part from the command to the end of the first step."""
    reading = [span.end for span in spans if span.role == "reader" and span.name == "_begin_task"]
    formed = next(event.at for event in events if event.event == "generation_started") - at
    first_step = next(event.at for event in events if event.event == "first_step") - at
    return {
        "driver: Python, and the program's import of torch": (0.0, part(spans, "driver", "import torch")[1]),
        "driver: import of elastic_ddp": part(spans, "driver", "import elastic_ddp.driver.trainer"),
        "driver: index of the data set": part(spans, "driver", "ElasticTrainer._create_job"),
        "driver: start of Ray's processes": part(spans, "driver", "connect_or_start"),
        "driver: import of Ray Train": part(spans, "driver", "import elastic_ddp.driver.session"),
        "rendezvous: process and imports": part(spans, "rendezvous", "process", "Rendezvous.__init__"),
        "controller: process and imports": part(spans, "controller", "process", "ElasticController.__init__"),
        **parts_of_worker(spans),
        "generation: rendezvous, process group, state": (part(spans, "worker", "WorkerMembership.join")[0], formed),
        "readers: process, import of Ray Data": (part(spans, "reader", "process")[0], min(reading)),
        "first step": (formed, first_step),
    }


def parts_of_worker(spans: list[Span]) -> dict[str, tuple[float, float]]:
    """Returns the parts of the start of workers, until they can join."""
    build = part(spans, "worker", "_train", "WorkerMembership.warm_up")
    return {
        "workers: process and import of Ray": part(spans, "worker", "process", "import ray.train"),
        "workers: import of Ray Train": part(spans, "worker", "import ray.train"),
        "workers: import of torch": part(spans, "worker", "import torch"),
        "workers: import of torch's compiler": part(spans, "worker", "import torch._dynamo"),
        "workers: model and optimizer": build,
        "workers: first rows, warm-up": (build[1], part(spans, "worker", "_train", "WorkerMembership.join")[1]),
    }


class Run:
    """One run of the program, in a process group of its own."""

    def __init__(self, folder: Path, *, steps: int, workers: int, cores: int) -> None:
        self.folder, self.trace = folder, folder / "trace"
        self.trace.mkdir()
        (folder / "data").mkdir()
        values = np.random.default_rng(0).integers(0, 256, ROWS * (CONTEXT + 1), dtype=np.uint8)
        table = pa.table({"window": pa.FixedSizeListArray.from_arrays(pa.array(values), CONTEXT + 1)})
        pq.write_table(table, folder / "data" / "part-0.parquet", row_group_size=256)
        variables = {"RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1", "STARTUP_TRACE": str(self.trace)}
        environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(FOLDERS)}
        command = [sys.executable, str(PARTS_FOLDER / "program.py"), str(folder), str(steps), str(workers)]
        usable = set(sorted(os.sched_getaffinity(0))[:cores])
        self._own_s, self._busy_s = {}, busy_seconds()
        self.began = time.time()
        with (folder / "log").open("w") as log:
            self.driver = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: os.sched_setaffinity(0, usable),
            )

    def events(self) -> list[Event]:
        return list(read_ledger(Storage(str(self.folder / "runs" / "startup"))))

    def wait(self, condition: Callable[[list[Event]], bool]) -> list[Event]:
        """Waits until a condition on the ledger is true, and returns the ledger."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition(events := self.events() if (self.folder / "runs" / "startup" / "ledger").exists() else []):
            if self.driver.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the run did not get that far:\n{(self.folder / 'log').read_text()[-4000:]}")
            time.sleep(0.1)
        return events

    def cpu_seconds(self) -> tuple[float, float]:
        """Returns the CPU seconds so far of the run's live processes, and those of other programs."""
        own = sum(processes_below(self.driver.pid).values())
        return own, busy_seconds() - self._busy_s - own

    def end(self) -> None:
        self.driver.send_signal(signal.SIGTERM)
        self.driver.wait(TIMEOUT_S)


def measure_start(folder: Path, **options: int) -> dict[str, Any]:
    """Returns the parts of a run's start, the seconds to its first step, and those from its last step to its end."""
    run = Run(folder, steps=STEPS, **options)
    run.wait(lambda events: any(event.event == "first_step" for event in events))
    own_s, foreign_s = run.cpu_seconds()
    run.driver.wait(TIMEOUT_S)
    ended, events = time.time(), run.events()
    spans = read_spans(run.trace, run.began)
    parts = parts_of_start(spans, events, run.began)
    last_step = max(event.at for event in events if event.event == "steps_completed")
    return {
        "parts": parts,
        "cpu_s_of_imports": cpu_of_imports(spans),
        "first_step_s": parts["first step"][1],
        "cpu_s": own_s,
        "foreign_cpu_s": foreign_s,
        "end_s": ended - last_step,
    }


def measure_replacement(folder: Path, **options: int) -> dict[str, Any]:
    """Kills a worker. Returns the parts of its replacement, and the seconds until the run has all workers again."""
    run = Run(folder, steps=MANY_STEPS, **options)
    try:
        events = run.wait(lambda events: any(e.event == "steps_completed" and e.step > STEPS for e in events))
        victim = next(event for event in events if event.event == "generation_formed").members[-1]["pid"]
        at = time.time()
        os.kill(victim, signal.SIGKILL)

        def is_whole(events: list[Event]) -> bool:
            sizes = [event.world_size for event in events if event.event == "generation_started" and event.at > at]
            return bool(sizes) and sizes[-1] == options["workers"]

        events = [event for event in run.wait(is_whole) if (event.at or 0) > at]
    finally:
        run.end()
    spans = read_spans(run.trace, at)
    new = {span.pid for span in spans if span.role == "worker" and span.name == "process" and span.start > 0}
    spans = [span for span in spans if span.pid in new]
    detected = next(event.at for event in events if event.event == "worker_failed") - at
    joined = [event.at for event in events if event.event == "generation_started"][-1] - at
    requested, ready = part(spans, "worker", "process")[0], part(spans, "worker", "_train", "WorkerMembership.join")[1]
    return {
        "parts": {
            "failure detected": (0.0, detected),
            "replacement requested": (detected, requested),
            **parts_of_worker(spans),
            "joined": (ready, joined),
        },
        "whole_s": joined,
    }


def medians(values: list[Any]) -> Any:
    """Returns the median of figures; of each key of dicts, and of each element of tuples."""
    first = values[0]
    if isinstance(first, dict):
        return {name: medians([each[name] for each in values if name in each]) for name in first}
    if isinstance(first, tuple):
        return tuple(statistics.median(sides) for sides in zip(*values, strict=True))
    return statistics.median(values)


def print_tables(results: dict[str, Any]) -> None:
    console = Console()
    console.print(f"{results['machine']}; {results['workers']} workers, {results['cores']} cores")
    titles = {"start": "seconds after the command", "replacement": "seconds after SIGKILL"}
    for name, title in titles.items():
        if name in results:
            table = Table(title=title, title_justify="left")
            for heading in ("", "start", "end"):
                table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
            for row, (start, end) in results[name]["median"]["parts"].items():
                table.add_row(row, f"{start:.2f}", f"{end:.2f}")
            console.print(table)
    if "start" in results:
        figures = results["start"]["median"]
        table = Table("", "CPU seconds", title="imports in one process", title_justify="left")
        for row, seconds in figures["cpu_s_of_imports"].items():
            table.add_row(row, f"{seconds:.2f}")
        console.print(table)
        first_step_s, foreign_cpu_s = figures["first_step_s"], figures["foreign_cpu_s"]
        console.print(f"from the command to the end of the first step: {first_step_s:.1f} s; target {TARGET_S:g} s")
        console.print(f"CPU time until then: {figures['cpu_s']:.1f} s; of other programs: {foreign_cpu_s:.1f} s")
        console.print(f"from the last step to the end of the command: {figures['end_s']:.1f} s")
    if "replacement" in results:
        console.print(f"from SIGKILL to all workers: {results['replacement']['median']['whole_s']:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=5, help="rounds of each part; medians are reported")
    parser.add_argument("--workers", type=positive_int, default=2, help="workers of the run")
    parser.add_argument("--cores", type=positive_int, default=2, help="cores of the machine that the run may use")
    parser.add_argument("--parts", default="start,replacement", help="comma-separated: start, replacement")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/startup.json"))
    options = parser.parse_args()
    measures = {"start": measure_start, "replacement": measure_replacement}
    parts = options.parts.split(",")
    if unknown := sorted({*parts} - {*measures}):
        parser.error(f"no {', '.join(unknown)}: parts are {', '.join(measures)}")
    results: dict[str, Any] = {"machine": describe_machine(), "workers": options.workers, "cores": options.cores}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in parts}
    for _ in range(options.rounds):
        for name in parts:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                rounds[name].append(measures[name](Path(folder), workers=options.workers, cores=options.cores))
    results |= {name: {"median": medians(each), "rounds": each} for name, each in rounds.items()}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print_tables(results)
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
