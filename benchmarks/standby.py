"""Measures what a standby saves and costs: `python benchmarks/standby.py [--repeats 3] [--kills 3]`.

Runs the workload of `elasticity.py` on two workers of one node, without and with `standby_workers = 1` in turns, and
kills a worker several times in each run. The time to full strength ends with the first step of two workers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from arguments import positive_int
from elasticity import trigger, wait_until
from peers import report
from peers.measures import has_begun
from peers.ours import ElasticDDP
from peers.system import tree
from rich.console import Console
from rich.table import Table

WORKERS = 2
POLL_S = 2.0

console = Console()


class WithStandby(ElasticDDP):
    standby_workers = 1


def memory_mib(pids: Iterable[int]) -> float:
    """Returns the memory of processes in MiB. What several share counts in parts."""
    total = 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def measure_run(make: type[ElasticDDP], scratch: Path, *, kills: int, timeout_s: float) -> list[dict[str, Any]]:
    """Kills workers of one run. Returns the figures of each kill."""
    system, figures = make(Path(tempfile.mkdtemp(dir=scratch))), list[dict[str, Any]]()
    try:
        system.start(WORKERS)
        wait_until(system, partial(has_begun, workers=WORKERS), timeout_s)
        for number in range(kills):
            end = time.monotonic() + timeout_s
            while len(standbys := system.standbys()) < make.standby_workers and time.monotonic() < end:
                time.sleep(POLL_S)
            memory = {"standby_mib": memory_mib(standbys), "all_mib": memory_mib(tree(os.getpid()))}
            killed = trigger("kill", system, number % WORKERS, timeout_s=timeout_s, workers=WORKERS)
            figures.append({**killed, **memory})
            console.print(f"standby_workers = {make.standby_workers}: {describe(figures[-1])}", highlight=False)
    finally:
        system.stop()
    return figures


def describe(figures: dict[str, Any]) -> str:
    if not figures["recovered"]:
        return str(figures["outcome"])
    return f"full strength after {figures['all_at_work_after_s']:.1f} s, stall {figures['stall_s']:.2f} s"


def print_table(sides: dict[str, list[dict[str, Any]]], timeout_s: float) -> None:
    """Prints the figures of all kills, by `standby_workers`. Raises SystemExit if a side recovered from none."""
    table = Table("standby_workers", "full strength after, s", "stall, s", "kills", "MiB of standby", "MiB of all")
    for name, figures in sides.items():
        done = [kill for kill in figures if kill["recovered"]]
        if not done:
            raise SystemExit(
                f"With standby_workers = {name}, the run recovered from no kill within {timeout_s:g} s. Run this on an "
                f"idle machine, or raise --timeout-s."
            )
        table.add_row(
            name,
            report.spread([kill["all_at_work_after_s"] for kill in done], 1),
            report.spread([kill["changes"][0]["stall_s"] for kill in done]),
            f"{len(done)} of {len(figures)}",
            report.spread([kill["standby_mib"] for kill in done], 0),
            report.spread([kill["all_mib"] for kill in done], 0),
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=positive_int, default=3, help="runs of each side")
    parser.add_argument("--kills", type=positive_int, default=3, help="kills in each run")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="seconds that a run has to recover")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/standby"), help="folder of the results")
    options = parser.parse_args()
    sides: dict[str, list[dict[str, Any]]] = {"0": [], "1": []}
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        os.environ["RAY_TMPDIR"] = scratch  # otherwise other ray.init() calls on this machine would join these clusters
        for _ in range(options.repeats):
            for make, figures in zip((ElasticDDP, WithStandby), sides.values(), strict=True):
                figures += measure_run(make, Path(scratch), kills=options.kills, timeout_s=options.timeout_s)
                (options.out / "results.json").write_text(json.dumps(sides, indent=2) + "\n")
    print_table(sides, options.timeout_s)


if __name__ == "__main__":
    main()
