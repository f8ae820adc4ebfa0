"""`RunHandle` checks arguments before it calls the run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elastic_ddp.driver.run_handle import RunHandle
from elastic_ddp.errors import ConfigError


class RecordingHandle(RunHandle):
    """A handle whose calls are recorded and always succeed."""

    def __init__(self) -> None:
        super().__init__("live", None)
        self.calls: list[tuple[Any, ...]] = []

    def _call(self, method: str, *arguments: Any) -> Any:
        if method == "status":
            return {"min_workers": 1, "max_workers": 4, "members": []}
        self.calls.append((method, *arguments))
        return []


@pytest.mark.parametrize("num_workers", [2.5, True, "2", math.nan, None])
def test_resize_refuses_a_number_of_workers_that_is_not_an_int(num_workers: Any) -> None:
    run = RecordingHandle()
    with pytest.raises(ConfigError, match=r"num_workers=.* is not an int"):
        run.resize(num_workers)
    assert not run.calls
    run.resize(3)
    assert run.calls == [("resize", 3)]


@pytest.mark.parametrize("num_workers", [0, 5])
def test_resize_refuses_a_number_of_workers_out_of_range(num_workers: int) -> None:
    run = RecordingHandle()
    with pytest.raises(ConfigError, match=rf"num_workers={num_workers} .*min_workers=1.*max_workers=4"):
        run.resize(num_workers)
    assert not run.calls


@pytest.mark.parametrize("deadline_s", [0, -1.0, math.inf, math.nan])
def test_drain_refuses_a_deadline_out_of_range(deadline_s: float) -> None:
    run = RecordingHandle()
    with pytest.raises(ConfigError, match=r"deadline_s="):
        run.drain("10.0.0.1", deadline_s=deadline_s)
    assert not run.calls
