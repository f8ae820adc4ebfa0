"""States that differ by step, so that mixtures are detected. Imports little, for processes that start often."""

from __future__ import annotations

from typing import Any

import torch

from elastic_ddp.tensors.state_tree import weights_sha256


def make_state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(16, 8, generator=generator)
    return {
        "model": {"weight": weight, "bias": torch.full((16,), float(step), dtype=torch.bfloat16)},
        "optimizer": {
            "state": {0: {"exp_avg": weight * 2, "step": torch.tensor(float(step))}},
            "param_groups": [{"lr": 0.1}],
        },
        "user": {"step": step, "complex": torch.tensor([1j * step], dtype=torch.complex128), "none": None},
    }


def step_of(state: dict[str, Any]) -> int:
    """Returns the step of a state of `make_state`, and checks that it is no mixture of two."""
    step = state["user"]["step"]
    expected = make_state(step)
    assert weights_sha256(state["model"].items()) == weights_sha256(expected["model"].items())
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], expected["optimizer"]["state"][0]["exp_avg"])
    assert torch.equal(state["user"]["complex"], expected["user"]["complex"])
    assert state.keys() == expected.keys() and state["optimizer"]["param_groups"] == [{"lr": 0.1}]
    return int(step)
