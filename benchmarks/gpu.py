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
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]

import torch  # noqa: E402
from arguments import positive_int  # noqa: E402
from gpu_parts import shared_gpu  # noqa: E402
from gpu_parts.figures import print_gaps, print_save, print_steps, summarize  # noqa: E402
from gpu_parts.host import MODES  # noqa: E402
from gpu_parts.running import RunningSide, SideFailedError  # noqa: E402
from gpu_parts.trace import Trace  # noqa: E402
from gpu_parts.train import SIDES, Setting, Side, run  # noqa: E402
from machine import describe_machine  # noqa: E402
from windows import write_random_windows  # noqa: E402

PARTS = ("steps", "modes", "host", "bits", "gaps", "save", "evaluation", "overlap")
SETTINGS = {
    "large": Setting(layers=12, width=768, heads=12, context=1024, micro_batch_size=16, micro_batches=4),
    "small": Setting(layers=6, width=384, heads=6, context=256, micro_batch_size=16, micro_batches=1),
}
TINY = {
    "large": Setting(layers=2, width=64, heads=2, context=32, micro_batch_size=4, micro_batches=4),
    "small": Setting(layers=6, width=32, heads=2, context=16, micro_batch_size=4, micro_batches=1),
}
HELD_OUT_ROWS = 256
STAGGER_S = 0.7
"""Between two starts: each starts a Ray of its own, which looks for free ports."""


class Benchmark:
    """The sides that run, and the figures so far."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.settings = {name: (SETTINGS if options.device == "cuda" else TINY)[name] for name in options.settings}
        self.sides: dict[str, dict[str, RunningSide]] = {name: {} for name in self.settings}
        self.results: dict[str, Any] = {"machine": machine(options.device), "settings": {}, "failures": []}
        self._began_at = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_at

    def say(self, text: str) -> None:
        print(f"[{self.elapsed_s:6.1f} s] {text}", flush=True)

    def fail(self, text: str) -> None:
        self.results["failures"].append(text)
        self.say(text)

    def write(self) -> None:
        self.results["seconds"] = self.elapsed_s
        self.options.json.parent.mkdir(parents=True, exist_ok=True)
        self.options.json.write_text(json.dumps(self.results, indent=2) + "\n")

    def try_part(self, what: str, part: Callable[[], None]) -> None:
        """Runs a part, and reports its error."""
        if self.elapsed_s > self.options.seconds:
            return self.fail(f"{what}: skipped, the {self.options.seconds:.0f} s of --seconds are over")
        self.say(f"{what} begins")
        try:
            part()
        except Exception:
            self.fail(f"{what} failed:\n{traceback.format_exc()}")
        self.write()

    # Sides.

    def start(self) -> None:
        """Starts all sides, and waits until each has run its first steps."""
        compiled = [
            (name, side, True)
            for name in self.options.compile
            for side in self.options.sides
            if side not in ("deterministic", "variable-kept", "fsdp")
        ]
        eager = [(name, side, False) for name in self.settings for side in self.options.sides]
        started: list[tuple[str, RunningSide, int]] = []
        for name, side, is_compiled in compiled + eager:  # those that compile take longest
            running = RunningSide(self._side(name, self.settings[name], side, is_compiled))
            self.sides[name][running.label] = running
            started.append((name, running, running.begin("steps", warmup=3, steps=5)))
            time.sleep(STAGGER_S)
        for name, running, number in started:
            with self.reported(name, running):
                answer = running.wait(number, max(1.0, self.options.patience_s - self.elapsed_s))
                step_s = statistics.median(answer["each_s"])
                self.say(f"{name}, {running.label}: runs, {1000 * step_s:.1f} ms a step beside the others")

    def _side(self, name: str, setting: Setting, side: str, is_compiled: bool) -> Side:
        data = self.folder / name
        if not data.exists():
            rows = 16_384 if self.options.device == "cuda" else 2_048
            write_random_windows(data / "train", rows=rows, context=setting.context)
            write_random_windows(data / "held-out", rows=HELD_OUT_ROWS, context=setting.context)
        return Side(
            name=side,
            is_compiled=is_compiled,
            setting=setting,
            device=self.options.device,
            data=str(data / "train"),
            held_out=str(data / "held-out"),
            folder=str(self.folder / f"{name}-{side}{'-compiled' if is_compiled else ''}"),
        )

    def running(self, setting: str, labels: Iterable[str]) -> list[RunningSide]:
        """Returns those of these sides that run."""
        return [self.sides[setting][label] for label in labels if label in self.sides[setting]]

    @contextmanager
    def reported(self, setting: str, running: RunningSide) -> Iterator[None]:
        """Reports an error of a side. One that has died is ended, and the others go on."""
        try:
            yield
        except SideFailedError as error:
            self.fail(f"{setting}: {error}")
            self.sides[setting].pop(running.label).close()
        except Exception:
            self.fail(f"{setting}: {traceback.format_exc()}")

    def steps_of_turn(self, running: RunningSide) -> int:
        step_s = running.ask("steps", warmup=2, steps=3)["seconds"] / 3
        return max(4, min(200, round(self.options.turn_s / step_s)))

    def close(self) -> None:
        for sides in self.sides.values():
            for running in sides.values():
                running.close()
            sides.clear()

    def figures(self, setting: str, part: str) -> dict[str, Any]:
        chosen = self.settings[setting]
        about = {"model": str(chosen), "parameter_bytes": chosen.parameter_bytes}
        of_part: dict[str, Any] = self.results["settings"].setdefault(setting, about).setdefault(part, {})
        return of_part

    # Parts.

    def steps(self, setting: str) -> None:
        turns: dict[str, list[dict[str, Any]]] = {label: [] for label in self.sides[setting]}
        counts: dict[str, int] = {}
        for number in range(self.options.rounds):
            sides = [*self.sides[setting].values()]
            first = number % max(1, len(sides))
            for running in sides[first:] + sides[:first]:
                with self.reported(setting, running):
                    if running.label not in counts:
                        counts[running.label] = self.steps_of_turn(running)
                    turns[running.label].append(running.ask("steps", warmup=3, steps=counts[running.label]))
        self.figures(setting, "steps").update(summarize(turns, self.settings[setting]))
        print_steps(str(self.settings[setting]), self.figures(setting, "steps"))

    def modes(self, setting: str) -> None:
        """In the processes of two sides: the same steps with each mode, in turns."""
        sides = self.running(setting, ("deterministic", "canonical"))
        turns: dict[str, dict[str, list[float]]] = {side.label: {mode: [] for mode in MODES} for side in sides}
        for _ in range(max(2, self.options.rounds // 2)):
            for running in self.running(setting, turns):
                with self.reported(setting, running):
                    steps = self.steps_of_turn(running)
                    for mode in MODES:
                        answer = running.ask("steps", warmup=3, steps=steps, mode=mode)
                        turns[running.label][mode].append(1000 * answer["seconds"] / steps)
        for label, by_mode in turns.items():
            medians = {mode: statistics.median(each) for mode, each in by_mode.items() if each}
            self.figures(setting, "modes")[label] = {"ms": medians, "ms_by_round": by_mode}
            values = ", ".join(f"{mode} {milliseconds:.2f}" for mode, milliseconds in medians.items())
            print(f"{setting}, {label}: ms a step with deterministic algorithms {values}", flush=True)

    def host(self, setting: str) -> None:
        for running in self.running(setting, ("plain", "native", "canonical")):
            with self.reported(setting, running):
                steps = self.steps_of_turn(running)
                answer = running.ask("host", warmup=3, steps=steps)
                step_ms = 1000 * answer["seconds"] / steps
                calls = {
                    name: {"per_step": len(each) / steps, "ms": 1000 * sum(each) / steps}
                    for name, each in answer["calls_s"].items()
                }
                self.figures(setting, "host")[running.label] = {"step_ms": step_ms, "calls": calls}
                parts = [f"{each['ms']:.2f} in {each['per_step']:.0f} {name}" for name, each in calls.items()]
                print(f"{setting}, {running.label}: {step_ms:.2f} ms a step: {', '.join(parts)}", flush=True)

    def gaps(self, setting: str) -> None:
        for running in self.running(setting, self.options.gap_sides):
            label = running.label
            with self.reported(setting, running):
                running.ask("trace", with_stack=False, warmup=1, steps=1)  # the first trace starts the profiler
                plain = running.ask("trace", with_stack=False, warmup=2, steps=6)["path"]
                stacks = running.ask("trace", with_stack=True, warmup=1, steps=3)["path"]
                self.keep_trace(plain, f"{setting}-{label}.json")
                self.keep_trace(stacks, f"{setting}-{label}-stacks.json")
                without, with_stacks = Trace(plain), Trace(stacks)
                self.figures(setting, "gaps")[label] = {
                    **without.idle(),
                    "kernels_ms": without.kernels(),
                    "waits": without.waits(),
                    "waits_with_places": with_stacks.waits(),
                    "idle_places": with_stacks.idle_places(),
                }
                untraced = self.figures(setting, "steps").get(label, {}).get("step_ms")
                print_gaps(f"{setting}, {label}", self.figures(setting, "gaps")[label], untraced)

    def keep_trace(self, path: str, name: str) -> None:
        if self.options.traces is not None:
            self.options.traces.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, self.options.traces / name)

    def save(self, setting: str) -> None:
        for running in self.running(setting, ("canonical", "native")):
            with self.reported(setting, running):
                saved = running.ask("commits", timeout_s=90.0, rounds=4, steps=5)
                restored = running.ask("restore", rounds=3)
                self.figures(setting, "save")[running.label] = saved | restored
                print_save(f"{setting}, {running.label}", saved, restored)
                return  # the other side saves in the same way

    def evaluation(self, setting: str) -> None:
        for running in self.running(setting, ["canonical"]):
            with self.reported(setting, running):
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

    def bits(self, setting: str) -> None:
        for running in self.running(setting, ("plain", "canonical")):
            with self.reported(setting, running):
                figures = self.figures(setting, "bits")[running.label] = running.ask("repeat", rounds=5)
                print(
                    f"{setting}, {running.label}: gradients of {figures['differing']} of {figures['parameters']} "
                    f"parameters differ in 5 repeats; {figures['ms']:.1f} ms each",
                    flush=True,
                )

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
    parser.add_argument("--ranks", type=positive_int, default=1, help="ranks that share the GPU, for the part overlap")
    parser.add_argument("--rounds", type=positive_int, default=5, help="turns of each side")
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
            benchmark.write()  # what there is, also if the time is over
        if "overlap" in options.parts:
            for setting in options.settings:
                benchmark.try_part(f"overlap, {setting}", partial(benchmark.overlap, setting))
        benchmark.write()
        benchmark.say(f"written to {options.json}; {len(benchmark.results['failures'])} failures")


if __name__ == "__main__":
    main()
