"""State from one rank to others over the process group, and the check that all ranks built the same model.

Those who take part form a chain: everybody hands a piece to the next while it waits for the one after it, so that it
takes hardly longer for many receivers than for one. It needs no group of its own, whose connections would have to be
made, and to be cut when a peer is lost.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from elastic_ddp.distributed.process_group import Message, ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.tensors import host_memory
from elastic_ddp.tensors.state_tree import dtype_name, dtype_of, flatten, in_a_row, unflatten

CHUNK_BYTES = 16 << 20
GROUP_BYTES = 64 << 20
"""Received tensors of about so many lie together in memory."""
MOST_PIECES, MOST_BYTES = 64, 4 * CHUNK_BYTES
"""Of what is on its way between two ranks at once."""


def hand_over(
    state: Any,
    group: ProcessGroup,
    *,
    source: int,
    receivers: Sequence[int],
    tick: Callable[[], None] = lambda: None,
) -> Any:
    """The state of rank `source`, on the receivers; others get None, and nothing is sent to them. Every rank calls it.

    Tensors travel as they are, without pickle. What ranks other than the source pass is ignored. Receiving ranks get
    tensors on the CPU. `tick` is called whenever a piece has arrived.
    """
    if not receivers:
        return None
    ranks = [source, *receivers]
    if group.rank not in ranks:
        return None
    chain = _Chain(ranks, group, tick)
    tensors: dict[str, torch.Tensor] = {}
    header = torch.empty(0, dtype=torch.uint8)
    if group.rank == source:
        skeleton, tensors = flatten(state)
        layout = {key: [dtype_name(value.dtype), list(value.shape)] for key, value in tensors.items()}
        text = json.dumps({"skeleton": skeleton, "layout": layout}).encode()
        header = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    size = chain.pass_on(torch.tensor([len(header)]))
    header = chain.pass_on(header if group.rank == source else torch.empty(int(size), dtype=torch.uint8))
    received = json.loads(header.numpy().tobytes())
    if group.rank != source:
        tensors = _empty(received["layout"])
    chain.pass_all(_pieces(tensors))
    return None if group.rank == source else unflatten(received["skeleton"], tensors)


def _empty(layout: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """Tensors to be received, in the order in which they are sent. None lies together with those of other components,
    which may stay for longer."""
    groups: dict[tuple[str, int], dict[str, tuple[Sequence[int], torch.dtype]]] = {}
    num_bytes = 0
    for key, (name, shape) in layout.items():
        dtype = dtype_of(name)
        groups.setdefault((key.partition(".")[0], num_bytes // GROUP_BYTES), {})[key] = shape, dtype
        num_bytes += math.prod(shape) * dtype.itemsize
    tensors = host_memory.Memory(groups.values()).tensors
    return {key: tensors[key] for key in layout}


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors as bytes, as gloo does not know every dtype, and in pieces: the source holds no second copy of them
    on the host."""
    for value in tensors.values():
        if value.numel():
            yield from in_a_row(value).view(torch.uint8).split(CHUNK_BYTES)


class _OnTheWay:
    """Pieces that were sent, or are awaited, and have not arrived."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._pieces: deque[tuple[Message, torch.Tensor, int]] = deque()
        self._num_bytes = 0

    def add(self, message: Message, piece: torch.Tensor, number: int) -> None:
        self._pieces.append((message, piece, number))
        self._num_bytes += piece.numel()

    def first(self) -> tuple[torch.Tensor, int]:
        """The one that has been on its way for longest, once it has arrived, and its number."""
        message, piece, number = self._pieces.popleft()
        message.wait()
        self._tick()
        self._num_bytes -= piece.numel()
        return piece, number

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def is_full(self) -> bool:
        return len(self._pieces) >= MOST_PIECES or self._num_bytes >= MOST_BYTES


class _Chain:
    """Ranks of which each gives what it gets to the next one."""

    def __init__(self, ranks: Sequence[int], group: ProcessGroup, tick: Callable[[], None]) -> None:
        place = ranks.index(group.rank)
        self._group = group
        self._before = ranks[place - 1] if place else None
        self._next = ranks[place + 1] if place + 1 < len(ranks) else None
        self._tick, self._going = tick, _OnTheWay(tick)

    def pass_on(self, piece: torch.Tensor) -> torch.Tensor:
        """A tensor on the CPU: the first rank's own, and on the others filled with that."""
        if self._before is not None:
            self._group.begin_receive(piece, self._before, 0).wait()
        self._give(piece, 0)
        return piece

    def pass_all(self, pieces: Iterable[torch.Tensor]) -> None:
        """Tensors of bytes, on the CPU but for the first rank's. Many are on their way at once: to wait for each of
        those of a model takes longer than to carry them."""
        coming = _OnTheWay(self._tick)
        for number, piece in enumerate(pieces, start=1):
            if self._before is None:
                self._give(piece.cpu(), number)
                continue
            coming.add(self._group.begin_receive(piece, self._before, number), piece, number)
            if coming.is_full:
                self._give(*coming.first())
        while coming:
            self._give(*coming.first())
        while self._going:
            self._going.first()

    def _give(self, piece: torch.Tensor, number: int) -> None:
        if self._next is not None:
            self._going.add(self._group.begin_send(piece, self._next, number), piece, number)
            while self._going.is_full:
                self._going.first()


def check_same_model(module: torch.nn.Module, group: ProcessGroup) -> None:
    """Raises a ConfigError that names the parameter and the rank where models differ. Every rank calls it."""
    mine = [
        f"{name} {tuple(parameter.shape)} {dtype_name(parameter.dtype)} requires_grad={parameter.requires_grad}"
        for name, parameter in module.named_parameters()
    ]
    everyone = [part.decode().split("\n") for part in group.all_gather_bytes("\n".join(mine).encode())]
    for rank, theirs in enumerate(everyone[1:], start=1):
        for place in range(max(len(theirs), len(everyone[0]))):
            here = everyone[0][place] if place < len(everyone[0]) else "no such parameter"
            there = theirs[place] if place < len(theirs) else "no such parameter"
            if here != there:
                raise ConfigError(
                    f"the models differ: parameter {place} is '{there}' on rank {rank} and '{here}' on rank 0; build "
                    "the same model, with the same frozen parameters, on every rank (nothing in it may depend on the "
                    "rank, the host or the time)"
                )
