"""Sends a state from one rank to others over the process group, and checks that all ranks built the same model.

The ranks form a chain: each forwards a piece to the next rank while it receives the piece after it. So many receivers
take hardly longer than one, without a process group of their own.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from elastic_ddp.distributed.piece_transfer import TransferWindow
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.tensors import host_memory
from elastic_ddp.tensors.state_tree import dtype_name, dtype_of, flatten, ravel, unflatten

CHUNK_BYTES = 16 << 20
SLAB_BYTES = 64 << 20
"""Received tensors share slabs of host memory of about this size."""
MAX_CHUNKS_IN_FLIGHT, MAX_BYTES_IN_FLIGHT = 64, 4 * CHUNK_BYTES
"""Between two ranks."""


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
    if group.rank in (ranks := [source, *receivers]):
        _Chain(ranks, group, tick).forward(_pieces(tensors if received is None else received))
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


class _Chain:
    """Ranks that each forward what they receive to the next one."""

    def __init__(self, ranks: Sequence[int], group: ProcessGroup, tick: Callable[[], None]) -> None:
        index = ranks.index(group.rank)
        self._group, self._tick = group, tick
        self._previous = ranks[index - 1] if index else None
        self._next = ranks[index + 1] if index + 1 < len(ranks) else None
        self._incoming, self._outgoing = (
            TransferWindow[tuple[torch.Tensor, int]](
                group, max_items=MAX_CHUNKS_IN_FLIGHT, max_bytes=MAX_BYTES_IN_FLIGHT
            )
            for _ in range(2)
        )

    def forward(self, chunks: Iterable[torch.Tensor]) -> None:
        """Forwards chunks of bytes, many at a time. Only the first rank's chunks may be on a device."""
        for tag, chunk in enumerate(chunks):
            if self._previous is None:
                self._send(chunk.cpu(), tag)
                continue
            message = self._group.begin_receive(chunk, self._previous, tag)
            self._incoming.add((chunk, tag), [message], chunk.numel())
            if self._incoming.is_full:
                self._forward_oldest()
        while self._incoming:
            self._forward_oldest()
        while self._outgoing:
            self._finish_oldest_send()

    def _forward_oldest(self) -> None:
        chunk, tag = self._incoming.finish_oldest()
        self._tick()
        self._send(chunk, tag)

    def _send(self, tensor: torch.Tensor, tag: int) -> None:
        if self._next is not None:
            message = self._group.begin_send(tensor, self._next, tag)
            self._outgoing.add((tensor, tag), [message], tensor.numel())
            while self._outgoing.is_full:
                self._finish_oldest_send()

    def _finish_oldest_send(self) -> None:
        self._outgoing.finish_oldest()
        self._tick()


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
