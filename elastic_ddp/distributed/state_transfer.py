"""Sends pieces of bytes between ranks, and a state from one rank to others, after a check that models are equal.

For a state, the ranks form a chain: each forwards a piece to the next rank while it receives the piece after it. So
many receivers take hardly longer than one, without a process group of their own.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.tensors import host_memory
from elastic_ddp.tensors.state_tree import dtype_name, dtype_of, flatten, ravel, unflatten

Item = TypeVar("Item")

CHUNK_BYTES = 16 << 20
SLAB_BYTES = 64 << 20
"""Received tensors share slabs of host memory of about this size."""
MAX_CHUNKS_IN_FLIGHT, MAX_BYTES_IN_FLIGHT = 64, 4 * CHUNK_BYTES
"""Between two ranks."""


class TransferWindow(Generic[Item]):
    """Transfers that this rank has begun, oldest first: fewer than `max_items` and `max_bytes` after `add`.

    `finish` is called with each item once it has been sent or received.
    """

    def __init__(self, group: ProcessGroup, finish: Callable[[Item], None], *, max_items: int, max_bytes: int) -> None:
        self._group = group
        self._finish = finish
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._items: deque[tuple[Item, Sequence[dist.Work], int]] = deque()
        self._num_bytes = 0

    def add(self, item: Item, messages: Sequence[dist.Work], num_bytes: int) -> None:
        """Adds an item, and waits for the oldest ones while there are too many. Raises if a peer failed."""
        self._items.append((item, messages, num_bytes))
        self._num_bytes += num_bytes
        while len(self._items) >= self._max_items or self._num_bytes >= self._max_bytes:
            self._finish_oldest()

    def drain(self) -> None:
        """Waits for all items."""
        while self._items:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        item, messages, num_bytes = self._items.popleft()
        self._group.finish(messages)
        self._num_bytes -= num_bytes
        self._finish(item)


def begin_transfer(
    data: memoryview, group: ProcessGroup, *, tag: int, source: int, ranks: Sequence[int]
) -> list[dist.Work]:
    """Begins to send a piece from rank `source` to `ranks`, and returns the messages for `ProcessGroup.finish`.

    The source and each of the ranks call it. Ranks that share pieces begin them in the same order; otherwise they wait
    for each other forever. `data` is memory with the bytes on the source, and to receive them on the others; it must
    not change until `finish` returns. `tag` is the same on all ranks, and different for each piece in flight.
    """
    others = [rank for rank in ranks if rank != source]
    if not data or not others:
        return []
    tensor = torch.frombuffer(data, dtype=torch.uint8)
    if group.rank != source:
        begun = [dist.irecv(tensor, source, tag=tag)]
    else:
        begun = [dist.isend(tensor, rank, tag=tag) for rank in others]
    return [message for message in begun if message is not None]  # None outside of the group


def transfer_state(
    state: Any,
    group: ProcessGroup,
    *,
    source: int,
    receivers: Sequence[int],
    tick: Callable[[], None] = lambda: None,
) -> Any:
    """Sends the state of rank `source` to the receivers, and returns it there, with its tensors on the CPU.

    Every rank calls it; only the source's `state` is used, and all ranks but the receivers get None. `tick` is called
    whenever a chunk has been sent or received.
    """
    if not receivers:
        return None
    skeleton, tensors = flatten(state) if group.rank == source else (None, {})
    skeleton = json.loads(
        group.broadcast_bytes(json.dumps(skeleton).encode() if group.rank == source else None, source)
    )
    received = transfer_tensors(tensors, group, source=source, receivers=receivers, tick=tick)
    return None if received is None else unflatten(skeleton, received)


def transfer_tensors(
    tensors: Mapping[str, torch.Tensor],
    group: ProcessGroup,
    *,
    source: int,
    receivers: Sequence[int],
    tick: Callable[[], None] = lambda: None,
) -> dict[str, torch.Tensor] | None:
    """Sends tensors by name as `transfer_state` does, and returns them on the receivers, on the CPU."""
    if not receivers:
        return None
    layout = {key: [dtype_name(tensor.dtype), list(tensor.shape)] for key, tensor in tensors.items()}
    own = group.rank == source
    layout = json.loads(group.broadcast_bytes(json.dumps(layout).encode() if own else None, source))
    received = _allocate(layout) if group.rank in receivers else None
    ranks = [source, *receivers]
    if group.rank in ranks:
        _forward(_pieces(tensors if received is None else received), ranks, group, tick)
    return received


def _allocate(layout: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """Returns uninitialized tensors to receive, in the order in which they are sent.

    Tensors of two components share no slab, because one component may be kept longer than the other.
    """
    slabs: dict[tuple[str, int], dict[str, tuple[Sequence[int], torch.dtype]]] = {}
    num_bytes = 0
    for key, (name, shape) in layout.items():
        dtype = dtype_of(name)
        slabs.setdefault((key.partition(".")[0], num_bytes // SLAB_BYTES), {})[key] = shape, dtype
        num_bytes += math.prod(shape) * dtype.itemsize
    tensors = host_memory.Memory(slabs.values()).tensors
    return {key: tensors[key] for key in layout}


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields the tensors as bytes, because gloo does not support every dtype, in chunks: the source copies only chunks
    from its device to the host."""
    for tensor in tensors.values():
        if tensor.numel():
            yield from ravel(tensor).view(torch.uint8).split(CHUNK_BYTES)


def _forward(
    chunks: Iterable[torch.Tensor], ranks: Sequence[int], group: ProcessGroup, tick: Callable[[], None]
) -> None:
    """Sends chunks of bytes along a chain of ranks, many at a time. Only the first rank's may be on a device."""
    own = ranks.index(group.rank)

    def begin(data: memoryview, tag: int, first: int) -> list[dist.Work]:
        """Begins to send a chunk from one rank of the chain to the next."""
        return begin_transfer(data, group, tag=tag, source=ranks[first], ranks=ranks[first + 1 : first + 2])

    def arrived(item: tuple[memoryview, int]) -> None:
        tick()
        send(*item)

    def send(data: memoryview, tag: int) -> None:
        outgoing.add((data, tag), begin(data, tag, own), len(data))

    limits = {"max_items": MAX_CHUNKS_IN_FLIGHT, "max_bytes": MAX_BYTES_IN_FLIGHT}
    incoming = TransferWindow[tuple[memoryview, int]](group, arrived, **limits)
    outgoing = TransferWindow[tuple[memoryview, int]](group, lambda item: tick(), **limits)
    for tag, chunk in enumerate(chunks):
        data = chunk.cpu().numpy().data
        if own:
            incoming.add((data, tag), begin(data, tag, own - 1), len(data))
        else:
            send(data, tag)
    incoming.drain()
    outgoing.drain()


def check_same_model(
    module: torch.nn.Module, group: ProcessGroup, optimizers: Sequence[torch.optim.Optimizer] = ()
) -> None:
    """Raises a ConfigError if ranks built models with different parameters, or other param_groups. Collective."""
    places = {
        parameter: f" in param_groups[{index}] of optimizer {number}"
        for number, optimizer in enumerate(optimizers)
        for index, of_group in enumerate(optimizer.param_groups)
        for parameter in of_group["params"]
    }
    own = [
        f"{name} {tuple(parameter.shape)} {dtype_name(parameter.dtype)} requires_grad={parameter.requires_grad}"
        f"{places.get(parameter, '')}"
        for name, parameter in module.named_parameters()
    ]
    expected, *others = (part.decode().split("\n") for part in group.all_gather_bytes("\n".join(own).encode()))
    for rank, parameters in enumerate(others, start=1):
        pairs = itertools.zip_longest(parameters, expected, fillvalue="no such parameter")
        for index, (parameter, expected_parameter) in enumerate(pairs):
            if parameter != expected_parameter:
                raise ConfigError(
                    f"the models differ: parameter {index} is '{parameter}' on rank {rank} and '{expected_parameter}' "
                    "on rank 0. Build the same model with the same frozen parameters and param_groups on every "
                    "rank; they must not depend on the rank, the host or the time."
                )
