"""Rows that the micro-batches of a step compute, collected over the global batch for every rank: `Step.gather`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.tensors.state_tree import ravel


class RowGather:
    """The rows that this rank's micro-batches of a step gave, and their exchange with the other ranks."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, torch.Tensor]] = {}  # by micro-batch
        self._signature = 0

    def add(self, micro_batch: int, num_rows: int, values: Mapping[str, torch.Tensor]) -> None:
        """Adds rows of a micro-batch. A micro-batch of padding, with `num_rows` 0, gives shapes only.

        Raises:
            ConfigError: a value is no tensor with one row for each row of the batch, or its name was given before.
        """
        rows = self._rows.setdefault(micro_batch, {})
        for name, value in values.items():
            if not isinstance(value, torch.Tensor) or not value.dim() or (num_rows and len(value) != num_rows):
                shape = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise ConfigError(
                    f"step.gather got {name} of {shape} for a batch of {num_rows} rows. Give a tensor whose first "
                    "dimension is the rows of the batch."
                )
            if name in rows:
                raise ConfigError(f"step.gather got {name} twice for one batch. Give each name once.")
            rows[name] = value.detach()[:num_rows]

    def signature(self, micro_batches: Sequence[int]) -> int:
        """Returns a number that is equal on all ranks if they gather the same, and 0 if this rank gathers nothing.

        Raises:
            ConfigError: the rank's micro-batches do not gather the same names, shapes and dtypes.
        """
        described = {m: _describe(self._rows.get(m, {})) for m in micro_batches}
        if len(set(described.values())) > 1:
            parts = "; ".join(f"{text or 'nothing'} from micro-batch {m}" for m, text in described.items())
            raise ConfigError(f"step.gather got {parts}. Give the same names, shapes and dtypes for every batch.")
        text = next(iter(described.values()))
        self._signature = zlib.crc32(text.encode()) | 1 if text else 0
        return self._signature

    def exchange(
        self, signatures: int, rows: np.ndarray, ranges: Sequence[range], group: ProcessGroup
    ) -> dict[str, torch.Tensor]:
        """Returns the rows of all micro-batches of the step, in order. Collective if anything is gathered.

        `signatures` is the sum of `signature` over all ranks; `rows` has the number of rows of each of the M
        micro-batches, shape (M,); `ranges` has the micro-batches of each rank.

        Raises:
            ConfigError: the ranks gather different names, shapes or dtypes.
        """
        if signatures != self._signature * group.world_size:
            raise ConfigError(
                "step.gather got other names, shapes or dtypes on another rank. Give the same for every batch."
            )
        if not self._signature:
            return {}
        own = [self._rows[m] for m in sorted(self._rows)]
        values = {name: torch.cat([part[name] for part in own]) for name in sorted(own[0])}
        if group.world_size == 1:
            return values
        counts = [int(rows[list(owned)].sum()) for owned in ranges]
        # One collective for all names: the bytes of each row, one name after the other.
        parts = [
            ravel(value).view(torch.uint8).view(len(value), math.prod(value.shape[1:]) * value.itemsize)
            for value in values.values()
        ]
        own_rows = torch.cat(parts, 1)
        sent = own_rows.new_zeros(max(counts), own_rows.shape[1])
        sent[: len(own_rows)] = own_rows
        received = group.all_gather(sent)
        parts_of = {
            m: part
            for rank, owned in enumerate(ranges)
            for m, part in zip(owned, received[rank, : counts[rank]].split(rows[list(owned)].tolist()), strict=True)
        }
        everything = torch.cat([parts_of[m] for m in sorted(parts_of)])
        columns = everything.split([part.shape[1] for part in parts], 1)
        return {
            name: ravel(column).to(value.device).view(value.dtype).view(len(everything), *value.shape[1:])
            for (name, value), column in zip(values.items(), columns, strict=True)
        }


def _describe(values: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(
        f"{name} ({value.dtype}, rows of {tuple(value.shape[1:])})" for name, value in sorted(values.items())
    )
