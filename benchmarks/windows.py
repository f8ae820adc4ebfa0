"""The rows that benchmarks train a GPT on: windows of random bytes. Their values do not affect the time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from text import write_windows
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def write_random_windows(folder: Path, *, rows: int, context: int, row_group_rows: int = 1024) -> None:
    """Writes windows of random bytes, in the format of `examples/text.py`."""
    values = np.random.default_rng(0).integers(0, 256, (rows, context + 1), dtype=np.uint8)
    write_windows(values, folder, row_group_rows)


class Windows(Dataset):
    """The rows of a Parquet folder in memory, fetched by the batch: the fastest form of a map-style data set."""

    def __init__(self, data: str) -> None:
        column = pq.read_table(data)["window"].combine_chunks()
        self.windows = torch.from_numpy(column.flatten().to_numpy().reshape(len(column), -1).copy())

    def __len__(self) -> int:
        return len(self.windows)

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return {"window": self.windows[indices]}


def endless_batches(data: str, batch_size: int, **options: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the batches of this rank, epoch after epoch, from a DataLoader with these options."""
    rows = Windows(data)
    sampler: DistributedSampler[Any] = DistributedSampler(rows, drop_last=True)
    loader = DataLoader(
        rows,
        batch_size=batch_size,
        sampler=sampler,
        persistent_workers=True,
        collate_fn=_as_it_is,
        drop_last=True,
        **options,
    )
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def _as_it_is(batch: Any) -> Any:
    return batch
