"""Model buffers (BatchNorm statistics, for example) that end a step with the same bits at every world size.

Every micro-batch of a step starts from the same buffers. The buffer's rule combines the changes of the micro-batches:
their mean over rows, their sum (both along the reduction tree), or the change of micro-batch 0. Changes are combined
rather than values: a buffer that no micro-batch changes keeps its bits, even if it holds infinities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
import torch.distributed as dist

from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.reduction_tree import Node, fold_in, fold_to_root, maximal_subtrees, with_rows
from elastic_ddp.errors import ConfigError, shorten
from elastic_ddp.tensors.state_tree import ravel
from elastic_ddp.torch_internals import buffers_of, is_normalization, modules_of, version

MEAN = "mean"
SUM = "sum"
FIRST = "first"
RULES = {
    MEAN: "averages the changes over the rows of the global batch",
    SUM: "adds the changes of all micro-batches",
    FIRST: "keeps what micro-batch 0 leaves",
}
"""The rules of `run.prepare(model, buffers=...)`, and the effect of each."""
Rules = dict[tuple[int, str], tuple[str, str | None]]
"""The full name of each buffer and its rule, by the `id` of its owner and its name there."""
Changes = list[torch.Tensor | None]
"""The change that a subtree of micro-batches makes to each combined buffer; None for no change."""


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype in which bits are compared, by the size of an element."""


def check_rules(module: torch.nn.Module, rules: Mapping[str, str]) -> None:
    """Raises a ConfigError for rules of buffers, by name or glob pattern, that a model cannot follow."""
    if not isinstance(rules, Mapping):
        raise ConfigError(
            f'run.prepare got buffers={rules!r}. Give a dict of names and rules, such as {{"usage": "sum"}}.'
        )
    buffers = dict(module.named_buffers())
    for pattern, rule in rules.items():
        given = f"run.prepare got buffers={{{pattern!r}: {rule!r}}}"
        if rule not in RULES:
            raise ConfigError(
                f"{given}. Use one of {', '.join(f'{name!r}, which {does}' for name, does in RULES.items())}."
            )
        named = [name for name in buffers if fnmatchcase(name, pattern)]
        if not named:
            raise ConfigError(f"{given}, but the model has no such buffer. It has {shorten(sorted(buffers))}.")
        for name in named:
            dtype = buffers[name].dtype
            if rule == MEAN and not dtype.is_floating_point:
                raise ConfigError(f"{given}, but {name} has {dtype}, which has no mean. Use 'sum' or 'first'.")
            if rule == SUM and (dtype == torch.bool or dtype.is_complex):
                raise ConfigError(f"{given}, but {name} has {dtype}, which is not summed. Use 'first'.")


def find_rules(module: torch.nn.Module, rules: Mapping[str, str]) -> Rules:
    """Returns the full name of each buffer and its rule: the first in `rules` that matches, or torch's layers' own.

    The statistics of torch's normalization layers are averaged; their counters come from micro-batch 0. None: no
    micro-batch may change the buffer.
    """
    found = {}
    for path, owner in module.named_modules():
        for name, buffer in buffers_of(owner).items():
            full_name = f"{path}.{name}" if path else name
            rule = next((rule for pattern, rule in rules.items() if fnmatchcase(full_name, pattern)), None)
            if rule is None and is_normalization(owner, name):
                rule = MEAN if buffer is None or buffer.is_floating_point() else FIRST
            found[id(owner), name] = full_name, rule
    return found


def evaluated_error(names: list[str]) -> ConfigError:
    """Returns the error for buffers without a rule that a forward of an evaluation changed."""
    return ConfigError(
        f"a forward in run.evaluate changed buffers: {shorten(names, 5)}. An evaluation restores buffers after each "
        "batch. If the model does not need the changes (of a cache, for example), keep them in an attribute that is "
        f"no buffer, or choose a rule: run.prepare(model, buffers={{{names[0]!r}: {FIRST!r}}}). Return what should be "
        "counted or averaged from loss_fn."
    )


def changed_error(names: list[str]) -> ConfigError:
    """Returns the error for buffers without a rule that a forward changed."""
    return ConfigError(
        f"a forward changed buffers: {shorten(names, 5)}. The micro-batches of a step all start from the same "
        "buffers, so it is not known what the step should leave there. Change it once per step, after step.optimize() "
        "in the block, with what step.gather() collects from all micro-batches. Or choose how the changes combine: "
        f"run.prepare(model, buffers={{{names[0]!r}: {SUM!r}}}) {RULES[SUM]}, {MEAN!r} {RULES[MEAN]}, and {FIRST!r} "
        f"{RULES[FIRST]}."
    )


def _add(left: Changes, right: Changes) -> Changes:
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


def resolve_views(module: torch.nn.Module) -> None:
    """Copies buffers that cannot be written in place or sent as bytes.

    These are buffers whose elements share memory (expanded ones), and lazily conjugated or negated buffers
    (`tensor.conj()`).
    """
    copies: dict[int, torch.Tensor] = {}
    for submodule in module.modules():
        buffers = buffers_of(submodule)
        for name, buffer in buffers.items():
            if buffer is None or buffer.layout is not torch.strided:
                continue
            is_expanded = any(s == 0 and size > 1 for s, size in zip(buffer.stride(), buffer.shape, strict=True))
            if is_expanded or buffer.is_conj() or buffer.is_neg():
                buffers[name] = copies.setdefault(id(buffer), buffer.resolve_conj().resolve_neg().contiguous())


def _differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns whether any bit differs. Comparing values would miss the sign of zero."""
    if left.dtype != right.dtype:
        return (left != right).any()
    integer = _INTEGERS.get(left.itemsize, torch.int64)  # complex128 has twice its size
    return (ravel(left).view(integer) != ravel(right).view(integer)).any()


class _Place(NamedTuple):
    """A buffer with values, found by owner and key: a forward may change it in place, or assign another tensor."""

    owner: torch.nn.Module
    key: str
    buffer: torch.Tensor
    start: torch.Tensor
    """Its values when the step began."""
    name: str
    """Its full name in the model."""
    rule: str | None

    def current(self) -> torch.Tensor | None:
        """Returns the tensor that is registered now."""
        return buffers_of(self.owner).get(self.key)


class StepBuffers:
    """The buffers of a model during a step. `rules` come from `run.prepare(model, buffers=...)`."""

    def __init__(self, module: torch.nn.Module, rules: Mapping[str, str] | None = None) -> None:
        self._module = module
        self._given_rules = rules or {}
        self._rules: Rules | None = None  # of the buffers that it had so far

    def begin(self, modules: Sequence[torch.nn.Module] | None = None) -> None:
        """Begins a step: saves the values that every micro-batch starts from. `modules` are all of the model's."""
        self._modules = modules_of(self._module) if modules is None else modules
        registered = self._registered()
        rules = self._check_known(registered)
        self._is_checked = False  # whether `_check_known` ran after a forward of this step
        self._empty = [(owner, key) for owner, key, buffer in registered if buffer is None or not buffer.numel()]
        places = [
            _Place(owner, key, buffer, buffer.clone(), *rules[id(owner), key])
            for owner, key, buffer in registered
            if buffer is not None and buffer.numel()
        ]
        self._combined = [place for rule in (MEAN, SUM) for place in places if place.rule == rule]
        self._first = [place for place in places if place.rule == FIRST]
        self._places = [*self._combined, *self._first, *(place for place in places if place.rule is None)]
        self._first_end: list[torch.Tensor] | None = None
        self._sums: dict[Node, Changes] = {}
        self.changed = False  # whether any micro-batch so far changed any buffer
        self._versions = self._count_changes()

    def end_micro_batch(self, micro_batch: int, weight: float | None) -> None:
        """Collects the changes of a micro-batch and restores the buffers. A weight of None ignores the changes.

        Raises:
            ConfigError: its forward created a buffer, filled an empty one or changed a shape, or it changed a buffer
                without a rule.
        """
        ends, changed = self._compare()
        if weight is not None and ends:
            self._check_rules(changed)
            self.changed = self.changed or any(changed)
            deltas: Changes = [
                # inf - inf is NaN, but an unchanged infinity is no change.
                torch.where(
                    end == place.start,
                    torch.zeros_like(end),
                    (end - place.start) * (weight if place.rule == MEAN else 1),
                )
                if touched
                else None
                for place, end, touched in zip(self._combined, ends, changed, strict=False)
            ]
            fold_in(self._sums, Node(0, micro_batch), deltas, _add)
            if micro_batch == 0:
                after = ends[len(self._combined) :]
                self._first_end = [end.clone() for _, end in zip(self._first, after, strict=False)]
        self._restore(changed)

    def end_evaluated_batch(self) -> None:
        """Restores the buffers after a forward that does not train. Raises a ConfigError as `end_micro_batch` does."""
        _, changed = self._compare()
        self._check_rules(changed, evaluated_error)
        self._restore(changed)

    def check_untouched(self) -> None:
        """Raises a ConfigError if a buffer changed since the step began, or since its last micro-batch ended."""
        changed = []
        for place, count, before in zip(self._places, self._count_changes(), self._versions, strict=True):
            if count != before:  # an evaluation restores what it changes
                now = place.current()
                if now is None or now.shape != place.start.shape or bool(_differ(now, place.start)):
                    changed.append(place.name)
        if changed:
            raise ConfigError(
                f"buffers changed in the step before step.optimize(), and not in a forward: {shorten(changed, 5)}. "
                "Every micro-batch starts from the buffers that the step began with. Change them after step.optimize() "
                "in the block, also for the next step: it runs once per step, and alike on all ranks. A value that "
                "your code sets in each step, such as a temperature, can also be a plain attribute of the model."
            )

    def _compare(self) -> tuple[list[torch.Tensor], list[bool]]:
        """Returns the buffers as a forward left them, and which of them it changed."""
        for owner, name in self._empty:
            filled = buffers_of(owner).get(name)
            if filled is not None and filled.numel():
                raise _buffer_error(owner, name, "was None or empty until a forward filled it")
        # The first forward of a step is checked before the step is committed or handed over, others in the next step.
        if not self._is_checked:
            self._modules = modules_of(self._module)  # it may have created some
            self._check_known(self._registered())
            self._is_checked = True
        ends = []
        for place in self._places:
            now = place.current()
            end = place.start if now is None else now.detach()
            if end.shape != place.start.shape:
                problem = f"changed its shape from {tuple(place.start.shape)} to {tuple(end.shape)} in a forward"
                raise _buffer_error(place.owner, place.key, problem)
            ends.append(end)
        if not ends:
            return [], []
        # One transfer from the device for all buffers.
        differ = [_differ(end, place.start) for end, place in zip(ends, self._places, strict=True)]
        return ends, torch.stack(differ).tolist()

    def _check_rules(self, changed: list[bool], error: Callable[[list[str]], ConfigError] = changed_error) -> None:
        """Raises a ConfigError if a buffer changed that has no rule."""
        places = zip(self._places, changed, strict=True)
        names = [place.name for place, touched in places if touched and place.rule is None]
        if names:
            raise error(names)

    def _count_changes(self) -> list[tuple[int, int]]:
        """Returns what differs for each buffer after it was changed in place or replaced."""
        current = [place.current() for place in self._places]
        return [(id(buffer), 0 if buffer is None else version(buffer)) for buffer in current]

    def _registered(self) -> list[tuple[torch.nn.Module, str, torch.Tensor | None]]:
        """Returns the buffers of all modules, each with its module and its name there."""
        return [(module, name, buffer) for module in self._modules for name, buffer in buffers_of(module).items()]

    def _check_known(self, buffers: Sequence[tuple[torch.nn.Module, str, torch.Tensor | None]]) -> Rules:
        """Returns the names and rules of all buffers. Raises a ConfigError for a buffer that a forward created.

        A worker that resumes or joins does not have such a buffer.
        """
        registered = {(id(owner), name): owner for owner, name, _ in buffers}
        if self._rules is None or self._rules.keys() != registered.keys():
            for key in registered.keys() - (registered.keys() if self._rules is None else self._rules):
                raise _buffer_error(registered[key], key[1], "was created by a forward")
            self._rules = find_rules(self._module, self._given_rules)
        return self._rules

    def revert(self) -> None:
        """Restores the buffers to the start of the step, after an interrupted micro-batch."""
        self._restore([True] * len(self._places))

    def _restore(self, changed: list[bool]) -> None:
        for place, touched in zip(self._places, changed, strict=True):
            buffers_of(place.owner)[place.key] = place.buffer
            if touched:
                place.buffer.copy_(place.start)
        self._versions = self._count_changes()

    def combine(self, ranges: list[range], num_leaves: int, divisor: float, group: ProcessGroup) -> None:
        """Sets the buffers to their values at the end of the step.

        Collective: all ranks call it if the buffers of any rank changed. The arguments are as in `CanonicalReduction`.
        """
        sums = self._sums
        if group.world_size > 1:
            sums = self._gather_sums(ranges, num_leaves, group)
            self._first_end = self._first_end or [torch.empty_like(place.buffer) for place in self._first]
            for end in self._first_end:
                raw = end.contiguous()
                # Rank 0 has micro-batch 0. As bytes, because gloo does not support every dtype.
                group.wait(dist.broadcast(ravel(raw).view(torch.uint8), 0, async_op=True))
                end.copy_(raw)
        total: Changes = fold_to_root(sums, num_leaves, _add)
        for place, delta in zip(self._combined, total, strict=False):
            if delta is not None:
                change = delta / divisor if place.rule == MEAN else delta
                place.buffer.copy_(torch.where(delta == 0, place.start, place.start + change))
        for place, end in zip(self._first, self._first_end or [], strict=True):
            place.buffer.copy_(end)

    def _gather_sums(self, ranges: list[range], num_leaves: int, group: ProcessGroup) -> dict[Node, Changes]:
        """Returns the subtree sums of all ranks, on every rank. Buffers are small, so each rank adds all of them up."""
        subtrees = [maximal_subtrees(with_rows(owned, num_leaves)) for owned in ranges]
        most = max(map(len, subtrees))
        sums: dict[Node, Changes] = {node: [] for nodes in subtrees for node in nodes}
        for position, place in enumerate(self._combined):
            own = place.buffer.new_zeros(most, place.buffer.numel())
            for row, node in enumerate(subtrees[group.rank]):
                change = self._sums[node][position]
                if change is not None:
                    own[row] = change.reshape(-1)
            gathered = group.all_gather(own)
            for rank, nodes in enumerate(subtrees):
                for row, node in enumerate(nodes):
                    sums[node].append(gathered[rank, row].view_as(place.buffer))
        return sums


def _buffer_error(owner: torch.nn.Module, name: str, problem: str) -> ConfigError:
    return ConfigError(
        f"the buffer {name!r} of {type(owner).__name__} {problem}. Every micro-batch of a step starts from the same "
        "buffers: create the buffer with its final shape and its values in __init__."
    )
