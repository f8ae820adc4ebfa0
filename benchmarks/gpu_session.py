"""Runs everything that needs a GPU, in the order of its worth: `make gpu`, or `python benchmarks/gpu_session.py`.

Each part has a time limit, and all of them together 14 minutes. What a part prints goes into a log in `--folder` as it
comes, and its figures into JSON beside it, so that nothing is lost if the machine goes away. A part that fails or takes
too long is reported, and the next one runs. `--parts` selects parts. `--dry-run` checks the commands on a machine
without a GPU, in seconds: tests are collected, and benchmarks start no side.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 14 * 60.0


@dataclass(frozen=True)
class Part:
    """A command of Python, and how long it may take."""

    name: str
    what: str
    limit_s: float
    arguments: tuple[str, ...]

    def command(self, folder: Path, *, is_dry: bool) -> list[str]:
        if self.arguments[0] == "-m":
            return [*self.arguments, *(["--collect-only", "-q"] if is_dry else [])]
        # With no seconds, the benchmark parses its options, leaves out what it would measure, and writes its results.
        limits = ["--seconds", str(self.limit_s - 25), "--patience-s", str(self.limit_s / 2)]
        seconds = ["--seconds", "0", "--device", "cpu"] if is_dry else limits
        return [*self.arguments, *seconds, "--json", str(folder / f"{self.name}.json")]


def benchmark(parts: str, *options: str) -> tuple[str, ...]:
    return ("benchmarks/gpu.py", "--parts", parts, *options)


EXACT = "plain,deterministic,variable-kept,native,canonical"
TRACED = "plain,deterministic,canonical"
SEVERAL_RANKS = "tests/gpu/test_several_ranks.py"
SIDE_BY_SIDE = ("-n", "4") if importlib.util.find_spec("xdist") is not None else ()
PARTS = (
    Part("exactness", "what exactness costs", 170.0, benchmark("steps,host", "--sides", EXACT, "--compile", "none")),
    # Not side by side: some read the memory of the device.
    Part("tests", "tests of one rank", 200.0, ("-m", "pytest", "tests/gpu", "-v", "--ignore", SEVERAL_RANKS)),
    Part("fsdp", "FSDP beside plain", 80.0, benchmark("steps", "--sides", "plain,fsdp", "--compile", "none")),
    # Without the one that reads the memory of the device, which the others use beside it.
    Part(
        "ranks",
        "tests of several ranks",
        150.0,
        ("-m", "pytest", SEVERAL_RANKS, "-v", "-k", "not leave_no_memory", *SIDE_BY_SIDE),
    ),
    Part("overlap", "two ranks on the GPU", 80.0, benchmark("overlap", "--ranks", "2", "--settings", "large")),
    Part(
        "save",
        "saves and evaluation",
        90.0,
        benchmark("save,evaluation", "--sides", "canonical", "--settings", "large", "--compile", "none"),
    ),
    Part(
        "gaps",
        "how long the device idles",
        70.0,
        benchmark("gaps", "--sides", TRACED, "--gap-sides", TRACED, "--settings", "small", "--compile", "none"),
    ),
)


def run(part: Part, folder: Path, limit_s: float, *, is_dry: bool) -> str:
    """Runs a part. Returns how it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with (folder / f"{part.name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *part.command(folder, is_dry=is_dry)],
            stdout=log,
            stderr=log,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            failures = _failures(folder / f"{part.name}.json") if not is_dry else 0
            outcome = f"failed ({code})" if code else f"done, but for {failures} failures" if failures else "done"
        except subprocess.TimeoutExpired:
            outcome = "stopped at its limit"
            process.terminate()  # the benchmark then ends its sides
            try:
                process.wait(15.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return f"{outcome} after {time.monotonic() - begin:.0f} s"


def _failures(figures: Path) -> int:
    """Returns how many parts of a benchmark did not measure what they should."""
    return len(json.loads(figures.read_text())["failures"]) if figures.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("benchmarks/results/gpu"), help="for logs and figures")
    parser.add_argument("--parts", help=f"those to run, of {','.join(part.name for part in PARTS)}; by default all")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds of all parts together")
    parser.add_argument("--dry-run", action="store_true", help="check the commands without a GPU")
    options = parser.parse_args()
    names = [part.name for part in PARTS] if options.parts is None else options.parts.split(",")
    if unknown := set(names) - {part.name for part in PARTS}:
        parser.error(f"unknown --parts {','.join(sorted(unknown))}; use {','.join(part.name for part in PARTS)}")
    begin, has_failed = time.monotonic(), False
    for part in PARTS:
        if part.name not in names:
            continue
        left_s = options.limit_s - (time.monotonic() - begin)
        if left_s < 20.0:
            print(f"{part.name}: left out, the time is over", flush=True)
            continue
        outcome = run(part, options.folder.absolute(), min(part.limit_s, left_s), is_dry=options.dry_run)
        has_failed = has_failed or not outcome.startswith("done after")
        print(f"{part.name}: {part.what}: {outcome}; {options.folder / part.name}.log", flush=True)
    if has_failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
