"""How a worker ends, by what came out of the user's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from elastic_ddp import worker
from elastic_ddp.elastic.members import Member
from elastic_ddp.errors import WorkersLostError
from elastic_ddp.ray_train import Place
from elastic_ddp.run import Run
from tests.unit.alone import CPU, LOST_PEER, FakeLink, NewRun, link_of, prepared

Train = Callable[[Run], Any]


@pytest.fixture
def outcome_of(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> Callable[[Train], dict[str, Any]]:
    """What a worker with a training function says of the run's end."""
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(FakeLink, "end", lambda link, **outcome: said.append(outcome) or True, raising=False)
    monkeypatch.setattr(FakeLink, "close", lambda link: None, raising=False)
    monkeypatch.setattr(worker.signals, "on_sigterm", lambda act: None)
    monkeypatch.setattr(worker, "_make_deterministic", lambda config: None)
    member = Member(id="m", group="g", group_size=1, rank_in_group=0, node="203.0.113.1", node_id="n", pid=1)

    def end_of(train: Train) -> dict[str, Any]:
        run = new_run()
        job: Any = run._job
        object.__setattr__(job, "train", train)
        monkeypatch.setattr(worker, "RendezvousLink", lambda *_: link_of(run))
        monkeypatch.setattr(worker, "Run", lambda *_: run)
        worker.work(job, None, Place(member, CPU, {"CPU": 4.0}))
        (outcome,) = said
        return outcome

    return end_of


@pytest.mark.parametrize("call", [dist.get_rank, dist.barrier, lambda: dist.new_group([0])])
def test_a_collective_before_the_first_step_is_a_mistake_and_not_a_lost_peer(
    outcome_of: Callable[[Train], dict[str, Any]], call: Callable[[], Any]
) -> None:
    outcome = outcome_of(lambda run: call())
    assert outcome["status"] == "failed" and outcome["kind"] == "TrainFunctionError"
    assert "Before the first step there is no process group" in outcome["error"]
    assert "Traceback" in outcome["error"]


def test_a_lost_peer_that_the_training_function_lets_through_has_the_worker_replaced(
    outcome_of: Callable[[Train], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run) -> None:
        prepared(run)
        for _ in run.steps():
            monkeypatch.setattr(Run, "world_size", 2)
            raise dist.DistNetworkError(LOST_PEER)

    with pytest.raises(WorkersLostError, match="was left by an error of a lost peer"):
        outcome_of(train)
