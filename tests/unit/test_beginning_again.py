"""Training functions that begin again, and what a worker keeps of what it was before."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.elastic.messages import Prospect
from elastic_ddp.errors import ConfigError, StorageError, WorkersLostError
from elastic_ddp.generation import Generation
from elastic_ddp.parallel.process_group import Assignment
from elastic_ddp.participation import TrainAgain
from elastic_ddp.run import Run
from elastic_ddp.seeding import seed_all
from elastic_ddp.step import Step
from elastic_ddp.storage import Storage
from elastic_ddp.train_state import TrainState
from tests.unit.alone import LOST_PEER, FakeLink, Model, NewRun, link_of, prepared, train


def test_a_loop_that_ends_with_a_half_made_step_begins_again(new_run: NewRun) -> None:
    run = new_run()
    model = prepared(run)
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())
            step.optimize()
            raise dist.DistNetworkError(LOST_PEER)
        break
    with pytest.raises(TrainAgain):
        run._loop.finish()


def test_a_sharded_run_refuses_a_model_that_it_has_sharded_before(new_run: NewRun) -> None:
    run, module = new_run(strategy="fsdp", checkpoint={"every_steps": 1}), Model()
    link_of(run).is_again = False
    model = run.prepare(module)
    run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TrainAgain):
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    step.backward(model(batch["x"]).square().mean())
                if step.index == 2:
                    raise dist.DistNetworkError(LOST_PEER)
                step.optimize()
    again = Run(run._loop.again())
    with pytest.raises(
        ConfigError, match=r"is in shards already, .*; give it a new one, which the training function builds"
    ):
        again.prepare(module)
    again._loop.close(intact=False)


def train_until(run: Run, last: int, lose: Callable[[int], None], *, evaluates: str = "never") -> dict[str, Any]:
    """A loop that ends itself after a step. Begins again like a worker."""
    while True:
        seed_all(0, 0, "init")
        model = prepared(run)
        for step in run.steps():
            if evaluates == "before the block":
                run.evaluate(lambda *_: torch.zeros(()), "held-out")
            with step:
                for batch in step.micro_batches():
                    lose(step.index)
                    step.backward(model(batch["x"]).square().mean())
                step.optimize()
            if evaluates == "after the block":
                run.evaluate(lambda *_: torch.zeros(()), "held-out")
            if step.index == last:
                break
        try:
            ended = run._loop.finish()
        except TrainAgain:
            run = Run(run._loop.again())
        else:
            return ended
        finally:
            run._loop.close(intact=False)


def test_a_loop_that_ends_with_a_step_that_was_lost_makes_it_after_all(new_run: NewRun) -> None:
    lost: list[int] = []

    def lose_once(index: int) -> None:
        if index == 3 and not lost:
            lost.append(index)
            raise dist.DistNetworkError(LOST_PEER)

    run = new_run()
    link = link_of(run)
    ended = train_until(run, 3, lose_once)
    assert ended == train_until(new_run(folder="calm"), 3, lambda _: None) and ended["steps"] == 4
    assert lost == [3] and link.steps_of("resumed") == [3], "it went on from a commit of what it had"


@pytest.mark.parametrize("when", ["before the block", "after the block"])
def test_so_it_does_where_an_evaluation_comes_between(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    lost: list[int] = []

    def lose_once(index: int) -> None:
        if index == 3 and not lost and when == "after the block":
            lost.append(index)
            raise dist.DistNetworkError(LOST_PEER)

    def evaluate(*_: Any) -> float:
        if run.position.step == 3 and not lost and when == "before the block":
            lost.append(3)
            raise dist.DistNetworkError(LOST_PEER)
        return 0.1

    monkeypatch.setattr("elastic_ddp.run.evaluate", evaluate)
    run = new_run()
    ended = train_until(run, 3, lose_once, evaluates=when)
    assert lost == [3] and ended == train_until(new_run(folder="calm"), 3, lambda _: None)


@pytest.mark.parametrize("whom", ["a newcomer", "one that begins again"])
def test_a_loop_that_ends_with_a_step_that_others_are_at_is_begun_again(new_run: NewRun, whom: str) -> None:
    """A newcomer rehearses it, and has not trained; one that begins again has nothing to rehearse."""
    lost: list[int] = []

    def lose_once(index: int) -> None:
        if index == 3 and not lost and whom == "one that begins again":
            lost.append(index)
            link.others_train = others
            raise dist.DistNetworkError(LOST_PEER)

    run, others = new_run(), Prospect(rank=0, world_size=1, step=3)
    link = link_of(run)
    link.others_train = others if whom == "a newcomer" else None
    assert train_until(run, 3, lose_once) == train_until(new_run(folder="calm"), 3, lambda _: None)


def test_deaths_one_after_the_other_in_the_step_with_which_a_loop_ends_do_not_end_the_run(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[int] = []

    def join_others(link: FakeLink, **options: Any) -> Assignment:
        return replace(joins(link, **options), again=bool(link.losses[:-1]) and options["lost"] is None)

    def lose(index: int) -> None:
        if index == 3 and len(lost) < 5:
            lost.append(index)
            raise dist.DistNetworkError(LOST_PEER)

    joins = FakeLink.join
    monkeypatch.setattr(FakeLink, "join", join_others)
    assert train_until(new_run(), 3, lose)["steps"] == 4 and len(lost) == 5


def test_a_loop_that_ends_with_a_step_that_is_lost_every_time_ends_the_run(new_run: NewRun) -> None:
    lost: list[int] = []

    def lose(index: int) -> None:
        if index == 3:
            lost.append(index)
            raise dist.DistNetworkError(LOST_PEER)

    with pytest.raises(WorkersLostError, match="step 3 was lost 3 times in a row"):
        train_until(new_run(), 3, lose)
    assert lost == [3] * 3


def test_an_evaluation_that_a_sharded_run_loses_every_time_ends_the_run(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each time it begins again from its newest commit, makes steps and evaluates before."""
    monkeypatch.setattr("elastic_ddp.run.evaluate", lambda generation, job, loss_fn, *_: float(loss_fn(None, None)))
    run, made = new_run(strategy="fsdp", checkpoint={"every_steps": 2}), list[int]()

    def lose(*_: object) -> torch.Tensor:
        raise dist.DistNetworkError(LOST_PEER)

    def train_once() -> None:
        model = prepared(run)
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    step.backward(model(batch["x"]).square().mean())
                step.optimize()
            made.append(step.index)
            run._loop.commits.close(60)
            if step.index in (2, 4):
                run.evaluate(lose if step.index == 4 else lambda *_: torch.tensor(0.5), "held-out")

    with pytest.raises(WorkersLostError, match="'validation_loss' after 5 steps was lost 3 times in a row"):
        for _ in range(9):
            try:
                train_once()
            except TrainAgain:
                run = Run(run._loop.again())
    run._loop.close(intact=False)
    assert made == [0, 1, 2, 3, 4, 4, 4]


def test_deaths_one_after_the_other_in_a_step_do_not_end_a_run_that_evaluates_after_it(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ddp.run.evaluate", lambda *_: 0.1)
    run, lost = new_run(), []
    link_of(run).is_again = False  # it is another worker that dies each time
    model = prepared(run)
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                if step.index == 3 and len(lost) < 4:
                    lost.append(step.index)
                    raise dist.DistNetworkError(LOST_PEER)
                step.backward(model(batch["x"]).square().mean())
            step.optimize()
        run.evaluate(lambda *_: torch.zeros(()), "held-out")
    assert run._loop.finish()["steps"] == 6 and len(lost) == 4


@pytest.mark.parametrize("is_spread", [False, True], ids=["whole", "sharded"])
def test_a_generation_that_breaks_whenever_it_forms_ends_the_run(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, is_spread: bool
) -> None:
    """Also where the training function begins again each time."""

    def breaks(*_: Any, state: TrainState, **options: Any) -> None:
        state.layout = (lambda name: None) if is_spread else None
        raise dist.DistNetworkError(LOST_PEER)

    monkeypatch.setattr(Generation, "open", breaks)
    run = new_run()
    link = link_of(run)
    with pytest.raises(WorkersLostError, match="broke 10 times while it formed"):
        while True:
            try:
                train(run)
            except TrainAgain:
                run = Run(run._loop.again())
    assert len(link.joins) == 11


@pytest.mark.parametrize("times", [1, 12])
def test_a_save_that_fails_where_the_state_is_handed_on_is_no_end(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """In a brief generation, of a run below min_workers for example."""
    lost: list[int] = []

    def is_brief(link: FakeLink) -> bool:
        return 2 <= len(link.joins) < 2 + times

    def join_briefly(link: FakeLink, **options: Any) -> Assignment:
        return replace(joins(link, **options), brief=is_brief(link))

    def fail(storage: Storage, key: str, data: Any) -> None:
        if key.startswith("step=") and is_brief(link_of(run)):
            raise StorageError("no space left") from OSError(errno.ENOSPC, "no space left")
        write(storage, key, data)

    def lose_once(step: Step) -> None:
        if step.index == 3 and not lost:
            lost.append(step.index)
            raise dist.DistNetworkError(LOST_PEER)

    joins, write = FakeLink.join, Storage.write
    monkeypatch.setattr("elastic_ddp.commits.REST_S", 0.001)
    monkeypatch.setattr("elastic_ddp.commits.LONGEST_REST_S", 0.01)
    monkeypatch.setattr(FakeLink, "join", join_briefly)
    monkeypatch.setattr(Storage, "write", fail)
    run = new_run(checkpoint={"every_steps": 100})
    assert train(run, lose_once)["steps"] == 6
    assert link_of(run).steps_of("commit_failed") == [3] * times and len(link_of(run).joins) == 2 + times
