"""The private parts of torch that this package uses, all in one module. Written for torch 2.11 to 2.15.

No other module may use a private name of torch; `tests/unit/test_architecture.py` checks that.
"""

from __future__ import annotations

import ctypes
import datetime
import threading
import warnings
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial, wraps
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd import profiler as autograd_profiler
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim.lr_scheduler import SequentialLR
from torch.utils import _pytree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

EXTRA_STATE = "_extra_state"
"""The last part of the `state_dict` key that holds what `Module.get_extra_state` returns. Torch does not export it."""


def add_pairwise(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    """Adds each right tensor to its left one, in place, and returns the left ones: few kernel launches."""
    torch._foreach_add_(left, right)
    return left


# Also with few kernel launches, and without a wait for the device.
copy_pairwise = partial(torch._foreach_copy_, non_blocking=True)
"""Copies each tensor of the second list into its one of the first."""
divide = torch._foreach_div_
"""Divides tensors in place by a number."""
version = attrgetter("_version")
"""Returns a number that every in-place change of a tensor increases."""
_get_address = methodcaller("data_ptr")


def total_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the 2-norm over all tensors, whose bits do not depend on where in memory they begin.

    On a GPU, `torch._foreach_norm` adds squares in an order that differs if an address is no multiple of 16. Sums in
    float64 differ so little that rounding to float32 hides it.
    """
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack(norms)).float()


def largest_values(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the largest absolute value of each tensor, shape (tensors,), NaN if it has a NaN, and 0 without elements.

    `torch._foreach_norm`: few kernel launches.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    return torch.stack(torch._foreach_norm(filled, torch.inf)) if filled else torch.zeros(1)


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Returns the `version` of each tensor, without a Python call for each."""
    return list(map(version, tensors))


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns where the elements of each tensor are in memory; 0 for a sparse one."""
    try:
        return list(map(_get_address, tensors))
    except RuntimeError:  # a sparse one has no single place
        return [tensor.data_ptr() if tensor.layout is torch.strided else 0 for tensor in tensors]


class CallRoute:
    """Takes over the calls of a module: `module(x)` calls the route, whose function may call `inner`.

    It is where `Module.compile` puts the compiled call, `Module._compiled_call_impl`. Torch does not copy that with the
    module, nor pickle it. `inner` runs the module with its hooks, compiled if `Module.compile` was called.
    """

    inner: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def install(self, module: torch.nn.Module) -> None:
        """Routes the calls of the module. Replaces a route that it has, and keeps a compiled call as `inner`."""
        current = module.__dict__.get("_compiled_call_impl")
        if current is self:
            return
        if isinstance(current, CallRoute):
            current = current.inner
        self.inner = module._call_impl if current is None else current
        # Past `__setattr__`, which a compiled module forwards to the module it compiles.
        module.__dict__["_compiled_call_impl"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copies and pickles as None, so copies of a module whose own `__getstate__` includes the route have none."""
        return type(None), ()


def map_tree(function: Callable[..., Any], *trees: Any) -> Any:
    """Returns the tree of containers with the function applied to each leaf, or to the leaves of several equal trees.

    `torch.utils._pytree`: its public successor `torch.utils.pytree` is not in these versions.
    """
    return _pytree.tree_map(function, *trees)


def modules_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns what `Module.modules` yields, from `Module._modules`: its nested generators take four times as long."""
    found: dict[int, torch.nn.Module] = {}
    left: list[torch.nn.Module | None] = [module]
    while left:
        current = left.pop()
        if current is not None and id(current) not in found:
            found[id(current)] = current
            if current._modules:
                left.extend(reversed(current._modules.values()))
    return list(found.values())


def parameters_of(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Returns the own parameters of modules, from `Module._parameters`: a tied one several times."""
    found = (parameter for module in modules if module._parameters for parameter in module._parameters.values())
    return [parameter for parameter in found if parameter is not None]


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the module's own buffers by name. `Module._buffers`: `named_buffers` leaves out buffers that are None."""
    return module._buffers


def is_normalization(module: torch.nn.Module, buffer: str) -> bool:
    """Returns whether a buffer holds statistics of one of torch's own normalization layers.

    These are BatchNorm, InstanceNorm and their subclasses; the observers of quantization; and spectral normalization,
    which keeps the vectors of its power iteration in a parametrization or, in its older form, in the normalized layer,
    whose `Module._forward_pre_hooks` update them.
    """
    if isinstance(module, _NormBase | _SpectralNorm) or type(module).__module__.startswith("torch.ao."):
        return True
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(hook, SpectralNorm) and buffer.startswith(hook.name) for hook in hooks)


def has_gradient_hooks(parameter: torch.nn.Parameter) -> bool:
    """Returns whether hooks run on the parameter's gradient. Public API does not list hooks."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def layer_versions(state: OrderedDict[str, Any]) -> Any:
    """Returns the versions of the layers in a module's `state_dict`, or None for any other dict: `_metadata`."""
    return getattr(state, "_metadata", None)


def set_layer_versions(state: OrderedDict[str, Any], versions: Any) -> None:
    """Sets what `layer_versions` returns."""
    state._metadata = versions  # type: ignore[attr-defined]


def has_load_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether hooks change the state that `Optimizer.load_state_dict` loads. Public API does not list hooks."""
    return bool(optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks)


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a scheduler was built for an optimizer, whose `step` it marks: `_wrapped_by_lr_sched`."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def inner_schedulers(scheduler: torch.optim.lr_scheduler.LRScheduler) -> Sequence[Any]:
    """Returns the schedulers that a `SequentialLR` or `ChainedScheduler` runs; none for any other: `_schedulers`."""
    return getattr(scheduler, "_schedulers", None) or ()


def move_scheduler(scheduler: Any, position: int) -> None:
    """Moves a scheduler from its initial state to a number of steps, without those steps.

    Calls the deprecated `step(epoch)`, which uses `_get_closed_form_lr` where a scheduler has it. Raises ValueError or
    TypeError for schedulers whose learning rate follows from the steps before.
    """
    if isinstance(scheduler, SequentialLR):
        number = bisect_right(scheduler._milestones, position)
        active = scheduler._schedulers[number]
        start = scheduler._milestones[number - 1] if number else 0
        move_scheduler(active, position - start)
        scheduler.last_epoch = position
        scheduler._last_lr = active.get_last_lr()
        return
    rates = []
    for factor in (2.0, 1.0):  # a rate that depends on the one before differs
        for group in scheduler.optimizer.param_groups:
            rate = factor * group["initial_lr"]
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `epoch` is deprecated, and the optimizer has not stepped
            scheduler.step(position)
        rates.append(scheduler.get_last_lr())
    if rates[0] != rates[1]:
        raise ValueError("its learning rate follows from the steps before")


def is_profiling() -> bool:
    """Returns whether a `torch.profiler` is active in this process: `torch.autograd.profiler._is_profiler_enabled`."""
    return torch.autograd.profiler._is_profiler_enabled


def call_after_gradients(loss: torch.Tensor, function: Callable[[], object]) -> None:
    """Makes the backward of a loss call a function when all gradients of this rank are computed.

    `Engine.queue_callback` runs callbacks at the end of the backward, in the order in which they were queued. This one
    is queued first. DDP and FSDP queue theirs, which wait for the reduction, during the backward.
    """

    def queue(_: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: (function(), None)[1])

    if loss.requires_grad:
        loss.register_hook(queue)


def wrap_waits(unit: torch.nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps the methods in which a unit of FSDP waits for other ranks, or makes the current stream wait.

    With gloo, `unshard` gathers the parameters and `post_backward` reduces the gradients. On a GPU, both run on other
    streams, and `wait_for_unshard` waits. Torch 2.11 may have one group of parameters for each unit.
    """
    for group in _parameter_groups(unit):
        for name in ("unshard", "wait_for_unshard", "post_backward"):
            setattr(group, name, wrap(getattr(group, name)))


def _units(module: torch.nn.Module) -> list[Any]:
    return [each for each in module.modules() if hasattr(each, "_get_fsdp_state")]


def _parameter_groups(unit: Any) -> list[Any]:
    state = unit._get_fsdp_state()
    one = getattr(state, "_fsdp_param_group", None)
    return list(getattr(state, "_fsdp_param_groups", [one] if one is not None else []))


def take_off_fsdp(module: torch.nn.Module) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    """Undoes `fully_shard` on all units of a model, which torch has no function for. Hooks of others stay.

    Returns, by the shards, the parameters that replace them: of the whole shape, on the meta device.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping

    replaced: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for unit in _units(module):
        state = unit._get_fsdp_state()
        handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
        for group in _parameter_groups(unit):
            handles += group._module_to_pre_save_state_dict_hook_handle.values()
            handles += group._module_to_pre_load_state_dict_hook_handle.values()
            for each in group.fsdp_params:
                handles.append(each._post_load_hook_handle)
                shard, place = each.sharded_param, each._module_info
                whole = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
                replaced[shard] = torch.nn.Parameter(whole, requires_grad=shard.requires_grad)
                for owner, name in (
                    (place.module, place.param_name),
                    *zip(place.shared_modules, place.shared_param_names, strict=True),
                ):
                    owner._parameters[name] = replaced[shard]
        for handle in handles:
            handle.remove()
        for key in (STATE_KEY, REGISTRY_KEY):
            entries = unit.__dict__[key]
            for name in [name for name in entries if getattr(name, "__name__", name) == "fully_shard"]:
                del entries[name]
        _module_state_mapping.pop(unit)
        unit.__class__ = type(unit).__mro__[2]  # after the class that `fully_shard` made, and FSDPModule
    return replaced


def restart_group_numbers() -> None:
    """Makes the next process group of this process number 0, the number under which its ranks meet in the store.

    Torch also counts a group that failed to form, in `distributed_c10d._world`. Without this, a rank on which a group
    failed would wait under another number than its peers.
    """
    dist.distributed_c10d._world.group_count = 0


def set_collective_timeout(timeout: datetime.timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Sets the timeout of collectives of a process group, by default of the default one, which messages ignore.

    The public `init_process_group` takes one timeout, for forming the group and for its collectives. Torch 2.15 has the
    public `set_timeout`.
    """
    c10d = dist.distributed_c10d
    (getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout)(timeout, group)


def backend_of(device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """Returns the backend for a device of a process group, by default of the default one.

    The public `ProcessGroup.abort` aborts all backends.
    """
    found = group or dist.group.WORLD
    assert found is not None, "the default process group is formed"
    return found._get_backend(device)


class CollectiveCounter:
    """Returns how many collectives the default process group has begun, on the CPU and on `device`.

    `Backend._get_sequence_number_for_group` of gloo also counts messages between two ranks, whose number differs from
    rank to rank, and the messages of a `monitored_barrier`. Therefore `ProcessGroup` subtracts its own messages and
    barriers.
    """

    _newest: weakref.ref[CollectiveCounter] | None = None

    def __init__(self, device: torch.device) -> None:
        self._backends = {backend_of(torch.device("cpu")), backend_of(device)}
        self._num_messages = self._num_within = 0
        self._number_within: int | None = None
        self._lock = threading.RLock()
        CollectiveCounter._newest = weakref.ref(self)
        for name, function in _MESSAGES.items():
            setattr(dist.ProcessGroup, name, _excluding(function))

    def __call__(self) -> int:
        """Returns the number. Callable from any thread."""
        with self._lock:
            number = self._number_within
            return self._num_begun() - self._num_messages if number is None else number

    def _num_begun(self) -> int:
        return sum(backend._get_sequence_number_for_group() for backend in self._backends)

    @contextmanager
    def excluding(self) -> Iterator[None]:
        """Excludes what begins in the context. Threads may be in it at the same time."""
        with self._lock:
            self._num_within += 1
            self._number_within = self()
        try:
            yield
        finally:
            with self._lock:
                self._num_within -= 1
                if not self._num_within:
                    assert self._number_within is not None
                    self._num_messages = self._num_begun() - self._number_within
                    self._number_within = None


_MESSAGES = {name: getattr(dist.ProcessGroup, name) for name in ("send", "recv", "recv_anysource", "monitored_barrier")}


def _excluding(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(group: dist.ProcessGroup, *arguments: Any, **named: Any) -> Any:
        newest = CollectiveCounter._newest
        counter = newest() if newest is not None and group is dist.group.WORLD else None
        with counter.excluding() if counter is not None else nullcontext():
            return function(group, *arguments, **named)

    return call


def dtensor_in_place(local: torch.Tensor, like: DTensor) -> DTensor:
    """Returns a DTensor laid out like another one, whose part on this rank is `local`, on whatever device it is.

    FSDP2 keeps shards on the host in this way. The public `DTensor.from_local` moves them to the mesh's device.
    """
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    return type(like)(local, replace(like._spec, tensor_meta=meta), requires_grad=False)


def release_groups(mesh: DeviceMesh, module: torch.nn.Module) -> None:
    """Makes a mesh, and the units of FSDP that were sharded over it, release their process groups.

    The groups keep threads and connections alive, and torch caches every mesh for the life of the process. Torch 2.11
    may not have `DeviceMesh._pg_registry`.
    """
    getattr(mesh, "_pg_registry", {}).clear()
    for unit in _units(module):
        for group in _parameter_groups(unit):
            for info in (group.mesh_info, group.post_forward_mesh_info):
                if info is not None:
                    info.shard_process_group = None


class ProfilerListener(Protocol):
    """Learns of sessions of `torch.profiler` in this process; see `listen_to_profilers`."""

    def session_changes(self, *, begins: bool) -> None:
        """A session is about to begin, or to end, in the thread that calls this."""


_listeners: weakref.WeakSet[ProfilerListener] = weakref.WeakSet()


def listen_to_profilers(listener: ProfilerListener) -> None:
    """Notifies a listener of sessions until it is collected."""
    _watch_profilers()
    _listeners.add(listener)


@cache
def _watch_profilers() -> None:
    """Sessions call `torch.autograd.profiler._run_on_profiler_start` first, and `_run_on_profiler_stop` last."""
    for name, begins in (("_run_on_profiler_start", True), ("_run_on_profiler_stop", False)):
        setattr(autograd_profiler, name, partial(_notify, getattr(autograd_profiler, name), begins=begins))


def _notify(original: Callable[[], None], *, begins: bool) -> None:
    for listener in [*_listeners]:
        listener.session_changes(begins=begins)
    original()


def delay_cuda(wait: Callable[[], None]) -> None:
    """Makes the first use of CUDA in this process call `wait` before it: all go through `torch._C._cuda_init`."""
    initialize = torch._C._cuda_init

    def initialize_later() -> None:
        wait()
        initialize()

    torch._C._cuda_init = initialize_later


def has_used_cuda() -> bool:
    """Whether this process has loaded the CUDA driver, which fixes the GPUs that it sees."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != 3  # CUDA_ERROR_NOT_INITIALIZED


def records_memory_history() -> bool:
    """Returns whether the stacks of GPU allocations are recorded: `torch._C._cuda_isHistoryEnabled`."""
    return torch._C._cuda_isHistoryEnabled()


def record_memory_history(record: bool) -> None:
    """Starts or ends the recording of GPU allocations with their stacks: `torch.cuda.memory._record_memory_history`."""
    torch.cuda.memory._record_memory_history(enabled="all" if record else None)


def dump_memory_snapshot(path: str) -> None:
    """Writes what `record_memory_history` has recorded, for https://pytorch.org/memory_viz: `_dump_snapshot`."""
    torch.cuda.memory._dump_snapshot(path)
