"""`SavedParameters`: what a function, such as the ascent of SAM, changes for a while in a step."""

from __future__ import annotations

import torch


class SavedParameters:
    """A copy of a module's trained parameters and of its buffers."""

    @torch.no_grad()
    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters = [(p, p.detach().clone()) for p in module.parameters() if p.requires_grad]
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    @torch.no_grad()
    def put_back(self, *, with_buffers: bool) -> None:
        """Restores the parameters, bit for bit, and the buffers if the step is repeated or left out."""
        for tensor, saved in [*self._parameters, *(self._buffers if with_buffers else [])]:
            tensor.copy_(saved)
