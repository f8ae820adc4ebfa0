"""The part of `data.py` that measures a map-style data set: the feed next to a DataLoader with as many processes."""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from elastic_ddp.config.run_config import DataConfig
from elastic_ddp.data.feed import MicroBatchFeed
from elastic_ddp.data.map_style import MapStyleIndex, index_in_memory
from elastic_ddp.data.order import EpochShape, FeedPlan


class Images(Dataset[dict[str, torch.Tensor]]):
    """Random crops of images from an array of bytes, resized, flipped and normalized: about 1 ms for a row."""

    def __init__(self, num_rows: int, *, num_images: int = 100, size: int = 448) -> None:
        self.images = np.random.default_rng(0).integers(0, 255, (num_images, size, size, 3), dtype=np.uint8)
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        top, left = torch.randint(96, (2,)).tolist()
        crop = self.images[row % len(self.images), top : top + 352, left : left + 352]
        image = torch.tensor(crop).permute(2, 0, 1)[None].float()
        image = torch.nn.functional.interpolate(image, size=64, mode="bilinear", antialias=True)[0]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return {"image": (image - image.mean()) / image.std(), "label": torch.tensor(row % 10)}


def make_feed(index: MapStyleIndex, *, micro_batch_size: int, num_micro_batches: int, processes: int) -> MicroBatchFeed:
    shape = EpochShape(index.num_rows, num_micro_batches, micro_batch_size)
    plan = FeedPlan(
        rows_per_group=index.group_rows,
        shape=shape,
        seed=0,
        options=DataConfig(concurrency=processes),
        micro_batches=tuple(range(num_micro_batches)),
        first_step=0,
        last_step=shape.steps_per_epoch,
    )
    return MicroBatchFeed(index, plan, device=torch.device("cpu"))


def measure_map_style(*, micro_batch_size: int, num_rows: int, processes: int, pairs: int) -> dict[str, object]:
    """Measures rows/s over an epoch, start-up included. The sides alternate, after an uncounted run of each."""
    data, num_micro_batches = Images(num_rows), 8
    index = index_in_memory(data, identify=False).share()
    steps = EpochShape(num_rows, num_micro_batches, micro_batch_size).steps_per_epoch
    begin = time.perf_counter()
    for row in range(100):
        data[row]
    seconds_per_row = (time.perf_counter() - begin) / 100
    feeds, loaders = [], []
    for _ in range(pairs + 1):
        begin = time.perf_counter()
        settings = {"micro_batch_size": micro_batch_size, "num_micro_batches": num_micro_batches}
        with make_feed(index, **settings, processes=processes) as feed:
            assert sum(batch.num_rows for step in range(steps) for batch in feed.step(step)) == num_rows
        feeds.append(num_rows / (time.perf_counter() - begin))
        begin = time.perf_counter()
        loader = DataLoader(data, batch_size=micro_batch_size, shuffle=True, num_workers=processes)
        assert sum(len(batch["label"]) for batch in loader) == num_rows
        loaders.append(num_rows / (time.perf_counter() - begin))
    ratios = [feed / loader for feed, loader in zip(feeds[1:], loaders[1:], strict=True)]
    return {
        "micro_batch_size": micro_batch_size,
        "ms_per_row": seconds_per_row * 1e3,
        "processes": processes,
        "feed_rows_per_s": statistics.median(feeds[1:]),
        "loader_rows_per_s": statistics.median(loaders[1:]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }
