"""SyncBatchNorm on one GPU that two ranks share: the training of tests/unit/distributed/test_sync_batch_norm.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.distributed.test_sync_batch_norm import assert_trains_like_one_process

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_sync_batch_norm_trains_like_one_process_with_the_rows_of_all_ranks(tmp_path: Path) -> None:
    resources = {"CPU": 1.0, "GPU": 0.5}
    assert_trains_like_one_process(
        tmp_path, torch.nn.SyncBatchNorm, torch.device("cuda:0"), resources_per_worker=resources
    )
