"""The state of a run as one tree: saved, loaded, hashed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.errors import CheckpointError
from elastic_ddp.worker.train_state import TrainState
from tests.unit.single_worker import (
    CPU,
    Model,
)


def state_of(model: torch.nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, optimizers: int = 1) -> Any:
    state = TrainState(model=PreparedModel(model, device=CPU, bf16=False))
    for _ in range(optimizers):
        state.add_optimizer(kind(state.module.parameters(), lr=0.1))
    return state


def load_error(state: TrainState, saved: TrainState) -> str:
    with pytest.raises(CheckpointError, match="use another name") as caught:
        state.load_state_dict(saved.state_dict())
    return str(caught.value)


def test_state_of_other_objects_is_refused() -> None:
    registered, scheduled = state_of(Model()), state_of(Model())
    registered.registered["sampler"] = Model()
    scheduled.add_scheduler(StepLR(scheduled.optimizers[0], 1))
    for state, saved, names in [
        (state_of(Model(), optimizers=2), state_of(Model()), ["optimizer state for ['0']", "['0', '1']"]),
        (state_of(Model()), registered, ["user state for ['sampler']", "has []"]),
        (scheduled, state_of(Model()), ["scheduler state for []", "has ['0']"]),
    ]:
        error = load_error(state, saved)
        assert all(name in error for name in names), error


@pytest.mark.parametrize(
    "other", [torch.nn.Linear(3, 4), Model().append(torch.nn.Linear(1, 1)), torch.nn.Sequential(torch.nn.Linear(3, 5))]
)
def test_state_of_another_model_is_refused(other: torch.nn.Module) -> None:
    assert "does not fit the model or optimizer" in load_error(state_of(other), state_of(Model()))


def test_state_of_an_optimizer_with_other_param_groups_is_refused() -> None:
    other = TrainState(model=PreparedModel(Model(), device=CPU, bf16=False))
    other.add_optimizer(torch.optim.AdamW([{"params": [parameter]} for parameter in other.module.parameters()]))
    assert "6 param_groups, and 1 were saved" in load_error(other, state_of(Model()))


def test_loaded_state_equals_the_saved_state() -> None:
    saved, loaded = state_of(Model()), state_of(Model())
    saved.module(torch.ones(2, 3)).sum().backward()
    saved.optimizers[0].step()
    saved.position = saved.position.after(8, [b"digest"])
    loaded.load_state_dict(saved.state_dict())
    assert loaded.weights_sha256() == saved.weights_sha256()
    assert loaded.position == saved.position
    moments = [state.optimizers[0].state_dict()["state"][0]["exp_avg"] for state in (saved, loaded)]
    assert torch.equal(*moments)


def test_a_worker_that_joins_takes_the_hyperparameters_of_its_peer_as_they_are() -> None:
    peer, joins = state_of(Model()), state_of(Model())
    peer.optimizers[0].param_groups[0]["weight_decay"] = 0.5
    for state in (peer, joins):
        state.record_prepared()
    joins.load_state_dict(peer.state_dict())
    assert joins.optimizers[0].param_groups[0]["weight_decay"] == 0.5
    assert joins.state_dict()["prepared"] == peer.state_dict()["prepared"], "the next commit is the same from any rank"


def weights_hash(**tensors: torch.Tensor) -> str:
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return state_of(torch.nn.ModuleDict({"part": module}), optimizers=0).weights_sha256()


def test_the_hash_of_weights_covers_name_dtype_shape_value_and_order() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3])
    same = weights_hash(a=a, b=b)
    assert weights_hash(a=a.clone(), b=b.clone()) == same
    others = [
        weights_hash(a=a, c=b),
        weights_hash(a=a.view(torch.int32), b=b),
        weights_hash(a=a.view(2, 1), b=b),
        weights_hash(a=torch.nextafter(a, a + 1), b=b),
        weights_hash(b=b, a=a),
        weights_hash(a=a),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_the_hash_of_weights_covers_parameters_and_buffers() -> None:
    state = state_of(Model())
    before = state.weights_sha256()
    state.module[1].running_mean[0] += 1
    after = state.weights_sha256()
    with torch.no_grad():
        state.module[0].bias[0] += 1
    assert len({before, after, state.weights_sha256()}) == 3


def test_state_of_an_optimizer_of_another_class_is_refused() -> None:
    load_error(state_of(Model()), state_of(Model(), kind=torch.optim.SGD))


def test_non_persistent_buffers_are_part_of_the_state() -> None:
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
