"""States that can be read and do not fit the run."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ConstantLR, MultiStepLR, SequentialLR, StepLR

from elastic_ddp.distributed.buffer_sync import resolve_views
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.tensors.state_tree import flatten, unflatten, weights_sha256
from elastic_ddp.worker.resume import resume
from elastic_ddp.worker.train_state import Position, TrainState


class Model(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        self.register_buffer("passing", torch.zeros(2), persistent=False)


class Registered:
    def __init__(self) -> None:
        self.values: Any = {"best": 1.0}

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def prepared() -> TrainState:
    state = train_state_of(Model())
    adamw = torch.optim.AdamW(state.module.parameters(), lr=0.1)
    sgd = torch.optim.SGD(state.module.parameters(), lr=0.1, momentum=0.9)
    for optimizer in (adamw, sgd):
        state.add_optimizer(optimizer)
    state.add_scheduler(SequentialLR(adamw, [ConstantLR(adamw), StepLR(adamw, 2)], [3]))
    state.add_scheduler(MultiStepLR(sgd, [1]))
    state.registered["counter"] = Registered()
    state.record_prepared()
    return state


def train(state: TrainState) -> None:
    state.module(torch.randn(4, 2)).sum().backward()
    state.step_optimizers(lambda: None)
    state.step_schedulers(is_skipped=False)
    state.position = state.position.after(4, [b"digest"])


def trained() -> dict[str, Any]:
    state = prepared()
    train(state)
    return state.state_dict()


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Sets the value at a path; both are in the arguments, the value last."""
    *before, last, value = path

    def change(state: dict[str, Any]) -> None:
        inner: Any = state
        for key in before:
            inner = inner[key]
        inner[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state["optimizer"]["0"].pop("param_groups"),
            "does not fit the model or optimizer.*param_groups",
        ),
        (put("optimizer", [1]), "holds optimizer state for"),
        (put("optimizer", 3), "does not fit the model or optimizer"),
        (put("optimizer", "0", "param_groups", 3), "does not fit the model or optimizer"),
        (put("optimizer", "0", "param_groups", 0, "momentum", 3), "another optimizer: AdamW has no mom"),
        (
            put("optimizer", "0", "state", "0.weight", "step", 10**400),
            "does not fit the model or optimizer.*int too large",
        ),
        (put("scheduler", "0", [3]), "another scheduler"),
        (put("scheduler", "0", "optimizer", 3), "another scheduler: SequentialLR has no optimizer"),
        (put("scheduler", "0", "_schedulers", 1, "get_lr", 3), "another scheduler: StepLR has no get_lr"),
        (put("scheduler", "1", "step", 3), "another scheduler: MultiStepLR has no step"),
        (put("buffers", "other", torch.zeros(2)), "does not fit the model or optimizer"),
        (put("position", [1, 2]), r"position is invalid: \[1, 2\]"),
        (put("position", "steps", 1), "position is invalid.*'steps': 1"),
        (put("position", "step", "x"), "position is invalid.*'step': 'x'"),
        (put("position", "step", True), "position is invalid"),
        (put("position", "step", -1), "position is invalid"),
        (put("position", "samples", 1.5), "position is invalid"),
        (put("position", "samples", 10**400), "position is invalid"),
        (put("position", "samples_sha256", "a" * 63 + "\n"), "position is invalid"),
        (lambda state: state["position"].pop("samples"), "position is invalid"),
        (put("prepared", 3), "hyperparameters are invalid"),
        (put("prepared", "optimizer", 3), "hyperparameters are invalid"),
        (put("prepared", "optimizer", []), "hyperparameters are invalid"),
        (put("prepared", "scheduler", {}), "hyperparameters are invalid"),
        (put("prepared", "every", "0", "year"), "hyperparameters are invalid"),
        (put("prepared", "kind", "0", "StepLR"), "scheduler 0 is a StepLR with every='step' in the commit"),
    ],
)
@pytest.mark.parametrize("use_code", [False, True], ids=["saved", "code"])
def test_a_state_that_does_not_fit_the_run_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, use_code: bool
) -> None:
    saved = trained()
    change(saved)
    state = prepared()
    with pytest.raises(CheckpointError, match=message):
        resume(state, saved, use_code=use_code)
    if "hyperparameters" not in message:
        assert state.position == Position()
    assert all(isinstance(scheduler.step, types.MethodType) for scheduler in state.schedulers)


def test_a_users_setting_in_a_parameter_group_is_restored() -> None:
    state = prepared()
    train(state)
    state.optimizers[0].param_groups[0]["frozen"] = True
    resumed = prepared()
    resumed.load_state_dict(state.state_dict())
    assert resumed.optimizers[0].param_groups[0]["frozen"] is True


class Wide(torch.nn.Module):
    """A model with a buffer that is not in its state_dict."""

    def __init__(self, name: str = "table") -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer(name, torch.zeros(2), persistent=False)


def train_state_of(model: torch.nn.Module) -> TrainState:
    return TrainState(model=PreparedModel(model, device=torch.device("cpu"), bf16=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.linear.bfloat16(), r"linear\.weight is float32 .* in the commit and bfloat16 "),
        (lambda model: setattr(model, "table", model.table.double()), "table is float32 .* in the commit and float64 "),
        (
            lambda model: model.register_buffer("new", torch.zeros(1), persistent=False),
            "new is missing in the commit and float32",
        ),
        (lambda model: delattr(model, "table"), "table is float32 .* in the commit and missing"),
    ],
    ids=["parameters", "a buffer", "a new buffer", "no buffer"],
)
def test_a_model_with_other_dtypes_or_buffers_is_refused(change: Callable[[Any], Any], message: str) -> None:
    """Torch would round the weights without an error."""
    saved, model = train_state_of(Wide()).state_dict(), Wide()
    state = train_state_of(model)
    change(model)
    before = weights_sha256(model.named_parameters())
    with pytest.raises(CheckpointError, match=f"{message}.*changed model is another run"):
        state.load_state_dict(saved)
    assert weights_sha256(model.named_parameters()) == before


class Scaled(Wide):
    """A model whose extra state changes its type during training."""

    scale: Any = None

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


@pytest.mark.parametrize("before", [None, torch.zeros((), dtype=torch.int64), {"of": 1}], ids=["none", "int64", "dict"])
def test_extra_state_may_have_another_type_than_when_the_module_was_built(before: Any) -> None:
    trained, built = Scaled(), Scaled()
    trained.scale, built.scale = torch.tensor(1.5), before
    train_state_of(built).load_state_dict(train_state_of(trained).state_dict())
    assert built.scale == 1.5


class Counting(torch.optim.SGD):
    """An optimizer that adds a setting in `step`, as several outside of torch do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


def test_a_setting_that_an_optimizer_adds_in_its_first_step_is_restored() -> None:
    def counting() -> TrainState:
        state = TrainState(model=PreparedModel(Model(), device=torch.device("cpu"), bf16=False))
        state.add_optimizer(Counting(state.module.parameters(), lr=0.1, momentum=0.9))
        return state

    before, after = counting(), counting()
    for _ in range(2):
        before.module(torch.randn(4, 2)).sum().backward()
        before.optimizers[0].step()
    after.load_state_dict(before.state_dict())
    assert after.optimizers[0].param_groups[0]["step"] == 2


class Mixed(torch.optim.SGD):
    """An optimizer with state of many types, none in the dtype of its parameter."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["master"] = state.get("master", parameter.detach().to(torch.float64)) + 1 / 3
            state["seen"] = state.get("seen", torch.zeros(3, dtype=torch.int64)) + 2**40 + 1
            state["mask"] = torch.tensor([True, False])
            state["scale"] = {"kind": "dynamic", "at": [torch.tensor(1.1, dtype=torch.float64), "a", 2]}
            state["last"] = deque([torch.tensor(7, dtype=torch.int8)], maxlen=4)
        return super().step(closure)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "kind",
    [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Rprop, Mixed],
    ids=lambda kind: kind.__name__,
)
def test_optimizer_state_of_any_dtype_is_restored_bit_for_bit(
    kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    """`Optimizer.load_state_dict` converts state to the dtype of the parameter."""

    def steps(state: TrainState, count: int) -> str:
        for number in range(count):
            for parameter in state.module.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
            state.optimizers[0].step()
        return state.weights_sha256()

    def prepared_with() -> TrainState:
        torch.manual_seed(0)
        state = TrainState(model=PreparedModel(Model().to(dtype), device=torch.device("cpu"), bf16=False))
        state.add_optimizer(kind(state.module.parameters(), lr=0.1))
        return state

    before, after = prepared_with(), prepared_with()
    steps(before, 2)
    after.load_state_dict(unflatten(*flatten(copy.deepcopy(before.state_dict()))))
    (skeleton, tensors), (expected_skeleton, expected) = (flatten(state.state_dict()) for state in (after, before))
    assert skeleton == expected_skeleton and tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert steps(before, 2) == steps(after, 2)


class RoundsWhatItLoads(Mixed):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["master"] = state["master"].round()


def test_an_optimizer_with_its_own_load_state_dict_uses_it() -> None:
    def prepared_with() -> TrainState:
        state = TrainState(model=PreparedModel(Model(), device=torch.device("cpu"), bf16=False))
        state.add_optimizer(RoundsWhatItLoads(state.module.parameters(), lr=0.1))
        state.optimizers[0].step()
        return state

    state = prepared_with()
    state.load_state_dict(prepared_with().state_dict())
    assert all((own["master"] == own["master"].round()).all() for own in state.optimizers[0].state.values())


class Masked(Model):
    """A model with an expanded buffer that is registered twice."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((1, 4), value).expand(4, 4), persistent=False)
        self[0].register_buffer("same", self.mask)
        resolve_views(self)


def test_an_expanded_buffer_is_restored() -> None:
    def masked(value: float) -> TrainState:
        return TrainState(model=PreparedModel(Masked(value), device=torch.device("cpu"), bf16=False))

    before, after = masked(float("nan")), masked(2.0)
    after.load_state_dict(before.state_dict())
    mask: Any = after.module.mask
    assert mask.isnan().all() and mask is after.module[0].same, "it is still shared"


def test_a_buffer_of_another_shape_is_refused() -> None:
    saved = prepared().state_dict()
    saved["buffers"]["passing"] = torch.ones(1)  # torch would broadcast it
    with pytest.raises(CheckpointError, match=r"passing is float32 of shape \(1,\) in .* of shape \(2,\)"):
        prepared().load_state_dict(saved)


def test_a_buffer_is_restored_bit_for_bit_even_if_equal() -> None:
    before, after = prepared(), prepared()
    buffer = dict(before.module.named_buffers())["passing"]
    buffer.fill_(-0.0)
    after.load_state_dict(before.state_dict())
    assert torch.signbit(dict(after.module.named_buffers())["passing"]).all()


class Warmup(StepLR):
    """A user's scheduler that adds an attribute in its first step."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch > 0:
            self.warmed_up = True


def test_a_users_scheduler_is_restored_and_its_methods_are_not_replaced() -> None:
    def prepared_with() -> TrainState:
        state = TrainState(model=PreparedModel(Model(), device=torch.device("cpu"), bf16=False))
        sgd = torch.optim.SGD(state.module.parameters(), lr=0.1)
        state.add_optimizer(sgd)
        state.add_scheduler(Warmup(sgd, 2))
        return state

    trains, state = prepared_with(), prepared_with()
    train(trains)
    saved = trains.state_dict()
    assert "warmed_up" in saved["scheduler"]["0"]
    state.load_state_dict(saved)
    assert state.state_dict()["scheduler"] == saved["scheduler"]
    for name in ("step", "optimizer"):
        with pytest.raises(CheckpointError, match=f"Warmup has no {name}"):
            prepared_with().load_state_dict({**saved, "scheduler": {"0": {**saved["scheduler"]["0"], name: 3}}})


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to everything in a tree of JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(below for key, child in inner for below in paths(child, (*path, key)))]


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.just(10**400), st.floats(),
    st.sampled_from(["", "a", "step", "optimizer", "_schedulers", "params"]),
    st.sampled_from([torch.zeros(3), torch.zeros(0), torch.tensor(1), torch.zeros(2, 3, dtype=torch.complex64)]),
    st.sampled_from([b"x", torch.float32, torch.device("cpu"), torch.Size([1])]),
)  # fmt: skip
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(st.sampled_from([0, 1, "0", "a", "step", "params", "state"]), inner, max_size=3),
        st.dictionaries(st.sampled_from("ab"), inner).map(OrderedDict),
    ),
    max_leaves=6,
)
SAVED = trained()
PATHS = [path for path in paths(SAVED) if path]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([path for path in paths(SAVED) if path]),
    ANYTHING,
    st.sampled_from(["replace", "remove", "add"]),
    st.booleans(),
)
def test_any_state_is_loaded_or_is_an_error(path: tuple[Any, ...], other: Any, how: str, use_code: bool) -> None:
    saved = copy.deepcopy(SAVED)
    inner: Any = saved
    for key in path[:-1]:
        inner = inner[key]
    if how == "replace":
        inner[path[-1]] = copy.deepcopy(other)
    elif how == "remove":
        del inner[path[-1]]
    elif isinstance(inner, dict):
        inner[other if isinstance(other, str | int) else "step"] = copy.deepcopy(other)
    state = prepared()
    try:
        resume(state, saved, use_code=use_code)
    except CheckpointError:
        return
    except ConfigError:  # a changed scheduler cannot be moved
        assert use_code
        return
    assert type(state.position.step) is int and type(state.position.samples) is int
    state.position.after(4, [b"digest"])
    assert all(isinstance(scheduler.step, types.MethodType) for scheduler in state.schedulers)
