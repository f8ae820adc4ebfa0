"""The parameters and buffers of a model, also those that its `state_dict()` omits.

Models with adapters often save their adapters only. The rest is part of the run's state, too: each worker may have
built other values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastic_ddp.tensors.dtensor import is_dtensor

PARAMETERS, BUFFERS = "parameters", "buffers"
"""The components of a state for what the model's `state_dict()` leaves out; `parameters` only if there are any."""


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


class SavedParameters:
    """A copy of a module's trained parameters and buffers, which an update changes for a while (the ascent of SAM)."""

    @torch.no_grad()
    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters = [(p, p.detach().clone()) for p in module.parameters() if p.requires_grad]
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    @torch.no_grad()
    def put_back(self, *, with_buffers: bool) -> None:
        """Restores the parameters, bit for bit, and the buffers if the step is repeated or left out."""
        for tensor, saved in [*self._parameters, *(self._buffers if with_buffers else [])]:
            tensor.copy_(saved)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_dtensor(tensor) and not tensor.is_meta


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns where a tensor is in memory, equal for the names of tied weights."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()
