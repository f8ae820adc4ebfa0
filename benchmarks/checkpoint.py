"""Measures what commits cost: `python benchmarks/checkpoint.py` prints tables and writes the figures as JSON.

    held         how long a save blocks a training step, compared with DCP, Ray Train, torch.save and a copy
    throughput   saves and restores compared with bare parallel writes and reads, and how much W ranks read in total
    overhead     samples/s of the example job with a save every 20 steps and without
    memory       the peak memory of a save and a restore beyond the state

The sides alternate within one run, and a ratio is the median of the ratios of the rounds. The storage is a folder and,
with --s3, also a bucket: of Ceph's gateway or moto's server, which the script starts, or below a given URI.
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

from arguments import positive_int  # noqa: E402
from saves.state import TENSOR_KIB  # noqa: E402

from elastic_ddp.checkpoint.pieces import MAX_PIECE_BYTES  # noqa: E402
from elastic_ddp.checkpoint.reader import PIECES_READ_AHEAD  # noqa: E402
from elastic_ddp.worker.shared_read import PIECES_IN_FLIGHT  # noqa: E402

PARTS = ("held", "throughput", "overhead", "memory")
OTHERS = ("dcp", "dcp, cached", "ray", "ray, async", "torch")
"""The other sides of `held`."""
MIB = 1 << 20
MOST_OF_A_COPY = 1.10
LEAST_OF_BARE = {"save": 0.9, "restore": 0.5, "restore to shards": 0.5}
LEAST_SAMPLES = 0.98
MOST_EXTRA_COPIES = 1.0
WINDOW_BYTES = (PIECES_READ_AHEAD + PIECES_IN_FLIGHT) * MAX_PIECE_BYTES
"""The limit of memory for pieces that a restore has read ahead, or has between ranks."""


def ratios(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    by_round = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, high = (by_round * 2)[:2] if len(by_round) == 1 else statistics.quantiles(by_round, n=4)[::2]
    return {"ratio": statistics.median(by_round), "quartiles": [low, high], "ratios": by_round}


@contextmanager
def local_ray() -> Iterator[None]:
    import ray

    # Workers import the modules in these folders.
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

        with local_ray():
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
        for rates in (rates for by_world_size in results.values() for rates in by_world_size.values()):
            rates["ours_to"] = {
                name: ratios(rates["ours"], rates[name]) for name in ("bare", "whole", "sent") if name in rates
            }
        for rates in results["restore"].values():
            rates["whole_to_bare"] = ratios(rates["whole"], rates["bare"])
        for rates in results["save"].values():
            rates["from_begin_to_bare"] = ratios(rates["from begin"], rates["bare"])
        return results
    if part == "overhead":
        from saves import overhead

        with local_ray():
            results = overhead.measure(f"{uri}/overhead", rounds=rounds)
        return {**results, "with_to_without": ratios(results["with"], results["without"])}
    from saves import memory

    return memory.measure(f"{uri}/memory", size_mib=size_mib)


# The table.


def line(label: str, value: str, ratio: str = "", verdict: str = "") -> None:
    print(f"{label:52}{value:>14}{ratio:>9}   {verdict}".rstrip())


def judged(value: float, *, at_most: float | None = None, at_least: float | None = None) -> str:
    """Returns the target as text, and by how much the value misses it."""
    if at_most is not None:
        missed, target = value - at_most, f"at most {at_most:g}"
    else:
        assert at_least is not None
        missed, target = at_least - value, f"at least {at_least:g}"
    return f"{target}: missed by {missed:.3f}" if missed > 0 else target


def print_held(results: dict[str, Any]) -> None:
    line(f"step time blocked by a save of {results['state_bytes'] / MIB:,.0f} MiB", "", "ours to")
    for name, seconds in results["held_s"].items():
        ratio = results["ours_to"].get(name, {}).get("ratio")
        most = MOST_OF_A_COPY if name == "copy" else 1.0
        verdict = ("", "") if ratio is None else (f"{ratio:.3f}", judged(ratio, at_most=most))
        line(f"    {name}", f"{1000 * statistics.median(seconds):,.1f} ms", *verdict)


def print_throughput(results: dict[str, Any]) -> None:
    for verb, by_world_size in results.items():
        line(f"{verb}, ours", "", "to bare")
        for world_size, rates in by_world_size.items():
            ratio = rates["ours_to"]["bare"]["ratio"]
            rate = f"{statistics.median(rates['ours']):,.0f} MiB/s"
            line(f"    W = {world_size}", rate, f"{ratio:.3f}", judged(ratio, at_least=LEAST_OF_BARE[verb]))
            if verb == "save":
                rate = f"{statistics.median(rates['from begin']):,.0f} MiB/s"
                line("        including the copy", rate, f"{rates['from_begin_to_bare']['ratio']:.3f}")
            if verb == "restore":
                line("        bare reads of everything by each rank", "", f"{rates['whole_to_bare']['ratio']:.3f}")
            if "processor_s" in rates:
                wall_s = rates["commit_bytes"] / MIB / statistics.median(rates["ours"])
                processor_s = statistics.median(rates["processor_s"]["ours"])
                busy = processor_s / wall_s / (os.cpu_count() or 1)
                line("        CPU time and utilization", f"{1000 * processor_s:,.0f} ms", f"{busy:.3f}")
    sides = (("whole", "each rank reads everything"), ("sent", "each rank reads a share and broadcasts it"))
    for name, description in sides:
        line("restore, ours", "", f"to {name}")
        for world_size, rates in results["restore"].items():
            line(f"    W = {world_size}", "", f"{rates['ours_to'][name]['ratio']:.3f}", description)
    for verb in ("restore", "restore to shards"):
        line(f"bytes read by a {verb}, to the commit's", "")
        for world_size, rates in results[verb].items():
            ratio = rates["read_bytes"] / rates["commit_bytes"]
            # The commit's size does not include the manifest, which is read too.
            value = f"{rates['read_bytes'] / MIB:,.1f} MiB"
            line(f"    W = {world_size}", value, f"{ratio:.3f}", judged(ratio, at_most=1.01))


def print_overhead(results: dict[str, Any]) -> None:
    ratio = results["with_to_without"]["ratio"]
    line("the example job, samples/s", "", "to none")
    line("    no saves", f"{statistics.median(results['without']):,.1f}")
    rate = f"{statistics.median(results['with']):,.1f}"
    line("    a save every 20 steps", rate, f"{ratio:.3f}", judged(ratio, at_least=LEAST_SAMPLES))
    line("    commits, and skipped commits", f"{results['commits']}, {results['skipped']}")


def print_memory(results: dict[str, Any]) -> None:
    line("memory beyond the state, two ranks", "", "shares")
    for size, peaks in results["save"].items():
        for name, label in (("first", "the first save"), ("both", "two saves")):
            ratio = peaks[name] / peaks["share"]
            value = f"{peaks[name] / MIB:,.0f} MiB"
            line(f"    {label}, {size} MiB", value, f"{ratio:.3f}", judged(ratio, at_most=MOST_EXTRA_COPIES))
    line("memory beyond the restored state, two ranks", "")
    for name, label in (("restore", "restore"), ("restore_sharded", "restore to shards")):
        for size, peaks in results[name].items():
            window = (peaks["peak"] - peaks["state"]) / MIB
            label_of_size = f"    {label} of {size} MiB, {peaks['state'] / MIB:,.0f} per rank"
            line(label_of_size, f"{window:,.0f} MiB", "", judged(window, at_most=WINDOW_BYTES / MIB))


PRINT = {"held": print_held, "throughput": print_throughput, "overhead": print_overhead, "memory": print_memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/checkpoint.json"))
    parser.add_argument("--parts", default=",".join(PARTS), help="the parts to run, separated by commas")
    parser.add_argument("--size-mib", type=positive_int, default=512, help="size of the state")
    parser.add_argument(
        "--tensor-kib", type=positive_int, default=TENSOR_KIB, help="size of its tensors (held, throughput)"
    )
    parser.add_argument("--limit-mibs", type=float, help="limit of a rank's MiB/s to or from the storage (throughput)")
    parser.add_argument("--rounds", type=positive_int, default=9, help="rounds of each side; medians are reported")
    parser.add_argument("--folder", help="folder for commits on disk; a temporary one by default")
    parser.add_argument("--gpu", action="store_true", help="put the state on a GPU that two ranks share (held)")
    parser.add_argument(
        "--without", action="append", default=[], choices=OTHERS, help="skip a side; can be repeated (held)"
    )
    parser.add_argument("--s3", help="measure also on `ceph`, `moto`, or s3://bucket/folder")
    parser.add_argument("--no-disk", action="store_true", help="measure on S3 only")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown --parts {','.join(sorted(unknown))}; use {','.join(PARTS)}")
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
