"""State that training code updates once per step, from rows of the global batch: MoCo, EMA, and a VQ codebook."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.data.order import EpochShape
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.tensors.state_tree import weights_sha256
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.step_plan import StepPlan
from elastic_ddp.worker.train_state import TrainState
from tests.inside_run import finish
from tests.ranks import run_ranks
from tests.unit.rank_steps import open_generation
from tests.unit.single_worker import CPU, NewRun, PeerFailures, restarting


class MoCo(nn.Module):
    """A momentum encoder gives the keys; a queue holds those of the steps before."""

    def __init__(self, num_keys: int = 32, width: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, width)
        self.momentum_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(num_keys, width)))
        self.register_buffer("end", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        queries, keys = F.normalize(self.encoder(x)), F.normalize(self.momentum_encoder(x))
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.T], 1)
        return F.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long)), {"keys": keys}

    @torch.no_grad()
    def update(self, keys: torch.Tensor) -> None:
        self.queue[(self.end + torch.arange(len(keys))) % len(self.queue)] = keys
        self.end.add_(len(keys)).remainder_(len(self.queue))
        self.seen.add_(len(keys))
        for average, newest in zip(self.momentum_encoder.parameters(), self.encoder.parameters(), strict=True):
            average.lerp_(newest, 0.1)


class Codebook(nn.Module):
    """An autoencoder whose codes are moving averages of what they stand for, as in VQ-VAE."""

    def __init__(self, num_codes: int = 5, width: int = 4) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, width), nn.Linear(width, 3)
        self.register_buffer("codes", torch.randn(num_codes, width))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(num_codes))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        vectors = self.encoder(x)
        chosen = torch.cdist(vectors, self.codes).argmin(1)
        quantized = vectors + (self.codes[chosen] - vectors).detach()
        return F.mse_loss(self.decoder(quantized), x), {"vectors": vectors, "chosen": chosen.to(torch.int16)}

    @torch.no_grad()
    def update(self, vectors: torch.Tensor, chosen: torch.Tensor) -> None:
        members = F.one_hot(chosen.long(), len(self.codes)).to(vectors.dtype)
        self.counts.lerp_(members.sum(0), 0.1)
        self.sums.lerp_(members.T @ vectors, 0.1)
        self.codes.copy_(self.sums / self.counts[:, None])
        dead = torch.rand(len(self.codes)) < 0.2  # restarts a code now and then, by chance
        self.codes[dead] = vectors[torch.randint(len(vectors), (int(dead.sum()),))]


MODELS: dict[str, type[Any]] = {"MoCo": MoCo, "codebook": Codebook}
NUM_ROWS = 31
"""The last step of an epoch of 31 rows has 7 of 12, in four of its six micro-batches."""


def train_on(group: ProcessGroup, name: str) -> tuple[str, dict[str, list[float]]]:
    """Trains for two epochs on the ranks of a group. Returns the hash of all state, and the buffers."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"steps": 6, "global_batch_size": 12, "micro_batch_size": 2}
    config = RunConfig(name="test", storage="memory://test", **settings)
    model = MODELS[name]()
    state = TrainState(model=PreparedModel(model, device=CPU, bf16=False))
    state.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    shape = EpochShape(NUM_ROWS, config.num_micro_batches, config.micro_batch_size)
    generation = open_generation(group, config, state, shape)
    for index in range(6):
        step = Step(StepPlan(generation, shape.rows(index)), shape.epoch_of(index))
        with step:
            for batch in step.micro_batches():
                loss, rows = model(batch["x"])
                step.gather(**rows)
                step.backward(loss)
            step.optimize()
            model.update(**step.gathered)
    generation.strategy.close()
    return state.weights_sha256(), {name: buffer.flatten().tolist() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("name", MODELS)
def test_updates_from_gathered_rows_have_the_same_bits_at_every_world_size(name: str) -> None:
    [expected] = run_ranks(1, train_on, name)
    for world_size in (2, 5):
        assert run_ranks(world_size, train_on, name) == [expected] * world_size
    if name == "MoCo":
        _, buffers = expected
        assert buffers["seen"] == [2 * NUM_ROWS] and buffers["end"] == [2 * NUM_ROWS % 32]
        assert torch.tensor(buffers["queue"]).view(-1, 4).norm(dim=1).allclose(torch.ones(32))


def train(run: Run, name: str, fail: Callable[[Any], None] = lambda place: None) -> tuple[str, str]:
    """A training function that also averages the model. Returns the hashes of both."""
    torch.manual_seed(0)
    model: Any = run.prepare(MODELS[name]())
    run.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    run.register("average", average)
    for step in run.steps():
        with step:
            for place, batch in enumerate(step.micro_batches()):
                loss, rows = model(batch["x"])
                step.gather(**rows)
                fail(("loop", step.index, place))
                step.backward(loss)
            step.optimize()
            model.update(**step.gathered)
            fail(("update", step.index))
            average.update_parameters(model)
    return finish(run)["weights_sha256"], weights_sha256(average.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_updates_have_the_same_bits_after_a_step_is_repeated_and_a_resume(new_run: NewRun, name: str) -> None:
    expected = train(new_run(num_rows=NUM_ROWS), name)
    for fault in (("loop", 3, 2), ("update", 3)):
        run = new_run(num_rows=NUM_ROWS, folder=fault[0], checkpoint={"every_steps": 2})
        assert restarting(run, partial(train, name=name, fail=PeerFailures(fault))) == expected
    train(new_run(num_rows=NUM_ROWS, folder="resumed", steps=4), name)
    assert train(new_run(num_rows=NUM_ROWS, folder="resumed"), name) == expected


def on_one_worker(new_run: NewRun, model: nn.Module, body: Callable[[Step, Any], None]) -> Step:
    """Runs `body(step, model)` in the block of a step."""
    run = new_run()
    run.prepare(model)
    run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = next(run.steps())
    with step:
        body(step, model)
    return step


def test_gathered_rows_are_in_the_order_of_the_micro_batches(new_run: NewRun) -> None:
    rows = []

    def body(step: Step, model: Any) -> None:
        for batch in step.micro_batches():
            rows.append(batch["x"])
            step.gather(x=batch["x"], is_positive=batch["x"][:, 0] > 0)
            step.backward(model(batch["x"]).mean())
        step.optimize()

    step = on_one_worker(new_run, nn.Linear(3, 1), body)
    assert torch.equal(step.gathered["x"], torch.cat(rows))
    assert torch.equal(step.gathered["is_positive"], torch.cat(rows)[:, 0] > 0)


def after_backward(step: Step, x: torch.Tensor, loss: torch.Tensor) -> None:
    step.backward(loss)
    step.gather(x=x)


WRONG_GATHERS: dict[str, tuple[Callable[[Step, torch.Tensor, torch.Tensor], object], str]] = {
    "after backward": (after_backward, "Call it before step.backward"),
    "other rows": (lambda step, x, loss: step.gather(x=x[:1]), r"got x of shape \(1, 3\) for a batch of 2 rows"),
    "a mean": (lambda step, x, loss: step.gather(loss=loss), r"got loss of shape \(\) for a batch of 2 rows"),
    "twice": (lambda step, x, loss: [step.gather(x=x) for _ in "ab"], "got x twice for one batch"),
    "too early": (lambda step, x, loss: step.gathered, r"step.gathered of step 0 was read before step.optimize\(\)"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG_GATHERS.values(), ids=WRONG_GATHERS)
def test_a_wrong_gather_is_an_error(
    new_run: NewRun, wrong: Callable[[Step, torch.Tensor, torch.Tensor], object], message: str
) -> None:
    def body(step: Step, model: Any) -> None:
        for batch in step.micro_batches():
            wrong(step, batch["x"], model(batch["x"]).mean())

    with pytest.raises(ConfigError, match=message):
        on_one_worker(new_run, nn.Linear(3, 1), body)


def test_rows_that_only_some_micro_batches_gather_are_an_error(new_run: NewRun) -> None:
    def body(step: Step, model: Any) -> None:
        for place, batch in enumerate(step.micro_batches()):
            if place:
                step.gather(x=batch["x"])
            step.backward(model(batch["x"]).mean())

    with pytest.raises(ConfigError, match=r"nothing from micro-batch 0; x \(torch.float32, rows of \(3,\)\) from"):
        on_one_worker(new_run, nn.Linear(3, 1), body)


def gather_by_rank(group: ProcessGroup) -> str:
    from elastic_ddp.distributed.row_gather import RowGather

    gather = RowGather()
    gather.add(group.rank, 1, {"x": torch.ones(1, 1 + group.rank)})
    total = torch.tensor(gather.signature([group.rank]))
    torch.distributed.all_reduce(total)
    try:
        gather.exchange(int(total), torch.ones(2).numpy(), [range(1), range(1, 2)], group)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_ranks_that_gather_different_rows_all_raise_an_error() -> None:
    for text in run_ranks(2, gather_by_rank):
        assert "other names, shapes or dtypes on another rank" in text
