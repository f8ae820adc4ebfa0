"""What takes the place of Ray Train's `TorchConfig` and of `ray.train.torch`, which imports all of its trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.train.backend import BackendConfig
from ray.train.v2._internal.util import TrainingFramework

if TYPE_CHECKING:
    import torch


class TorchWithoutProcessGroup(BackendConfig):
    """Each generation forms its own process group. `TorchConfig` would import torch in the controller."""

    @property
    def framework(self) -> TrainingFramework:
        return TrainingFramework.TORCH


def device_of_worker() -> torch.device:
    """Returns the device of this worker, the current one on CUDA; the same as `ray.train.torch.get_device`."""
    import torch
    from ray.air._internal.device_manager import get_torch_device_manager_by_context

    device: torch.device = get_torch_device_manager_by_context().get_devices()[0]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
