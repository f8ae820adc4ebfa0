"""A peer that fails while a step changes the state: on two workers, one of which may have done the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.rendezvous.members import JoinRequest
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import Job
from elastic_ddp.worker.loop import Loop
from elastic_ddp.worker.run import Run
from tests.ranks import run_ranks
from tests.unit.single_worker import (
    CPU,
    PEER_FAILURE,
    FakeClient,
    FakeFeed,
    FakeIndex,
    Place,
    client_of,
    train_and_count,
)

Where = Place | Literal["both"]
"""The collective in which a peer fails: the optimizer's, one after it, or the optimizer's on both ranks."""
FAILS_IN = 3
STEPS = 6


class ClientOfTwo(FakeClient):
    """The client of one of two workers. `others` has the steps with which the other one joins."""

    def __init__(self, group: ProcessGroup, others: Sequence[int | None]) -> None:
        super().__init__(group.assignment.store_port)
        self._own = group.assignment
        self._others = others

    def join(self, request: JoinRequest, **facts: Any) -> Assignment:
        assignment = super().join(request, **facts)
        number = len(self.joins)
        own, other = request.step, self._others[number - 1]
        steps = [own, other] if self._own.rank == 0 else [other, own]
        newest = max((step for step in steps if step is not None), default=None)
        return replace(
            assignment,
            generation=self._own.generation + number,
            rank=self._own.rank,
            world_size=2,
            source=None if newest is None else steps.index(newest),
            receivers=tuple(rank for rank, step in enumerate(steps) if step is None or step != newest),
            first_step=newest,
        )


@contextmanager
def run_of_two(group: ProcessGroup, folder: Path, steps: int, others: Sequence[int | None] = (None,)) -> Iterator[Run]:
    """A run on one of two ranks, which forms process groups of its own. `others` as in `ClientOfTwo`."""
    group.barrier()
    group.close(intact=True)
    client: Any = ClientOfTwo(group, others)
    index: Any = FakeIndex(80)
    settings: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 2, "max_workers": 2}
    config = RunConfig(name="test", storage=str(folder), steps=steps, **settings)
    job = Job(config=config, train=lambda run: None, index=index, transform=None, storage=Storage(folder))
    with mock.patch("elastic_ddp.worker.generation.MicroBatchFeed", FakeFeed):
        yield Run(Loop(job, client, CPU))


def train(group: ProcessGroup, folder: Path, where: Where | None, failing: int) -> dict[str, Any]:
    """Trains with collectives in the optimizer and after it. One of them fails once, on rank `failing`."""
    others = [None, FAILS_IN + 1] if group.rank == failing and where != "both" else [None, None]
    failed: list[int] = []

    def communicate(place: Place, step: int) -> None:
        if (place, where) == ("block", "optimizer"):  # otherwise the other rank would not do the step either
            return
        dist.all_reduce(torch.zeros(1))
        breaks_in = "optimizer" if where == "both" else where
        if (place, step, group.rank) == (breaks_in, FAILS_IN, failing) and not failed:
            failed.append(step)
            raise dist.DistNetworkError(PEER_FAILURE)

    with run_of_two(group, folder, STEPS, others) as run:
        outcome, counted = train_and_count(run, communicate, seed=group.rank)
    return {**outcome, "counted": counted, "joins": client_of(run).joins, "failed": failed}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of a run without failures."""
    first, second = run_ranks(2, train, tmp_path_factory.mktemp("undisturbed"), None, 0)
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["joins"] == [(None, True)] and first["counted"] == list(range(STEPS))
    return first


@pytest.mark.parametrize(("where", "failing"), [("optimizer", 1), ("block", 0)])
def test_a_worker_with_a_torn_step_receives_the_state_of_a_peer_that_did_the_step(
    tmp_path: Path, undisturbed: dict[str, Any], where: Place, failing: int
) -> None:
    results = run_ranks(2, train, tmp_path, where, failing)
    assert results[failing]["failed"] == [FAILS_IN]
    for result in results:
        assert (result["weights_sha256"], result["counted"]) == (undisturbed["weights_sha256"], undisturbed["counted"])
        assert result["samples_sha256"] == undisturbed["samples_sha256"]
    assert results[failing]["joins"][1] == (None, True)
    assert results[1 - failing]["joins"][1] == (FAILS_IN + 1, True)


def test_workers_that_all_have_a_torn_step_resume_from_the_newest_commit(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    for result in run_ranks(2, train, tmp_path, "both", 0):
        assert (result["weights_sha256"], result["counted"]) == (undisturbed["weights_sha256"], undisturbed["counted"])
        assert result["samples_sha256"] == undisturbed["samples_sha256"]
        assert result["joins"] == [(None, True)] * 2
