"""Mistakes that were made once: what a review found, one test each."""

from __future__ import annotations

import collections
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.buffer_sync import StepBuffers
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.distributed.reduction_tree import micro_batch_ranges
from elastic_ddp.driver.trainer import ElasticTrainer
from elastic_ddp.errors import ConfigError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker import loop as loop_module
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.train_state import TrainState
from tests.ranks import run_ranks
from tests.unit.single_worker import CPU, PEER_FAILURE, Model, NewRun, client_of, prepared
from tests.unit.test_run_api import Scripted, load_error, state_of


def test_a_model_that_is_called_past_the_prepared_one_is_refused(new_run: NewRun) -> None:
    """Silently trains on the last micro-batch's gradient alone (and unreduced at W > 1)."""
    for how in ("method", "raw"):

        class Net(torch.nn.Linear):
            def loss(self, x: torch.Tensor) -> torch.Tensor:
                return self(x).square().mean()

        r = new_run(folder=how)
        net = Net(3, 1)
        model: Any = r.prepare(net)
        r.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ConfigError):
            for step in r.steps():
                with step:
                    for batch in step.micro_batches():
                        step.backward(model.loss(batch["x"]) if how == "method" else net(batch["x"]).square().mean())
                    step.optimize()


def test_the_last_step_is_committed_when_the_connection_breaks_right_after_it(
    new_run: NewRun, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    r, gather = new_run(), loop_module.gather_metrics

    def lose_the_last(group: Any, step: Step, rows: Any) -> Any:
        if step.index == 5:
            raise dist.DistNetworkError(PEER_FAILURE)
        return gather(group, step, rows)

    monkeypatch.setattr(loop_module, "gather_metrics", lose_the_last)
    model = prepared(r)
    for step in r.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())
            step.optimize()
    assert r._loop.finish()["steps"] == 6
    assert client_of(r).joins == [(None, True), (6, True)]
    assert client_of(r).steps_of("commit") == [6]
    assert CheckpointStore(Storage(tmp_path / "run").at(COMMITS), keep=1).latest() is not None


def test_setting_an_attribute_reaches_the_users_model() -> None:
    model: Any = PreparedModel(Scripted(), device=CPU, bf16=False)
    model.vocabulary = ["c"]
    assert model.module.vocabulary == ["c"]


def test_names_of_parameters_are_the_users() -> None:
    model = PreparedModel(Scripted(), device=CPU, bf16=False)
    assert [name for name, _ in model.named_parameters()] == ["layer.weight", "layer.bias"]


def test_state_of_another_kind_of_optimizer_is_refused() -> None:
    """Today: KeyError 'betas' in the first optimizer.step(), reported as an error of the training function."""
    load_error(state_of(Model()), state_of(Model(), kind=torch.optim.SGD))


def test_bf16_outputs_in_a_named_tuple_come_back_as_fp32() -> None:
    Output = collections.namedtuple("Output", "logits")
    model = PreparedModel(Scripted(lambda y: Output(y)), device=CPU, bf16=True)
    assert model(torch.ones(1, 2)).logits.dtype == torch.float32


def test_bf16_outputs_in_a_defaultdict_come_back_as_fp32() -> None:
    model = PreparedModel(Scripted(lambda y: collections.defaultdict(list, y=y)), device=CPU, bf16=True)
    assert model(torch.ones(1, 2))["y"].dtype == torch.float32


class Buffered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.ones(3, dtype=torch.int16))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("lowest", torch.tensor([float("inf")]))


def combine_int16(group: Any) -> list[int]:
    model = Buffered()
    buffers = StepBuffers(model)
    buffers.begin()
    model.mean.add_(1)
    model.number.add_(1)
    buffers.end_micro_batch(group.rank, 1.0)
    buffers.combine(ranges=micro_batch_ranges(2, 2), num_leaves=2, divisor=2.0, group=group)
    return model.number.tolist()


def test_a_buffer_of_a_type_that_gloo_does_not_know_is_combined() -> None:
    assert run_ranks(2, combine_int16) == [[2, 2, 2], [2, 2, 2]]


def test_a_folder_given_as_configuration_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError):
        RunConfig.load(tmp_path)


@pytest.mark.parametrize("key", ["collective_timeout_s", "clip_grad_norm", "resize_interval_s"])
def test_infinite_numbers_are_refused(key: str) -> None:
    """timedelta(seconds=inf) raises OverflowError in the workers."""
    with pytest.raises(ConfigError):
        RunConfig(name="a", storage="s", steps=1, global_batch_size=1, micro_batch_size=1, **{key: float("inf")})


def test_buffers_that_are_not_persistent_are_part_of_the_state() -> None:
    class Net(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.register_buffer("seen", torch.zeros(2), persistent=False)

    def state() -> TrainState:
        return TrainState(model=PreparedModel(Net(), device=CPU, bf16=False))

    first, second = state(), state()
    first.module.seen.fill_(7.0)
    assert first.weights_sha256() != second.weights_sha256()
    second.load_state_dict(first.state_dict())
    assert first.weights_sha256() == second.weights_sha256()


def test_a_training_function_that_cannot_be_sent_is_refused_by_name(tmp_path: Any) -> None:
    lock = threading.Lock()

    def train(run: Any) -> None:
        lock.acquire()

    settings = {"name": "a", "storage": str(tmp_path), "steps": 1, "global_batch_size": 1, "micro_batch_size": 1}
    with pytest.raises(ConfigError, match=r"train.*cannot be sent to workers because of <unlocked _thread.lock"):
        ElasticTrainer(train, "data", settings)


def caught(step: Step, model: PreparedModel, error: Exception | None = None) -> None:
    """A user's function that goes on whatever backward says."""
    for place, batch in enumerate(step.micro_batches()):
        loss = model(batch["x"]).mean()
        if place == 1:
            loss.register_hook(lambda gradient: fail(error or MemoryError("no memory")))
        with suppress(Exception):
            step.backward(loss)
    step.optimize()


def fail(error: Exception) -> None:
    raise error


def test_a_backward_whose_error_the_user_catches_makes_no_step(new_run: NewRun) -> None:
    """It left a micro-batch's gradients out, and hashes of samples that were in it."""
    run = new_run()
    model = prepared(run)
    with pytest.raises(ConfigError, match=r"step 0: .*MemoryError: no memory"):
        for step in run.steps():
            with step:
                caught(step, model)
    assert run.position.step == 0


def test_a_lost_peer_that_the_user_catches_is_lost_all_the_same(new_run: NewRun) -> None:
    run = new_run(steps=2)
    model = prepared(run)
    failure = []
    for step in run.steps():
        with step:
            if not failure:
                failure.append(step.index)
                caught(step, model, dist.DistNetworkError(PEER_FAILURE))
            else:
                for batch in step.micro_batches():
                    step.backward(model(batch["x"]).mean())
                step.optimize()
    assert run.position.step == 2
    assert client_of(run).joins == [(None, True), (0, True)]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.SyncBatchNorm(3)),
            "got a SyncBatchNorm, whose statistics",
        ),
        (torch.nn.EmbeddingBag(3, 3, sparse=True), r"got an EmbeddingBag\(sparse=True\)"),
        (torch.nn.Linear(3, 3, dtype=torch.complex64), "got complex parameters: weight, bias"),
    ],
)
def test_models_that_cannot_be_reduced_are_refused(new_run: NewRun, model: torch.nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        new_run().prepare(model)


def test_a_scheduler_that_is_prepared_twice_is_refused(new_run: NewRun) -> None:
    """It would step twice."""
    run = new_run()
    optimizer = run.prepare(torch.optim.SGD(run.prepare(torch.nn.Linear(3, 1)).parameters()))
    scheduler = run.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(ConfigError, match="the same StepLR twice"):
        run.prepare(scheduler)


def test_an_array_is_logged_as_one_number_only(new_run: NewRun) -> None:
    run = new_run()
    prepared(run)
    step = next(iter(run.steps()))
    step.log(one=np.ones(1))
    with pytest.raises(ConfigError, match=r"step.log got many of shape \(3,\)"):
        step.log(many=np.zeros(3))


def test_storage_in_the_memory_of_one_process_is_refused() -> None:
    config = {"name": "a", "storage": "memory://a", "steps": 1, "global_batch_size": 1, "micro_batch_size": 1}
    with pytest.raises(ConfigError, match="every worker would have its own"):
        ElasticTrainer(lambda run: None, "data", config)
