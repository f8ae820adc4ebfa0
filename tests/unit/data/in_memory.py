"""Data sets in memory, and the data path up to the worker without Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from elastic_ddp.config.run_config import DataConfig
from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.map_style import index_in_memory
from elastic_ddp.data.micro_batches import MicroBatch, Placer
from elastic_ddp.data.order import EpochShape, FeedPlan
from elastic_ddp.data.packing import dump, pack_blocks, unpack_block
from elastic_ddp.data.split import take_collated
from elastic_ddp.data.user_code import Shipped
from elastic_ddp.data.work import CollateFn, Transform, Work

NUM_MICRO_BATCHES, MICRO_BATCH_SIZE = 4, 3


class Noisy(Dataset[dict[str, Any]]):
    """Rows of different lengths, with a string, and noise from all three global generators."""

    def __init__(self, num_rows: int = 41) -> None:
        self.num_rows = num_rows
        self.offset = np.arange(num_rows)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        noise = torch.rand(2) + np.random.random()
        return {"id": self.offset[row], "tokens": torch.arange(row % 5 + 1), "noise": noise, "name": f"row {row}"}


def pad(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A collate function with noise of its own."""
    return {
        "id": torch.tensor([int(row["id"]) for row in rows]),
        "tokens": torch.nn.utils.rnn.pad_sequence([row["tokens"] for row in rows], batch_first=True),
        "noise": torch.stack([row["noise"] for row in rows]) + torch.rand(()),
        "names": [row["name"] for row in rows],
    }


class Shared(Shipped):
    """Stands for the Ray object of a data set."""

    def __init__(self, content: Any) -> None:
        self._parts = dump(content)

    def load(self) -> Any:
        return self._parts

    __eq__, __hash__ = object.__eq__, object.__hash__


def plan_of(num_rows: int, micro_batches: Sequence[int], first_step: int, last_step: int, **options: Any) -> FeedPlan:
    rows_per_group = np.asarray(options.pop("rows_per_group", [num_rows]))
    return FeedPlan(
        rows_per_group=rows_per_group,
        shape=EpochShape(num_rows, NUM_MICRO_BATCHES, MICRO_BATCH_SIZE),
        seed=7,
        options=DataConfig(**options),
        micro_batches=tuple(micro_batches),
        first_step=first_step,
        last_step=last_step,
    )


def read(
    data: Any,
    *,
    collate_fn: CollateFn | None = None,
    transform: Transform | None = None,
    micro_batches: Sequence[int] = range(NUM_MICRO_BATCHES),
    first_step: int = 0,
    last_step: int = 8,
    processes: int = 1,
    **options: Any,
) -> dict[tuple[int, int], MicroBatch]:
    """Returns the micro-batches that a worker gets of a data set in memory or of Parquet files, by step and number."""
    is_parquet = isinstance(data, DatasetIndex)
    index = data if is_parquet else index_in_memory(data, identify=False)
    if is_parquet:
        options["rows_per_group"] = index.group_rows
    plan = plan_of(index.num_rows, micro_batches, first_step, last_step, **options)
    if is_parquet:
        shares = [Work(index, plan, transform, collate_fn).contents()]
    else:
        work = Work(replace(index, content=Shared(index.content)), plan, transform, collate_fn)
        shares = [work.make_in_memory(share, processes) for share in range(processes)]
    contents = [(batch for block in pack_blocks(share) for batch in unpack_block(block)) for share in shares]

    def in_turn() -> Iterator[Any]:
        while True:
            for content in contents:
                if (batch := next(content, None)) is None:
                    return
                yield batch

    place = Placer(torch.device("cpu"))
    return {(batch.step, batch.index): place(batch) for batch in take_collated(plan, in_turn(), lambda: first_step)}


def plain(value: Any) -> Any:
    """Returns a batch as values that compare exactly."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(plain, value)]
    return value


def values_of(batches: dict[tuple[int, int], MicroBatch]) -> dict[tuple[int, int], Any]:
    return {key: (batch.row_ids.tolist(), plain(batch.rows)) for key, batch in batches.items()}
