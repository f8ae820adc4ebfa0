"""Measures training on one GPU: `python benchmarks/gpu.py` prints tables and writes the figures as JSON.

    steps        whole steps of elastic_ddp, next to plain PyTorch: DDP, a DataLoader with 4 processes, autocast
    modes        the same steps with torch's deterministic algorithms and without
    host         where the host spends the time of a step, without a trace, and the CPU time of each thread
    bits         whether the gradients of a micro-batch have the same bits each time
    gaps         a trace of some steps: when the device was idle, and where the host waited for it
    save         how long a commit to a local folder holds up a step, and how long a restore takes
    evaluation   the same steps with an evaluation and without
    overlap      with --ranks 2: how much of the exchange of gradients overlaps other kernels; several ranks share
                 the GPU, which takes NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1

All sides are started once, with processes of their own, and wait between two steps until it is their turn. Figures are
medians over rounds, and ratios are medians of the rounds' ratios. A part that fails prints why, and the others run.
`--device cpu` runs the same code with tiny models on a machine without a GPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]
sys.path[:0] = FOLDERS

import torch  # noqa: E402
from gpu_parts import shared_gpu  # noqa: E402
from gpu_parts.gate import write_json  # noqa: E402
from gpu_parts.host import MODES  # noqa: E402
from gpu_parts.trace import Trace  # noqa: E402
from gpu_parts.train import SIDES, Setting, Side, make_data, run  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from steps import describe_machine, signal_all  # noqa: E402

PARTS = ("steps", "modes", "host", "bits", "gaps", "save", "evaluation", "overlap")
SETTINGS = {
    "large": Setting(layers=12, width=768, heads=12, context=1024, micro_batch_size=16, micro_batches=4),
    "small": Setting(layers=6, width=384, heads=6, context=256, micro_batch_size=16, micro_batches=1),
}
TINY = {
    "large": Setting(layers=2, width=64, heads=2, context=32, micro_batch_size=4, micro_batches=4),
    "small": Setting(layers=6, width=32, heads=2, context=16, micro_batch_size=4, micro_batches=1),
}
TARGETS = {"native": 0.98, "canonical": 0.95}
MOST_MEMORY = {"native": 1.05}
HELD_OUT_ROWS = 256
MIB, GIB = 1 << 20, 1 << 30
STAGGER_S = 0.7
"""Between two starts: each starts a Ray of its own, which looks for free ports."""


class SideFailedError(Exception):
    """A side died, or did not answer in time."""


class RunningSide:
    """A side in its process. `ask` sends it a command and returns the answer."""

    def __init__(self, side: Side) -> None:
        self.side, self._asked = side, 0
        self.label = f"{side.name}, compiled" if side.is_compiled else side.name
        Path(side.folder).mkdir(parents=True)
        write_json(Path(side.folder, "side.json"), side.to_json())
        path = os.pathsep.join(filter(None, [*FOLDERS, os.environ.get("PYTHONPATH")]))
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": "4", "OMP_NUM_THREADS": "1"}
        with Path(side.folder, "log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--side", f"{side.folder}/side.json"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **threads, "PYTHONPATH": path, "RAY_ADDRESS": "", "PYTHONUNBUFFERED": "1"},
            )

    def begin(self, do: str, **arguments: Any) -> int:
        """Sends a command. Returns its number, for `wait`."""
        self._asked += 1
        write_json(Path(self.side.folder, f"command-{self._asked - 1}.json"), {"do": do, **arguments})
        return self._asked - 1

    def wait(self, number: int, timeout_s: float) -> dict[str, Any]:
        path, deadline = Path(self.side.folder, f"answer-{number}.json"), time.monotonic() + timeout_s
        while not path.exists():
            if self._process.poll() is not None:
                raise SideFailedError(f"the {self.label} side ended:\n{self._end_of_log()}")
            if time.monotonic() > deadline:
                raise SideFailedError(
                    f"the {self.label} side gave no answer in {timeout_s:.0f} s:\n{self._end_of_log()}"
                )
            time.sleep(0.005)
        answer: dict[str, Any] = json.loads(path.read_text())
        if "error" in answer:
            raise RuntimeError(f"the {self.label} side failed:\n{answer['error']}")
        return answer

    def ask(self, do: str, *, timeout_s: float = 60.0, **arguments: Any) -> dict[str, Any]:
        return self.wait(self.begin(do, **arguments), timeout_s)

    def _end_of_log(self) -> str:
        return Path(self.side.folder, "log").read_text(errors="replace")[-3000:]

    def close(self) -> None:
        if self._process.poll() is None:
            signal_all(self._process.pid, signal.SIGSTOP)  # stopped processes start no new ones
            signal_all(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Benchmark:
    """The sides that run, and the figures so far."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.settings = {name: (SETTINGS if options.device == "cuda" else TINY)[name] for name in options.settings}
        self.sides: dict[str, dict[str, RunningSide]] = {}
        self.results: dict[str, Any] = {"machine": machine(options.device), "settings": {}, "failures": []}
        self._began_at = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_at

    def say(self, text: str) -> None:
        print(f"[{self.elapsed_s:6.1f} s] {text}", flush=True)

    def has_time_for(self, what: str) -> bool:
        if self.elapsed_s < self.options.seconds:
            return True
        self.fail(f"{what}: skipped, the {self.options.seconds:.0f} s of --seconds are over")
        return False

    def fail(self, text: str) -> None:
        self.results["failures"].append(text)
        self.say(text)

    def write(self) -> None:
        self.results["seconds"] = self.elapsed_s
        self.options.json.parent.mkdir(parents=True, exist_ok=True)
        self.options.json.write_text(json.dumps(self.results, indent=2) + "\n")

    def try_part(self, what: str, part: Callable[[], None]) -> None:
        """Runs a part, and reports its error."""
        if not self.has_time_for(what):
            return
        self.say(f"{what} begins")
        try:
            part()
        except Exception:
            self.fail(f"{what} failed:\n{traceback.format_exc()}")
        self.write()

    def with_side(self, setting: str, label: str, task: Callable[[RunningSide], None]) -> None:
        """Runs a task with a side, if it runs. A side that fails is ended, and the others go on."""
        if (running := self.sides.get(setting, {}).get(label)) is None:
            return
        try:
            task(running)
        except Exception as error:
            self.fail(f"{setting}: {error if isinstance(error, SideFailedError) else traceback.format_exc()}")
            if isinstance(error, SideFailedError):
                self.sides[setting].pop(label).close()

    # Sides.

    def start(self) -> None:
        """Starts all sides, and waits until each has run its first steps."""
        compiled = [
            (name, side, True)
            for name in self.options.compile
            for side in self.options.sides
            if side not in ("deterministic", "fsdp")
        ]
        eager = [(name, side, False) for name in self.settings for side in self.options.sides]
        started: list[tuple[str, RunningSide, int]] = []
        for name, side, is_compiled in compiled + eager:  # those that compile take longest
            running = RunningSide(self._side(name, self.settings[name], side, is_compiled))
            self.sides.setdefault(name, {})[running.label] = running
            started.append((name, running, running.begin("steps", warmup=3, steps=5)))
            time.sleep(STAGGER_S)
        for name, running, number in started:
            left_s = max(1.0, self.options.patience_s - self.elapsed_s)

            def wait(running: RunningSide, name: str = name, number: int = number, left_s: float = left_s) -> None:
                answer = running.wait(number, left_s)
                step_s = statistics.median(answer["each_s"])
                self.say(f"{name}, {running.label}: runs, {1000 * step_s:.1f} ms a step beside the others")

            self.with_side(name, running.label, wait)

    def _side(self, name: str, setting: Setting, side: str, is_compiled: bool) -> Side:
        data = self.folder / name
        if not data.exists():
            rows = 16_384 if self.options.device == "cuda" else 2_048
            make_data(data / "train", setting.context, rows)
            make_data(data / "held-out", setting.context, HELD_OUT_ROWS)
        return Side(
            name=side,
            is_compiled=is_compiled,
            setting=setting,
            device=self.options.device,
            data=str(data / "train"),
            held_out=str(data / "held-out"),
            folder=str(self.folder / f"{name}-{side}{'-compiled' if is_compiled else ''}"),
        )

    def close(self) -> None:
        for sides in self.sides.values():
            for running in sides.values():
                running.close()
        self.sides.clear()

    def figures(self, setting: str, part: str) -> dict[str, Any]:
        figures = self.results["settings"].setdefault(
            setting,
            {"model": str(self.settings[setting]), "parameter_bytes": self.settings[setting].parameter_bytes},
        )
        of_part: dict[str, Any] = figures.setdefault(part, {})
        return of_part

    # Parts.

    def steps(self, setting: str) -> None:
        turns: dict[str, list[dict[str, Any]]] = {label: [] for label in self.sides[setting]}
        counts: dict[str, int] = {}
        for number in range(self.options.rounds):
            labels = [*self.sides[setting]]
            first = number % len(labels)
            for label in labels[first:] + labels[:first]:

                def turn(running: RunningSide, label: str = label) -> None:
                    if label not in counts:
                        step_s = running.ask("steps", warmup=2, steps=3)["seconds"] / 3
                        counts[label] = max(4, min(200, round(self.options.turn_s / step_s)))
                    turns[label].append(running.ask("steps", warmup=3, steps=counts[label]))

                self.with_side(setting, label, turn)
        self.figures(setting, "steps").update(summarize(turns, self.settings[setting]))
        print_steps(str(self.settings[setting]), self.figures(setting, "steps"))

    def modes(self, setting: str) -> None:
        """In the processes of two sides: the same steps with each mode, in turns."""
        labels = [label for label in ("deterministic", "canonical") if label in self.sides[setting]]
        turns: dict[str, dict[str, list[float]]] = {label: {mode: [] for mode in MODES} for label in labels}
        for _ in range(max(2, self.options.rounds // 2)):
            for label in labels:

                def turn(running: RunningSide, label: str = label) -> None:
                    step_s = running.ask("steps", warmup=2, steps=3)["seconds"] / 3
                    steps = max(4, min(200, round(self.options.turn_s / step_s)))
                    for mode in MODES:
                        answer = running.ask("steps", warmup=3, steps=steps, mode=mode)
                        turns[label][mode].append(1000 * answer["seconds"] / steps)

                self.with_side(setting, label, turn)
        for label in labels:
            medians = {mode: statistics.median(each) for mode, each in turns[label].items() if each}
            self.figures(setting, "modes")[label] = {"ms": medians, "ms_by_round": turns[label]}
            values = ", ".join(f"{mode} {milliseconds:.2f}" for mode, milliseconds in medians.items())
            print(f"{setting}, {label}: ms a step with deterministic algorithms {values}", flush=True)

    def host(self, setting: str) -> None:
        for label in ("plain", "native", "canonical"):

            def measure(running: RunningSide, label: str = label) -> None:
                step_s = running.ask("steps", warmup=2, steps=3)["seconds"] / 3
                steps = max(4, min(200, round(self.options.turn_s / step_s)))
                answer = running.ask("host", warmup=3, steps=steps)
                calls = {
                    name: {"per_step": len(each) / steps, "ms": 1000 * sum(each) / steps}
                    for name, each in answer["calls_s"].items()
                }
                self.figures(setting, "host")[label] = {"step_ms": 1000 * answer["seconds"] / steps, "calls": calls}
                parts = [f"{each['ms']:.2f} in {each['per_step']:.0f} {name}" for name, each in calls.items()]
                print(f"{setting}, {label}: {1000 * answer['seconds'] / steps:.2f} ms a step: {', '.join(parts)}")

            self.with_side(setting, label, measure)

    def gaps(self, setting: str) -> None:
        for label in self.options.gap_sides:

            def trace(running: RunningSide, label: str = label) -> None:
                running.ask("trace", with_stack=False, warmup=1, steps=1)  # the first trace starts the profiler
                plain = running.ask("trace", with_stack=False, warmup=2, steps=6)
                stacks = running.ask("trace", with_stack=True, warmup=1, steps=3)
                self.keep_trace(plain["path"], f"{setting}-{label}.json")
                self.keep_trace(stacks["path"], f"{setting}-{label}-stacks.json")
                without, with_stacks = Trace(plain["path"]), Trace(stacks["path"])
                self.figures(setting, "gaps")[label] = {
                    **without.idle(),
                    "kernels_ms": without.kernels(),
                    "waits": without.waits(),
                    "waits_with_places": with_stacks.waits(),
                    "idle_places": with_stacks.idle_places(),
                }
                untraced = self.figures(setting, "steps").get(label, {}).get("step_ms")
                print_gaps(f"{setting}, {label}", self.figures(setting, "gaps")[label], untraced)

            self.with_side(setting, label, trace)

    def keep_trace(self, path: str, name: str) -> None:
        if self.options.traces is not None:
            self.options.traces.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, self.options.traces / name)

    def save(self, setting: str) -> None:
        for label in ("canonical", "native"):

            def commit(running: RunningSide, label: str = label) -> None:
                saved = running.ask("commits", timeout_s=90.0, rounds=4, steps=5)
                restored = running.ask("restore", rounds=3)
                self.figures(setting, "save")[label] = saved | restored
                print_save(f"{setting}, {label}", saved, restored)

            self.with_side(setting, label, commit)
            if self.figures(setting, "save"):
                return  # the other side saves in the same way

    def evaluation(self, setting: str) -> None:
        def evaluate(running: RunningSide) -> None:
            steps = 20 if self.settings[setting].micro_batches == 1 else 10
            answer = running.ask("evaluations", rounds=3, steps=steps, rows=HELD_OUT_ROWS)
            without, beside = statistics.median(answer["without_s"]), statistics.median(answer["with_s"])
            evaluation = statistics.median(answer["evaluation_s"])
            self.figures(setting, "evaluation").update(answer | {"steps": steps, "ratio": without / beside})
            print(
                f"{setting}: {steps} steps {1000 * without:.0f} ms, with an evaluation of {HELD_OUT_ROWS} rows "
                f"{1000 * beside:.0f} ms: {without / beside:.3f} of the steps/s. The evaluation takes "
                f"{1000 * evaluation:.0f} ms, its forwards alone {1000 * answer['forwards_s']:.0f} ms.",
                flush=True,
            )

        self.with_side(setting, "canonical", evaluate)

    def bits(self, setting: str) -> None:
        for label in ("plain", "canonical"):

            def repeat(running: RunningSide, label: str = label) -> None:
                answer = self.figures(setting, "bits")[label] = running.ask("repeat", rounds=5)
                for how, figures in answer.items():
                    text = figures.get("error", "")[:300] or (
                        f"gradients of {figures['differing']} of {figures['parameters']} parameters differ in 5 "
                        f"repeats; {figures['ms']:.1f} ms each"
                    )
                    print(f"{setting}, {label}, {how}: {text}", flush=True)

            self.with_side(setting, label, repeat)

    def overlap(self, setting: str) -> None:
        if (reason := shared_gpu.reason_to_skip(self.options.device)) is not None:
            return self.fail(f"overlap: skipped, {reason}")
        chosen = self.settings[setting]
        chosen = replace(chosen, micro_batches=max(chosen.micro_batches, self.options.ranks))
        for name in ("canonical", "native"):
            folder = self.folder / f"overlap-{setting}-{name}"
            folder.mkdir()
            side = replace(self._side(setting, chosen, name, False), folder=str(folder))
            try:
                answers = shared_gpu.measure(side, ranks=self.options.ranks, steps=5, timeout_s=75.0)
            except Exception as error:
                self.fail(f"overlap, {setting}, {name}: {error}")
                continue
            for path in folder.glob("*.json"):
                self.keep_trace(str(path), f"{setting}-{path.name}")
            self.figures(setting, "overlap")[name] = answers
            for rank, figures in enumerate(answers):
                values = ", ".join(f"{key} {value:.3f}" for key, value in figures.items() if value is not None)
                print(f"{setting}, {name}, rank {rank}: {values}", flush=True)


def machine(device: str) -> dict[str, Any]:
    described = {**describe_machine(), "device": "cpu"}
    if device == "cuda":
        # Not by torch.cuda: this process would take memory of the device.
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        try:
            described["device"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            described["device"] = f"unknown: {error}"
        described |= {"cuda": torch.version.cuda, "nccl": shared_gpu.nccl_version()}
    return described


def summarize(turns: dict[str, list[dict[str, Any]]], setting: Setting) -> dict[str, Any]:
    """Returns the figures of each side from its turns, and those next to the plain side."""
    milliseconds = {
        label: [1000 * turn["seconds"] / len(turn["each_s"]) for turn in taken] for label, taken in turns.items()
    }
    figures: dict[str, Any] = {}
    for label, taken in turns.items():
        if not taken:
            continue
        step_ms = statistics.median(milliseconds[label])
        peaks = [turn["peak_bytes"] for turn in taken if turn["peak_bytes"] is not None]
        figures[label] = {
            "step_ms": step_ms,
            "step_ms_by_round": milliseconds[label],
            "steps_per_turn": len(taken[0]["each_s"]),
            **host_figures(taken),
            "bytes_per_s": 1000 * setting.bytes_per_step / step_ms,
            "peak_bytes": max(peaks, default=None),
            "reserved_bytes": taken[-1]["reserved_bytes"],
        }
        for other in ("plain", "plain, compiled"):
            pairs = [*zip(milliseconds.get(other, []), milliseconds[label], strict=False)]
            if pairs and (other == "plain" or "compiled" in label):
                figures[label][f"to {other}"] = statistics.median(theirs / own for theirs, own in pairs)
        if peaks and (plain := figures.get("plain", {}).get("peak_bytes")):
            figures[label]["peak_to_plain"] = max(peaks) / plain
            figures[label]["copies_beyond_plain"] = (max(peaks) - plain) / setting.parameter_bytes
    return figures


def host_figures(taken: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median and the 90th percentile of single steps, and the CPU milliseconds of a step by thread."""
    each = sorted(1000 * step_s for turn in taken for step_s in turn["each_s"])
    threads: dict[str, float] = {}
    for turn in taken:
        for name, seconds in turn["cpu_s"].items():
            threads[name] = threads.get(name, 0.0) + 1000 * seconds / len(each)
    busiest = sorted(threads.items(), key=lambda item: -item[1])
    return {
        "single_step_ms": each[len(each) // 2],
        "single_step_ms_90": each[len(each) * 9 // 10],
        "cpu_ms_by_thread": {name: value for name, value in busiest if value > 0.01},
    }


# Tables.


def print_steps(title: str, figures: dict[str, Any]) -> None:
    table = Table(title=title, title_justify="left", caption_justify="left", box=None)
    table.add_column("", no_wrap=True)
    for heading in ("ms/step", "of plain", "of compiled", "target", "kB/s", "peak MiB", "of plain", "target", "copies"):
        table.add_column(heading, justify="right", no_wrap=True)
    for label, side in figures.items():
        ratios = [f"{side[key]:.3f}" if key in side else "" for key in ("to plain", "to plain, compiled")]
        peak = side["peak_bytes"]
        table.add_row(
            label,
            f"{side['step_ms']:.2f}",
            *ratios,
            f"{TARGETS[label]}" if label in TARGETS else "",
            f"{side['bytes_per_s'] / 1000:.1f}",
            f"{peak / MIB:.0f}" if peak else "",
            f"{side['peak_to_plain']:.3f}" if "peak_to_plain" in side else "",
            f"{MOST_MEMORY[label]}" if label in MOST_MEMORY else "",
            f"{side['copies_beyond_plain']:+.2f}" if "copies_beyond_plain" in side else "",
        )
    table.caption = "copies: peak memory beyond that of plain, in copies of the gradients"
    show(table)
    for label, side in figures.items():
        threads = ", ".join(f"{name} {value:.2f}" for name, value in [*side["cpu_ms_by_thread"].items()][:6])
        print(
            f"    {label}: single steps {side['single_step_ms']:.2f} ms, of ten one above "
            f"{side['single_step_ms_90']:.2f}; CPU ms a step by thread: {threads}",
            flush=True,
        )


def print_gaps(title: str, figures: dict[str, Any], untraced_ms: float | None) -> None:
    idle = "no device in this trace"
    if figures["idle_ms"] is not None:
        share = 100 * figures["idle_share"]
        idle = f"the device idles {figures['idle_ms']:.3f} ms of it, {share:.1f} %; {figures['kernels']:.0f} kernels"
    print(f"{title}: a traced step takes {figures['step_ms']:.2f} ms, {idle}", flush=True)
    if figures["busy_ms"] is not None and untraced_ms is not None:
        rest_ms = untraced_ms - figures["busy_ms"]
        print(f"    without the trace it takes {untraced_ms:.2f} ms, so the device idles {rest_ms:.3f} ms of that")
    for name, milliseconds in [*figures["kernels_ms"].items()][:6]:
        print(f"    {milliseconds:.3f} ms a step in {name[:110]}")
    for wait in figures["waits"][:6]:
        print(
            f"    {wait['call']} ({wait['thread']} thread): {wait['per_step']:.2f} a step, {wait['ms']:.3f} ms; the "
            f"device then idles {wait['idle_ms']:.3f} ms"
        )
    for wait in figures["waits_with_places"][:8]:
        print(f"    with stacks: {wait['call']} {wait['per_step']:.2f} a step, {wait['ms']:.3f} ms at {wait['place']}")
    for gap in figures["idle_places"][:6]:
        print(f"    with stacks: idle {gap['idle_ms']:.3f} ms in {gap['gaps']:.1f} gaps at {gap['place']}")


def print_save(title: str, saved: dict[str, Any], restored: dict[str, Any]) -> None:
    alone, held = statistics.median(saved["alone_s"]), statistics.median(saved["held_s"])
    beside = statistics.median(saved["beside_s"]) if saved["beside_s"] else alone
    read, load = statistics.median(restored["read_s"]), statistics.median(restored["load_s"])
    print(
        f"{title}: a commit of {saved['num_bytes'] / MIB:.0f} MiB holds up its step for {1000 * (held - alone):.1f} ms "
        f"({1000 * held:.1f} ms; {1000 * alone:.1f} ms without), steps beside the writing take {1000 * beside:.1f} ms, "
        f"the writing {1000 * statistics.median(saved['write_s']):.0f} ms. A restore reads for {1000 * read:.0f} ms "
        f"from the page cache, and loads for {1000 * load:.0f} ms.",
        flush=True,
    )


def show(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    sys.stdout.flush()


# The command.


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/gpu.json"), help="file for the figures")
    parser.add_argument("--parts", help="the parts to run, separated by commas; by default all that --ranks allows")
    parser.add_argument("--settings", help="the models: large, small; by default both, and on a CPU small")
    parser.add_argument("--sides", default=",".join(SIDES), help="the sides that train")
    parser.add_argument("--gap-sides", help="the sides that the part gaps traces; by default plain, native, canonical")
    parser.add_argument(
        "--compile",
        help="the models that are compiled as well: large, small, none; by default small, and none on a CPU",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny models, to try the code")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share the GPU, for the part overlap")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--turn-s", type=float, default=1.0, help="seconds of a turn, at least four steps")
    parser.add_argument("--seconds", type=float, default=300.0, help="after these, parts that are left are skipped")
    parser.add_argument(
        "--patience-s", type=float, default=110.0, help="after these, a side that has not begun is ended"
    )
    parser.add_argument("--traces", type=Path, help="folder for the traces, for chrome://tracing or Perfetto")
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)  # for the process of a side
    options = parser.parse_args()
    on_gpu = options.device == "cuda"

    def chosen(name: str, default: str, known: tuple[str, ...]) -> list[str]:
        given = getattr(options, name)
        names = [entry for entry in (default if given is None else given).split(",") if entry and entry != "none"]
        if unknown := set(names) - set(known):
            parser.error(f"unknown --{name} {','.join(sorted(unknown))}; use {','.join(known)}")
        return names

    default_parts = PARTS if options.ranks > 1 else PARTS[:-1]
    options.parts = chosen("parts", ",".join(default_parts), PARTS)
    options.settings = chosen("settings", "large,small" if on_gpu else "small", tuple(SETTINGS))
    options.sides = chosen("sides", ",".join(SIDES), SIDES)
    options.gap_sides = chosen("gap_sides", "plain,native,canonical", SIDES)
    options.compile = [
        name for name in chosen("compile", "small" if on_gpu else "", tuple(SETTINGS)) if name in options.settings
    ]
    if "overlap" in options.parts and options.ranks < 2:
        parser.error("--parts overlap needs --ranks 2 or more")
    return options


def main() -> None:
    options = parse()
    if options.side is not None:
        return run(Side.from_json(json.loads(options.side.read_text())))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: there is no GPU. --device cpu tries the code with tiny models.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the sides end
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-", ignore_cleanup_errors=True) as folder:
        benchmark = Benchmark(options, Path(folder))
        benchmark.say(f"{benchmark.results['machine']}")
        try:
            measured = [part for part in options.parts if part != "overlap"]
            if measured:
                benchmark.try_part("start of all sides", benchmark.start)
            for part in measured:
                for setting in options.settings:
                    benchmark.try_part(f"{part}, {setting}", partial(getattr(benchmark, part), setting))
        finally:
            benchmark.close()
        if "overlap" in options.parts:
            for setting in options.settings:
                benchmark.try_part(f"overlap, {setting}", partial(benchmark.overlap, setting))
        benchmark.write()
        benchmark.say(f"written to {options.json}; {len(benchmark.results['failures'])} failures")


if __name__ == "__main__":
    main()
