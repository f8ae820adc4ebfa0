"""The private parts of torch that this package uses, all in one module. Written for torch 2.11 to 2.13.

No other module may use a private name of torch; `tests/unit/test_architecture.py` checks that. Each function names the
private part and says why no public API serves.
"""

from __future__ import annotations

import datetime
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils import _pytree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

EXTRA_STATE = "_extra_state"
"""The last part of the `state_dict` key that holds what `Module.get_extra_state` returns. Torch does not export it."""


def add_pairwise(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    """Adds each right tensor to its left one, in place, with few kernel launches.

    Uses `torch._foreach_add_`. Public operators take one tensor at a time.
    """
    torch._foreach_add_(left, right)


def copy_pairwise(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each source into its target, with few kernel launches. From CUDA to pinned memory it does not block.

    Uses `torch._foreach_copy_`. Public operators take one tensor at a time.
    """
    torch._foreach_copy_(targets, sources, non_blocking=True)


def version(tensor: torch.Tensor) -> int:
    """Returns a number that every in-place change of the tensor increases.

    Uses `Tensor._version`, the counter of autograd. Torch has no public name for it.
    """
    return tensor._version


def map_tree(function: Callable[..., Any], *trees: Any) -> Any:
    """Returns the tree of containers with the function applied to each leaf, or to the leaves of several equal trees.

    Uses `torch.utils._pytree`, whose public successor `torch.utils.pytree` is not in these versions.
    """
    return _pytree.tree_map(function, *trees)


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the module's own buffers by name, as the dict in which the module keeps them.

    Uses `Module._buffers`: `named_buffers` leaves out buffers that are None.
    """
    return module._buffers


def has_gradient_hooks(parameter: torch.nn.Parameter) -> bool:
    """Returns whether hooks run on the parameter's gradient.

    Uses `Tensor._backward_hooks` and `Tensor._post_accumulate_grad_hooks`. Public API registers hooks and removes them,
    but does not list them.
    """
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def layer_versions(state: OrderedDict[str, Any]) -> Any:
    """Returns the versions of the layers in a module's `state_dict`, or None for any other dict.

    Uses the attribute `_metadata`, which `Module.state_dict` sets and `Module.load_state_dict` reads.
    """
    return getattr(state, "_metadata", None)


def set_layer_versions(state: OrderedDict[str, Any], versions: Any) -> None:
    """Sets what `layer_versions` returns."""
    state._metadata = versions  # type: ignore[attr-defined]


def has_load_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether hooks change the state that `Optimizer.load_state_dict` loads.

    Uses `Optimizer._optimizer_load_state_dict_pre_hooks` and `..._post_hooks`. Public API registers hooks only.
    """
    return bool(optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks)


def inner_schedulers(scheduler: torch.optim.lr_scheduler.LRScheduler) -> Sequence[Any]:
    """Returns the schedulers that a `SequentialLR` or `ChainedScheduler` runs; none for any other.

    Uses `_schedulers`. Torch has no public name for it.
    """
    return getattr(scheduler, "_schedulers", ())


def inner_scheduler_states(state: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the states of the schedulers that `inner_schedulers` returns, from their scheduler's `state_dict`."""
    return state.get("_schedulers", ())


def restart_group_numbers() -> None:
    """Makes the next process group of this process number 0, the number under which its ranks meet in the store.

    Uses `distributed_c10d._world.group_count`. Torch also counts a group that failed to form. Without this, a rank on
    which a group failed would wait under another number than its peers. `group_name` of `init_process_group` is
    deprecated and has no effect.
    """
    dist.distributed_c10d._world.group_count = 0


def set_collective_timeout(timeout: datetime.timedelta) -> None:
    """Sets the timeout of collectives of the default process group. Messages keep the one the group was formed with.

    Uses `distributed_c10d._set_pg_timeout`. The public `init_process_group` takes one timeout, for forming the group
    and for its collectives.
    """
    dist.distributed_c10d._set_pg_timeout(timeout)


def default_backend(device: torch.device) -> Any:
    """Returns the backend of the default process group for a device, such as its `ProcessGroupNCCL`.

    Uses `ProcessGroup._get_backend`. The public `ProcessGroup.abort` aborts the backends of all devices.
    """
    assert dist.group.WORLD is not None, "the default process group is formed"
    return dist.group.WORLD._get_backend(device)


def release_groups(mesh: DeviceMesh) -> None:
    """Makes a mesh release its process groups.

    Uses `DeviceMesh._pg_registry`, which torch 2.13 has and 2.11 may not. Torch caches every mesh for the life of the
    process. A mesh keeps its groups alive, with their threads and connections.
    """
    getattr(mesh, "_pg_registry", {}).clear()
