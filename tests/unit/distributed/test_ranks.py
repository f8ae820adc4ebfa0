"""`run_ranks`, which runs the ranks of tests, reports failures."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from elastic_ddp.distributed.process_group import ProcessGroup
from tests.ranks import run_ranks


def one_fails(group: ProcessGroup, how: str) -> None:
    if group.rank == 0:
        threading.Event().wait()
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    raise NameError(how)


@pytest.mark.parametrize(("how", "error"), [("a typo", "rank 1: .*NameError: a typo"), ("dies", "rank 1: it died")])
def test_a_rank_that_fails_ends_the_ranks_that_wait_for_it(how: str, error: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s)^{error}"):
        run_ranks(2, one_fails, how)
