"""Process groups that form after others could not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from elastic_ddp.parallel.process_group import ProcessGroup, is_lost_peer
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def form_after_a_failure(group: ProcessGroup) -> str:
    """Rank 1 alone tries generation 2; both meet in generation 3. `run_ranks` closes that one."""
    group.close(intact=True)
    if group.rank == 1:
        with pytest.raises(RuntimeError) as caught:
            ProcessGroup.form(replace(group.assignment, generation=2), device=CPU, timeout_s=1)
        assert is_lost_peer(caught.value)
    again = ProcessGroup.form(replace(group.assignment, generation=3), device=CPU, timeout_s=20)
    return b"".join(again.all_gather_bytes(bytes([again.rank]))).hex()


def test_a_rank_that_could_not_form_one_group_meets_others_in_the_next() -> None:
    assert run_ranks(2, form_after_a_failure) == ["0001", "0001"]
