"""The control all-reduce of a step: the votes that all ranks must agree on, and the records of all micro-batches.

The all-reduce sums one int64 vector over the ranks. Votes are counted. Each micro-batch has slots for its loss, its
weight, and the digest of its row ids. Only the rank that computed it fills them; all others leave zeros. The sum
therefore gives every rank the exact bits, at any world size.
"""

from __future__ import annotations

import hashlib
import math
import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from elastic_ddp.distributed.process_group import read
from elastic_ddp.distributed.reduction_tree import Node, fold_to_root
from elastic_ddp.errors import ConfigError

VOTES = ("stop", "commit", "saving", "reconfigure", "buffers_changed", "gathered", "profile", "verify", "update")
_DIGEST_WORDS = 4  # 32 bytes of SHA-256
_SLOT_WORDS = 2 + _DIGEST_WORDS


@dataclass
class MicroBatchRecord:
    """A rank's record of one micro-batch that it computed."""

    row_ids: np.ndarray
    """The rows' positions in the stored order of the data set, int64 of shape (rows,)."""
    loss: torch.Tensor
    """The mean loss over the rows, one number, as `to_host` returns it."""
    weight: float | None = None
    """The weight of the loss; None for the number of rows."""

    @property
    def num_rows(self) -> int:
        return len(self.row_ids)


@dataclass(frozen=True)
class Agreement:
    """The votes and records of all ranks at the end of a step."""

    votes: Mapping[str, int]
    """The number of ranks that voted for each name in `VOTES`; for the last four, the sum of the votes."""
    loss: float
    """The mean loss over the global batch, weighted, with the same bits at every world size."""
    total_weight: float | None
    """The sum of the weights; None if micro-batches have no weights but their numbers of rows."""
    losses: Sequence[float]
    """The loss of every micro-batch with rows, in order; 0 for a micro-batch of weight 0."""
    row_digests: Sequence[bytes]
    """The row digest of every micro-batch, in order."""


@dataclass
class ControlExchange:
    """The control all-reduce of one step, begun by `start` and completed by `wait`."""

    rows: np.ndarray
    """The number of rows of every micro-batch of the step, int64 of shape (M,)."""
    votes: dict[str, int] = field(default_factory=dict)
    """This rank's votes by name; 0 if there is none. `gathered` is a signature of the gathered values, `profile` the
    number of the request that this rank can start, and `update` the number of the update."""
    _vector: torch.Tensor | None = None
    _work: dist.Work | None = None
    _agreement: Agreement | None = None

    def start(self, records: Mapping[int, MicroBatchRecord], world_size: int) -> None:
        """Starts the all-reduce, with the records of this rank's micro-batches. Every rank calls it once a step."""
        vector = np.zeros(len(VOTES) + len(self.rows) * _SLOT_WORDS, dtype=np.int64)
        vector[: len(VOTES)] = [self.votes.get(name, 0) for name in VOTES]
        slots = vector[len(VOTES) :].reshape(len(self.rows), _SLOT_WORDS)
        for micro_batch, record in records.items():
            weight = math.nan if record.weight is None else record.weight
            slots[micro_batch, :2] = struct.unpack("<qq", struct.pack("<dd", read(record.loss), weight))
            slots[micro_batch, 2:] = np.frombuffer(digest_rows(record.row_ids), dtype="<i8")
        self._vector = torch.from_numpy(vector)
        self._work = dist.all_reduce(self._vector, async_op=True) if world_size > 1 else None

    def wait(self) -> Agreement:
        """Waits for the all-reduce and returns its result, also when called again.

        Raises:
            ConfigError: some micro-batches have a weight, and others none.
        """
        assert self._vector is not None
        if self._agreement is None:
            if self._work is not None:
                self._work.wait()
            self._agreement = self._decode(self._vector.numpy())
        return self._agreement

    def _decode(self, vector: np.ndarray) -> Agreement:
        slots = vector[len(VOTES) :].reshape(len(self.rows), _SLOT_WORDS)
        rows = [number for number in self.rows.tolist() if number]
        pairs = slots[: len(rows), :2].copy().view("<f8").tolist()
        losses = [loss for loss, _ in pairs]
        weights = [weight for _, weight in pairs]
        loss, total_weight = _weighted_mean(losses, weights, rows)
        return Agreement(
            votes=dict(zip(VOTES, vector.tolist(), strict=False)),
            loss=loss,
            total_weight=total_weight,
            losses=[0.0 if weight == 0 else loss for loss, weight in pairs],
            row_digests=[slots[m, 2:].tobytes() if m < len(rows) else _NO_ROWS for m in range(len(slots))],
        )


def _weighted_mean(losses: list[float], weights: list[float], rows: list[int]) -> tuple[float, float | None]:
    """Returns the mean loss and the sum of the weights, both added along the reduction tree. NaN means no weight."""
    unweighted = [m for m, weight in enumerate(weights) if math.isnan(weight)]
    num_leaves = len(rows)
    if 0 < len(unweighted) < num_leaves:
        raise ConfigError(
            f"step.backward got a weight for some micro-batches, and none for {unweighted}. Give a weight for every "
            "micro-batch of a step, or for none."
        )
    factors = rows if unweighted else weights
    # A loss without weight may be NaN.
    leaves = {
        Node(0, m): factor * loss if factor else 0.0
        for m, (factor, loss) in enumerate(zip(factors, losses, strict=True))
    }
    sum_of_losses = fold_to_root(leaves, num_leaves, operator.add)
    if unweighted:
        return sum_of_losses / sum(rows), None
    total = fold_to_root({Node(0, m): weight for m, weight in enumerate(factors)}, num_leaves, operator.add)
    return sum_of_losses / total if total else math.nan, total


def digest_rows(row_ids: np.ndarray) -> bytes:
    """Returns the SHA-256 of a micro-batch's row ids, as little-endian int64."""
    return hashlib.sha256(np.ascontiguousarray(row_ids, dtype="<i8").tobytes()).digest()


def extend_samples_digest(previous: str, row_digests: Sequence[bytes]) -> str:
    """Returns the `samples_sha256` after a step: SHA-256 of the previous one and the digests of all micro-batches."""
    return hashlib.sha256(bytes.fromhex(previous) + b"".join(row_digests)).hexdigest()


_NO_ROWS = hashlib.sha256(b"").digest()
EMPTY_SAMPLES_DIGEST = hashlib.sha256(b"").hexdigest()
"""The `samples_sha256` of a run that has consumed no samples."""
