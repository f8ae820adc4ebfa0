"""Commits of sharded state, restored to a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.unit.worker.test_shared_shards import NUM_PARAMETERS, save_shards, shards_restored_to

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("world_size", [1, 2])
def test_shards_are_restored_to_a_gpu(tmp_path: Path, world_size: int) -> None:
    """The ranks share the GPU, so they use gloo."""
    run_ranks(2, save_shards, tmp_path)
    assert run_ranks(world_size, shards_restored_to, tmp_path, "cuda") == [[True] * NUM_PARAMETERS] * world_size
