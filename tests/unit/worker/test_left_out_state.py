"""What a model's state_dict leaves out is state of the run, if the forward uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.state_transfer import transfer_state
from elastic_ddp.errors import CheckpointError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors.state_tree import flatten
from elastic_ddp.worker.generation import strategy_of
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.restore import restore
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.train_state import TrainState
from tests.inside_run import finish, leave
from tests.ranks import run_ranks
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_fsdp_commits import save
from tests.unit.distributed.test_fsdp import config_of
from tests.unit.single_worker import NewRun, compute_gradients

CPU = torch.device("cpu")


class Adapted(torch.nn.Module):
    """A frozen base and a trained adapter, of which the state dict holds the adapter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(3, 4).requires_grad_(False)
        self.adapter = torch.nn.Linear(4, 1)
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(torch.tanh(self.base(x)) * self.scale)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        whole = super().state_dict(*args, **kwargs)
        return {name: value for name, value in whole.items() if "adapter" in name}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(self.state_dict() | state, strict=False, assign=assign)


class Rounded(Adapted):
    """Exports other values than those that it trains."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        whole = torch.nn.Module.state_dict(self, *args, **kwargs)
        return {name: value.half().float() for name, value in whole.items()}


class Renamed(torch.nn.Module):
    """Its state dict has other names, which it maps back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"exported.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({name[9:]: value for name, value in state.items()}, strict, assign)


def train(run: Run, kind: type[torch.nn.Module], seed: int, weights: str | None = None, **options: Any) -> str:
    """Trains a model that is initialized from `seed`. Returns the hash of its weights."""
    torch.manual_seed(seed)
    model: Any = run.prepare(kind())
    run.prepare(torch.optim.AdamW(filter(lambda each: each.requires_grad, model.parameters()), lr=0.1))
    if weights is not None:
        run.load_weights(weights, **options)
    for step in run.steps():
        with step:
            compute_gradients(step, model)
            step.optimize()
    outcome = finish(run)
    leave(run)
    return str(outcome["weights_sha256"])


@pytest.mark.parametrize("kind", [Adapted, Rounded, Renamed])
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(
    new_run: NewRun, kind: type[torch.nn.Module], tmp_path: Path
) -> None:
    calm = train(new_run(folder="calm", steps=8), kind, seed=0)
    train(new_run(folder="again", steps=4), kind, seed=0)
    assert train(new_run(folder="again", steps=8), kind, seed=1) == calm
    found = SingleRankStore(Storage(tmp_path / "calm").at(COMMITS), keep=1).load_latest()
    assert found is not None
    assert bool(found[1]["parameters"]) == (kind is not Renamed), "what the state dict holds is saved once"


def test_a_commit_of_shards_of_a_model_that_exports_copies_is_restored() -> None:
    states = [TrainState(PreparedModel(Rounded(), device=CPU, bf16=False)) for _ in range(2)]
    saved = states[0].state_dict()
    saved["parameters"] = {}  # as with FSDP
    states[1].load_state_dict(saved)
    assert torch.equal(states[1].module.base.weight, states[0].module.base.weight.half().float())


def test_a_run_starts_from_what_the_state_dict_of_another_run_left_out(new_run: NewRun, tmp_path: Path) -> None:
    train(new_run(folder="first", steps=4), Adapted, seed=0)
    uri, models = str(tmp_path / "first"), []
    for seed in (0, 1):
        run = new_run(folder=f"tuned{seed}", steps=4)
        torch.manual_seed(seed)
        models.append(run.prepare(Adapted()))
        run.prepare(torch.optim.SGD(models[-1].adapter.parameters(), lr=0.1))
        run.load_weights(uri)
        next(iter(run.steps()))
    first, second = models
    assert torch.equal(first.base.weight, second.base.weight) and torch.equal(first.adapter.bias, second.adapter.bias)


class Doubled(Renamed):
    """Exports its weights in another scale, which it converts back."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value * 2 for name, value in torch.nn.Module.state_dict(self, *args, **kwargs).items()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        own = {name: value / 2 for name, value in state.items()}
        return torch.nn.Module.load_state_dict(self, own, strict, assign)


def test_weights_go_through_the_load_state_dict_of_the_model(new_run: NewRun, tmp_path: Path) -> None:
    torch.manual_seed(5)
    exported = Doubled()
    torch.save(exported.state_dict(), tmp_path / "doubled.pt")
    run = new_run(steps=2)
    model = run.prepare(Doubled())
    run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    run.load_weights(str(tmp_path / "doubled.pt"))
    next(iter(run.steps()))
    assert torch.equal(model.net.weight, exported.net.weight)


def test_a_sparse_buffer_is_named(new_run: NewRun) -> None:
    module = Renamed()
    module.register_buffer("adjacency", torch.eye(2).to_sparse(), persistent=False)
    with pytest.raises(CheckpointError, match="adjacency"):
        train_state = TrainState(PreparedModel(module, device=CPU, bf16=False))
        flatten(train_state.state_dict())


def test_weights_from_a_file_reach_what_load_state_dict_leaves_out(new_run: NewRun, tmp_path: Path) -> None:
    class Partial(Adapted):
        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            adapter = {name: value for name, value in state.items() if "adapter" in name}
            return torch.nn.Module.load_state_dict(self, adapter, strict=False, assign=assign)

    whole = torch.nn.Module.state_dict(Adapted())
    del whole["scale"]
    torch.save(whole, tmp_path / "base.pt")
    hashes = {
        train(new_run(folder=f"run{seed}", steps=2), Partial, 0, str(tmp_path / "base.pt"), strict=strict)
        for seed, strict in enumerate((True, False))
    }
    assert len(hashes) == 1, "and strict does not ask for the names that the state dict leaves out twice"


def _on_rank(group: ProcessGroup, folder: Path) -> tuple[str, str, str]:
    """Returns the weights of rank 0, those that this rank received, and those that it restored as shards."""
    torch.manual_seed(group.rank)
    states = [TrainState(PreparedModel(Adapted(), device=CPU, bf16=False)) for _ in range(2)]
    for state in states:
        state.add_optimizer(torch.optim.AdamW(state.module.adapter.parameters(), lr=0.1))
    own = states[0].state_dict() if group.rank == 0 else None
    received = transfer_state(own, group, source=0, receivers=range(1, group.world_size))
    if received is not None:
        states[0].load_state_dict(received)
    config, model = config_of("fsdp"), states[0].model
    assert model is not None and states[1].model is not None
    whole = states[0].weights_sha256()
    strategies = [strategy_of(config)(each, config, group) for each in (model, states[1].model)]
    strategies[0].shard(states[0].optimizers)
    save(group, folder, states[0].state_dict())

    def layout() -> Any:
        strategies[1].shard(states[1].optimizers)
        return strategies[1].layout(states[1].optimizers)

    storage = Storage(folder)
    restored = restore(CheckpointStore(storage, keep=1), storage, group, layout)
    assert restored is not None
    states[1].load_state_dict(restored[1])
    return str(group.all_gather_bytes(whole.encode())[0].decode()), whole, states[1].weights_sha256()


def test_every_rank_has_what_the_state_dict_leaves_out_also_as_shards(tmp_path: Path) -> None:
    for expected, received, restored in run_ranks(2, _on_rank, tmp_path):
        assert expected == received == restored
