"""The DDP strategy: every rank holds the full model, and DDP reduces the gradients bucket by bucket in the backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from elastic_ddp import torch_internals
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.canonical_reduction import CanonicalReduction, Record
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.strategy import Strategy, ignore, unused_parameters_error
from elastic_ddp.errors import ConfigError
from elastic_ddp.tensors.digest import digest_tensors

POWERSGD_FIRST_STEP = 10
"""Steps of a generation that PowerSGD leaves uncompressed: at least two, in which DDP arranges its buckets."""


class _DirectCall(torch.nn.Module):
    """The module that DDP wraps: the model's parameters, and a forward that calls the model itself."""

    def __init__(self, model: PreparedModel) -> None:
        super().__init__()
        self.module = model.module
        self._call = model.call_directly

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class _Parameters(torch.nn.Module):
    """The module that DDP wraps to reduce a part of the parameters. Each loss passes through it before its backward.

    So it does not matter which submodules the training function has called for this loss.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__()
        self.parameters_ = torch.nn.ParameterList(parameters)

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


class DDPStrategy(Strategy):
    """Builds a DDP replica in each generation, for the first micro-batch whose backward reduces.

    The forward of that micro-batch goes through the replica; with `trains`, only its loss does.
    """

    def __init__(
        self,
        model: PreparedModel,
        config: RunConfig,
        group: ProcessGroup,
        enter_phase: Callable[[str], str] = ignore,
        trains: Iterable[torch.nn.Parameter] | None = None,
    ) -> None:
        super().__init__(model, config, group, enter_phase, trains)
        self._options = config.ddp
        self._replica: DistributedDataParallel | None = None
        self._reduction: CanonicalReduction | None = None
        if config.reduction == "canonical":
            options: dict[str, Any] = {"may_be_unused": config.ddp.find_unused_parameters, "enter_phase": enter_phase}
            self._reduction = CanonicalReduction(list(self.trained.values()), self.ranges, group, **options)

    def _build_replica(self) -> DistributedDataParallel:
        with warnings.catch_warnings():
            # Torch 2.13 renamed broadcast_buffers; 2.11 has only the old name.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
            replica = DistributedDataParallel(
                _DirectCall(self._model) if self._trains is None else _Parameters(self.trained.values()),
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
        elif self._options.comm_hook == "fp16":
            replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self._options.comm_hook == "bf16":
            # DDP refuses the hook by its name in builds without NCCL, although gloo supports bfloat16.
            replica.register_comm_hook(None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
        elif self._options.comm_hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=POWERSGD_FIRST_STEP)
            replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return replica

    def begin_step(self, rows: np.ndarray) -> None:
        super().begin_step(rows)
        if self._reduction is not None:
            self._reduction.begin(num_leaves=self.num_leaves, divisor=self.divisor)

    def prepare_forward(self, micro_batch: int | None) -> None:
        """Routes the forward of the last micro-batch through DDP, and all others through the user's model.

        With `no_sync` and a static graph, DDP would count the other backwards as part of the reducing one.
        """
        last = micro_batch == self.to_compute[-1]
        if last and self._replica is None:
            self._replica = self._build_replica()
        self._model.use_replica(self._replica if last and self._trains is None else None)

    def backward(self, loss: torch.Tensor, micro_batch: int, weight: float | None = None) -> None:
        last = micro_batch == self.to_compute[-1]
        with self._accumulating(is_last=last):
            self._backward(loss, micro_batch, weight, last=last)
        if last:
            self._check_used()
        self._model.use_replica(None)

    def _backward(self, loss: torch.Tensor, micro_batch: int, weight: float | None, *, last: bool) -> None:
        if last and self._trains is None and not self._model.called_replica:
            raise ConfigError(
                "step.backward got a loss that does not come from calling the prepared model, so its gradients cannot "
                "be reduced. Call it as model(x): not as model.forward(x), and not a part or a copy of it; losses of "
                "parts belong in step.update(optimizer). Compile it by model.compile(), or before run.prepare: "
                "torch.compile(model) after it goes past the prepared model."
            )
        if last and self._trains is not None:
            assert self._replica is not None
            loss = self._replica(loss)
        factor = self._factor(micro_batch, weight)
        if self._reduction is None:
            if not factor and not (self._options.find_unused_parameters or self._options.static_graph):
                # Any graph of all parameters does, so that the loss of a micro-batch that does not count may be a
                # constant. Otherwise the model's own graph decides in which order buckets are reduced.
                loss = sum((parameter.reshape(-1)[:1].sum() for parameter in self.trained.values()), loss.detach())
            # DDP divides by the world size.
            loss = loss * (factor * self._group.world_size / (self.divisor if weight is None else 1.0))
            self._run_backward(loss, is_last=last, zeroed=() if factor else self.trained.values())
            return
        loss = loss if factor == 1.0 else loss * factor
        if not last:
            past_hooks = self._options.find_unused_parameters
            self._reduction.fold(micro_batch, loss, past_hooks=past_hooks, is_zero=not factor)
            return
        has_rows = bool(self._rows[micro_batch])
        self._reduction.expect(micro_batch if has_rows else None, divides=weight is None, is_zero=not factor)
        self._run_backward(loss, is_last=last)
        if self._options.find_unused_parameters:
            self._enter_phase("communication")
            self._reduction.drop_unused_gradients()
            self._enter_phase("backward")

    def watch(self, micro_batches: Collection[int], record: Record) -> None:
        assert self._reduction is not None, "only with the canonical reduction"
        self._reduction.watch(micro_batches, record)

    def compute_again(self, loss: torch.Tensor, micro_batch: int, weight: float | None = None) -> torch.Tensor:
        assert self._reduction is not None, "only with the canonical reduction"
        self.check_gradients()
        factor = self._factor(micro_batch, weight)
        gradients = self._reduction.compute(
            loss if factor == 1.0 else loss * factor,
            past_hooks=self._options.find_unused_parameters,
            is_zero=not factor,
        )
        return digest_tensors(gradients)

    def gradient_norm(self) -> torch.Tensor:
        # DDP moves gradients to other places after the first step of a generation.
        gradients = [gradient for _, gradient in self._gradients()]
        if self._reduction is not None and gradients and gradients[0].is_cuda:
            return torch_internals.total_norm(gradients)
        return super().gradient_norm()

    def _check_used(self) -> None:
        """Raises a ConfigError if a parameter got no gradient. DDP itself would raise in the next step."""
        if self._options.find_unused_parameters or self._options.static_graph:
            return
        unused = self._unused()
        if unused:
            raise unused_parameters_error(unused, "set ddp.find_unused_parameters = true")

    def close(self) -> None:
        self._model.use_replica(None)
        self._replica = None
