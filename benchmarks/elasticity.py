"""Measures the cost of membership changes, also of other systems: `python benchmarks/elasticity.py [--peers all]`.

All systems run the same small workload (`peers/workload.py`) and get the same events: a worker is added, killed
(SIGKILL, a seeded rank) or drained, and a machine dies or freezes with its worker. Workers log the time of each
completed step. Stalls and repeated steps follow from these logs alone (`peers/measures.py`). Without --peers, it
measures elastic_ddp only.

Writes results.json and table.md into a folder; with peers also elasticity.png and elasticity.svg, which need
`pip install 'elastic_ddp[bench]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from arguments import positive_int
from peers import report
from peers.measures import SETTLED_STEPS, Event, has_begun, is_settled, measure
from peers.ours import ElasticDDP
from peers.ray_torch_ft import RayTrainTorchFT
from peers.ray_train import RayTrain, RayTrainTuned
from peers.system import System
from peers.torch_ft import TorchFT, TorchFTTuned
from peers.torchrun import Torchrun, TorchrunTuned
from peers.workload import GLOBAL_BATCH_SIZE, WAIT_S, StepEnd
from rich.console import Console
from rich.table import Table

from elastic_ddp import RunConfig

SYSTEMS: dict[str, type[System]] = {
    system.about.name: system
    for system in (ElasticDDP, RayTrain, RayTrainTuned, Torchrun, TorchrunTuned, TorchFT, TorchFTTuned, RayTrainTorchFT)
}
WORKERS = {"add": (2, 3), "kill": (3, 3), "drain": (3, 2), "node": (3, 2), "silence": (3, 2), "resize": (3, 2)}
"""Number of workers before and after each event."""
JOINS, REPLACED = "a worker joins on an added node", "a worker replaces a failed one"
CHANGES = {
    "kill": "a worker is killed",
    "drain": "a worker is drained",
    "node": "a machine dies",
    "silence": "a machine freezes",
    "resize": "resized to one less",
}
TARGETS = {
    JOINS: 0.15,
    REPLACED: 0.15,
    CHANGES["kill"]: 0.35,
    CHANGES["drain"]: 0.15,
    CHANGES["resize"]: 0.15,
    CHANGES["node"]: 0.35,
    CHANGES["silence"]: RunConfig.model_fields["heartbeat_timeout_s"].default + 0.35,
}
"""Target stall of elastic_ddp in seconds."""
MAX_FAILURES = 2
"""Number of failed recoveries after which an event is not repeated on a system."""

console = Console()


def wait_until(
    system: System, condition: Callable[[list[StepEnd]], bool], timeout_s: float
) -> tuple[bool, list[StepEnd]]:
    """Returns whether the condition became true in time, and the steps so far."""
    end = time.monotonic() + timeout_s
    while not condition(ends := system.step_ends()):
        if time.monotonic() > end or system.ended():
            return False, ends
        time.sleep(0.5)
    return True, ends


def trigger(
    event: str,
    system: System,
    rank: int,
    *,
    timeout_s: float,
    workers: int | None = None,
    settled_steps: int = SETTLED_STEPS,
) -> dict[str, Any]:
    """Triggers an event in a training run, waits until the run has recovered, and returns the figures.

    `workers` is the number of workers afterwards, by default that of `WORKERS`.
    """
    at, load, victim = time.time(), os.getloadavg()[0], None
    if event == "add":
        system.add_worker()
    elif event == "kill":
        victim = system.kill_worker(rank)
    elif event == "drain":
        system.drain_worker()
    elif event == "resize":
        system.resize(WORKERS[event][1])
    else:
        system.stop_machine(signal.SIGKILL if event == "node" else signal.SIGSTOP)
    happened = Event(at, workers or WORKERS[event][1], victim, settled_steps)
    _, ends = wait_until(system, partial(is_settled, event=happened), timeout_s)
    figures = measure(ends, happened, now=time.time(), ended=system.ended())
    return {"rank": rank if event == "kill" else None, "load": load, **figures}


def run_system(
    make: type[System],
    scratch: Path,
    *,
    events: list[str],
    repeats: int,
    seed: int,
    timeout_s: float,
    sizes: Mapping[str, tuple[int, int]] = WORKERS,
    settled_steps: int = SETTLED_STEPS,
) -> dict[str, Any]:
    """Triggers all events in one run, and starts a new run after each that it does not survive. Returns the figures of
    each event, and the seconds from the start of each run to its first step.

    `sizes` has the number of workers before and after each event. A run has settled after `settled_steps` steps.
    """
    results: dict[str, list[dict[str, Any]]] = {event: [] for event in events}
    starts: list[float] = []
    ranks = random.Random(seed)
    system: System | None = None
    workers, begun = 0, False
    try:
        for _ in range(repeats):
            rank = ranks.randrange(sizes["kill"][0])
            for event in events:
                if sum(not figures["recovered"] for figures in results[event]) >= MAX_FAILURES:
                    continue
                before, after = sizes[event]
                if system is None or workers != before:
                    if system is not None:
                        system.stop()
                    system = make(Path(tempfile.mkdtemp(dir=scratch)))
                    system.start(before)
                    at, condition = time.time(), partial(has_begun, workers=before, settled_steps=settled_steps)
                    begun, ends = wait_until(system, condition, timeout_s)
                    starts += [ends[0].time - at] if begun else []
                if begun:
                    options: dict[str, Any] = {"timeout_s": timeout_s, "settled_steps": settled_steps}
                    figures = trigger(event, system, rank, workers=after, **options)
                else:
                    figures = {"recovered": False, "outcome": f"not started within {timeout_s:g} s"}
                    console.print((system.folder / "log").read_text(errors="replace")[-4000:], markup=False)
                results[event].append(figures)
                # A frozen machine stays part of the run, and a resized run keeps its size.
                is_reusable = figures["recovered"] and event not in ("silence", "resize")
                workers = after if is_reusable else 0
                console.print(f"{make.about.name}, {event}: {_describe(figures)}", highlight=False, soft_wrap=True)
    finally:
        if system is not None:
            system.stop()
    return {"events": results, "start_s": starts}


def _describe(figures: dict[str, Any]) -> str:
    if not figures["recovered"]:
        return str(figures["outcome"])
    return (
        f"stall {figures['stall_s']:.2f} s, {figures['steps_done_twice']} steps repeated, "
        f"all workers train after {figures['all_at_work_after_s']:.1f} s"
    )


def describe_machine() -> dict[str, Any]:
    versions = {}
    for name in ("torch", "ray", "torchft"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"cpus": os.cpu_count(), "python": platform.python_version(), **versions}


def print_ours(results: dict[str, Any]) -> None:
    """Prints the stall of each change. A kill is one change, and the replacement of the worker another."""
    changes: dict[str, list[float]] = {}
    ours = results["systems"][ElasticDDP.about.name]
    events = ours["events"]
    for event, repeats in events.items():
        for figures in repeats:
            for change in figures.get("changes", []):
                joins = JOINS if event == "add" else REPLACED
                name = joins if change["to"] > change["from"] else CHANGES[event]
                changes.setdefault(name, []).append(change["stall_s"])
    table = Table("elastic_ddp", "stall, s: median (min to max)", "times", "target")
    for name, seconds in changes.items():
        table.add_row(name, report.spread(seconds), str(len(seconds)), str(TARGETS[name]))
    console.print(table)
    if added := [figures["all_at_work_after_s"] for figures in events.get("add", []) if figures["recovered"]]:
        console.print(f"from the start of a node to the first step on it: {report.spread(added, 1)} s")
        started = report.spread(ours["start_s"], 1)
        console.print(f"from the start of a run on existing nodes to its first step: {started} s")
    twice = sum(figures.get("steps_done_twice", 0) for repeats in events.values() for figures in repeats)
    console.print(f"{twice} steps repeated")


def main() -> None:
    # Ray's workers import the peers' modules.
    path = str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    peers = [name for name in SYSTEMS if name != ElasticDDP.about.name]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="", help=f"all, or a comma-separated list of {','.join(peers)}")
    parser.add_argument("--repeats", type=positive_int, default=3, help="of each event on each system")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/elasticity"), help="folder of the results")
    parser.add_argument(
        "--events",
        default=",".join(WORKERS),
        help=f"comma-separated: {','.join(WORKERS)}; resize on elastic_ddp only",
    )
    parser.add_argument("--seed", type=int, default=0, help="decides which ranks are killed")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="seconds that a system has to recover")
    options = parser.parse_args()
    chosen = peers if options.peers == "all" else [name for name in options.peers.split(",") if name]
    events = options.events.split(",")
    if unknown := sorted({*chosen} - {*peers}) + sorted({*events} - {*WORKERS}):
        parser.error(f"no {', '.join(unknown)}: peers are {', '.join(peers)}, events {', '.join(WORKERS)}")
    needs = {"matplotlib": bool(chosen), "torchft": any("torchft" in name for name in chosen)}
    if missing := [name for name, needed in needs.items() if needed and find_spec(name) is None]:
        parser.error(f"{' and '.join(missing)} missing. Install them with: pip install 'elastic_ddp[bench]'")

    results: dict[str, Any] = {
        "machine": describe_machine(),
        "workload": {"global_batch_size": GLOBAL_BATCH_SIZE, "wait_s": WAIT_S},
        "repeats": options.repeats,
        "seed": options.seed,
        "timeout_s": options.timeout_s,
        "systems": {},
    }
    console.print(f"{results['machine']}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends all processes, like Ctrl-C
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        os.environ["RAY_TMPDIR"] = scratch  # otherwise other ray.init() calls on this machine would join these clusters
        for name in [ElasticDDP.about.name, *chosen]:
            system = SYSTEMS[name]
            measured = run_system(
                system,
                Path(scratch),
                events=[event for event in events if event != "resize" or name == ElasticDDP.about.name],
                repeats=options.repeats,
                seed=options.seed,
                timeout_s=options.timeout_s,
            )
            results["systems"][name] = {**asdict(system.about), **measured}
            (options.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (options.out / "table.md").write_text(report.markdown(results))
    if chosen:
        report.plot(results, options.out)
    print_ours(results)
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
