"""The state of a run as one tree: saved, loaded, hashed. State of another model, optimizer or scheduler is refused."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from elastic_ddp.distributed.buffer_sync import resolve_views
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.errors import CheckpointError
from elastic_ddp.tensors.state_tree import flatten, unflatten
from elastic_ddp.worker.train_state import TrainState
from tests.unit.single_worker import CPU, Model


def state_of(
    model: torch.nn.Module, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, optimizers: int = 1
) -> TrainState:
    state = TrainState(model=PreparedModel(model, device=CPU, bf16=False))
    for _ in range(optimizers):
        state.add_optimizer(kind(state.module.parameters(), lr=0.1))
    return state


def take_steps(state: TrainState, count: int = 1) -> str:
    """Steps the optimizers and schedulers. Returns the hash of the weights."""
    for number in range(count):
        for parameter in state.module.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
        state.step_optimizers(lambda: None)
        state.step_schedulers(is_skipped=False)
    return state.weights_sha256()


def load_error(state: TrainState, saved: TrainState) -> str:
    before = state.weights_sha256()
    with pytest.raises(CheckpointError, match="use another name") as caught:
        state.load_state_dict(saved.state_dict())
    assert state.weights_sha256() == before
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


class Wide(torch.nn.Module):
    """A model with a buffer that is not in its state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(2), persistent=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.linear.bfloat16(), "linear.weight is float32 of shape (2, 2) in the commit and bfloat16"),
        (lambda model: setattr(model, "table", model.table.double()), "table is float32 of shape (2,) in the commit"),
        (lambda model: setattr(model, "table", torch.zeros(1)), "(2,) in the commit and float32 of shape (1,)"),
        (
            lambda model: model.register_buffer("new", torch.zeros(1), persistent=False),
            "new is missing in the commit and float32",
        ),
        (lambda model: delattr(model, "table"), "table is float32 of shape (2,) in the commit and missing"),
    ],
    ids=["parameters", "a buffer", "another shape", "a new buffer", "no buffer"],
)
def test_a_model_with_other_dtypes_or_buffers_is_refused(change: Callable[[Any], Any], message: str) -> None:
    """Torch would round the weights without an error."""
    model = Wide()
    state = state_of(model)
    change(model)
    error = load_error(state, state_of(Wide()))
    assert message in error and "changed model is another run" in error


def test_state_of_other_param_groups_is_refused() -> None:
    other = state_of(Model(), lambda parameters, lr: torch.optim.AdamW([{"params": [each]} for each in parameters]))
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


class Scaled(Wide):
    """A model whose extra state changes its type during training."""

    scale: Any = None

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


@pytest.mark.parametrize("before", [None, torch.zeros((), dtype=torch.int64)], ids=["none", "int64"])
def test_extra_state_may_have_another_type_than_when_the_module_was_built(before: Any) -> None:
    trained, built = Scaled(), Scaled()
    trained.scale, built.scale = torch.tensor(1.5), before
    state_of(built).load_state_dict(state_of(trained).state_dict())
    assert built.scale == 1.5


class Masked(Model):
    """A model with an expanded buffer that is registered twice."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((1, 4), value).expand(4, 4), persistent=False)
        self[0].register_buffer("same", self.mask)
        resolve_views(self)


def test_buffers_that_the_state_dict_omits_are_state_also_if_they_share_memory() -> None:
    before, after = state_of(Masked(float("nan"))), state_of(Masked(2.0))
    assert before.weights_sha256() != after.weights_sha256()
    after.load_state_dict(before.state_dict())
    mask: Any = after.module.mask
    assert mask.isnan().all() and mask is after.module[0].same, "it is still shared"  # type: ignore[index]


class Counting(torch.optim.SGD):
    """Adds a setting in `step`, as several optimizers outside of torch do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


class Warmup(StepLR):
    """A user's scheduler that adds an attribute in its first step."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch > 0:
            self.warmed_up = True


def test_what_optimizers_and_schedulers_of_the_user_add_while_they_step_is_restored() -> None:
    before, after = (state_of(Model(), Counting) for _ in range(2))
    for state in (before, after):
        state.add_scheduler(Warmup(state.optimizers[0], 2))
    take_steps(before, 2)
    after.load_state_dict(before.state_dict())
    assert after.optimizers[0].param_groups[0]["step"] == 2
    assert after.schedulers[0].warmed_up  # type: ignore[attr-defined]


class Mixed(torch.optim.SGD):
    """An optimizer with state of many types, none in the dtype of its parameter."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["master"] = state.get("master", parameter.detach().to(torch.float64)) + 1 / 3
            state["seen"] = state.get("seen", torch.zeros(3, dtype=torch.int64)) + 2**40 + 1
            state["scale"] = {"kind": "dynamic", "at": [torch.tensor(1.1, dtype=torch.float64), "a", 2]}
            state["last"] = deque([torch.tensor(7, dtype=torch.int8)], maxlen=4)
        return super().step(closure)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.AdamW, Mixed], ids=lambda kind: kind.__name__)
def test_optimizer_state_of_any_dtype_is_restored_bit_for_bit(
    kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    """`Optimizer.load_state_dict` converts state to the dtype of the parameter."""
    before, after = (state_of(Model().to(dtype), kind) for _ in range(2))
    take_steps(before, 2)
    after.load_state_dict(unflatten(*flatten(copy.deepcopy(before.state_dict()))))
    (skeleton, tensors), (expected_skeleton, expected) = (flatten(state.state_dict()) for state in (after, before))
    assert skeleton == expected_skeleton and tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert take_steps(before, 2) == take_steps(after, 2)


class RoundsWhatItLoads(Mixed):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["master"] = state["master"].round()


def test_an_optimizer_with_its_own_load_state_dict_uses_it() -> None:
    saved, state = (state_of(Model(), RoundsWhatItLoads) for _ in range(2))
    take_steps(saved)
    state.load_state_dict(saved.state_dict())
    assert all((own["master"] == own["master"].round()).all() for own in state.optimizers[0].state.values())
