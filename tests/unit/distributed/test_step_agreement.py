"""What ranks agree on at the end of a step, and the record of the rows that it consumed."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ddp.distributed.process_group import ProcessGroup, to_host
from elastic_ddp.distributed.reduction_tree import micro_batch_ranges
from elastic_ddp.distributed.step_agreement import (
    EMPTY_SAMPLES_DIGEST,
    VOTES,
    Agreement,
    ControlExchange,
    MicroBatchRecord,
    digest_rows,
    extend_samples_digest,
)
from elastic_ddp.worker.train_state import Position
from tests.ranks import run_ranks

FULL = [4, 4, 4, 4, 4, 4, 4]
SHORT = [4, 4, 4, 3, 3, 0, 0]
"""The last step of an epoch."""
LOSSES = [1e16, 1.0, -1e16, 0.1, 1e-300, 3.0, 1e8]
"""Any other order of additions gives another sum."""


def bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def row_ids(micro_batch: int, rows: int) -> np.ndarray:
    return np.arange(rows) * 7 + micro_batch


def agree(owned: range, rows: list[int], votes: dict[str, bool], losses: list[float], world_size: int) -> Agreement:
    exchange = ControlExchange(np.array(rows), votes)
    records = {
        m: MicroBatchRecord(row_ids(m, rows[m]), to_host(torch.tensor(losses[m], dtype=torch.float64)))
        for m in owned
        if rows[m]
    }
    exchange.start(records, world_size)
    return exchange.wait()


def on_a_rank(group: ProcessGroup) -> list[dict[str, Any]]:
    """What this rank hears at the end of two steps, one of them short."""
    owned = micro_batch_ranges(len(FULL), group.world_size)[group.rank]
    votes = {"stop": group.rank == 0, "commit": True, "buffers_changed": group.rank == 1}
    heard = [agree(owned, rows, votes, LOSSES, group.world_size) for rows in (FULL, SHORT)]
    return [{"votes": dict(agreed.votes), "loss": bits(agreed.loss), "digests": agreed.row_digests} for agreed in heard]


def test_the_loss_is_the_mean_over_rows_added_along_the_tree() -> None:
    full = [4 * loss for loss in LOSSES]
    total = ((full[0] + full[1]) + (full[2] + full[3])) + ((full[4] + full[5]) + full[6])
    assert bits(agree(range(7), FULL, {}, LOSSES, 1).loss) == bits(total / 28)
    short = ((4 * LOSSES[0] + 4 * LOSSES[1]) + (4 * LOSSES[2] + 3 * LOSSES[3])) + 3 * LOSSES[4]
    assert bits(agree(range(7), SHORT, {}, LOSSES, 1).loss) == bits(short / 18)
    assert bits(total / 28) != bits(sum(full) / 28)  # this test could fail


@pytest.mark.parametrize("loss", [-0.0, 0.1, 5e-324, float("-inf"), float("nan")])
def test_a_loss_of_any_value_comes_through_bit_by_bit(loss: float) -> None:
    assert bits(agree(range(1), [1], {}, [loss], 1).loss) == bits(loss)


def test_every_rank_hears_the_same_as_a_single_process_would() -> None:
    calm = [agree(range(7), rows, {}, LOSSES, 1) for rows in (FULL, SHORT)]
    for world_size in (2, 3):
        ranks = run_ranks(world_size, on_a_rank)
        for heard in ranks:
            assert heard == ranks[0]
            for after, alone in zip(heard, calm, strict=True):
                votes = {"stop": 1, "commit": world_size, "buffers_changed": 1}
                assert after["votes"] == {**dict.fromkeys(VOTES, 0), **votes}
                assert after["loss"] == bits(alone.loss)
                assert after["digests"] == alone.row_digests


def test_digests_are_in_micro_batch_order_and_empty_ones_equal_that_of_no_rows() -> None:
    digests = agree(range(7), SHORT, {}, LOSSES, 1).row_digests
    ids = [row_ids(m, rows) for m, rows in enumerate(SHORT)]
    assert digests == [hashlib.sha256(b"".join(struct.pack("<q", i) for i in each)).digest() for each in ids]
    assert digests[5] == digests[6] == hashlib.sha256(b"").digest()


def test_row_ids_of_any_integer_type_and_layout_have_one_digest() -> None:
    ids = np.arange(10, dtype=np.int64)
    narrow = np.arange(20, dtype=np.int32)[::2] // 2
    assert digest_rows(narrow) == digest_rows(ids.astype(">i8")) == digest_rows(ids) != digest_rows(ids[::-1])


def test_the_chain_over_samples_spelled_out() -> None:
    steps = [[hashlib.sha256(f"{step}-{m}".encode()).digest() for m in range(3)] for step in range(2)]
    first = hashlib.sha256(hashlib.sha256(b"").digest() + steps[0][0] + steps[0][1] + steps[0][2]).digest()
    second = hashlib.sha256(first + steps[1][0] + steps[1][1] + steps[1][2]).digest()
    assert hashlib.sha256(b"").hexdigest() == EMPTY_SAMPLES_DIGEST
    assert extend_samples_digest(EMPTY_SAMPLES_DIGEST, steps[0]) == first.hex()
    position = Position().after(6, steps[0]).after(5, steps[1])
    assert (position.step, position.samples, position.samples_sha256) == (2, 11, second.hex())
