"""Everything of a run that changes while it trains, as one tree: what a commit holds and what a newcomer is given."""

from __future__ import annotations

import copy
import inspect
import re
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor, Placement

from elastic_ddp import torch_internals
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.distributed.step_agreement import EMPTY_CHAIN, chain
from elastic_ddp.errors import CheckpointError, ConfigError, shorten
from elastic_ddp.tensors.state_tree import Layout, dtype_name, flatten, gather_full, weights_sha256

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_ddp.distributed.process_group import ProcessGroup

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST = 2**62
"""What torch calls in a state dict that of a module's `get_extra_state`. It may be anything, and nobody converts it."""


@runtime_checkable
class Stateful(Protocol):
    """What `run.register` takes."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Position:
    """Where the run stands. It moves when the optimizer has stepped, never when data is read ahead."""

    step: int = 0
    """Steps done, and so the number of the next one."""
    samples: int = 0
    """Rows consumed by those steps."""
    samples_sha256: str = EMPTY_CHAIN
    """The chain over the row ids of every micro-batch consumed so far, in order."""

    @classmethod
    def of(cls, saved: Any) -> Position:
        """What `asdict` made of one; a CheckpointError for anything else."""
        kinds = {"step": int, "samples": int, "samples_sha256": str}
        if (
            not isinstance(saved, dict)
            or {name: type(value) for name, value in saved.items()} != kinds
            or not all(0 <= saved[name] <= _MOST for name in ("step", "samples"))
            or not _SHA256.fullmatch(saved["samples_sha256"])
        ):
            raise CheckpointError(
                f"the commit holds no position of a run: {saved!r:.200}; that is a step and a number of samples, "
                f"from 0 to {_MOST}, and a SHA-256. Remove the commit, and the one before is used"
            )
        return cls(**saved)

    def after(self, samples: int, row_digests: Any) -> Position:
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + samples,
            samples_sha256=chain(self.samples_sha256, row_digests),
        )


@dataclass
class TrainState:
    """The objects that the user's function prepared or registered, and the position."""

    model: PreparedModel | None = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedulers: list[torch.optim.lr_scheduler.LRScheduler] = field(default_factory=list)
    registered: dict[str, Stateful] = field(default_factory=dict)
    begin_with: Callable[[ProcessGroup], None] | None = None
    """Loads other weights into the model, on every rank, where a run begins."""
    position: Position = field(default_factory=Position)
    layout: Layout | None = None
    """How a restore lays out on this rank what it reads, where there is only a part of it here."""
    is_changing: bool = False
    """Whether a step has begun to change it, and its block goes on: there may be more that it changes."""
    is_torn: bool = False
    """Whether a peer was lost meanwhile: it is the state of no step, and of no use to anybody."""

    @property
    def is_sharded(self) -> bool:
        """Whether this rank has only a part of it, which is of no use outside of its generation."""
        return self.layout is not None

    @property
    def module(self) -> torch.nn.Module:
        """The user's model."""
        assert self.model is not None
        return self.model.module

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.model is None:
            raise ConfigError(
                "run.prepare got an optimizer before the model; prepare the model first, then build the "
                "optimizer from its parameters"
            )
        if any(optimizer is each for each in self.optimizers):
            raise ConfigError(f"run.prepare got the same {type(optimizer).__name__} twice; prepare each optimizer once")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "run.prepare got an LBFGS, which evaluates the model again and again within a step; use an optimizer "
                "whose step() takes no closure"
            )
        known = {id(parameter) for parameter in self.module.parameters()}
        strangers = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
        if strangers:
            raise ConfigError(
                f"{strangers} parameters of the {type(optimizer).__name__} are not parameters of the prepared model; "
                "build the optimizer from model.parameters() of the model that run.prepare returned"
            )
        self.optimizers.append(optimizer)

    def add_scheduler(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                "run.prepare got a ReduceLROnPlateau, which needs a metric to step; keep it out of run.prepare, give "
                "it to run.register, and step it yourself with what run.evaluate returned"
            )
        if any(scheduler is each for each in self.schedulers):
            raise ConfigError(f"run.prepare got the same {type(scheduler).__name__} twice; prepare each scheduler once")
        if not any(scheduler.optimizer is optimizer for optimizer in self.optimizers):
            raise ConfigError(
                "run.prepare got a scheduler of an optimizer it does not know; prepare its optimizer first"
            )
        self.schedulers.append(scheduler)

    def state_dict(self) -> dict[str, Any]:
        """Raises a ConfigError, the same on every rank, where registered state is in shards, or an optimizer's is in
        others than its parameter: nobody knows like what to lay it out again."""
        model = self.module.state_dict()
        optimizers = {str(k): optimizer.state_dict() for k, optimizer in enumerate(self.optimizers)}
        if self.layout is not None:
            for place, optimizer in enumerate(self.optimizers):
                _check_layout(optimizer, f"optimizer.{place}", optimizers[str(place)], self.layout)
        user = {name: thing.state_dict() for name, thing in self.registered.items()}
        if self.is_sharded and (
            shards := [k for k, each in flatten({"user": user})[1].items() if isinstance(each, DTensor)]
        ):
            raise ConfigError(
                f"state given to run.register holds shards of tensors: {shorten(shards, 5)}; have its "
                "state_dict() return each whole, as "
                "tensor.full_tensor(). Its load_state_dict() may shard it again, like the parameter it belongs to: "
                "torch.distributed.tensor.distribute_tensor(value, parameter.device_mesh, parameter.placements)"
            )
        return {
            "model": model,
            # Those that are not persistent: state of a run all the same, as a step starts from them.
            "buffers": {name: buffer for name, buffer in self.module.named_buffers() if name not in model},
            "optimizer": optimizers,
            "scheduler": {str(k): scheduler.state_dict() for k, scheduler in enumerate(self.schedulers)},
            "user": user,
            "position": asdict(self.position),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises a CheckpointError where the state is of another model, optimizer or set of registered objects, or of
        no run at all."""
        expected: dict[str, Mapping[str, Any]] = {
            "optimizer": {str(k): optimizer for k, optimizer in enumerate(self.optimizers)},
            "scheduler": {str(k): scheduler for k, scheduler in enumerate(self.schedulers)},
            "user": self.registered,
        }
        if missing := {"model", "buffers", "position", *expected} - state.keys():
            raise CheckpointError(f"the commit holds no {', '.join(sorted(missing))}; it is not one of a run's")
        position = Position.of(state["position"])
        try:
            for kind, things in expected.items():
                if set(state[kind]) != set(things):
                    raise CheckpointError(
                        f"the commit holds {kind} state for {sorted(state[kind])}, the training function has "
                        f"{sorted(things)}; prepare and register the same things in the same order, or use another name"
                    )
            for place, optimizer in enumerate(self.optimizers):
                _check_optimizer(optimizer, state["optimizer"][str(place)])
            for place, scheduler in enumerate(self.schedulers):
                _check_scheduler(scheduler, state["scheduler"][str(place)])
            model = self.module.state_dict()
            # Those that are not persistent have nobody else who would look.
            buffers = {name: buffer for name, buffer in self.module.named_buffers() if name not in model}
            extra = torch_internals.EXTRA_STATE
            tensors = {name: each for name, each in model.items() if name.rpartition(".")[2] != extra}
            if changed := [*_retyped(tensors, state["model"]), *_retyped(buffers, state["buffers"], strict=True)]:
                raise ValueError(shorten(changed, separator="; "))
            self.module.load_state_dict(state["model"])
            for name, value in state["buffers"].items():
                _load_buffer(name, buffers[name], value)
            for place, optimizer in enumerate(self.optimizers):
                _load_optimizer(optimizer, state["optimizer"][str(place)])
            for kind in ("scheduler", "user"):
                for key, thing in expected[kind].items():
                    thing.load_state_dict(state[kind][key])
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the commit does not fit the model or optimizer that the training function built: {error}; a changed "
                "model is another run: use another name"
            ) from error
        self.position = position

    def weights_sha256(self) -> str:
        """Over names, dtypes, shapes and bytes of parameters, then buffers, in the model's order. Every rank calls it:
        parameters that are sharded are put together, one after the other."""
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        return weights_sha256((name, gather_full(each)) for name, each in tensors)


def _check_layout(optimizer: torch.optim.Optimizer, name: str, saved: Any, layout: Layout) -> None:
    """ConfigError where a restore would lay state out in another way than it is now, so that no step could follow."""
    unlike = []
    for at, each in _tensors(saved, name):
        like = layout(at)
        if _placements(each) != (_placements(like) if like is not None and like.shape == each.shape else ()):
            how = ", ".join(map(repr, _placements(each))) or "whole"
            unlike.append(f"{at} of {tuple(each.shape)}, {how}")
    if unlike:
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__} keeps what no restore lays out again as it is now: "
            f"{shorten(unlike, 5, separator='; ')}. What has its parameter's shape has to be in the same shards, as "
            "torch.zeros_like(parameter) is, and comes back in them; all else comes back whole. Have the optimizer's "
            "state_dict() return that as tensor.full_tensor(), and its load_state_dict() shard it again by "
            "torch.distributed.tensor.distribute_tensor, where the parameter is a DTensor; or use another optimizer, "
            'or strategy="ddp"'
        )


def _tensors(tree: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """With the names that `flatten` gives them, in a fraction of its time."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict | list | tuple | deque):
        for key, each in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _tensors(each, f"{name}.{key}")


def _placements(tensor: torch.Tensor) -> tuple[Placement, ...]:
    """How a tensor is spread over the ranks; none if it is whole."""
    return tensor.placements if isinstance(tensor, DTensor) else ()


def _retyped(own: Mapping[str, Any], saved: Mapping[str, Any], *, strict: bool = False) -> list[str]:
    """Tensors that torch would silently convert to another dtype; `strict` for names that only one of the two has."""
    there, here = ({name: _dtype(each) for name, each in values.items()} for values in (saved, own))
    names = here | there if strict else here.keys() & there
    return [
        f"{name} is {there.get(name, 'not')} there and {here.get(name, 'not')} here"
        for name in sorted(names)
        if there.get(name) != here.get(name)
    ]


def _dtype(value: Any) -> str:
    return dtype_name(value.dtype) if isinstance(value, torch.Tensor) else "no tensor"


def _load_buffer(name: str, buffer: torch.Tensor, value: torch.Tensor) -> None:
    if buffer.shape != value.shape:
        raise ValueError(f"the buffer {name} has the shape {tuple(value.shape)} there and {tuple(buffer.shape)} here")
    buffer.copy_(value)


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Torch's own loader gives floating-point state the dtype of its parameter, and makes something else of text: what
    it changed is put back as it was saved. One that loads in its own way, or has hooks for that, knows what it does."""
    optimizer.load_state_dict(dict(saved))
    has_own_way = type(
        optimizer
    ).load_state_dict is not torch.optim.Optimizer.load_state_dict or torch_internals.has_load_hooks(optimizer)
    if has_own_way:
        return
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in saved["state"]:
            optimizer.state[parameter] = _as_saved(saved["state"][number], optimizer.state[parameter])


def _as_saved(saved: Any, loaded: Any) -> Any:
    """A value of an optimizer's state, on the device that torch has loaded it to."""
    if isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        kept = copy.copy(saved)
        kept.update({key: _as_saved(value, loaded[key]) for key, value in saved.items()})
        return kept
    if isinstance(saved, list | tuple | deque):
        items = [_as_saved(*each) for each in zip(saved, loaded, strict=True)]
        return deque(items, saved.maxlen) if isinstance(saved, deque) else type(saved)(items)
    return saved


def _check_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """CheckpointError where the state is of another of torch's kinds of optimizer. One of somebody else's may get
    settings when it steps, and any from its user, in the groups of parameters."""
    if _is_torchs(optimizer):
        for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=False):
            _check_keys("optimizer", optimizer, _settings_of_torchs().intersection(group), own)


@cache
def _settings_of_torchs() -> frozenset[str]:
    """Names of what any optimizer of torch's is made with."""
    kinds = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    optimizers = [each for each in kinds if issubclass(each, torch.optim.Optimizer)]
    return frozenset(name for each in optimizers for name in inspect.signature(each).parameters)


def _check_scheduler(scheduler: torch.optim.lr_scheduler.LRScheduler, saved: Mapping[str, Any]) -> None:
    """CheckpointError where loading would set what is no state: schedulers take whatever there is as their attributes,
    in the place of their methods, too."""
    own = set(scheduler.state_dict())
    if not _is_torchs(scheduler):  # a user's may get attributes when it steps
        own |= {name for name in saved if not hasattr(scheduler, name)}
    _check_keys("scheduler", scheduler, saved, own)
    inner = torch_internals.inner_schedulers(scheduler), torch_internals.inner_scheduler_states(saved)
    for inner_scheduler, state in zip(*inner, strict=False):
        _check_scheduler(inner_scheduler, state)


def _is_torchs(thing: object) -> bool:
    return type(thing).__module__.startswith("torch.")


def _check_keys(kind: str, thing: Any, saved: Collection[str], own: Collection[str]) -> None:
    if unknown := sorted(map(str, set(saved).difference(own))):  # torch would take them, and fail in the first step
        raise CheckpointError(
            f"the commit holds the state of another kind of {kind}: {type(thing).__name__} knows no "
            f"{', '.join(unknown)}; prepare the {kind} that the run began with, or use another name"
        )


def check_model(module: torch.nn.Module) -> None:
    """Raises a ConfigError for a model that a run cannot train."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        raise ConfigError("run.prepare got a DistributedDataParallel; give it the plain model, it wraps it itself")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(
            "run.prepare got a model without a parameter that requires a gradient; there is nothing to train"
        )
    if sharded := [name for name, each in module.named_parameters() if isinstance(each, DTensor)]:
        raise ConfigError(
            f"run.prepare got a model that is in shards already, {shorten(sharded, 5)}; give it a new one, which the "
            "training function builds: with FSDP that begins again whenever membership changes"
        )
    for part in module.modules():
        kind = type(part).__name__
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
            raise ConfigError(
                f"run.prepare got an {kind}(sparse=True); sparse gradients cannot be reduced, use sparse=False"
            )
        if isinstance(part, torch.nn.SyncBatchNorm):
            raise ConfigError(
                f"run.prepare got a {kind}, whose statistics depend on the number of workers; use BatchNorm, whose "
                "running statistics the run combines over all micro-batches of a step"
            )
    if complex_ones := [name for name, each in module.named_parameters() if each.is_complex()]:
        raise ConfigError(
            f"run.prepare got complex parameters, {shorten(complex_ones, 5)}, whose gradients DDP cannot reduce; "
            "keep them as real ones, and use torch.view_as_complex in forward"
        )
