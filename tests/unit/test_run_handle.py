"""What is asked of a live run is looked at before the run hears of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elastic_ddp.driver.run_handle import RunHandle
from elastic_ddp.errors import ConfigError


class LiveRun(RunHandle):
    """One whose rendezvous takes anything, and notes it."""

    def __init__(self) -> None:
        super().__init__("live", None)
        self.asked: list[tuple[Any, ...]] = []

    def _ask(self, what: str, *arguments: Any) -> Any:
        if what == "status":
            return {"min_workers": 1, "max_workers": 4, "members": []}
        self.asked.append((what, *arguments))
        return []


@pytest.mark.parametrize("num_workers", [2.5, True, "2", math.nan, None])
def test_a_run_is_resized_to_a_whole_number_of_workers(num_workers: Any) -> None:
    run = LiveRun()
    with pytest.raises(ConfigError, match="is no number of workers; give an int"):
        run.resize(num_workers)
    assert not run.asked
    run.resize(3)
    assert run.asked == [("resize", 3)]


@pytest.mark.parametrize("deadline_s", [0, -1.0, math.inf, math.nan])
def test_a_node_is_drained_within_some_time(deadline_s: float) -> None:
    run = LiveRun()
    with pytest.raises(ConfigError, match="give the seconds until the node is gone"):
        run.drain("10.0.0.1", deadline_s=deadline_s)
    assert not run.asked
