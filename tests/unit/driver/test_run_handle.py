"""`RunHandle` checks arguments before it calls the run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import ray

from elastic_ddp.driver import run_handle
from elastic_ddp.driver.run_handle import RunHandle
from elastic_ddp.errors import ConfigError, ElasticDDPError

FIGURES = {"first_step": 8, "num_steps": 5, "ended_early": None, "trace": "profiles/t/rank-0.json.gz"}


class RecordingHandle(RunHandle):
    """A handle of a run with two ranks, of which rank 1 does not answer. Its calls are recorded."""

    def __init__(self, request: Any = 7) -> None:
        super().__init__("live", None)
        self.calls: list[tuple[Any, ...]] = []
        self._request = request

    def _call(self, method: str, *arguments: Any) -> Any:
        if method == "status":
            of_nodes = {"draining": ["id1", "id2", "gone"], "driver": {"uri": "s3://runs/live"}}
            return {"min_workers": 1, "max_workers": 4, "members": [{"rank": 0}, {"rank": 1}], **of_nodes}
        self.calls.append((method, *arguments))
        worker = {"node": "10.0.0.1", "pid": 1, "id": "a"}
        answers = [{"rank": 0, **worker, "answer": FIGURES}, {"rank": 1, **worker, "answer": None}]
        return self._request if method == "request_profile" else answers


BAD_CALLS: list[tuple[str, dict[str, Any], str]] = [
    *(("resize", {"num_workers": number}, r"num_workers=.* is not an int") for number in (2.5, True, "2", None)),
    *(("resize", {"num_workers": n}, rf"num_workers={n} .*min_workers=1.*max_workers=4") for n in (0, 5)),
    *(("drain", {"node": "a", "deadline_s": seconds}, "deadline_s=") for seconds in (0, math.inf, math.nan)),
    *(("profile", {"num_steps": number}, r"num_steps=.* is not an int from 1 to 20") for number in (0, 21, 2.5, True)),
    *(("profile", {"ranks": ranks}, r"not different ranks of run 'live'\. .*: 0, 1") for ranks in ([0, 2], [], [1, 1])),
    *(("profile", {"timeout_s": seconds}, "timeout_s=") for seconds in (0, math.inf, math.nan)),
]


@pytest.mark.parametrize(("method", "arguments", "message"), BAD_CALLS, ids=str)
def test_an_argument_of_the_wrong_type_or_out_of_range_is_refused_before_the_run_is_called(
    method: str, arguments: dict[str, Any], message: str
) -> None:
    run = RecordingHandle()
    with pytest.raises(ConfigError, match=message):
        getattr(run, method)(**arguments)
    assert not run.calls


def test_resize_passes_the_number_of_workers_on() -> None:
    run = RecordingHandle()
    run.resize(3)
    assert run.calls == [("resize", 3)]


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


def test_profile_returns_after_the_timeout_with_the_ranks_that_have_answered() -> None:
    run = RecordingHandle()
    facts = run.profile(num_steps=3, ranks=[0, 1], memory=True, timeout_s=0.1)
    assert run.calls[0] == ("request_profile", [0, 1], 3, True)
    assert facts["uri"] == "s3://runs/live" and "answer" not in facts["ranks"][0]
    assert facts["ranks"][0]["trace"] == FIGURES["trace"]
    assert "no trace within 0.1 s" in facts["ranks"][1]["error"]


def test_profile_of_a_run_that_does_not_train_says_so() -> None:
    run = RecordingHandle(request="it does not train at the moment")
    with pytest.raises(ElasticDDPError, match="cannot be profiled: it does not train at the moment"):
        run.profile()
