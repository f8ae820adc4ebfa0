"""`RunHandle` checks arguments before it calls the run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import ray

from elastic_ddp.driver import run_handle
from elastic_ddp.driver.run_handle import RunHandle
from elastic_ddp.errors import ConfigError, ElasticDDPError


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


FIGURES = {"first_step": 8, "num_steps": 5, "ended_early": None, "trace": "profiles/t/rank-0.json.gz"}


class ProfiledHandle(RunHandle):
    """A handle of a run with two ranks, of which rank 1 does not answer."""

    def __init__(self, answers: Any = None, request: Any = 7) -> None:
        super().__init__("live", None)
        self.calls: list[tuple[Any, ...]] = []
        worker = {"node": "10.0.0.1", "pid": 1, "id": "a"}
        self._request = request
        self._given = answers or [{"rank": 0, **worker, "answer": FIGURES}, {"rank": 1, **worker, "answer": None}]

    def _call(self, method: str, *arguments: Any) -> Any:
        if method == "status":
            return {"members": [{"rank": 0}, {"rank": 1}], "driver": {"uri": "s3://runs/live"}}
        self.calls.append((method, *arguments))
        return self._request if method == "request_profile" else self._given


@pytest.mark.parametrize("num_steps", [0, -1, 21, 2.5, True, "5"])
def test_profile_refuses_a_number_of_steps_out_of_range(num_steps: Any) -> None:
    run = ProfiledHandle()
    with pytest.raises(ConfigError, match=r"num_steps=.* is not an int from 1 to 20"):
        run.profile(num_steps=num_steps)
    assert not run.calls


@pytest.mark.parametrize("ranks", [[0, 2], [-1], [], [1, 1]])
def test_profile_refuses_ranks_that_the_run_does_not_have(ranks: list[int]) -> None:
    run = ProfiledHandle()
    with pytest.raises(ConfigError, match=r"ranks=.* are not different ranks of run 'live'\. Its ranks are now: 0, 1"):
        run.profile(ranks=ranks)
    assert not run.calls


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.inf, math.nan])
def test_profile_refuses_a_timeout_out_of_range(timeout_s: float) -> None:
    run = ProfiledHandle()
    with pytest.raises(ConfigError, match=r"timeout_s="):
        run.profile(timeout_s=timeout_s)
    assert not run.calls


def test_profile_returns_after_the_timeout_with_the_ranks_that_have_answered() -> None:
    run = ProfiledHandle()
    facts = run.profile(num_steps=3, ranks=[0, 1], memory=True, timeout_s=0.1)
    assert run.calls[0] == ("request_profile", [0, 1], 3, True)
    assert facts["uri"] == "s3://runs/live" and "answer" not in facts["ranks"][0]
    assert facts["ranks"][0]["trace"] == FIGURES["trace"]
    assert "no trace within 0.1 s" in facts["ranks"][1]["error"]


def test_profile_of_a_run_that_does_not_train_says_so() -> None:
    run = ProfiledHandle(request="it does not train at the moment")
    with pytest.raises(ElasticDDPError, match="cannot be profiled: it does not train at the moment"):
        run.profile()
