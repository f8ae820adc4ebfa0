"""`TrainState`: everything that training changes, as one tree. Commits hold it; workers that join receive it."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch

from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.distributed.step_agreement import EMPTY_SAMPLES_DIGEST, extend_samples_digest
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.tensors.state_tree import Layout, flatten, gather_full, local_part, weights_sha256
from elastic_ddp.worker import hyperparameters
from elastic_ddp.worker.held_shards import HeldShards
from elastic_ddp.worker.hyperparameters import Every, Prepared
from elastic_ddp.worker.loss_scale import LossScale
from elastic_ddp.worker.mirror import Mirror
from elastic_ddp.worker.model_state import BUFFERS, PARAMETERS, left_out
from elastic_ddp.worker.optimizer_state import (
    check_groups,
    group_names,
    load_state_of,
    named_state,
    saved_names,
    state_of,
)
from elastic_ddp.worker.state_checks import (
    check_layout,
    check_optimizer,
    check_saved_model,
    check_scheduler,
)
from elastic_ddp.worker.step_guard import StepGuard

if TYPE_CHECKING:
    from elastic_ddp.distributed.assignment import Shards
    from elastic_ddp.distributed.process_group import ProcessGroup

_MISMATCH = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that torch and registered objects raise for the state of another model or object."""
ChangedBy: TypeAlias = torch.optim.Optimizer | Callable[[], object] | None
"""What changes the parameters in an update: an optimizer, a function, or None for all optimizers."""


@runtime_checkable
class Stateful(Protocol):
    """An object with state, as `Run.register` takes it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Position:
    """The run's position. It advances when the optimizer has stepped, not when data is prefetched."""

    step: int = 0
    """The number of steps done, which is the index of the next step."""
    samples: int = 0
    """The number of rows consumed in these steps."""
    samples_sha256: str = EMPTY_SAMPLES_DIGEST
    """A hash chain over the row ids of all micro-batches consumed so far, in order."""

    def after(self, samples: int, row_digests: Any) -> Position:
        """Returns the position after one more step."""
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + samples,
            samples_sha256=extend_samples_digest(self.samples_sha256, row_digests),
        )


@dataclass
class TrainState:
    """The objects that the training function prepared or registered, and the position."""

    model: PreparedModel | None = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedulers: list[torch.optim.lr_scheduler.LRScheduler] = field(default_factory=list)
    every: list[Every] = field(default_factory=list)
    """When each of the schedulers is stepped."""
    steps_per_epoch: int = 1
    registered: dict[str, Stateful] = field(default_factory=dict)
    load_initial_weights: Callable[[ProcessGroup, Layout | None], Iterable[str]] | None = None
    """Loads pretrained weights at step 0, and returns the names of the loaded tensors; see `PretrainedWeights.load`."""
    loss_scale: LossScale | None = None
    """Set with `precision = "fp16"`."""
    update_scales: dict[str, LossScale] = field(default_factory=dict)
    """With `precision = "fp16"`, the scale of each optimizer, by its number, in steps of several updates."""
    position: Position = field(default_factory=Position)
    updates: list[dict[str, Any]] = field(default_factory=list)
    """The completed updates of the step at this position: the name of each, and its metrics."""
    prepared: Prepared = field(default_factory=lambda: Prepared([], {}, {}))
    """The hyperparameters as the code of the session sets them; see `record_prepared`."""
    layout: Layout | None = None
    """How a restore lays out tensors on this rank; None if every rank holds the full state."""
    shards: Shards | None = None
    """With FSDP, the shards that this rank holds, its own first; None before the first generation."""
    held: HeldShards | None = None
    """With FSDP, this rank's shards between two generations; None inside a generation, and if they are lost."""
    mirror: Mirror | None = None
    """With FSDP, the shard of another rank that this rank keeps, inside a generation."""
    finish_step: Callable[[], None] | None = None
    """Set if the vote on a step failed on this rank: finishes the step, if the vote passed on another rank."""
    is_changing: bool = False
    """Whether a step has begun to change the state and its block has not ended."""
    is_torn: bool = False
    """Whether the state must be discarded: a worker failed during a change, or a verdict asks for a rollback."""
    guard: StepGuard = field(default_factory=StepGuard, init=False)

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds only a part of the state. After its generation, that part is in `held`, or lost."""
        return self.layout is not None

    @property
    def has_lost_shards(self) -> bool:
        """Whether this rank no longer holds its part of a sharded state, after a generation."""
        if not self.is_sharded or self.finish_step is not None:
            return False
        return self.held is None or not self.held.is_whole

    @property
    def module(self) -> torch.nn.Module:
        """The user's model."""
        assert self.model is not None
        return self.model.module

    def is_model(self, thing: object) -> bool:
        return self.model is not None and thing is self.model.module

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.model is None:
            raise ConfigError(
                "run.prepare got an optimizer before the model. Prepare the model first, then build the optimizer "
                "from its parameters."
            )
        check_optimizer(optimizer, self.module, self.optimizers)
        self.optimizers.append(optimizer)
        self.guard.watch(optimizer)

    def add_scheduler(self, scheduler: torch.optim.lr_scheduler.LRScheduler, every: Every = "step") -> None:
        check_scheduler(scheduler, self.optimizers, self.schedulers)
        self.schedulers.append(scheduler)
        self.every.append(every)

    def record_prepared(self) -> None:
        """Records the hyperparameters, before the first step and before a state is loaded."""
        self.prepared = hyperparameters.record(self.optimizers, self.all_schedulers(), self.every)
        self.guard.begin(self.optimizers)
        self.guard.count(self.schedulers)

    # Steps of optimizers and schedulers.

    @contextmanager
    def in_doubt(self, finish_step: Callable[[], None] | None) -> Iterator[None]:
        """The context of the vote on a step. If it fails, the vote may have passed on other ranks."""
        self.finish_step = finish_step or (lambda: None)
        yield
        self.finish_step = None

    def step_optimizers(self, seed: Callable[[], None], by: ChangedBy = None) -> None:
        """Steps all optimizers, or one, and this rank's mirror; or calls a function that changes the parameters.

        `seed` seeds the generators.
        """
        if by is not None and not isinstance(by, torch.optim.Optimizer):
            seed()
            with torch.no_grad():
                by()
            return

        def step() -> None:
            for optimizer in self.optimizers if by is None else [by]:
                optimizer.step()

        with self.guard.stepping():
            if self.mirror is not None:
                self.mirror.step_with(step, seed)
            else:
                seed()
                step()

    def step_schedulers(self, *, is_skipped: bool, by: ChangedBy = None) -> None:
        """Steps the schedulers that are due after the current step; after a skipped step, only schedulers of the epoch.

        With `by`, only the schedulers of this optimizer, which has stepped or was skipped.
        """
        self.guard.check(self.optimizers, self.schedulers)
        for scheduler, every in zip(self.schedulers, self.every, strict=True):
            if every == "epoch":
                is_due = by is None and self.is_last_of_epoch(self.position.step)
            else:
                is_due = not is_skipped and (by is None or scheduler.optimizer is by)
            if is_due:
                scheduler.step()
        self.guard.count(self.schedulers)

    def loss_scale_of(self, by: ChangedBy) -> LossScale | None:
        """Returns the scale of the losses whose gradients `by` gets; None without `precision = "fp16"`."""
        return self.loss_scale if by is None else self.update_scales.get(self._number_of(by), self.loss_scale)

    def set_loss_scale(self, by: ChangedBy, scale: LossScale) -> None:
        if by is None:
            self.loss_scale = scale
        elif self.loss_scale is not None:
            self.update_scales[self._number_of(by)] = scale
            self.loss_scale = replace(self.loss_scale, weight_unit=scale.weight_unit)

    def _number_of(self, by: ChangedBy) -> str:
        numbers = [number for number, optimizer in enumerate(self.optimizers) if optimizer is by]
        return str(numbers[0]) if numbers else "function"

    def is_last_of_epoch(self, step: int) -> bool:
        """Returns whether an epoch ends with this step."""
        return (step + 1) % self.steps_per_epoch == 0

    def all_schedulers(self) -> dict[str, torch.optim.lr_scheduler.LRScheduler]:
        """Returns the schedulers of prepared optimizers: prepared and registered ones."""
        return {str(index): scheduler for index, scheduler in enumerate(self.schedulers)} | {
            f"user.{name}": thing
            for name, thing in self.registered.items()
            if isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as one tree. Every rank calls it: registered objects may gather shards.

        Raises a ConfigError on every rank if a restore could not reproduce how the state is sharded.
        """
        model = self.module.state_dict()
        optimizers = {
            str(index): named_state(optimizer, group_names(optimizer, self.module))
            for index, optimizer in enumerate(self.optimizers)
        }
        user = {name: state_of(registered, self.module) for name, registered in self.registered.items()}
        if self.layout is not None:
            check_layout({"optimizer": optimizers, "user": user}, self.layout)
        return {
            "model": model,
            **left_out(self.module, model),
            "optimizer": optimizers,
            "scheduler": {str(index): scheduler.state_dict() for index, scheduler in enumerate(self.schedulers)},
            "user": user,
            "position": asdict(self.position),
            "prepared": vars(self.prepared),
            "loss_scale": None if self.loss_scale is None else asdict(self.loss_scale),
            "update_scales": {number: asdict(scale) for number, scale in self.update_scales.items()},
            "updates": self.updates,
        }

    def replicated(self) -> dict[str, torch.Tensor]:
        """Returns parameters, buffers, and the state of the optimizers, which all ranks hold alike without shards."""
        optimizers = {str(index): optimizer.state_dict()["state"] for index, optimizer in enumerate(self.optimizers)}
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: tensor.detach() for name, tensor in {**tensors, **flatten({"optimizer": optimizers})[1]}.items()}

    def mirror_bytes(self) -> int:
        """Returns how much memory a mirror of this rank's shard takes: values, gradients, and optimizer state."""
        parameters = [local_part(parameter).nbytes for parameter in self.module.parameters()]
        states = flatten([optimizer.state_dict()["state"] for optimizer in self.optimizers])[1].values()
        return 2 * sum(parameters) + sum(local_part(tensor).nbytes for tensor in states)

    def check_outlives(self, group: ProcessGroup) -> None:
        """Raises a ConfigError if `state_dict()` of a registered object runs a collective, which needs all workers."""
        for name, registered in self.registered.items():
            before = group.num_collectives()
            state_of(registered, self.module)
            if group.num_collectives() != before:
                raise ConfigError(
                    f"state_dict() of the registered {name!r} runs collectives, which fail after a worker has died. "
                    "Register state that each rank holds as a whole. Or set fsdp.mirror = false: after a failure, the "
                    "run then resumes from its newest commit."
                )
        self.state_dict()

    def hold(self) -> None:
        """Keeps this rank's shards for the next generation. Every rank calls it, as `state_dict`."""
        assert self.shards is not None and self.layout is not None
        self.held = HeldShards.of(self.position.step, self.state_dict(), self.shards, self.layout, self.mirror)

    def drop_doubt(self) -> None:
        """Discards the gradients, ends the doubt about a step, and keeps this rank's shards as they are now."""
        self.finish_step = None
        self.module.zero_grad(set_to_none=True)
        self.hold()

    def settle_doubt(self, shared: HeldShards) -> None:
        """Finishes the step that this rank is in doubt about, and keeps its shards beside what all ranks hold.

        The call waits for no other rank: after a failure this rank is still in doubt, or holds the state of one step.
        """
        assert self.finish_step is not None
        self.finish_step()
        self.drop_doubt()
        assert self.held is not None
        self.held = replace(self.held, step=shared.step, skeleton=shared.skeleton, plain=shared.plain)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a tree that `state_dict` returned. Raises a CheckpointError if it is not a state of these objects."""
        expected: dict[str, Mapping[str, Any]] = {
            "optimizer": {str(index): optimizer for index, optimizer in enumerate(self.optimizers)},
            "scheduler": {str(index): scheduler for index, scheduler in enumerate(self.schedulers)},
            "user": self.registered,
        }
        try:
            for kind, objects in expected.items():
                if state[kind].keys() != objects.keys():
                    raise CheckpointError(
                        f"the commit holds {kind} state for {sorted(state[kind])}, the training function has "
                        f"{sorted(objects)}. Prepare and register the same objects in the same order, or use another "
                        "name."
                    )
            for key, optimizer in expected["optimizer"].items():
                check_groups(optimizer, group_names(optimizer, self.module), saved_names(state["optimizer"][key]))
            model = self.module.state_dict()
            saved_others = {**state[PARAMETERS], **state[BUFFERS]}
            built = ChainMap(*left_out(self.module, model).values())
            # With FSDP, a commit has parameters that the model's `state_dict()` copies in `model` alone.
            others = {name: built[name] for name in built if name in saved_others or name not in state["model"]}
            check_saved_model(model, state["model"], others, saved_others)
            self.module.load_state_dict(state["model"])
            with torch.no_grad():
                for name, value in saved_others.items():
                    others[name].copy_(value)
            for kind, objects in expected.items():
                for key, target in objects.items():
                    load_state_of(target, self.module, state[kind][key])
        except _MISMATCH as error:
            raise CheckpointError(
                f"the commit does not fit the model or optimizer that the training function built: {error}. A changed "
                "model is another run: use another name."
            ) from error
        self.position = Position(**state["position"])
        self.prepared = Prepared(**state["prepared"])
        if self.loss_scale is not None:
            self.loss_scale = LossScale(**state["loss_scale"])
        self.update_scales = {key: LossScale(**scale) for key, scale in state["update_scales"].items()}
        self.updates = list(state["updates"])
        self.guard.count(self.schedulers)

    def nonfinite_parameters(self) -> list[str]:
        """Returns the names of trained parameters that have a NaN or an infinity, with FSDP in this rank's shards."""
        trained = [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        local = {name: local_part(parameter.detach()) for name, parameter in trained}
        # The norm is ten times faster than a look at each element. It may overflow though they are all finite.
        if torch.nn.utils.get_total_norm(local.values()).isfinite():
            return []
        return [name for name, part in local.items() if not part.isfinite().all()]

    def weights_sha256(self) -> str:
        """Returns the hash of all parameters and buffers. Every rank calls it: shards are gathered one at a time."""
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        return weights_sha256((name, gather_full(tensor)) for name, tensor in tensors)
