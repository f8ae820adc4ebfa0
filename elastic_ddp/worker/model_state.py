"""Tensors that a forward uses but the model's `state_dict()` omits: they are part of the run's state, too.

Models with adapters often save their adapters only. The other tensors must be equal, however each worker built
the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastic_ddp.tensors.dtensor import is_dtensor

PARAMETERS, BUFFERS = "parameters", "buffers"
"""The components of a state for tensors that the model's `state_dict()` omits."""


def left_out(module: torch.nn.Module, model: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the parameters and the buffers that a state dict of the module leaves out, or changes, by name."""
    held = {_memory(value) for value in model.values() if isinstance(value, torch.Tensor) and _is_dense(value)}
    named: dict[str, Any] = {PARAMETERS: module.named_parameters(), BUFFERS: module.named_buffers()}
    return {
        component: {
            name: tensor.detach()
            for name, tensor in tensors
            if not (_memory(tensor) in held if _is_dense(tensor) else name in model)
        }
        for component, tensors in named.items()
    }


def load_weights(module: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Loads weights by name, also those that the module's state dict leaves out. Skips other names."""
    module.load_state_dict(weights, strict=False)
    built = module.state_dict()
    with torch.no_grad():
        for tensors in left_out(module, built).values():
            for name, tensor in tensors.items():
                if name in weights and name not in built:
                    tensor.copy_(weights[name])


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_dtensor(tensor) and not tensor.is_meta


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns where a tensor is in memory, equal for the names of tied weights."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()
