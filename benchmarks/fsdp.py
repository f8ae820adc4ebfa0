"""Measures FSDP and its mirrors: `python benchmarks/fsdp.py [--parts memory,stalls,cost]`.

The model is an MLP of equal blocks, each a unit of FSDP. All ranks are processes on this machine, with gloo.

    memory    the live bytes of a rank at four points of a step, next to a formula, on 2 and on 4 ranks
    stalls    how long a worker's death, a join and a drain hold up training on up to two workers, next to Ray Train and
              torchrun with plain `fully_shard` and checkpoints on local disk
    cost      seconds per step with mirrors on and off, in turns, and how long ranks wait for the vote

Writes results.json and table.md into a folder. Parts that are not chosen keep their results of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from arguments import positive_int
from fsdp_parts import tables
from fsdp_parts.cost import measure_cost
from fsdp_parts.memory import measure_memory
from fsdp_parts.stalls import SYSTEMS, measure_system
from machine import describe_machine
from rich.console import Console

PARTS = ("memory", "stalls", "cost")
MEMORY_PARAMETERS = 16_000_000
"""Most parameters in the part `memory`: its ratios do not depend on the size, and a smaller model takes less time."""
HERE = Path(__file__).resolve().parent

console = Console()


def say(line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


def measure_stalls(options: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> None:
    """Saves the figures after each system, because all together take long."""
    results: dict[str, Any] = {"repeats": options.repeats, "systems": {}}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        os.environ["RAY_TMPDIR"] = scratch  # otherwise other ray.init() calls on this machine would join these clusters
        for name in options.systems:
            measured = measure_system(
                name,
                Path(scratch),
                parameters=options.parameters,
                repeats=options.repeats,
                seed=options.seed,
                timeout_s=options.timeout_s,
            )
            results["systems"][name] = {**asdict(SYSTEMS[name].about), **measured}
            save(results)


def names_of(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main() -> None:
    # Ray's workers import the files of this folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=names_of, default=list(PARTS), help=f"comma-separated: {','.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fsdp"), help="folder of the results")
    parser.add_argument("--parameters", type=positive_int, default=50_000_000, help="of the model, about")
    parser.add_argument("--repeats", type=positive_int, default=3, help="stalls: of each event on each system")
    parser.add_argument("--systems", type=names_of, default=list(SYSTEMS), help=f"stalls: {','.join(SYSTEMS)}")
    parser.add_argument("--seed", type=int, default=0, help="stalls: decides which ranks are killed")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="stalls: seconds that a system has to recover")
    parser.add_argument("--turns", type=positive_int, default=4, help="cost: turns of each side")
    options = parser.parse_args()
    if unknown := sorted({*options.parts} - {*PARTS}) + sorted({*options.systems} - {*SYSTEMS}):
        parser.error(f"no {', '.join(unknown)}: parts are {', '.join(PARTS)}, systems {', '.join(SYSTEMS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends all processes, like Ctrl-C

    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    machine = describe_machine()
    say(f"{machine}")

    def save(part: str, parameters: int, figures: Any) -> None:
        results[part] = {"machine": machine, "parameters": parameters, "figures": figures}
        file.write_text(json.dumps(results, indent=2) + "\n")

    if "memory" in options.parts:
        parameters = min(options.parameters, MEMORY_PARAMETERS)
        save("memory", parameters, measure_memory(parameters, say))
    if "stalls" in options.parts:
        measure_stalls(options, partial(save, "stalls", options.parameters))
    if "cost" in options.parts:
        save("cost", options.parameters, measure_cost(options.parameters, options.turns, say))
    text = tables.markdown(results)
    (options.out / "table.md").write_text(text)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
