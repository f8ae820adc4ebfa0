"""The warm-up step of a worker that joins while others train."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist

from elastic_ddp.errors import ConfigError
from elastic_ddp.rendezvous.messages import PlannedAssignment
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from tests.unit.single_worker import NewRun, client_of, evaluate, prepared, train


@pytest.fixture
def newcomer(new_run: NewRun) -> Run:
    """A run whose only worker expects to join two others at step 4."""
    run = new_run(folder="newcomer")
    client_of(run).planned_join = PlannedAssignment(rank=2, world_size=3, step=4)
    return run


def test_a_newcomer_computes_one_micro_batch_alone_before_it_joins(newcomer: Run) -> None:
    run, forwards, done = newcomer, list[tuple[int, int, int, int]](), list[int]()
    model = prepared(run)
    model.register_forward_pre_hook(
        lambda *_: forwards.append((len(client_of(run).joins), run.position.step, run.rank, run.world_size))
    )
    for step in run.steps():
        if not forwards:
            assert math.isnan(evaluate(run)), "the other ranks do not evaluate now"
            with pytest.raises(ConfigError, match=r"run\.register"):
                run.register("late", model)
            assert (step.index, step.epoch) == (4, 0) and math.isnan(step.loss)
        with step:
            for batch in step.micro_batches():
                loss = model(batch["x"]).square().mean()
                step.log(twice=2 * loss)
                step.backward(loss)
                batch["x"].zero_()
            step.optimize()
            done.append(step.index)
    assert forwards[0] == (0, 0, 2, 3) and forwards[1] == (1, 0, 0, 1)
    assert done == [0, 1, 2, 3, 4, 5]


def test_a_warmup_step_does_not_change_the_result(new_run: NewRun, newcomer: Run) -> None:
    warmed_up = train(newcomer)
    plain = train(new_run(folder="plain"))
    assert warmed_up["weights_sha256"] == plain["weights_sha256"]
    assert warmed_up["samples_sha256"] == plain["samples_sha256"]


def test_an_error_in_a_warmup_step_is_raised_before_the_worker_joins(newcomer: Run) -> None:
    prepared(newcomer)
    with pytest.raises(ZeroDivisionError):
        for step in newcomer.steps():
            with step:
                for _ in step.micro_batches():
                    raise ZeroDivisionError("in the training function")
    assert not client_of(newcomer).joins


def test_a_collective_of_the_training_function_ends_only_the_warmup_step(newcomer: Run) -> None:
    sizes = []

    def communicate(step: Step) -> None:
        sizes.append(dist.get_world_size())

    assert train(newcomer, communicate)["steps"] == 6
    assert sizes == [1] * 6
