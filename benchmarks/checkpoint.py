"""What commits cost: `python benchmarks/checkpoint.py` prints a table and writes its figures as JSON.

    held         how long a step is held up by a save, beside DCP's, Ray Train's and torch's, and a copy
    throughput   saving and restoring, beside a bare parallel put or get, and what W ranks read of the store together
    overhead     samples/s of the example job that saves every 20 steps, beside the same without
    memory       what a save and a restore take beyond the state

Sides take turns in one run, and a ratio is the median of the rounds' ratios. The store is a folder, and besides, with
--s3, a bucket: of Ceph's gateway or moto's server, which are started for it, or below a URI of yours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]
sys.path[:0] = FOLDERS

from saves.state import TENSOR_KIB  # noqa: E402

from elastic_ddp.checkpoint.pieces import MAX_PIECE_BYTES  # noqa: E402
from elastic_ddp.checkpoint.reader import PIECES_READ_AHEAD  # noqa: E402
from elastic_ddp.worker.shared_read import PIECES_IN_FLIGHT  # noqa: E402

PARTS = ("held", "throughput", "overhead", "memory")
OTHERS = ("dcp", "dcp, cached", "ray", "ray, async", "torch")
"""Beside whom a step is held up."""
MIB = 1 << 20
MOST_OF_A_COPY = 1.10
LEAST_OF_BARE = {"save": 0.9, "restore": 0.5, "restore to shards": 0.5}
LEAST_SAMPLES = 0.98
MOST_EXTRA_COPIES = 1.0
WINDOW_BYTES = (PIECES_READ_AHEAD + PIECES_IN_FLIGHT) * MAX_PIECE_BYTES
"""What a restore may have on its way, read and between ranks."""


def ratios(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    each = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, high = (each * 2)[:2] if len(each) == 1 else statistics.quantiles(each, n=4)[::2]
    return {"ratio": statistics.median(each), "quartiles": [low, high], "ratios": each}


@contextmanager
def ray_here() -> Iterator[None]:
    import ray

    # Workers import what is beside this file.
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="warning", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def measure(part: str, uri: str, options: argparse.Namespace) -> dict[str, Any]:
    size_mib, tensor_kib, rounds = options.size_mib, options.tensor_kib, options.rounds
    if part == "held":
        from saves import held

        with ray_here():
            results = held.measure(
                f"{uri}/held",
                size_mib=size_mib,
                tensor_kib=tensor_kib,
                rounds=rounds,
                gpu=options.gpu,
                without=options.without,
            )
        seconds = results["held_s"]
        results["ours_to"] = {name: ratios(seconds["ours"], seconds[name]) for name in seconds if name != "ours"}
        return results
    if part == "throughput":
        from saves import throughput

        results = throughput.measure(
            f"{uri}/throughput", size_mib=size_mib, tensor_kib=tensor_kib, rounds=rounds, limit_mibs=options.limit_mibs
        )
        for each in (each for what in results.values() for each in what.values()):
            each["ours_to"] = {
                name: ratios(each["ours"], each[name]) for name in ("bare", "whole", "sent") if name in each
            }
        for each in results["restore"].values():
            each["whole_to_bare"] = ratios(each["whole"], each["bare"])
        for each in results["save"].values():
            each["from_begin_to_bare"] = ratios(each["from begin"], each["bare"])
        return results
    if part == "overhead":
        from saves import overhead

        with ray_here():
            results = overhead.measure(f"{uri}/overhead", rounds=rounds)
        return {**results, "with_to_without": ratios(results["with"], results["without"])}
    from saves import memory

    return memory.measure(f"{uri}/memory", size_mib=size_mib)


# The table.


def line(label: str, value: str, ratio: str = "", verdict: str = "") -> None:
    print(f"{label:52}{value:>14}{ratio:>9}   {verdict}".rstrip())


def judged(value: float, *, at_most: float | None = None, at_least: float | None = None) -> str:
    """The target, and by how much it is missed."""
    if at_most is not None:
        missed, target = value - at_most, f"at most {at_most:g}"
    else:
        assert at_least is not None
        missed, target = at_least - value, f"at least {at_least:g}"
    return f"{target}: missed by {missed:.3f}" if missed > 0 else target


def print_held(results: dict[str, Any]) -> None:
    line(f"a step held up by a save of {results['state_bytes'] / MIB:,.0f} MiB", "", "ours to")
    for name, seconds in results["held_s"].items():
        ratio = results["ours_to"].get(name, {}).get("ratio")
        most = MOST_OF_A_COPY if name == "copy" else 1.0
        verdict = ("", "") if ratio is None else (f"{ratio:.3f}", judged(ratio, at_most=most))
        line(f"    {name}", f"{1000 * statistics.median(seconds):,.1f} ms", *verdict)


def print_throughput(results: dict[str, Any]) -> None:
    for verb, by_world_size in results.items():
        line(f"{verb}, ours", "", "to bare")
        for world_size, each in by_world_size.items():
            ratio = each["ours_to"]["bare"]["ratio"]
            rate = f"{statistics.median(each['ours']):,.0f} MiB/s"
            line(f"    W = {world_size}", rate, f"{ratio:.3f}", judged(ratio, at_least=LEAST_OF_BARE[verb]))
            if verb == "save":
                rate = f"{statistics.median(each['from begin']):,.0f} MiB/s"
                line("        and with the copy", rate, f"{each['from_begin_to_bare']['ratio']:.3f}")
            if verb == "restore":
                line("        if each rank gets all of it, unchecked", "", f"{each['whole_to_bare']['ratio']:.3f}")
            if "processor_s" in each:
                wall_s = each["commit_bytes"] / MIB / statistics.median(each["ours"])
                processor_s = statistics.median(each["processor_s"]["ours"])
                busy = processor_s / wall_s / (os.cpu_count() or 1)
                line("        processors, and how busy they were", f"{1000 * processor_s:,.0f} ms", f"{busy:.3f}")
    for name, what in (("whole", "if each rank gets all of it"), ("sent", "if each gets a share and broadcasts that")):
        line("restore, ours", "", f"to {name}")
        for world_size, each in results["restore"].items():
            line(f"    W = {world_size}", "", f"{each['ours_to'][name]['ratio']:.3f}", what)
    for verb in ("restore", "restore to shards"):
        line(f"read from the store to {verb}, of the commit", "")
        for world_size, each in results[verb].items():
            ratio = each["read_bytes"] / each["commit_bytes"]
            # Beside the blocks there are the skeleton and, in no commit's bytes, the manifest.
            value = f"{each['read_bytes'] / MIB:,.1f} MiB"
            line(f"    W = {world_size}", value, f"{ratio:.3f}", judged(ratio, at_most=1.01))


def print_overhead(results: dict[str, Any]) -> None:
    ratio = results["with_to_without"]["ratio"]
    line("the example job, samples/s", "", "to none")
    line("    no saves", f"{statistics.median(results['without']):,.1f}")
    rate = f"{statistics.median(results['with']):,.1f}"
    line("    a save every 20 steps", rate, f"{ratio:.3f}", judged(ratio, at_least=LEAST_SAMPLES))
    line("    commits, and those that were left out", f"{results['commits']}, {results['left_out']}")


def print_memory(results: dict[str, Any]) -> None:
    line("memory beyond the state, two ranks", "", "shares")
    for size, each in results["save"].items():
        for name, label in (("first", "the first save"), ("both", "two saves")):
            ratio = each[name] / each["share"]
            value = f"{each[name] / MIB:,.0f} MiB"
            line(f"    {label}, {size} MiB", value, f"{ratio:.3f}", judged(ratio, at_most=MOST_EXTRA_COPIES))
    line("memory beyond the restored state, two ranks", "")
    for name, label in (("restore", "restore"), ("restore_sharded", "restore to shards")):
        for size, each in results[name].items():
            window = (each["peak"] - each["state"]) / MIB
            label_of_size = f"    {label} of {size} MiB, {each['state'] / MIB:,.0f} to a rank"
            line(label_of_size, f"{window:,.0f} MiB", "", judged(window, at_most=WINDOW_BYTES / MIB))


PRINT = {"held": print_held, "throughput": print_throughput, "overhead": print_overhead, "memory": print_memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/checkpoint.json"))
    parser.add_argument("--parts", default=",".join(PARTS), help="which of them, with commas between")
    parser.add_argument("--size-mib", type=int, default=512, help="of the state")
    parser.add_argument("--tensor-kib", type=int, default=TENSOR_KIB, help="of each tensor in it (held and throughput)")
    parser.add_argument(
        "--limit-mibs", type=float, help="MiB/s that a rank carries to or from the store at most (throughput)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side; medians are reported")
    parser.add_argument("--folder", help="where commits go that go to a disk; a temporary one by default")
    parser.add_argument("--gpu", action="store_true", help="the state is on a GPU, which two ranks share (held)")
    parser.add_argument(
        "--without", action="append", default=[], choices=OTHERS, help="a side that is left out; several times (held)"
    )
    parser.add_argument("--s3", help="`ceph`, `moto`, or s3://bucket/folder: measure there, too")
    parser.add_argument("--no-disk", action="store_true", help="measure on S3 alone")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: there are {','.join(PARTS)}")
    if options.no_disk and not options.s3:
        parser.error("--no-disk needs --s3")
    results: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), **{name: version(name) for name in ("torch", "ray", "s3fs")}},
        "size_mib": options.size_mib,
        "tensor_kib": options.tensor_kib,
        "rounds": options.rounds,
        "limit_mibs": options.limit_mibs,
        "stores": {},
    }
    with ExitStack() as stack:
        stores = {}
        if not options.no_disk:
            stores["disk"] = stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))
        if options.s3:
            from saves.stores import s3_folder

            stores["s3"] = stack.enter_context(s3_folder(options.s3))
        print(f"{results['machine']}, {options.rounds} rounds\n")
        for store, uri in stores.items():
            figures = results["stores"][store] = {}
            for part in parts:
                figures[part] = measure(part, uri, options)
                print(f"{store}:")
                PRINT[part](figures[part])
                print(flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
