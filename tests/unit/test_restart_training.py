"""Training functions that begin again, and what a worker keeps of what it was before."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.distributed.process_group import Assignment
from elastic_ddp.errors import ConfigError, StorageError, WorkersFailedError
from elastic_ddp.rendezvous.messages import PlannedAssignment
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.generation import Generation, GenerationInputs
from elastic_ddp.worker.membership import RestartTraining
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.seeding import seed_all
from elastic_ddp.worker.step import Step
from tests.unit.single_worker import PEER_FAILURE, FakeClient, Model, NewRun, client_of, prepared, train


def test_a_loop_that_ends_with_a_half_made_step_begins_again(new_run: NewRun) -> None:
    run = new_run()
    model = prepared(run)
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())
            step.optimize()
            raise dist.DistNetworkError(PEER_FAILURE)
        break
    with pytest.raises(RestartTraining):
        run._loop.finish()


def test_a_sharded_run_refuses_a_model_that_it_has_sharded_before(new_run: NewRun) -> None:
    run, module = new_run(strategy="fsdp", checkpoint={"every_steps": 1}), Model()
    client_of(run).same_members = False
    model = run.prepare(module)
    run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RestartTraining):
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    step.backward(model(batch["x"]).square().mean())
                if step.index == 2:
                    raise dist.DistNetworkError(PEER_FAILURE)
                step.optimize()
    again = Run(run._loop.restart())
    with pytest.raises(ConfigError, match=r"already sharded: 0\.weight"):
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
        except RestartTraining:
            run = Run(run._loop.restart())
        else:
            return ended
        finally:
            run._loop.close(intact=False)


def test_a_loop_that_ends_with_a_step_that_was_lost_makes_it_after_all(new_run: NewRun) -> None:
    failure: list[int] = []

    def lose_once(index: int) -> None:
        if index == 3 and not failure:
            failure.append(index)
            raise dist.DistNetworkError(PEER_FAILURE)

    run = new_run()
    client = client_of(run)
    ended = train_until(run, 3, lose_once)
    assert ended == train_until(new_run(folder="calm"), 3, lambda _: None) and ended["steps"] == 4
    assert failure == [3] and client.steps_of("resumed") == [3], "it went on from a commit of what it had"


@pytest.mark.parametrize("when", ["before the block", "after the block"])
def test_so_it_does_where_an_evaluation_comes_between(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    failure: list[int] = []

    def lose_once(index: int) -> None:
        if index == 3 and not failure and when == "after the block":
            failure.append(index)
            raise dist.DistNetworkError(PEER_FAILURE)

    def evaluate(*_: Any) -> float:
        if run.position.step == 3 and not failure and when == "before the block":
            failure.append(3)
            raise dist.DistNetworkError(PEER_FAILURE)
        return 0.1

    monkeypatch.setattr("elastic_ddp.worker.run.evaluate", evaluate)
    run = new_run()
    ended = train_until(run, 3, lose_once, evaluates=when)
    assert failure == [3] and ended == train_until(new_run(folder="calm"), 3, lambda _: None)


@pytest.mark.parametrize("whom", ["a newcomer", "one that begins again"])
def test_a_loop_that_ends_with_a_step_that_others_are_at_is_begun_again(new_run: NewRun, whom: str) -> None:
    """A newcomer rehearses it, and has not trained; one that begins again has nothing to rehearse."""
    failure: list[int] = []

    def lose_once(index: int) -> None:
        if index == 3 and not failure and whom == "one that begins again":
            failure.append(index)
            client.planned_join = others
            raise dist.DistNetworkError(PEER_FAILURE)

    run, others = new_run(), PlannedAssignment(rank=0, world_size=1, step=3)
    client = client_of(run)
    client.planned_join = others if whom == "a newcomer" else None
    assert train_until(run, 3, lose_once) == train_until(new_run(folder="calm"), 3, lambda _: None)


def test_deaths_one_after_the_other_in_the_step_with_which_a_loop_ends_do_not_end_the_run(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure: list[int] = []

    def join_others(client: FakeClient, **options: Any) -> Assignment:
        return replace(joins(client, **options), same_members=bool(client.failures[:-1]) and options["failure"] is None)

    def lose(index: int) -> None:
        if index == 3 and len(failure) < 5:
            failure.append(index)
            raise dist.DistNetworkError(PEER_FAILURE)

    joins = FakeClient.join
    monkeypatch.setattr(FakeClient, "join", join_others)
    assert train_until(new_run(), 3, lose)["steps"] == 4 and len(failure) == 5


def test_a_loop_that_ends_with_a_step_that_is_lost_every_time_ends_the_run(new_run: NewRun) -> None:
    failure: list[int] = []

    def lose(index: int) -> None:
        if index == 3:
            failure.append(index)
            raise dist.DistNetworkError(PEER_FAILURE)

    with pytest.raises(WorkersFailedError, match="step 3 failed 3 times in a row"):
        train_until(new_run(), 3, lose)
    assert failure == [3] * 3


def test_an_evaluation_that_a_sharded_run_loses_every_time_ends_the_run(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each time it begins again from its newest commit, makes steps and evaluates before."""
    monkeypatch.setattr(
        "elastic_ddp.worker.run.evaluate", lambda generation, job, loss_fn, *_: float(loss_fn(None, None))
    )
    run, made = new_run(strategy="fsdp", checkpoint={"every_steps": 2}), list[int]()

    def lose(*_: object) -> torch.Tensor:
        raise dist.DistNetworkError(PEER_FAILURE)

    def train_once() -> None:
        model = prepared(run)
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    step.backward(model(batch["x"]).square().mean())
                step.optimize()
            made.append(step.index)
            run._loop.checkpointer.close(60)
            if step.index in (2, 4):
                run.evaluate(lose if step.index == 4 else lambda *_: torch.tensor(0.5), "held-out")

    with pytest.raises(WorkersFailedError, match="'validation_loss' after 5 steps failed 3 times in a row"):
        for _ in range(9):
            try:
                train_once()
            except RestartTraining:
                run = Run(run._loop.restart())
    run._loop.close(intact=False)
    assert made == [0, 1, 2, 3, 4, 4, 4]


def test_deaths_one_after_the_other_in_a_step_do_not_end_a_run_that_evaluates_after_it(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ddp.worker.run.evaluate", lambda *_: 0.1)
    run, failure = new_run(), []
    client_of(run).same_members = False  # it is another worker that dies each time
    model = prepared(run)
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                if step.index == 3 and len(failure) < 4:
                    failure.append(step.index)
                    raise dist.DistNetworkError(PEER_FAILURE)
                step.backward(model(batch["x"]).square().mean())
            step.optimize()
        run.evaluate(lambda *_: torch.zeros(()), "held-out")
    assert run._loop.finish()["steps"] == 6 and len(failure) == 4


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
def test_a_generation_that_breaks_whenever_it_forms_ends_the_run(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, is_sharded: bool
) -> None:
    """Also where the training function begins again each time."""

    def breaks(inputs: GenerationInputs, *_: Any) -> None:
        inputs.state.layout = (lambda name: None) if is_sharded else None
        raise dist.DistNetworkError(PEER_FAILURE)

    monkeypatch.setattr(Generation, "open", breaks)
    run = new_run()
    client = client_of(run)
    with pytest.raises(WorkersFailedError, match="failed to form 10 times in a row"):
        while True:
            try:
                train(run)
            except RestartTraining:
                run = Run(run._loop.restart())
    assert len(client.joins) == 11


@pytest.mark.parametrize("times", [1, 12])
def test_a_save_that_fails_where_the_state_is_handed_on_is_no_end(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """In a brief generation, of a run below min_workers for example."""
    failure: list[int] = []

    def is_brief(client: FakeClient) -> bool:
        return 2 <= len(client.joins) < 2 + times

    def join_briefly(client: FakeClient, **options: Any) -> Assignment:
        return replace(joins(client, **options), handover_only=is_brief(client))

    def fail(storage: Storage, key: str, data: Any) -> None:
        if key.startswith("step=") and is_brief(client_of(run)):
            raise StorageError("no space left") from OSError(errno.ENOSPC, "no space left")
        write(storage, key, data)

    def lose_once(step: Step) -> None:
        if step.index == 3 and not failure:
            failure.append(step.index)
            raise dist.DistNetworkError(PEER_FAILURE)

    joins, write = FakeClient.join, Storage.write
    monkeypatch.setattr("elastic_ddp.worker.commit_schedule.SAVE_BACKOFF_S", 0.001)
    monkeypatch.setattr("elastic_ddp.worker.commit_schedule.MAX_SAVE_BACKOFF_S", 0.01)
    monkeypatch.setattr(FakeClient, "join", join_briefly)
    monkeypatch.setattr(Storage, "write", fail)
    run = new_run(checkpoint={"every_steps": 100})
    assert train(run, lose_once)["steps"] == 6
    assert client_of(run).steps_of("commit_failed") == [3] * times and len(client_of(run).joins) == 2 + times
