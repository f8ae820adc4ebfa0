"""Sharded training that goes on from a commit, or begins with the weights of one, as if nothing had been between."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.strategy import Strategy
from elastic_ddp.errors import ConfigError
from elastic_ddp.rendezvous.hang import Activity
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors.state_tree import gather_full
from elastic_ddp.worker.generation import Generation, strategy_of
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.pretrained import Weights
from elastic_ddp.worker.restore import restore
from elastic_ddp.worker.train_state import TrainState
from tests.ranks import run_ranks
from tests.unit.test_fsdp import OPTIMIZERS, prepared, train_on
from tests.unit.test_fsdp_commits import Everything, everything, save

ROWS = np.array([3, 3, 3, 3])


class WithHistory(torch.optim.Optimizer):
    """Steps by the last two gradients, which it keeps in a list."""

    def __init__(self, parameters: Any, *, from_the_start: bool) -> None:
        super().__init__(parameters, {"lr": 0.05})
        for each in self.param_groups[0]["params"]:
            self.state[each] = {"last": {"two": [torch.zeros_like(each)] if from_the_start else []}}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    history = self.state[parameter]["last"]["two"]
                    history[:] = [*history[-1:], parameter.grad.clone()]
                    for gradient in history:
                        parameter.sub_(gradient * group["lr"])


class Keeping(torch.optim.Optimizer):
    """SGD that keeps something made of the gradient of each matrix."""

    def __init__(self, parameters: Any, made: Callable[[Any], torch.Tensor]) -> None:
        super().__init__([each for each in parameters if each.dim() == 2], {"lr": 0.05})
        self._made = made

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = [self._made(parameter.grad)]
                parameter.sub_(parameter.grad, alpha=group["lr"])


class RowWise(torch.optim.Optimizer):
    """Adagrad with one number for each row of a matrix, which it gives whole and takes whole."""

    def __init__(self, parameters: Any) -> None:
        super().__init__([each for each in parameters if each.dim() == 2], {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                rows = parameter.grad.pow(2).mean(-1)
                kept = self.state[parameter]
                kept["sum"] = kept["sum"] + rows if "sum" in kept else rows
                parameter.sub_(parameter.grad / (kept["sum"].sqrt().unsqueeze(-1) + 1e-3), alpha=group["lr"])

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        kept = {number: {key: gather_full(each) for key, each in one.items()} for number, one in saved["state"].items()}
        return {**saved, "state": kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for parameter, kept in self.state.items():
            if isinstance(parameter, DTensor):
                kept["sum"] = distribute_tensor(kept["sum"], parameter.device_mesh, [Shard(0)])


OF_USERS: dict[str, Any] = {
    "a list": lambda model: WithHistory(model.parameters(), from_the_start=False),
    "a list from the start": lambda model: WithHistory(model.parameters(), from_the_start=True),
    "another shape, given whole": lambda model: RowWise(model.parameters()),
}
"""Optimizers of users, by what they keep."""


def begun(
    group: ProcessGroup, optimizer: Any, *, folder: Path | None = None, begin_with: Any = None
) -> tuple[TrainState, Strategy]:
    """As a generation begins: with a model that was just built, with a folder's commit or with other weights."""
    config, state = prepared("fsdp", optimizer)
    if folder is not None or begin_with is not None:
        with torch.no_grad():
            for each in [*state.module.parameters(), *state.module.buffers()]:
                each.fill_(-1)  # whatever a rank has built
    assert state.model is not None

    def restored(group: ProcessGroup, layout: Any) -> dict[str, Any] | None:
        if folder is None:
            return None
        storage = Storage(folder)
        found = restore(CheckpointStore(storage, keep=1), storage, group, layout)
        assert found is not None
        return found[1]

    if begin_with is not None:
        state.load_initial_weights = lambda group: begin_with(state.module, group)
    strategy = strategy_of(config)(state.model, config, group)
    Generation._share_state(group, state=state, strategy=strategy, restore=restored, activity=Activity())
    return state, strategy


def _interrupted(group: ProcessGroup, folder: Path) -> dict[str, tuple[Everything, Everything]]:
    """By optimizer: a state after four steps, and that of a run which went on from the commit of two."""
    found = {}
    for name, optimizer in {**OPTIMIZERS, **OF_USERS}.items():
        first, strategy = begun(group, optimizer)
        train_on(strategy, group, first, ROWS, range(2))
        save(group, folder / name, first.state_dict())
        train_on(strategy, group, first, ROWS, range(2, 4))
        second, strategy = begun(group, optimizer, folder=folder / name)
        train_on(strategy, group, second, ROWS, range(2, 4))
        found[name] = everything(first), everything(second)
    return found


def _same(one: Everything, other: Everything) -> bool:
    """To the bit."""
    return one[0] == other[0] and {k: v.tobytes() for k, v in one[1].items()} == {
        k: v.tobytes() for k, v in other[1].items()
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_run_that_was_interrupted_has_the_bits_of_one_that_was_not(world_size: int, tmp_path: Path) -> None:
    for every in run_ranks(world_size, _interrupted, tmp_path):
        assert {"AdamW", "SGD"} < every.keys()
        for optimizer, (calm, interrupted) in every.items():
            assert _same(calm, interrupted), optimizer


def _moved_up(group: ProcessGroup, folder: Path) -> dict[int, Everything]:
    """By generation, what this process ends it with: two train, and then the second and a third go on from a commit."""
    first, found = group.assignment, {}
    group.barrier()
    group.close(intact=True)
    for number, members in ((2, (0, 1)), (3, (1, 2))):
        if first.rank in members:
            place = replace(first, generation=number, rank=members.index(first.rank), world_size=2)
            now = ProcessGroup.form(place, store=group.store, device=group.device, timeout_s=60)
            state, strategy = begun(now, "AdamW", folder=None if number == 2 else folder)
            if number == 2:
                train_on(strategy, now, state, ROWS, range(2))
                save(now, folder, state.state_dict())
            train_on(strategy, now, state, ROWS, range(2, 4))
            found[number] = everything(state)
            save(now, folder.with_name(f"of-{number}"), state.state_dict())
            del state, strategy
            now.close(intact=True)
    return found


def test_a_process_whose_rank_has_changed_has_the_shards_of_its_new_one(tmp_path: Path) -> None:
    first, second, third = run_ranks(3, _moved_up, tmp_path / "commits")
    for found in (second[2], second[3], third[3]):
        assert _same(found, first[2])
    assert [*first, *third] == [2, 3]
    for number in (2, 3):
        store = CheckpointStore(Storage(tmp_path / f"of-{number}"), keep=1)
        newest = store.latest()
        assert newest is not None
        store.verify(newest)


def _lived_through(group: ProcessGroup, num_generations: int) -> list[tuple[int, int]]:
    """Descriptors and threads of a process after each generation, in each of which it has another rank."""
    first, found = group.assignment, []
    group.barrier()
    group.close(intact=True)
    for number in range(2, 2 + num_generations):
        place = replace(first, generation=number, rank=(first.rank + number) % first.world_size)
        now = ProcessGroup.form(place, store=group.store, device=group.device, timeout_s=60)
        state, strategy = begun(now, "AdamW")
        train_on(strategy, now, state, ROWS, range(1))
        state.state_dict()
        now.barrier()
        strategy.close()
        del state, strategy
        now.close(intact=True)
        del now
        gc.collect()
        found.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_process_that_lives_on_keeps_no_connection_of_generations_that_are_over(world_size: int) -> None:
    for found in run_ranks(world_size, _lived_through, 5):
        assert len({*found[1:]}) == 1, found


MADE: dict[str, Callable[[Any], torch.Tensor]] = {
    "of (7,), Shard(dim=0)": lambda gradient: gradient.pow(2).mean(-1),
    "of (5,), Partial(sum)": lambda gradient: gradient.pow(2).sum(0),
    "of (7, 5), Replicate()": lambda gradient: gradient.redistribute(placements=[Replicate()]),
    "of (7, 5), not sharded": lambda gradient: gradient.full_tensor(),
}
"""From the gradient of a matrix, by what is said of it."""


def _refused(group: ProcessGroup) -> dict[str, str]:
    said = {}
    for what, make in MADE.items():
        state, strategy = begun(group, lambda model, make=make: Keeping(model.parameters(), make))
        state.state_dict()  # there is nothing yet
        train_on(strategy, group, state, ROWS, range(1))
        with pytest.raises(ConfigError) as refused:
            state.state_dict()
        said[what] = str(refused.value)
    return said


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_no_restore_lays_out_again_is_refused_on_every_rank(world_size: int) -> None:
    every = run_ranks(world_size, _refused)
    assert all(said == every[0] for said in every)
    for what, message in every[0].items():
        assert f"optimizer.0.state.1.kept.0 {what}" in message and "Keeping" in message
        assert "zeros_like(parameter)" in message and "full_tensor()" in message


def _tuned(group: ProcessGroup, folder: Path) -> tuple[str, str, bool]:
    """Of the weights that a run has, and of those that another one begins with. Whether these are in shards."""
    first, strategy = begun(group, "SGD")
    train_on(strategy, group, first, ROWS, range(1))
    save(group, folder / COMMITS, first.state_dict())
    weights = Weights(str(folder), step=None, strict=True)

    def load(module: torch.nn.Module, group: ProcessGroup) -> None:
        weights.load(module, group, lambda *event, **details: None, Activity())

    second, _ = begun(group, "AdamW", begin_with=load)
    in_shards = all(isinstance(each, DTensor) for each in second.module.parameters())
    return first.weights_sha256(), second.weights_sha256(), in_shards


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sharded_run_begins_with_the_weights_of_another(world_size: int, tmp_path: Path) -> None:
    for saved, loaded, in_shards in run_ranks(world_size, _tuned, tmp_path):
        assert saved == loaded and in_shards
