"""The DDP strategy: one model, replicated on every rank, its gradients reduced bucket by bucket during backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from elastic_ddp.batching import micro_batch_ranges, processing_order
from elastic_ddp.config import RunConfig
from elastic_ddp.errors import ConfigError
from elastic_ddp.parallel.process_group import ProcessGroup
from elastic_ddp.parallel.reduction import CanonicalReduction


class PreparedModel(torch.nn.Module):
    """The user's model as `run.prepare` returns it: called like the model, and the same object in every generation.

    The replica that it calls is replaced whenever membership changes. Attributes, `state_dict` and `load_state_dict`
    are those of the user's model.
    """

    def __init__(self, module: torch.nn.Module, *, device: torch.device, bf16: bool) -> None:
        super().__init__()
        self._device_type = device.type
        self._bf16 = bf16
        self.module = module
        self.use_replica(None)

    def use_replica(self, replica: DistributedDataParallel | None) -> None:
        """Sets what forward goes through; None for the user's model itself, without synchronization."""
        # Past nn.Module's own attribute handling, which would register the replica as a submodule.
        object.__setattr__(self, "_replica", replica)
        object.__setattr__(self, "called_replica", False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        target = self._replica if self._replica is not None and torch.is_grad_enabled() else self.module
        object.__setattr__(self, "called_replica", self.called_replica or target is self._replica)
        if not self._bf16:
            return target(*args, **kwargs)
        with torch.autocast(self._device_type, dtype=torch.bfloat16):
            return _to_fp32(target(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "module" not in self.__dict__.get("_modules", {}) or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


def _to_fp32(output: Any) -> Any:
    """A model's output with bf16 tensors as fp32, so that the loss is computed in full precision."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype == torch.bfloat16 else output
    if isinstance(output, dict):
        converted = copy.copy(output)  # a subclass may not be built from its items
        for key, value in output.items():
            converted[key] = _to_fp32(value)
        return converted
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(_to_fp32, output))
    if isinstance(output, list | tuple):
        return type(output)(_to_fp32(value) for value in output)
    return output


def _state_of(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    """Changes whenever something is added to the gradient."""
    return None if gradient is None else (id(gradient), gradient._version)


class DDPStrategy:
    """Gradients of a generation: which micro-batches are this rank's, and how their sum reaches every rank.

    A step goes `begin_step`, then for each micro-batch `backward`, and then holds the mean gradient in the
    parameters. Every rank builds it, with a model that `check_same_model` has seen.
    """

    def __init__(self, model: PreparedModel, config: RunConfig, group: ProcessGroup) -> None:
        self.ranges = micro_batch_ranges(config.num_micro_batches, group.world_size)
        self.micro_batches = processing_order(self.ranges[group.rank])
        """This rank's micro-batches, in the order in which it computes them."""
        self.micro_batch_size = config.micro_batch_size
        self._group = group
        self._model = model
        self._options = config.ddp
        self._replica: DistributedDataParallel | None = None
        self._reduction: CanonicalReduction | None = None
        self._trained = {name: each for name, each in model.module.named_parameters() if each.requires_grad}
        if config.reduction == "canonical":
            self._reduction = CanonicalReduction(
                list(self._trained.values()), self.ranges, group, may_be_unused=config.ddp.find_unused_parameters
            )

    def _build_replica(self) -> DistributedDataParallel:
        with warnings.catch_warnings():
            # torch 2.13 renamed broadcast_buffers; 2.11 knows only the old name.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
            replica = DistributedDataParallel(
                self._model.module,
                device_ids=[self._group.device] if self._group.device.type == "cuda" else None,
                broadcast_buffers=False,
                init_sync=False,
                bucket_cap_mb=self._options.bucket_cap_mb,
                gradient_as_bucket_view=self._options.gradient_as_bucket_view,
                static_graph=self._options.static_graph,
                find_unused_parameters=self._options.find_unused_parameters,
            )
        if self._reduction is not None:
            replica.register_comm_hook(None, self._reduction.hook)
        return replica

    def begin_step(self, rows: np.ndarray) -> None:
        """A new step; `rows` holds the row count of each of its M micro-batches.

        Raises:
            ConfigError: other parameters are to be trained than when the generation began, which no rank reduces.
        """
        trained = {name: each for name, each in self._model.module.named_parameters() if each.requires_grad}
        if changed := sorted(
            name for name in trained.keys() | self._trained.keys() if trained.get(name) is not self._trained.get(name)
        ):
            raise ConfigError(
                f"parameters {', '.join(changed[:5])} were added, replaced, frozen or unfrozen inside run.steps(), and "
                "a run trains the same ones from its first step to its last; to freeze some for a while, give them a "
                "param_group of their own with lr=0 (a scheduler can raise it)"
            )
        self._rows = rows
        self.num_leaves = int(np.count_nonzero(rows))
        self.divisor = int(rows.sum()) / self.micro_batch_size
        """The step's rows in units of full micro-batches: M, but for the short last step of an epoch."""
        with_rows = [m for m in self.micro_batches if rows[m]]
        self.to_compute = with_rows or self.micro_batches[-1:]
        """This rank's micro-batches with rows, in order. A rank without any computes one on padding and adds nothing:
        its part in the collectives has to be played."""
        if self._reduction is not None:
            self._reduction.begin(num_leaves=self.num_leaves, divisor=self.divisor)

    def prepare_forward(self, micro_batch: int) -> None:
        """Called before the forward of each micro-batch: only the last one goes through DDP and synchronizes.

        DDP comes into being with the first that does, and the others do not pass its forward as `no_sync` would have
        them do: with a static graph it would count their backward as part of the one it is to reduce.
        """
        if micro_batch != self.to_compute[-1]:
            self._model.use_replica(None)
            return
        self._replica = self._replica or self._build_replica()
        self._model.use_replica(self._replica)

    def weight(self, micro_batch: int) -> float:
        """A micro-batch's part in a step's sum: its rows in units of full micro-batches."""
        return int(self._rows[micro_batch]) / self.micro_batch_size

    def backward(self, loss: torch.Tensor, micro_batch: int) -> None:
        """The backward of a micro-batch's mean loss. After the last one, parameters hold the step's mean gradient."""
        last = micro_batch == self.to_compute[-1]
        if last and not self._model.called_replica:
            raise ConfigError(
                "the loss that step.backward got does not come from a call of the model that run.prepare returned, so "
                "its gradients would not be reduced; call that model itself, not one of its methods and not the model "
                "that went into run.prepare"
            )
        weight = self.weight(micro_batch)
        before = {name: _state_of(each.grad) for name, each in self._trained.items()} if last else {}
        if self._reduction is None:
            if not weight and not self._options.find_unused_parameters:
                # Zeros for all, whatever the model makes of padding: 0 times infinity would be NaN on every rank.
                loss = sum((each.reshape(-1)[:1].sum() for each in self._trained.values()), loss.detach())
            # DDP divides by the world size.
            (loss * (weight * self._group.world_size / self.divisor)).backward()
            self._check_used(before)
            return
        loss = loss if weight == 1.0 else loss * weight
        if not last:
            self._reduction.fold(micro_batch, loss, past_hooks=self._options.find_unused_parameters)
            return
        self._reduction.expect(micro_batch if weight else None)
        loss.backward()
        self._check_used(before)
        if self._options.find_unused_parameters:
            self._reduction.settle_unused()

    def _check_used(self, before: dict[str, tuple[int, int] | None]) -> None:
        """Refuses a step in which DDP waits in vain for a parameter's gradient, and so has reduced only some of them.
        It would say so itself, but in the step after."""
        if self._options.find_unused_parameters or self._options.static_graph:
            return
        unused = [name for name, state in before.items() if _state_of(self._trained[name].grad) == state]
        if unused:
            raise ConfigError(
                f"the loss does not depend on {len(unused)} parameters: {', '.join(unused[:5])}"
                f"{', …' if len(unused) > 5 else ''}; set ddp.find_unused_parameters = true, or freeze them with "
                "requires_grad_(False)"
            )

    def close(self) -> None:
        """Lets go of the process group."""
        self._model.use_replica(None)
        self._replica = None
