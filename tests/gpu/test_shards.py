"""Commits of sharded state, restored to a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.unit.test_fsdp_commits import NUM_LARGE, save_large, shards_restored_to

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("world_size", [1, 2])
def test_shards_come_to_a_gpu_as_they_were_saved(tmp_path: Path, world_size: int) -> None:
    """Over gloo, as the ranks share it."""
    run_ranks(2, save_large, tmp_path)
    assert run_ranks(world_size, shards_restored_to, tmp_path, "cuda") == [[True] * NUM_LARGE] * world_size
