"""The model that `run.prepare` returns."""

from __future__ import annotations

import collections
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic_ddp.distributed.prepared_model import PreparedModel
from tests.unit.single_worker import (
    CPU,
)


class ScriptedModel(torch.nn.Module):
    """A model whose forward returns `output(layer(x))`."""

    def __init__(self, output: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(1))
        self.output = output
        self.vocabulary = ["a", "b"]

    def forward(self, x: torch.Tensor) -> Any:
        return self.output(self.layer(x))

    def generate(self) -> str:
        return "text"


class FakeReplica:
    """Counts the calls of a DDP replica."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def test_attributes_and_methods_of_the_plain_model_are_reachable() -> None:
    model = PreparedModel(ScriptedModel(), device=CPU, bf16=False)
    assert model.vocabulary == ["a", "b"]
    assert model.generate() == "text"
    assert model.layer is model.module.layer
    with pytest.raises(AttributeError, match="'ScriptedModel' object has no attribute 'nothing'"):
        _ = model.nothing


def test_names_in_the_state_dict_are_those_of_the_plain_model() -> None:
    model = PreparedModel(ScriptedModel(), device=CPU, bf16=False)
    assert list(model.state_dict()) == ["count", "layer.weight", "layer.bias"]
    plain = ScriptedModel()
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})


def test_forward_without_gradients_bypasses_ddp() -> None:
    model, replica = PreparedModel(ScriptedModel(), device=CPU, bf16=False), FakeReplica()
    fake: Any = replica
    model.use_replica(fake)
    model(torch.ones(1, 2))
    assert replica.calls == 1
    with torch.no_grad():
        model(torch.ones(1, 2))
    with torch.inference_mode():
        model(torch.ones(1, 2))
    assert replica.calls == 1
    model.use_replica(None)
    model(torch.ones(1, 2))
    assert replica.calls == 1
    assert list(model.state_dict()) == list(ScriptedModel().state_dict())


def test_nested_bf16_outputs_are_converted_to_fp32() -> None:
    numbers = torch.tensor([1, 2])

    def nested(y: torch.Tensor) -> Any:
        assert y.dtype == torch.bfloat16
        return OrderedDict(
            logits=y, parts=[y, (y, {"deep": y})], numbers=numbers, double=y.double(), text="x", none=None
        )

    model = PreparedModel(ScriptedModel(nested), device=CPU, bf16=True)
    output = model(torch.ones(1, 2))
    assert type(output) is OrderedDict
    assert type(output["parts"]) is list
    assert type(output["parts"][1]) is tuple
    floats = [output["logits"], output["parts"][0], output["parts"][1][0], output["parts"][1][1]["deep"]]
    assert {tensor.dtype for tensor in floats} == {torch.float32}
    assert output["numbers"] is numbers
    assert output["double"].dtype == torch.float64
    assert (output["text"], output["none"]) == ("x", None)
    assert model.module.layer.weight.dtype == torch.float32


def test_without_bf16_outputs_are_not_converted() -> None:
    model = PreparedModel(ScriptedModel(lambda y: y.bfloat16()), device=CPU, bf16=False)
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16


def test_setting_an_attribute_sets_it_on_the_plain_model() -> None:
    model: Any = PreparedModel(ScriptedModel(), device=CPU, bf16=False)
    model.vocabulary = ["c"]
    assert model.module.vocabulary == ["c"]


def test_names_of_parameters_are_those_of_the_plain_model() -> None:
    model = PreparedModel(ScriptedModel(), device=CPU, bf16=False)
    assert [name for name, _ in model.named_parameters()] == ["layer.weight", "layer.bias"]


def test_bf16_outputs_in_a_named_tuple_are_converted_to_fp32() -> None:
    Output = collections.namedtuple("Output", "logits")
    model = PreparedModel(ScriptedModel(lambda y: Output(y)), device=CPU, bf16=True)
    assert model(torch.ones(1, 2)).logits.dtype == torch.float32


def test_bf16_outputs_in_a_defaultdict_are_converted_to_fp32() -> None:
    model = PreparedModel(ScriptedModel(lambda y: collections.defaultdict(list, y=y)), device=CPU, bf16=True)
    assert model(torch.ones(1, 2))["y"].dtype == torch.float32
