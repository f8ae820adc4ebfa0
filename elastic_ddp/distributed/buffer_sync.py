"""Buffers (BatchNorm statistics and the like) that end a step with the same bits at every world size.

Every micro-batch of a step starts from the same buffers. What each adds to a floating-point buffer is averaged along
the reduction tree, weighted by rows; integer buffers are taken from micro-batch 0. Changes are averaged rather than
values, so a buffer that nothing changes keeps its bits, whatever M is and even if it holds infinities.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from elastic_ddp.distributed.process_group import ProcessGroup, all_gather_single
from elastic_ddp.distributed.reduction_tree import Node, fold_in, fold_to_root, maximal_subtrees
from elastic_ddp.errors import ConfigError
from elastic_ddp.tensors.state_tree import in_a_row
from elastic_ddp.torch_internals import buffers_of

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By bytes. Other elements are as long as an int64, or twice as long."""
Changes = list[torch.Tensor | None]
"""What a subtree of micro-batches adds to each floating-point buffer; None where nothing changed."""


def _add(left: Changes, right: Changes) -> Changes:
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


def unshare_buffers(module: torch.nn.Module) -> None:
    """Gives every element of a buffer memory of its own, which one that was expanded has not: a step's end is written
    into it, and what is restored."""
    owned: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for name, buffer in buffers_of(part).items():
            if buffer is not None and _shares_memory(buffer):
                buffers_of(part)[name] = owned.setdefault(id(buffer), buffer.contiguous())


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether a bit does: numbers that are equal may have signs of zero that are not."""
    if one.dtype != other.dtype:
        return (one != other).any()
    integer = _INTEGERS.get(one.itemsize, torch.int64)  # complex128 is two of them
    return (in_a_row(one).view(integer) != in_a_row(other).view(integer)).any()


def _shares_memory(buffer: torch.Tensor) -> bool:
    if is_lazy(buffer) or buffer.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))


class StepBuffers:
    """The buffers of a model through the micro-batches of a step. Without buffers, everything here does nothing."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._known: set[tuple[int, str]] | None = None
        """The buffers that there were, by owner and name."""

    def begin(self) -> None:
        """Remembers what the step starts from."""
        everything = [
            (owner, name, buffer) for owner in self._module.modules() for name, buffer in buffers_of(owner).items()
        ]
        self._absent = [(owner, name) for owner, name, buffer in everything if buffer is None or not buffer.numel()]
        self._check_known({(id(owner), name) for owner, name, _ in everything})
        self._is_checked = False
        """Whether they were looked at after a forward of this step."""
        places = [(owner, name, buffer) for owner, name, buffer in everything if buffer is not None and buffer.numel()]
        # By place, not by tensor: a forward may change a buffer as well as put another tensor there.
        self._places = sorted(places, key=lambda place: not place[2].is_floating_point())
        buffers = [buffer for _, _, buffer in self._places]
        self._floats = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._others = buffers[len(self._floats) :]
        self._start = [buffer.clone() for buffer in self._floats]
        self._others_start = [buffer.clone() for buffer in self._others]
        self._others_end: list[torch.Tensor] | None = None
        self._sums: dict[Node, Changes] = {}
        self.changed = False
        """Whether any micro-batch so far changed any buffer."""

    def end_micro_batch(self, micro_batch: int, weight: float | None) -> None:
        """Collects what a micro-batch changed and puts the buffers back; `weight` None for one to be ignored.

        Raises:
            ConfigError: it filled a buffer that was None or empty, or made one, which the other micro-batches would not
                start from; or gave one another shape.
        """
        for owner, name in self._absent:
            if (filled := buffers_of(owner).get(name)) is not None and filled.numel():
                raise _refusal(owner, name, "was None or empty before a forward filled it")
        # What the first forward has made is found before the step counts, is committed or handed on, and what another
        # one has when the next step begins.
        if not self._is_checked:
            self._check_known({(id(owner), name) for owner in self._module.modules() for name in buffers_of(owner)})
            self._is_checked = True
        starts = self._start + self._others_start
        if not starts:
            return
        found = [buffers_of(owner)[name] for owner, name, _ in self._places]
        ends = [start if now is None else now.detach() for now, start in zip(found, starts, strict=True)]
        for (owner, name, _), end, start in zip(self._places, ends, starts, strict=True):
            if end.shape != start.shape:
                raise _refusal(
                    owner, name, f"had the shape {tuple(start.shape)} before a forward made it {tuple(end.shape)}"
                )
        # One transfer from the device for all buffers together.
        changed = torch.stack([_differ(end, start) for end, start in zip(ends, starts, strict=True)]).tolist()
        if weight is not None:
            self.changed = self.changed or any(changed)
            deltas: Changes = [
                # An infinity minus itself is no change.
                torch.where(end == start, torch.zeros_like(end), (end - start) * weight) if touched else None
                for end, start, touched in zip(ends, self._start, changed, strict=False)
            ]
            fold_in(self._sums, Node(0, micro_batch), deltas, _add)
            if micro_batch == 0:
                self._others_end = [end.clone() for end in ends[len(self._floats) :]]
        self._put_back(changed)

    def _check_known(self, places: set[tuple[int, str]]) -> None:
        """ConfigError for a buffer that a forward has made: whoever resumes or joins has not made it when it is to be
        given its values."""
        if self._known is not None and (new := places - self._known):
            for owner in self._module.modules():
                for name in buffers_of(owner):
                    if (id(owner), name) in new:
                        raise _refusal(owner, name, "was made by a forward")
        self._known = places

    def revert(self) -> None:
        """Undoes a micro-batch that was cut short: the step will start again."""
        self._put_back([True] * len(self._places))

    def _put_back(self, changed: list[bool]) -> None:
        """The buffers as they were at the start of the step, in their places."""
        starts = self._start + self._others_start
        for (owner, name, buffer), start, touched in zip(self._places, starts, changed, strict=True):
            buffers_of(owner)[name] = buffer
            if touched:
                buffer.copy_(start)

    def combine(self, *, ranges: list[range], num_leaves: int, divisor: float, group: ProcessGroup) -> None:
        """Leaves the step's end in the buffers. Collective: every rank calls it, when any rank's buffers changed."""
        sums = self._sums
        if group.world_size > 1:
            sums = self._gather_sums(ranges, num_leaves, group)
            ends = self._others_end or [torch.empty_like(buffer) for buffer in self._others]
            for end in ends:
                raw = end.contiguous()
                # Micro-batch 0 is rank 0's. As bytes: gloo does not know every dtype.
                dist.broadcast(in_a_row(raw).view(torch.uint8), 0)
                end.copy_(raw)
            self._others_end = ends
        total: Changes = fold_to_root(sums, num_leaves, _add)
        for now, start, delta in zip(self._floats, self._start, total, strict=True):
            if delta is not None:
                now.copy_(torch.where(delta == 0, start, start + delta / divisor))
        for now, end in zip(self._others, self._others_end or [], strict=True):
            now.copy_(end)

    def _gather_sums(self, ranges: list[range], num_leaves: int, group: ProcessGroup) -> dict[Node, Changes]:
        """The subtree sums of all ranks, on every rank. Buffers are small: no need to share the folding."""
        subtrees = [maximal_subtrees(range(r.start, min(r.stop, num_leaves))) for r in ranges]
        most = max(map(len, subtrees))
        everyone: dict[Node, Changes] = {node: [] for nodes in subtrees for node in nodes}
        for place, buffer in enumerate(self._floats):
            mine = buffer.new_zeros(most, buffer.numel())
            for row, node in enumerate(subtrees[group.rank]):
                change = self._sums[node][place]
                if change is not None:
                    mine[row] = change.reshape(-1)
            gathered = buffer.new_empty(group.world_size, most, buffer.numel())
            all_gather_single(gathered.view(-1), mine.view(-1))
            for rank, nodes in enumerate(subtrees):
                for row, node in enumerate(nodes):
                    everyone[node].append(gathered[rank, row].view_as(buffer))
        return everyone


def _refusal(owner: torch.nn.Module, name: str, what: str) -> ConfigError:
    return ConfigError(
        f"the buffer {name!r} of {type(owner).__name__} {what}, and every micro-batch of a step starts from the same "
        "buffers; give it its size and values in __init__"
    )
