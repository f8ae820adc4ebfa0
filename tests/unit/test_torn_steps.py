"""A peer that is lost where a step changes the state: two workers, of which one may have made the step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.process_group import Assignment, ProcessGroup
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import Job
from elastic_ddp.worker.loop import Loop
from elastic_ddp.worker.run import Run
from tests.ranks import run_ranks
from tests.unit.single_worker import CPU, PEER_FAILURE, FakeClient, FakeFeed, FakeIndex, Place, train_and_count

Where = Place | Literal["both"]
"""In which collective: the optimizer's, one after it, or on one rank in this and on the other in that."""
LOST_IN = 3
STEPS = 6


class LinkOfTwo(FakeClient):
    """The rendezvous of a worker that trains with another, who knows how far that one is."""

    def __init__(self, group: ProcessGroup, others: list[int | None]) -> None:
        super().__init__(group.assignment.store_port)
        self._here, self._others = group.assignment, others

    def join(self, **arguments: Any) -> Assignment:
        assignment = super().join(**arguments)
        number = len(self.joins)
        mine, theirs = arguments["step"], self._others[number - 1]
        steps = [mine, theirs] if self._here.rank == 0 else [theirs, mine]
        newest = max((each for each in steps if each is not None), default=None)
        return replace(
            assignment,
            generation=self._here.generation + number,
            rank=self._here.rank,
            world_size=2,
            source=None if newest is None else steps.index(newest),
            receivers=tuple(rank for rank, each in enumerate(steps) if each is None or each != newest),
            first_step=newest,
        )


def train(group: ProcessGroup, folder: Path, where: Where | None, loser: int) -> dict[str, Any]:
    """With a communicating optimizer, and a collective after it perhaps; one rank loses the other in one of them."""
    with mock.patch("elastic_ddp.worker.generation.MicroBatchFeed", FakeFeed):
        return _train(group, folder, where, loser)


def _train(group: ProcessGroup, folder: Path, where: Where | None, loser: int) -> dict[str, Any]:
    group.barrier()
    group.close(intact=True)
    others = [None, LOST_IN + 1] if group.rank == loser and where != "both" else [None, None]
    index: Any = FakeIndex(80)
    client: Any = LinkOfTwo(group, others)
    config = RunConfig(
        name="test", storage=str(folder), steps=STEPS, global_batch_size=8, micro_batch_size=2, max_workers=2
    )
    job = Job(
        config=config, train=lambda run: None, index=index, transform=None, storage=Storage(folder).at(str(where))
    )
    failure: list[int] = []

    def communicate(place: Place, step: int) -> None:
        if (place, where) == ("block", "optimizer"):  # or the other would not make the step either
            return
        dist.all_reduce(torch.zeros(1))
        breaks_in = "optimizer" if where == "both" else where
        if (place, step, group.rank) == (breaks_in, LOST_IN, loser) and not failure:
            failure.append(step)
            raise dist.DistNetworkError(PEER_FAILURE)

    ended, counted = train_and_count(Run(Loop(job, client, CPU)), communicate, seed=group.rank)
    return {**ended, "counted": counted, "joins": client.joins, "lost": failure}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How the run ends where nobody is lost."""
    first, second = run_ranks(2, train, tmp_path_factory.mktemp("calm"), None, 0)
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["joins"] == [(None, True)] and first["counted"] == list(range(STEPS))
    return first


@pytest.mark.parametrize("loser", [0, 1])
@pytest.mark.parametrize("where", ["optimizer", "block"])
def test_a_worker_that_is_left_with_half_a_step_gets_the_state_of_one_that_has_made_it(
    tmp_path: Path, calm: dict[str, Any], where: Place, loser: int
) -> None:
    every = run_ranks(2, train, tmp_path, where, loser)
    assert every[loser]["lost"] == [LOST_IN]
    for each in every:
        assert (each["weights_sha256"], each["counted"]) == (calm["weights_sha256"], calm["counted"])
        assert each["samples_sha256"] == calm["samples_sha256"]
    assert [each["joins"][1] for each in every][loser] == (None, True)
    assert [each["joins"][1] for each in every][1 - loser] == (LOST_IN + 1, True)


def test_workers_that_are_all_left_with_half_a_step_go_back(tmp_path: Path, calm: dict[str, Any]) -> None:
    for each in run_ranks(2, train, tmp_path, "both", 0):
        assert (each["weights_sha256"], each["counted"]) == (calm["weights_sha256"], calm["counted"])
        assert each["samples_sha256"] == calm["samples_sha256"]
        assert each["joins"] == [(None, True)] * 2
