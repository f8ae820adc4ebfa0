"""What a change of membership costs, beside what it costs with others: `python benchmarks/elasticity.py [--peers all]`.

The same small workload (`peers/workload.py`) and the same events on every system: a worker is added, one is killed
(SIGKILL, of a seeded rank), one is taken away with notice, a machine dies or falls silent with the worker on it. Every
worker writes down when it completed which step; from that alone come the stalls and the steps that were done twice
(`peers/measures.py`). Without --peers, elastic_ddp alone.

Writes results.json and table.md into a folder, and with peers elasticity.png and elasticity.svg, which need
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
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peers import report
from peers.measures import Event, has_begun, is_settled, measure
from peers.ours import ElasticDDP
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
    for system in (ElasticDDP, RayTrain, RayTrainTuned, Torchrun, TorchrunTuned, TorchFT, TorchFTTuned)
}
WORKERS = {"add": (2, 3), "kill": (3, 3), "drain": (3, 2), "node": (3, 2), "silence": (3, 2), "resize": (3, 2)}
"""By event: workers before, and after it."""
JOINS, REPLACED = "a worker joins on an added node", "a worker joins in the place of a lost one"
CHANGES = {
    "kill": "a worker is killed",
    "drain": "a worker is drained",
    "node": "a machine dies",
    "silence": "a machine falls silent",
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
"""Seconds that elastic_ddp may stall."""
MOST_FAILURES = 2
"""An event from which a system has not recovered so many times is not repeated on it."""

console = Console()


def wait_until(
    system: System, condition: Callable[[list[StepEnd]], bool], patience_s: float
) -> tuple[bool, list[StepEnd]]:
    """Whether it came true in time, and the steps so far."""
    end = time.monotonic() + patience_s
    while not condition(ends := system.step_ends()):
        if time.monotonic() > end or system.ended():
            return False, ends
        time.sleep(0.5)
    return True, ends


def cause(event: str, system: System, rank: int, *, patience_s: float) -> dict[str, Any]:
    """Does it to a run that trains, waits until it trains on as it should, and measures."""
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
        system.lose_machine(signal.SIGKILL if event == "node" else signal.SIGSTOP)
    happened = Event(at, WORKERS[event][1], victim)
    _, ends = wait_until(system, partial(is_settled, event=happened), patience_s)
    figures = measure(ends, happened, now=time.time(), ended=system.ended())
    return {"rank": rank if event == "kill" else None, "load": load, **figures}


def run_system(
    make: type[System], scratch: Path, *, events: list[str], repeats: int, seed: int, patience_s: float
) -> dict[str, Any]:
    """All events, one after the other, in one run for as long as it survives them and otherwise in a new one. What they
    cost, and how long every such run took to its first step, on machines that were there."""
    found: dict[str, list[dict[str, Any]]] = {event: [] for event in events}
    starts: list[float] = []
    ranks = random.Random(seed)
    system: System | None = None
    workers, begun = 0, False
    try:
        for _ in range(repeats):
            rank = ranks.randrange(WORKERS["kill"][0])
            for event in events:
                if sum(not figures["recovered"] for figures in found[event]) >= MOST_FAILURES:
                    continue
                if system is None or workers != WORKERS[event][0]:
                    if system is not None:
                        system.stop()
                    system = make(Path(tempfile.mkdtemp(dir=scratch)))
                    system.start(WORKERS[event][0])
                    at, condition = time.time(), partial(has_begun, workers=WORKERS[event][0])
                    begun, ends = wait_until(system, condition, patience_s)
                    starts += [ends[0].time - at] if begun else []
                if begun:
                    figures = cause(event, system, rank, patience_s=patience_s)
                else:
                    figures = {"recovered": False, "outcome": f"it did not start in {patience_s:g} s"}
                    console.print((system.folder / "log").read_text(errors="replace")[-4000:], markup=False)
                found[event].append(figures)
                # What is frozen is part of the run until it ends, and one that was told of a size keeps to it.
                goes_on = figures["recovered"] and event not in ("silence", "resize")
                workers = WORKERS[event][1] if goes_on else 0
                console.print(f"{make.about.name}, {event}: {_in_words(figures)}", highlight=False, soft_wrap=True)
    finally:
        if system is not None:
            system.stop()
    return {"events": found, "start_s": starts}


def _in_words(figures: dict[str, Any]) -> str:
    if not figures["recovered"]:
        return str(figures["outcome"])
    return (
        f"stall {figures['stall_s']:.2f} s, {figures['steps_done_twice']} steps done twice, "
        f"all at work after {figures['all_at_work_after_s']:.1f} s"
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
    """Every change on its own: that a worker is killed is one, that another replaces it the next."""
    changes: dict[str, list[float]] = {}
    ours = results["systems"][ElasticDDP.about.name]
    events = ours["events"]
    for event, each in events.items():
        for figures in each:
            for change in figures.get("changes", []):
                joins = JOINS if event == "add" else REPLACED
                name = joins if change["to"] > change["from"] else CHANGES[event]
                changes.setdefault(name, []).append(change["stall_s"])
    table = Table("elastic_ddp", "stall, s: median (least to most)", "times", "target")
    for name, seconds in changes.items():
        table.add_row(name, report.spread(seconds), str(len(seconds)), str(TARGETS[name]))
    console.print(table)
    if added := [figures["all_at_work_after_s"] for figures in events.get("add", []) if figures["recovered"]]:
        console.print(f"from a node that is started to a step on it: {report.spread(added, 1)} s")
        started = report.spread(ours["start_s"], 1)
        console.print(f"from a run's start on nodes that are there to its first step: {started} s")
    twice = sum(figures.get("steps_done_twice", 0) for each in events.values() for figures in each)
    console.print(f"{twice} steps done twice")


def main() -> None:
    peers = [name for name in SYSTEMS if name != ElasticDDP.about.name]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="", help=f"all, or some of {','.join(peers)}")
    parser.add_argument("--repeats", type=int, default=3, help="of every event, on every system")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/elasticity"), help="folder of the results")
    parser.add_argument(
        "--events", default=",".join(WORKERS), help=f"some of {','.join(WORKERS)}; resize is for elastic_ddp alone"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the ranks that are killed")
    parser.add_argument("--patience-s", type=float, default=120.0, help="until a system is said not to recover")
    options = parser.parse_args()
    chosen = peers if options.peers == "all" else [name for name in options.peers.split(",") if name]
    events = options.events.split(",")
    if unknown := sorted({*chosen} - {*peers}) + sorted({*events} - {*WORKERS}):
        parser.error(f"no {', '.join(unknown)}: peers are {', '.join(peers)}, events {', '.join(WORKERS)}")
    needs = {"matplotlib": bool(chosen), "torchft": any(name.startswith("torchft") for name in chosen)}
    if missing := [name for name, needed in needs.items() if needed and find_spec(name) is None]:
        parser.error(f"{' and '.join(missing)} missing; pip install 'elastic_ddp[bench]' brings what peers need")

    results: dict[str, Any] = {
        "machine": describe_machine(),
        "workload": {"global_batch_size": GLOBAL_BATCH_SIZE, "wait_s": WAIT_S},
        "repeats": options.repeats,
        "seed": options.seed,
        "patience_s": options.patience_s,
        "systems": {},
    }
    console.print(f"{results['machine']}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # like Ctrl-C: what was started is ended
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        os.environ["RAY_TMPDIR"] = scratch  # or whoever calls ray.init() on this machine would join our clusters
        for name in [ElasticDDP.about.name, *chosen]:
            system = SYSTEMS[name]
            found = run_system(
                system,
                Path(scratch),
                events=[event for event in events if event != "resize" or name == ElasticDDP.about.name],
                repeats=options.repeats,
                seed=options.seed,
                patience_s=options.patience_s,
            )
            results["systems"][name] = {**asdict(system.about), **found}
            (options.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (options.out / "table.md").write_text(report.markdown(results))
    if chosen:
        report.plot(results, options.out)
    print_ours(results)
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
