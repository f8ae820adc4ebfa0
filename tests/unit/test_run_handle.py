"""`RunHandle` checks arguments before it calls the run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import ray

from elastic_ddp.driver import run_handle
from elastic_ddp.driver.run_handle import RunHandle
from elastic_ddp.errors import ConfigError


class RecordingHandle(RunHandle):
    """A handle whose calls are recorded and always succeed."""

    def __init__(self) -> None:
        super().__init__("live", None)
        self.calls: list[tuple[Any, ...]] = []

    def _call(self, method: str, *arguments: Any) -> Any:
        if method == "status":
            return {"min_workers": 1, "max_workers": 4, "members": [], "draining": ["id1", "id2", "gone"]}
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


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes id1 and id2 have addresses, and Ray itself drains id2."""
    known = [{"NodeID": f"id{n}", "NodeManagerAddress": f"10.0.0.{n}"} for n in (1, 2, 3)]
    monkeypatch.setattr(ray, "nodes", lambda: known)
    monkeypatch.setattr(run_handle, "draining_nodes", lambda: {"id2": 0})


@pytest.mark.parametrize("node", ["id1", "10.0.0.1"])
def test_a_node_that_a_person_drained_is_undrained_by_its_id_or_address(nodes: None, node: str) -> None:
    run = RecordingHandle()
    run.undrain(node)
    assert run.calls == [("undrain", "id1")]


def test_undrain_refuses_a_node_that_is_not_drained_and_names_those_that_are(nodes: None) -> None:
    run = RecordingHandle()
    with pytest.raises(ConfigError, match=r"does not avoid node '10\.0\.0\.3'.*10\.0\.0\.1 \(id1\), .*\(gone\)\."):
        run.undrain("10.0.0.3")
    assert not run.calls


def test_undrain_of_a_node_that_ray_drains_says_that_ray_must_be_restarted_on_it(nodes: None) -> None:
    run = RecordingHandle()
    with pytest.raises(ConfigError, match=r"Ray itself drains node id2 .*cannot be undone.*`ray stop`"):
        run.undrain("id2")
    assert not run.calls
