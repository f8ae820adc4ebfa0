"""Measures the data path: `python benchmarks/data.py` prints a table and writes its figures as JSON.

It writes a data set into a temporary folder and measures:

    rows/s     one worker's feed, and a torch DataLoader that shuffles the same Parquet files in worker processes; the
               same for a map-style data set
    bytes      the bytes that W workers together read in an epoch, counted by the HTTP server of the files
    entry      the time to the first micro-batches of an epoch's last step, and of its first step
    memory     the memory of an epoch's order, for more rows and for more row groups
    shuffle    how well the rows of a sorted data set are mixed
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import statistics
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from arguments import positive_int
from map_style import measure_map_style
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elastic_ddp.config.run_config import DataConfig
from elastic_ddp.data.feed import MicroBatchFeed
from elastic_ddp.data.index import DatasetIndex, build_index
from elastic_ddp.data.order import EpochOrder, EpochShape, FeedPlan, Lane

NUM_MICRO_BATCHES = 8
MICRO_BATCH_SIZES = (64, 512)
MICRO_BATCH_SIZE = MICRO_BATCH_SIZES[0]  # for measurements that do not depend on it


def write_dataset(folder: Path, *, num_files: int, groups_per_file: int, rows_per_group: int, tokens: int) -> None:
    """Writes rows of `tokens` 32-bit integers and a label, like a tokenized text. The last row group of each file is
    short, so that lanes begin and end inside row groups."""
    random = np.random.default_rng(0)
    rows = groups_per_file * rows_per_group - rows_per_group // 3
    for number in range(num_files):
        values = pa.array(random.integers(0, 50_000, rows * tokens, dtype=np.int32))
        table = pa.table(
            {
                "tokens": pa.FixedSizeListArray.from_arrays(values, tokens),
                "label": pa.array(random.integers(0, 1000, rows)),
            }
        )
        pq.write_table(table, folder / f"{number:04}.parquet", row_group_size=rows_per_group)


def make_feed(
    index: DatasetIndex,
    *,
    first_step: int,
    last_step: int,
    micro_batch_size: int = MICRO_BATCH_SIZE,
    rank: int = 0,
    world_size: int = 1,
) -> MicroBatchFeed:
    plan = FeedPlan(
        rows_per_group=index.group_rows,
        shape=EpochShape(index.num_rows, NUM_MICRO_BATCHES, micro_batch_size),
        seed=0,
        options=DataConfig(),
        micro_batches=tuple(np.array_split(np.arange(NUM_MICRO_BATCHES), world_size)[rank].tolist()),
        first_step=first_step,
        last_step=last_step,
    )
    return MicroBatchFeed(index, plan, device=torch.device("cpu"))


def run_feed(feed: MicroBatchFeed, first_step: int, last_step: int) -> int:
    with feed:
        return sum(batch.num_rows for step in range(first_step, last_step) for batch in feed.step(step))


class ShuffledRowGroups(IterableDataset):
    """Shuffles Parquet as usual with a DataLoader: row groups in random order, distributed over worker processes, and
    the rows of each permuted. It yields batches, so that rows are not collated one by one."""

    def __init__(self, index: DatasetIndex, batch_size: int) -> None:
        self.batch_size = batch_size
        self.paths = [file.path for file in index.files]
        self.groups = list(zip(index.group_file.tolist(), index.group_number.tolist(), strict=True))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        order = np.random.default_rng(0).permutation(len(self.groups))[worker.id :: worker.num_workers]
        files: dict[int, pq.ParquetFile] = {}
        for number, index in enumerate(order):
            file, group = self.groups[index]
            if file not in files:
                files[file] = pq.ParquetFile(self.paths[file])
            table = files[file].read_row_group(group)
            shuffle = np.random.default_rng(number).permutation(table.num_rows)
            tokens = table["tokens"].combine_chunks()
            columns = {
                "tokens": tokens.flatten().to_numpy().reshape(len(tokens), -1)[shuffle],
                "label": table["label"].to_numpy()[shuffle],
            }
            for start in range(0, table.num_rows, self.batch_size):
                batch = slice(start, start + self.batch_size)
                yield {name: torch.from_numpy(values[batch]) for name, values in columns.items()}


def run_loader(index: DatasetIndex, batch_size: int, num_workers: int) -> int:
    loader = DataLoader(
        ShuffledRowGroups(index, batch_size), batch_size=None, num_workers=num_workers, prefetch_factor=4
    )
    return sum(len(batch["label"]) for batch in loader)


def measure_throughput(
    index: DatasetIndex, *, micro_batch_size: int, pairs: int, num_workers: int
) -> dict[str, object]:
    """Measures rows/s over an epoch, start-up included. Feed and loader alternate, after an uncounted run of each."""
    steps = EpochShape(index.num_rows, NUM_MICRO_BATCHES, micro_batch_size).steps_per_epoch
    feeds, loaders = [], []
    for _ in range(pairs + 1):
        begin = time.perf_counter()
        feed = make_feed(index, first_step=0, last_step=steps, micro_batch_size=micro_batch_size)
        assert run_feed(feed, 0, steps) == index.num_rows
        feeds.append(index.num_rows / (time.perf_counter() - begin))
        begin = time.perf_counter()
        assert run_loader(index, micro_batch_size, num_workers) == index.num_rows
        loaders.append(index.num_rows / (time.perf_counter() - begin))
    ratios = [feed / loader for feed, loader in zip(feeds[1:], loaders[1:], strict=True)]
    return {
        "micro_batch_size": micro_batch_size,
        "feed_rows_per_s": statistics.median(feeds[1:]),
        "loader_rows_per_s": statistics.median(loaders[1:]),
        "loader_workers": num_workers,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


class CountingServer:
    """An HTTP server with byte ranges for a folder, which counts the bytes that it sends."""

    def __init__(self, folder: Path) -> None:
        counter = self
        self.sent = 0
        self._lock = threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer(body=False)

            def do_GET(self) -> None:
                self._answer(body=True)

            def _answer(self, *, body: bool) -> None:
                path = folder / self.path.lstrip("/")
                size = path.stat().st_size
                start, stop = 0, size
                wanted = self.headers.get("Range", "").removeprefix("bytes=")
                if wanted:
                    first, _, last = wanted.partition("-")
                    start, stop = (int(first), int(last or size - 1) + 1) if first else (size - int(last), size)
                self.send_response(206 if wanted else 200)
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Length", str(stop - start))
                if wanted:
                    self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
                self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
                self.end_headers()
                if body:
                    with path.open("rb") as file:
                        self.wfile.write(os.pread(file.fileno(), stop - start, start))
                    with counter._lock:
                        counter.sent += stop - start

            def log_message(self, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def measure_bytes(folder: Path) -> list[dict[str, object]]:
    server = CountingServer(folder)
    try:
        names = sorted(path.name for path in folder.iterdir())
        index = build_index([f"{server.url}/{name}" for name in names])
        total = sum(file.size for file in index.files)
        steps = EpochShape(index.num_rows, NUM_MICRO_BATCHES, MICRO_BATCH_SIZE).steps_per_epoch
        results = []
        for world_size in (1, 2, 4):
            server.sent = 0
            rows = 0
            for rank in range(world_size):
                feed = make_feed(index, first_step=0, last_step=steps, rank=rank, world_size=world_size)
                rows += run_feed(feed, 0, steps)
            assert rows == index.num_rows
            results.append({"world_size": world_size, "bytes": server.sent, "ratio": server.sent / total})
        return results
    finally:
        server.close()


def measure_entry(index: DatasetIndex, pairs: int) -> dict[str, object]:
    """Measures entering epoch 3 at its first and at its last step, alternating, after an uncounted run of each.

    For the order alone, of 10^8 rows in 10^5 row groups, until the first rows of every lane are known. For a feed, from
    its creation until the micro-batches of the step are ready.
    """
    large = EpochShape(10**8, NUM_MICRO_BATCHES, MICRO_BATCH_SIZE)
    groups = np.full(10**5, 10**3)
    order: tuple[list[float], list[float]] = ([], [])
    for _ in range(4 * pairs + 1):
        for times, step in zip(order, (3 * large.steps_per_epoch, 4 * large.steps_per_epoch - 1), strict=True):
            begin = time.perf_counter()
            epoch = EpochOrder(plan_of(groups, NUM_MICRO_BATCHES), 3)
            for number in range(NUM_MICRO_BATCHES):
                chunk = epoch.lane(number).chunk_at(large.span(step, number)[0])
                chunk.lane.permutation(chunk.window)
            times.append(time.perf_counter() - begin)
    steps = EpochShape(index.num_rows, NUM_MICRO_BATCHES, MICRO_BATCH_SIZE).steps_per_epoch
    feeds: tuple[list[float], list[float]] = ([], [])
    for _ in range(2 * pairs + 1):
        for times, step in zip(feeds, (3 * steps, 4 * steps - 1), strict=True):
            begin = time.perf_counter()
            with make_feed(index, first_step=step, last_step=100 * steps) as feed:
                list(feed.step(step))
                times.append(time.perf_counter() - begin)
    return {"order": compare(*order), "feed": compare(*feeds)}


def plan_of(rows_per_group: np.ndarray, num_lanes: int, options: DataConfig | None = None) -> FeedPlan:
    """The plan of one worker that reads every lane of a data set."""
    return FeedPlan(
        rows_per_group=rows_per_group,
        shape=EpochShape(int(rows_per_group.sum()), num_lanes, MICRO_BATCH_SIZE),
        seed=0,
        options=options or DataConfig(),
        micro_batches=tuple(range(num_lanes)),
        first_step=0,
        last_step=0,
    )


def compare(first: list[float], last: list[float]) -> dict[str, float]:
    ratios = [late / early for early, late in zip(first[1:], last[1:], strict=True)]
    return {
        "first_step_s": statistics.median(first[1:]),
        "last_step_s": statistics.median(last[1:]),
        "ratio": statistics.median(ratios),
    }


def measure_memory() -> list[dict[str, object]]:
    """Measures the memory that entering an epoch allocates: for the epoch, and at most, with a window's permutation."""
    results = []
    for num_rows, num_groups in ((10**4, 10**3), (10**8, 10**3), (10**8, 10**4), (10**8, 10**5)):
        rows_per_group = np.full(num_groups, num_rows // num_groups)
        tracemalloc.start()
        order = EpochOrder(plan_of(rows_per_group, NUM_MICRO_BATCHES), 3)
        lanes = [order.lane(number) for number in range(NUM_MICRO_BATCHES)]
        chunks = [lane.chunk_at(lane.num_rows - 1) for lane in lanes]
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for chunk in chunks:
            chunk.lane.permutation(chunk.window)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        results.append({"rows": num_rows, "row_groups": num_groups, "kept_bytes": kept, "peak_bytes": peak})
    return results


def measure_shuffle() -> list[dict[str, float]]:
    """Measures the shuffle of a sorted data set: the variance of a global batch's label counts relative to a full
    shuffle, and the correlation of a row's position in the epoch with its value."""
    num_rows, num_groups, num_labels, results = 10**6, 1000, 10, []
    rows_per_group = np.full(num_groups, num_rows // num_groups)
    for num_lanes, micro_batch_size in ((8, 32), (64, 4)):
        for window in (1, 4, 16):
            options = DataConfig(window_row_groups=window)
            order = EpochOrder(plan_of(rows_per_group, num_lanes, options), 0)
            lanes = [rows_of(order.lane(number), num_rows // num_groups) for number in range(num_lanes)]
            steps = min(map(len, lanes)) // micro_batch_size
            batches = np.stack([lane[: steps * micro_batch_size].reshape(steps, -1) for lane in lanes], 1)
            batches = batches.reshape(steps, -1)
            labels = batches * num_labels // num_rows
            counts = np.stack([(labels == label).sum(axis=1) for label in range(num_labels)], 1)
            full_shuffle = batches.shape[1] / num_labels * (1 - 1 / num_labels)
            position = np.repeat(np.arange(steps), batches.shape[1])
            results.append(
                {
                    "micro_batches": num_lanes,
                    "micro_batch_size": micro_batch_size,
                    "window_row_groups": window,
                    "variance_ratio": float(counts.var(axis=0).mean() / full_shuffle),
                    "correlation": float(np.corrcoef(position, batches.reshape(-1))[0, 1]),
                }
            )
    return results


def rows_of(lane: Lane, rows_per_group: int) -> np.ndarray:
    """Returns the row ids of a lane, in its order."""
    windows = []
    for window in range(len(lane.window_starts) - 1):
        parts = [
            np.arange(group * rows_per_group + start, group * rows_per_group + stop)
            for group, start, stop in lane.segments(window)
        ]
        windows.append(np.concatenate(parts)[lane.permutation(window)])
    return np.concatenate(windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/data.json"))
    parser.add_argument("--pairs", type=positive_int, default=5, help="number of measurements of each side")
    parser.add_argument("--rows", type=positive_int, default=200_000, help="number of rows of 1 KiB in the data set")
    arguments = parser.parse_args()
    cores = os.cpu_count() or 1
    ray.init("local", num_cpus=cores, include_dashboard=False, logging_level="warning", log_to_driver=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        groups = {"num_files": 10, "groups_per_file": arguments.rows // 10_000, "rows_per_group": 1_000}
        write_dataset(folder, **groups, tokens=256)
        index = build_index(str(folder))
        results = {
            "machine": {"cpus": cores, "torch": torch.__version__, "ray": ray.__version__, "pyarrow": pa.__version__},
            "dataset": {
                "rows": index.num_rows,
                "row_groups": len(index.group_rows),
                "bytes": sum(file.size for file in index.files),
            },
            "throughput": [
                measure_throughput(index, micro_batch_size=size, pairs=arguments.pairs, num_workers=cores)
                for size in MICRO_BATCH_SIZES
            ],
            "map_style": measure_map_style(micro_batch_size=32, num_rows=6000, processes=cores, pairs=arguments.pairs),
            "bytes": measure_bytes(folder),
            "entry": measure_entry(index, arguments.pairs),
            "memory": measure_memory(),
            "shuffle": measure_shuffle(),
        }
    ray.shutdown()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=2) + "\n")
    print_table(results, arguments.output)


def print_table(results: dict[str, Any], output: Path) -> None:
    def line(label: str, value: str, promise: str = "") -> None:
        print(f"{label:56}{value:>10}   {promise}".rstrip())

    data = results["dataset"]
    print(f"{data['rows']:,} rows of 1 KiB in {data['row_groups']} row groups, {results['machine']}\n")
    line("", "measured", "promised")
    for entry in results["throughput"]:
        size = f"micro-batches of {entry['micro_batch_size']}"
        line(f"feed, {size}, rows/s", f"{entry['feed_rows_per_s']:,.0f}")
        line(f"DataLoader, {entry['loader_workers']} workers, {size}, rows/s", f"{entry['loader_rows_per_s']:,.0f}")
        line(f"feed / DataLoader, {size}", f"{entry['ratio']:.2f}", "at least 0.9")
    entry = results["map_style"]
    label = f"{entry['processes']} processes, {entry['ms_per_row']:.1f} ms a row"
    line(f"map-style data, {label}, rows/s", f"{entry['feed_rows_per_s']:,.0f}")
    line(f"map-style data, {label}: feed / DataLoader", f"{entry['ratio']:.2f}", "at least 0.9")
    for entry in results["bytes"]:
        line(f"bytes of an epoch / data set, W={entry['world_size']}", f"{entry['ratio']:.3f}", "at most 1.1")
    for name, label in (("order", "order of 1e+08 rows"), ("feed", "feed, first step")):
        entry = results["entry"][name]
        line(f"{label}: epoch 3 entered at its first step, ms", f"{entry['first_step_s'] * 1e3:.1f}")
        line(f"{label}: epoch 3 entered at its last step, ms", f"{entry['last_step_s'] * 1e3:.1f}")
        line(f"{label}: last / first", f"{entry['ratio']:.2f}", "at most 1, except for noise")
    for entry in results["memory"]:
        label = f"order of {entry['rows']:.0e} rows in {entry['row_groups']:.0e} row groups, KiB"
        line(label, f"{entry['kept_bytes'] / 1024:,.0f}", "grows with row groups, not rows")
        line(
            "with the permutation of a window, KiB",
            f"{entry['peak_bytes'] / 1024:,.0f}",
            "grows with a window's rows",
        )
    for entry in results["shuffle"]:
        label = f"{entry['micro_batches']} micro-batches of {entry['micro_batch_size']}, windows of "
        line(
            f"sorted data, {label}{entry['window_row_groups']}: variance",
            f"{entry['variance_ratio']:.1f}",
            "1 is a full shuffle",
        )
    print(f"\nwritten to {output}")


if __name__ == "__main__":
    main()
