"""The one small all-reduce of a step: what every rank must agree on, and what the record needs of every micro-batch.

All of it is one int64 vector that is summed over the ranks. Votes are counted. What belongs to a micro-batch (its
loss, the digest of the rows it consumed) is written into the micro-batch's own slots by the rank that computed it and
is zero on all others, so the sum carries the exact bits to everyone, at any world size.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from elastic_ddp.distributed.reduction_tree import Node, fold_to_root

VOTES = ("stop", "commit", "saving", "reconfigure", "buffers_changed")
_DIGEST_WORDS = 4  # 32 bytes of SHA-256
_SLOT_WORDS = 1 + _DIGEST_WORDS


@dataclass
class MicroBatchRecord:
    """What a rank knows of a micro-batch that it computed."""

    num_rows: int
    row_digest: bytes
    loss: torch.Tensor
    """Mean over the rows; one number, from `to_host`."""


def to_host(loss: torch.Tensor) -> torch.Tensor:
    """Starts copying one number to the host. Waiting for it waits for the forward, not for the backward after it."""
    if loss.device.type != "cuda":
        return loss
    host = torch.empty(1, dtype=loss.dtype, pin_memory=True)
    host.copy_(loss.reshape(1), non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    host.copied = copied  # type: ignore[attr-defined]
    return host


def _number(host: torch.Tensor) -> float:
    copied = getattr(host, "copied", None)
    if copied is not None:
        copied.synchronize()
    return float(host)


@dataclass(frozen=True)
class Agreement:
    """What all ranks know at the end of a step."""

    votes: Mapping[str, int]
    loss: float
    """The mean over the rows of the global batch, the same bits at every world size."""
    row_digests: Sequence[bytes]
    """Of every micro-batch, in order; of no rows for one that is empty."""


@dataclass
class ControlExchange:
    """The control all-reduce of one step, started by `start` and read by `wait`."""

    rows: np.ndarray
    """Rows of every micro-batch of the step, int64 of shape (M,)."""
    votes: dict[str, bool] = field(default_factory=dict)
    _vector: torch.Tensor | None = None
    _work: dist.Work | None = None

    def start(self, records: Mapping[int, MicroBatchRecord], world_size: int) -> None:
        """Issues the all-reduce; every rank calls it once a step, with the micro-batches it computed."""
        vector = np.zeros(len(VOTES) + len(self.rows) * _SLOT_WORDS, dtype=np.int64)
        for place, name in enumerate(VOTES):
            vector[place] = self.votes.get(name, False)
        slots = vector[len(VOTES) :].reshape(len(self.rows), _SLOT_WORDS)
        for micro_batch, record in records.items():
            slots[micro_batch, 0] = struct.unpack("<q", struct.pack("<d", _number(record.loss)))[0]
            slots[micro_batch, 1:] = np.frombuffer(record.row_digest, dtype="<i8")
        self._vector = torch.from_numpy(vector)
        self._work = dist.all_reduce(self._vector, async_op=True) if world_size > 1 else None

    def wait(self) -> Agreement:
        assert self._vector is not None
        if self._work is not None:
            self._work.wait()
        vector = self._vector.numpy()
        slots = vector[len(VOTES) :].reshape(len(self.rows), _SLOT_WORDS)
        losses = slots[:, 0].copy().view("<f8")
        num_leaves = int(np.count_nonzero(self.rows))
        weighted = {Node(0, m): float(losses[m]) * int(self.rows[m]) for m in range(num_leaves)}
        return Agreement(
            votes={name: int(vector[place]) for place, name in enumerate(VOTES)},
            loss=fold_to_root(weighted, num_leaves, lambda left, right: left + right) / int(self.rows.sum()),
            row_digests=[
                slots[m, 1:].tobytes() if m < num_leaves else digest_rows(_NO_ROWS) for m in range(len(slots))
            ],
        )


_NO_ROWS = np.empty(0, dtype="<i8")


def digest_rows(row_ids: np.ndarray) -> bytes:
    """SHA-256 over the row ids of a micro-batch, as little-endian int64."""
    return hashlib.sha256(np.ascontiguousarray(row_ids, dtype="<i8").tobytes()).digest()


def extend_samples_digest(previous: str, row_digests: Sequence[bytes]) -> str:
    """The `samples_sha256` after a step: SHA-256 over the one before it and the digests of all micro-batches."""
    return hashlib.sha256(bytes.fromhex(previous) + b"".join(row_digests)).hexdigest()


EMPTY_SAMPLES_DIGEST = hashlib.sha256(b"").hexdigest()
"""`samples_sha256` of a run that has consumed nothing."""
