"""The model that `run.prepare` returns: the user's own module, whose calls go through DDP."""

from __future__ import annotations

import collections
import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.errors import ConfigError
from tests.unit.single_worker import CPU, Model, NewRun, compute_gradients, prepared


class ScriptedModel(torch.nn.Module):
    """A model whose forward returns `output(layer(x))`."""

    def __init__(self, output: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.output = output

    def forward(self, x: torch.Tensor) -> Any:
        return self.output(self.layer(x))


class CopiesItself(torch.nn.Sequential):
    """A model that decides what its copies contain."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Replica:
    """Counts the calls of a DDP replica."""

    def __init__(self, model: PreparedModel) -> None:
        self.model, self.calls = model, 0

    def __call__(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.model.call_directly(x)


def in_replica(module: torch.nn.Module, *, bf16: bool = False) -> Replica:
    """Routes the calls of a module through a replica, which it returns."""
    model = PreparedModel(module, device=CPU, bf16=bf16)
    replica = Replica(model)
    model.use_replica(replica)
    return replica


X = torch.ones(1, 2)


def test_run_prepare_returns_the_module_itself(new_run: NewRun) -> None:
    for module in (Model(), torch.nn.Linear(3, 1)):
        kind, names = type(module), [name for name, _ in module.named_modules()]
        prepared = new_run().prepare(module)
        assert prepared is module and type(prepared) is kind
        assert [name for name, _ in prepared.named_modules()] == names
        assert not hasattr(prepared, "module")  # by which code outside recognizes a wrapper


def test_forward_without_gradients_bypasses_ddp() -> None:
    module = ScriptedModel()
    replica = in_replica(module)
    module(X)
    assert replica.calls == 1
    with torch.no_grad():
        module(X)
    with torch.inference_mode():
        module(X)
    assert replica.calls == 1
    replica.model.use_replica(None)
    module(X)
    assert replica.calls == 1


def test_hooks_run_once_in_each_call() -> None:
    module = ScriptedModel()
    replica, calls = in_replica(module), []
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    module.register_forward_hook(lambda *_: calls.append("after"))
    module(X)
    assert (calls, replica.calls) == (["before", "after"], 1)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),  # noqa: S301
    "averaged twice": lambda module: AveragedModel(AveragedModel(module)).module.module,
}


@pytest.mark.parametrize(
    ("duplicate", "kind"),
    [*((duplicate, torch.nn.Sequential) for duplicate in COPIES.values()), (copy.deepcopy, CopiesItself)],
    ids=[*COPIES, "own __getstate__"],
)
def test_a_copy_is_a_plain_model_outside_of_ddp(duplicate: Callable[[Any], Any], kind: type[Any]) -> None:
    module = kind(torch.nn.Linear(2, 2))
    replica = in_replica(module, bf16=True)
    copied = duplicate(module)
    assert type(copied) is kind and copied.state_dict().keys() == module.state_dict().keys()
    assert copied(X).dtype == torch.float32 and replica.calls == 0
    module(X)
    assert replica.calls == 1


@pytest.mark.parametrize("when", ["before", "after", "around"])
def test_a_compiled_model_calls_ddp_and_its_compiled_code(when: str) -> None:
    torch.compiler.reset()
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    module = ScriptedModel(torch.relu)
    if when == "before":
        module.compile(backend=backend)
    replica = in_replica(module)
    model: Any = torch.compile(module, backend=backend) if when == "around" else module
    if when == "after":
        module.compile(backend=backend)
        replica.model.use_replica(replica)  # as before every micro-batch
    model(X)
    assert replica.calls == 1 and compiled


def test_a_module_that_is_prepared_again_has_one_route() -> None:
    module = ScriptedModel()
    first = in_replica(module, bf16=True)
    second = in_replica(module)
    assert module(X).dtype == torch.float32
    assert (first.calls, second.calls) == (0, 1)


def test_a_model_that_calls_itself_goes_through_ddp_once() -> None:
    class Recursive(ScriptedModel):
        def forward(self, x: torch.Tensor, depth: int = 2) -> Any:
            y = self.layer(x)
            return self(y, depth - 1) if depth else y

    module = Recursive()
    replica = in_replica(module, bf16=True)
    assert module(X).dtype == torch.float32 and replica.calls == 1


@pytest.mark.parametrize(
    "past",
    [lambda model: model.forward, copy.deepcopy, partial(torch.compile, backend="eager")],
    ids=["forward", "copy", "compiled"],
)
def test_a_forward_that_is_called_past_ddp_is_refused(new_run: NewRun, past: Callable[[Any], Any]) -> None:
    run = new_run()
    model = past(prepared(run))
    step = next(run.steps())
    expected = r"does not come from calling the prepared model.*as model\(x\).*model\.compile\(\)"
    with pytest.raises(ConfigError, match=expected), step:
        compute_gradients(step, model)


def test_nested_bf16_outputs_are_converted_to_fp32() -> None:
    numbers = torch.tensor([1, 2])

    def nested(y: torch.Tensor) -> Any:
        assert y.dtype == torch.bfloat16
        return OrderedDict(
            logits=y, parts=[y, (y, {"deep": y})], numbers=numbers, double=y.double(), text="x", none=None
        )

    model = ScriptedModel(nested)
    in_replica(model, bf16=True)
    output = model(X)
    assert type(output) is OrderedDict
    assert type(output["parts"]) is list
    assert type(output["parts"][1]) is tuple
    floats = [output["logits"], output["parts"][0], output["parts"][1][0], output["parts"][1][1]["deep"]]
    assert {tensor.dtype for tensor in floats} == {torch.float32}
    assert output["numbers"] is numbers
    assert output["double"].dtype == torch.float64
    assert (output["text"], output["none"]) == ("x", None)
    assert model.layer.weight.dtype == torch.float32


@pytest.mark.parametrize("kind", [collections.namedtuple("Output", "y"), partial(collections.defaultdict, list)])
def test_bf16_outputs_in_other_containers_are_converted_to_fp32(kind: Any) -> None:
    model = ScriptedModel(lambda y: kind(y=y.bfloat16()))
    for bf16, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        in_replica(model, bf16=bf16)
        output = model(X)
        assert (output.y if isinstance(output, tuple) else output["y"]).dtype == dtype
