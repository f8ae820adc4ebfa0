"""Sharded training that resumes from a commit, moves to other ranks, or starts with the weights of another run."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.strategy import Strategy
from elastic_ddp.errors import ConfigError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors.state_tree import gather_full
from elastic_ddp.worker import hyperparameters
from elastic_ddp.worker.clock import WorkerClock
from elastic_ddp.worker.generation import strategy_of
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.pretrained import PretrainedWeights
from elastic_ddp.worker.restore import restore
from elastic_ddp.worker.state_sharing import share_state
from elastic_ddp.worker.train_state import TrainState
from tests.ranks import run_ranks
from tests.unit.checkpoint.test_fsdp_commits import Everything, everything, save
from tests.unit.distributed.test_fsdp import OPTIMIZERS, prepared, train_on

ROWS = np.array([3, 3, 3, 3])


class WithHistory(torch.optim.Optimizer):
    """Steps by its last two gradients, which it stores in a list."""

    def __init__(self, parameters: Any, *, at_creation: bool) -> None:
        super().__init__(parameters, {"lr": 0.05})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"last": {"two": [torch.zeros_like(parameter)] if at_creation else []}}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    history = self.state[parameter]["last"]["two"]
                    history[:] = [*history[-1:], parameter.grad.clone()]
                    for gradient in history:
                        parameter.sub_(gradient * group["lr"])


class Storing(torch.optim.Optimizer):
    """SGD that stores a function of the gradient of each matrix."""

    def __init__(self, parameters: Any, function: Callable[[Any], torch.Tensor]) -> None:
        super().__init__([parameter for parameter in parameters if parameter.dim() == 2], {"lr": 0.05})
        self._function = function

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["stored"] = [self._function(parameter.grad)]
                parameter.sub_(parameter.grad, alpha=group["lr"])


class RowWise(torch.optim.Optimizer):
    """Adagrad with one number for each row of a matrix. Its state_dict holds full tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__([parameter for parameter in parameters if parameter.dim() == 2], {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                rows = parameter.grad.pow(2).mean(-1)
                state = self.state[parameter]
                state["sum"] = state["sum"] + rows if "sum" in state else rows
                parameter.sub_(parameter.grad / (state["sum"].sqrt().unsqueeze(-1) + 1e-3), alpha=group["lr"])

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        full = {
            number: {key: gather_full(value) for key, value in state.items()}
            for number, state in saved["state"].items()
        }
        return {**saved, "state": full}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            if isinstance(parameter, DTensor):
                state["sum"] = distribute_tensor(state["sum"], parameter.device_mesh, [Shard(0)])


USER_OPTIMIZERS: dict[str, Any] = {
    "a list": lambda model: WithHistory(model.parameters(), at_creation=False),
    "a list at creation": lambda model: WithHistory(model.parameters(), at_creation=True),
    "another shape, saved as full tensors": lambda model: RowWise(model.parameters()),
}
"""User-defined optimizers, by their state."""


def begin_generation(
    group: ProcessGroup, optimizer: Any, *, folder: Path | None = None, begin_with: Any = None
) -> tuple[TrainState, Strategy]:
    """Begins a generation with a new model, with the commit in a folder, or with other initial weights."""
    config, state = prepared("fsdp", optimizer)
    state.prepared = hyperparameters.record(state.optimizers, state.all_schedulers(), state.every)
    if folder is not None or begin_with is not None:
        with torch.no_grad():
            for tensor in [*state.module.parameters(), *state.module.buffers()]:
                tensor.fill_(-1)  # any values: they are replaced
    assert state.model is not None

    def restored(group: ProcessGroup, layout: Any) -> dict[str, Any] | None:
        if folder is None:
            return None
        storage = Storage(folder)
        result = restore(CheckpointStore(storage, keep=1), storage, group, layout)
        assert result is not None
        return result[1]

    if begin_with is not None:
        state.load_initial_weights = lambda group, layout: begin_with(state.module, group, layout)
    strategy = strategy_of(config)(state.model, config, group)
    inputs: Any = SimpleNamespace(
        state=state, restore=restored, clock=WorkerClock(), job=SimpleNamespace(config=config)
    )
    share_state(inputs, group, strategy)
    return state, strategy


def _interrupted(group: ProcessGroup, folder: Path, names: list[str]) -> dict[str, tuple[Everything, Everything]]:
    """Returns for each optimizer the state after four steps, and that of a run that resumed after two of them."""
    states = {}
    for name in names:
        optimizer = {**OPTIMIZERS, **USER_OPTIMIZERS}[name]
        first, strategy = begin_generation(group, optimizer)
        train_on(strategy, group, first, ROWS, range(2))
        save(group, folder / name, first.state_dict())
        train_on(strategy, group, first, ROWS, range(2, 4))
        second, strategy = begin_generation(group, optimizer, folder=folder / name)
        train_on(strategy, group, second, ROWS, range(2, 4))
        states[name] = everything(first), everything(second)
    return states


def _same(one: Everything, other: Everything) -> bool:
    """Compares bit by bit."""
    return one[0] == other[0] and {k: v.tobytes() for k, v in one[1].items()} == {
        k: v.tobytes() for k, v in other[1].items()
    }


@pytest.mark.parametrize(("world_size", "names"), [(2, [*OPTIMIZERS, *USER_OPTIMIZERS]), (3, ["AdamW", "a list"])])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(world_size: int, names: list[str], tmp_path: Path) -> None:
    for states in run_ranks(world_size, _interrupted, tmp_path, names):
        for optimizer, (uninterrupted, resumed) in states.items():
            assert _same(uninterrupted, resumed), optimizer


def _resources_by_generation(group: ProcessGroup, num_generations: int) -> list[tuple[int, int]]:
    """Returns the number of descriptors and threads after each generation, in each of which the rank changes."""
    first, counts = group.assignment, []
    group.barrier()
    group.close(intact=True)
    for number in range(2, 2 + num_generations):
        place = replace(first, generation=number, rank=(first.rank + number) % first.world_size)
        formed = ProcessGroup.form(place, store=group.store, device=group.device, timeout_s=60)
        state, strategy = begin_generation(formed, "AdamW")
        train_on(strategy, formed, state, ROWS, range(1))
        state.state_dict()
        formed.barrier()
        strategy.close()
        del state, strategy
        formed.close(intact=True)
        del formed
        gc.collect()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


def test_a_process_keeps_no_connection_of_earlier_generations() -> None:
    for counts in run_ranks(3, _resources_by_generation, 4):
        assert len({*counts[1:]}) == 1, counts


FUNCTIONS: dict[str, Callable[[Any], torch.Tensor]] = {
    "of (7,), Shard(dim=0)": lambda gradient: gradient.pow(2).mean(-1),
    "of (5,), Partial(sum)": lambda gradient: gradient.pow(2).sum(0),
    "of (7, 5), Replicate()": lambda gradient: gradient.redistribute(placements=[Replicate()]),
    "of (7, 5), not sharded": lambda gradient: gradient.full_tensor(),
}
"""Functions of a matrix's gradient, by how the error describes their result."""


def _errors(group: ProcessGroup) -> dict[str, str]:
    errors = {}
    for description, function in FUNCTIONS.items():
        state, strategy = begin_generation(
            group, lambda model, function=function: Storing(model.parameters(), function)
        )
        state.state_dict()  # the state is empty so far
        train_on(strategy, group, state, ROWS, range(1))
        with pytest.raises(ConfigError) as caught:
            state.state_dict()
        errors[description] = str(caught.value)
    return errors


def test_optimizer_state_that_no_restore_can_shard_raises_on_every_rank() -> None:
    by_rank = run_ranks(2, _errors)
    assert all(errors == by_rank[0] for errors in by_rank)
    for description, message in by_rank[0].items():
        assert f"optimizer.0.state.blocks.0.up.weight.stored.0 {description}" in message
        assert "zeros_like(parameter)" in message and "full_tensor()" in message


def _tuned(group: ProcessGroup, folder: Path) -> tuple[str, str, bool]:
    """Returns the weight hash of a run, that of a run which starts with its weights, and whether these are sharded."""
    first, strategy = begin_generation(group, "SGD")
    train_on(strategy, group, first, ROWS, range(1))
    save(group, folder / COMMITS, first.state_dict())
    weights = PretrainedWeights(str(folder), step=None, strict=True)

    def load(module: torch.nn.Module, group: ProcessGroup, layout: Any) -> list[str]:
        return weights.load(module, group, lambda *event, **details: None, WorkerClock().activity, layout)

    second, _ = begin_generation(group, "AdamW", begin_with=load)
    is_sharded = all(isinstance(parameter, DTensor) for parameter in second.module.parameters())
    return first.weights_sha256(), second.weights_sha256(), is_sharded


def test_a_sharded_run_can_start_with_the_weights_of_another(tmp_path: Path) -> None:
    for saved, loaded, is_sharded in run_ranks(2, _tuned, tmp_path):
        assert saved == loaded and is_sharded
