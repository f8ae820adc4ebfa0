"""The FSDP strategy: each rank holds a shard of every parameter and of its optimizer state.

The strategy uses FSDP2, `torch.distributed.fsdp.fully_shard`. The forward and backward of a unit gather its parameters
from all ranks, so all ranks must run the same number of them; see `fsdp_rounds`. A group of another size needs other
shards: when workers join or leave as planned, rows move between the ranks (`shard_moves`), and the model is sharded
again. A new run shards the model that the ranks built, unit by unit. With a model on the meta device, a rank never
holds more than one whole unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from elastic_ddp import torch_internals
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.fsdp_rounds import Gather, Reduction, Round
from elastic_ddp.distributed.fsdp_units import (
    ParameterLocation,
    check_room,
    check_shardable,
    device_of_shards,
    locate_parameters,
    modules_by_unit,
)
from elastic_ddp.distributed.parameter_guard import changed_parameters_error
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.reduction_tree import Node, dealt_micro_batches, fold_in, fold_to_root
from elastic_ddp.distributed.row_norm import infinite_unless_finite, row_norm
from elastic_ddp.distributed.state_transfer import transfer_tensors
from elastic_ddp.distributed.strategy import Strategy, ignore, unused_parameters_error
from elastic_ddp.errors import ConfigError, shorten
from elastic_ddp.tensors.dtensor import shard_of
from elastic_ddp.tensors.host_memory import free_bytes
from elastic_ddp.tensors.state_tree import Layout, local_part

BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
FP32 = MixedPrecisionPolicy()
POLICIES = {
    "fp32": FP32,
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
}
"""The policy of each precision of a run."""
_USE_IN_ALL = "add 0 * parameter.sum() of each to the model's output: with FSDP every micro-batch must use all of them"


class FSDPStrategy(Strategy):
    """Reduces gradients in every round of micro-batches. Between two rounds, a rank holds shards only."""

    replicates_state = False
    deal = staticmethod(dealt_micro_batches)

    def __init__(
        self,
        model: PreparedModel,
        config: RunConfig,
        group: ProcessGroup,
        enter_phase: Callable[[str], str] = ignore,
    ) -> None:
        super().__init__(model, config, group, enter_phase)
        self._gathered: dict[str, torch.nn.Parameter] = {}  # the trained ones as the autograd graph contains them
        self._versions: dict[str, tuple[torch.Tensor, int]] = {}  # of all gathered ones, before the forward
        self._mesh: DeviceMesh | None = None
        self._options = config.fsdp
        self._policy = POLICIES[config.precision]
        self._shard_device = device_of_shards(config, group.device)
        self._offload = CPUOffloadPolicy(group.device.type == "cuda") if config.fsdp.cpu_offload else OffloadPolicy()
        self._round = Round(group)
        self._is_canonical = config.reduction == "canonical"
        self._is_weighted = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._reductions: dict[str, Reduction] = {}  # of the units with trained parameters, by name
        self._alone: dict[Node, list[torch.Tensor]] = {}  # the sums if there is one rank, which exchanges nothing

    def shard(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        rows: Mapping[str, torch.Tensor] = MappingProxyType({}),
        *,
        begins: bool = False,
    ) -> None:
        module = self._model.module
        former = self._take_off(optimizers)
        names = {parameter: name for name, parameter in module.named_parameters()}
        sharing = self._group.shard_group or dist.group.WORLD
        assert sharing is not None, "the generation's group is formed"
        # Meshes of the same ranks compare equal, and torch caches results by mesh. Without a name for each generation,
        # a process whose rank changed would get the coordinates of its old rank.
        dimension_names = (f"generation_{self._group.assignment.generation}",)
        mesh = DeviceMesh.from_group(sharing, self._group.device.type, mesh_dim_names=dimension_names)
        self._mesh = mesh
        is_mixed = self._policy is not FP32
        submodules = [submodule for submodule in module.modules() if submodule is not module]
        # Batch normalization keeps float32 statistics and needs parameters of the same dtype. FSDP1 did the same.
        norms = [submodule for submodule in submodules if isinstance(submodule, BATCH_NORMS)] if is_mixed else []
        units = [submodule for submodule in submodules if self._model.is_unit(submodule) and submodule not in norms]
        # Innermost units first: each unit takes the parameters that no unit inside it has.
        policies = [
            *((norm, FP32) for norm in norms),
            *((unit, self._policy) for unit in reversed(units)),
            # The loss is computed in float32.
            (module, replace(self._policy, output_dtype=torch.float32) if is_mixed else FP32),
        ]
        unit_names = {submodule: name or "the model itself" for name, submodule in module.named_modules()}
        locations = locate_parameters(module, {unit for unit, _ in policies})
        check_shardable(locations)
        if self._group.device.type == "cuda" and not former:
            free = free_bytes(self._group.device)
            check_room(locations, self._group.assignment.num_shards, free, offloads=self._options.cpu_offload)
        modules = modules_by_unit(module, {unit for unit, _ in policies})
        for unit, policy in policies:
            if begins:
                self._make_first_weights(modules[unit])
            # As torch does by default, parameters outside of all units stay gathered: the backward begins with them.
            reshard = self._options.sharding != "grad_op" and unit is not module
            sharded_unit = fully_shard(
                unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=self._offload
            )
            own = [location for location in locations if location.unit is unit]
            reduction = Reduction(self._round, is_canonical=self._is_canonical)
            if own:
                # Of their classes, which are private, torch uses two methods.
                sharded_unit.set_custom_all_gather(Gather(self._group))  # type: ignore[arg-type]
                sharded_unit.set_custom_reduce_scatter(reduction)  # type: ignore[arg-type]
                sharded_unit.set_gradient_divide_factor(1.0)
                sharded_unit.set_force_sum_reduction_for_comms(True)
            if any(location.parameter.requires_grad for location in own):
                self._reductions[unit_names[unit]] = reduction
            self._hooks.append(unit.register_forward_pre_hook(partial(self._record_gathered, own)))
            torch_internals.wrap_waits(unit, self._as_communication)
        _fill(module, self._group.device, self._shard_device, rows, former)
        self.trained = self._find_trained()
        # The user created the optimizers with the parameters that the shards replaced.
        sharded = dict(module.named_parameters())
        for optimizer in optimizers:
            _replace_parameters(optimizer, lambda parameter: sharded[names[parameter]])

    def _make_first_weights(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Gives the modules of a unit their first weights, which rank 0 built or `first_weights` makes.

        On the meta device each rank initializes the whole unit, and keeps its shard: the bits are equal on all.
        """
        first = self._model.first_weights
        built = [name for name, parameter in _parameters_of(modules).items() if not parameter.is_meta]
        first.make(modules, self._group.device)
        parameters = _parameters_of(modules)
        receivers = range(1, self._group.world_size)
        to_send = {name: parameters[name] for name in built}
        received = transfer_tensors(to_send, self._group, source=0, receivers=receivers) or {}
        with torch.no_grad():
            for name, value in received.items():
                parameters[name].copy_(value)
        if received:
            first.note_loaded(self._model.module, received)

    def _take_off(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.nn.Parameter]:
        """Undoes the sharding of an earlier generation, and drops the state of the optimizers, which has its shards.

        Returns the shards by name: the user may hold references to them, so the next generation reuses these shards.
        """
        replaced = torch_internals.take_off_fsdp(self._model.module)
        for optimizer in optimizers if replaced else ():
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
        former = {whole: shard for shard, whole in replaced.items()}
        return {name: former[whole] for name, whole in self._model.module.named_parameters() if whole in former}

    def _as_communication(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = self._enter_phase("communication")
            try:
                return method(*args, **kwargs)
            finally:
                self._enter_phase(before)

        return call

    @torch.compiler.disable  # otherwise it is compiled for each unit, and again in each generation
    def _record_gathered(self, own: Sequence[ParameterLocation], unit: torch.nn.Module, inputs: Any) -> None:
        """A forward hook that records a unit's parameters after torch gathered them."""
        for location in own:
            parameter = location.parameter
            self._versions[location.name] = parameter, torch_internals.version(parameter)
            if location.name in self.trained:
                self._gathered[location.name] = parameter

    def layout(self, optimizers: Sequence[torch.optim.Optimizer]) -> Layout | None:
        module = self._model.module
        parameters = dict(module.named_parameters())
        names = {parameter: name for name, parameter in parameters.items()}
        tensors = {f"model.{name}": value for name, value in module.state_dict(keep_vars=True).items()}
        tensors |= {f"parameters.{name}": parameter for name, parameter in parameters.items()}
        for number, optimizer in enumerate(optimizers):
            prefix = f"optimizer.{number}"
            of_groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for index, parameter in enumerate(of_groups):
                tensors[f"{prefix}.state.{names[parameter]}"] = parameter
                tensors[f"{prefix}.numbered.state.{index}"] = parameter  # in a format other than torch's
        sharded = {name: value for name, value in tensors.items() if isinstance(value, DTensor)}

        def sharded_like(name: str) -> torch.Tensor | None:
            # The state of a parameter may be nested, as in optimizer.0.state.body.weight.history.1.
            while name not in sharded and name.startswith("optimizer."):
                name = name.rpartition(".")[0]
            return sharded.get(name)

        return sharded_like

    def begin_step(self, rows: np.ndarray) -> None:
        self.reshard()
        super().begin_step(rows)
        self._round.num_leaves = self.num_leaves
        self._round.number = -1
        self._alone.clear()
        for reduction in self._reductions.values():
            reduction.clear()

    def reshard(self) -> None:
        for submodule in self._model.module.modules():
            if isinstance(submodule, FSDPModule):
                submodule.reshard()

    def min_forwards(self, rows: np.ndarray) -> int:
        return max(int(np.count_nonzero(rows[list(owned)])) for owned in self.ranges)

    def _accumulators(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.trained.items(), *self._gathered.items()]

    def prepare_forward(self, micro_batch: int | None) -> None:
        self._model.use_replica(None)

    def backward(self, loss: torch.Tensor, micro_batch: int, weight: float | None = None) -> None:
        factor = self._factor(micro_batch, weight)
        self._is_weighted = weight is not None
        self._backward(loss if factor in (0.0, 1.0) else loss * factor, is_zero=not factor)

    def dummy_backward(self, loss: torch.Tensor) -> None:
        self._backward(loss, is_zero=True)

    def _backward(self, loss: torch.Tensor, *, is_zero: bool) -> None:
        self._check_unchanged()
        self._check_used(loss)
        self._round.number += 1
        self._round.is_zero = is_zero
        for reduction in self._reductions.values():
            reduction.num_exchanges = 0
        with self._accumulating(is_last=self._round.is_last):
            self._run_backward(loss, is_last=self._round.is_last)
            # `_check_used` cannot see into reentrant checkpoints.
            unused = [name for name, parameter in self.trained.items() if parameter.grad is None]
            if unused:
                raise unused_parameters_error(unused, _USE_IN_ALL)
            left = [name for name, parameter in self._gathered.items() if parameter.grad is not None]
            if left:
                raise ConfigError(
                    f"a backward left gradients of {shorten(left, 5)} that are not reduced. Reentrant activation "
                    "checkpoints do that if a forward calls an FSDP unit more than once: use "
                    "checkpoint(..., use_reentrant=False)."
                )
            if self._group.world_size == 1:
                self._fold_alone()
            else:
                self._check_exchanged()
        if self._round.is_last and not self._is_weighted and self.divisor != 1.0:
            self.divide_gradients(self.divisor)

    def _check_exchanged(self) -> None:
        """Raises a ConfigError if the gradients of a unit were exchanged in several parts, whose order may differ."""
        for name, reduction in self._reductions.items():
            if reduction.num_exchanges != 1:
                raise ConfigError(
                    f"a backward exchanged the gradients of the FSDP unit {name} {reduction.num_exchanges} times "
                    "instead of once. Leave its class out of run.prepare(model, shard=...) and fsdp.shard_classes."
                )

    def _fold_alone(self) -> None:
        """Adds the gradients of the only rank along the tree. The last round leaves the sum in the gradients."""
        gradients = [local_part(gradient) for _, gradient in self._gradients()]
        for micro_batch in self._round.leaves:
            leaf = [torch.zeros_like(one) for one in gradients] if self._round.is_zero else gradients
            fold_in(self._alone, Node(0, micro_batch), leaf, torch_internals.add_pairwise)
        if self._round.is_last:
            torch_internals.copy_pairwise(
                gradients, fold_to_root(self._alone, self.num_leaves, torch_internals.add_pairwise)
            )
            self._alone.clear()

    def _put_away(self) -> None:
        self.clear_gradients()  # the sums are in the reductions

    @torch.no_grad()  # a DTensor then returns its local part at once
    def _local(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        return [local_part(gradient) for gradient in gradients]

    def _check_unchanged(self) -> None:
        """Raises a ConfigError if a forward changed gathered parameters. The change would be lost with them."""
        gathered = self._versions.items()
        changed = [name for name, (tensor, count) in gathered if torch_internals.version(tensor) != count]
        if changed:
            raise changed_parameters_error(changed, self._model.module)

    def _check_used(self, loss: torch.Tensor) -> None:
        """Raises a ConfigError if the loss does not depend on all trained parameters.

        Ranks could reduce the gradients of different parameters, which torch would add up. Checked in every backward,
        so that the outcome does not depend on the world size.
        """
        leaves = _graph_leaves(loss)
        if leaves is None:
            return
        unused = [name for name in self.trained if self._gathered.get(name) not in leaves]
        if unused:
            raise unused_parameters_error(unused, _USE_IN_ALL)

    def gradient_norm(self) -> torch.Tensor:
        return row_norm([gradient for _, gradient in self._gradients()], self._group)

    def check_value(self) -> torch.Tensor:
        return infinite_unless_finite([gradient for _, gradient in self._gradients()], self._group)

    def close(self) -> None:
        """Releases the process group. The shards remain but cannot be gathered any more."""
        for hook in self._hooks:
            hook.remove()
        if self._mesh is not None:
            torch_internals.release_groups(self._mesh, self._model.module)


def _parameters_of(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters that modules have themselves, by name; tied ones once."""
    found: dict[torch.nn.Parameter, str] = {}
    for prefix, module in modules.items():
        for key, parameter in module.named_parameters(prefix, recurse=False):
            found.setdefault(parameter, key)
    return {name: parameter for parameter, name in found.items()}


def _fill(
    module: torch.nn.Module,
    device: torch.device,
    shard_device: torch.device,
    rows: Mapping[str, torch.Tensor],
    former: Mapping[str, torch.nn.Parameter],
) -> None:
    """Gives shards and buffers on the meta device their rows, or memory. Earlier shards keep their identity."""
    allocated: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and parameter.is_meta:
            local = rows[name] if name in rows else torch.empty_like(parameter.to_local(), device=shard_device)
            sharded = torch.nn.Parameter(shard_of(local, parameter), requires_grad=parameter.requires_grad)
            allocated[parameter] = former.get(name, sharded)
            if name in former:
                torch.utils.swap_tensors(former[name], sharded)
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(owner, name, torch.empty_like(buffer, device=device))
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in allocated:
                setattr(owner, name, allocated[parameter])


def _graph_leaves(loss: torch.Tensor) -> set[torch.Tensor | None] | None:
    """Returns the tensors whose gradients the backward of a loss accumulates, or None if that is unknown."""
    leaves: set[torch.Tensor | None] = set()
    pending = [loss.grad_fn] if loss.grad_fn is not None else []
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.name() == "CheckpointFunctionBackward":
            return None  # a reentrant checkpoint builds its graph during the backward
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.add(leaf)
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                pending.append(next_node)
    return leaves


def _replace_parameters(
    optimizer: torch.optim.Optimizer, replacement: Callable[[torch.nn.Parameter], torch.nn.Parameter]
) -> None:
    """Replaces an optimizer's parameters, and shards the state of each like its replacement."""
    replaced = {parameter: replacement(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for group in optimizer.param_groups:
        group["params"] = [replaced[parameter] for parameter in group["params"]]
    states = {parameter: optimizer.state.pop(parameter) for parameter in replaced if parameter in optimizer.state}
    for parameter, state in states.items():
        optimizer.state[replaced[parameter]] = torch_internals.map_tree(
            partial(_shard_like, parameter=replaced[parameter]), state
        )


def _shard_like(value: Any, parameter: torch.nn.Parameter) -> Any:
    """Returns a tensor of a parameter's shape sharded like the parameter; any other value unchanged."""
    if not isinstance(value, torch.Tensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    if value.is_meta:
        raise ConfigError(
            "an optimizer creates its state with its parameters, which are on the meta device and have no values. Use "
            "one that creates it in its first step, such as AdamW; or build the model on the CPU."
        )
    # src_data_rank=None: all ranks hold the same value, so torch sends nothing.
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
