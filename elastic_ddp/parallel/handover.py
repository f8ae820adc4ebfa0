"""State from one rank to others over the process group, and the check that all ranks built the same model.

Those who take part form a chain: everybody hands a piece to the next while it waits for the one after it, so that it
takes hardly longer for many receivers than for one. It needs no group of its own, whose connections would have to be
made, and to be cut when a peer is lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from elastic_ddp.errors import ConfigError
from elastic_ddp.parallel.process_group import ProcessGroup
from elastic_ddp.state import flatten, unflatten

CHUNK_BYTES = 16 << 20


def hand_over(state: Any, group: ProcessGroup, *, source: int, receivers: Sequence[int]) -> Any:
    """The state of rank `source`, on the receivers; others get None, and nothing is sent to them. Every rank calls it.

    Tensors travel as they are, without pickle. What ranks other than the source pass is ignored. Receiving ranks get
    tensors on the CPU.
    """
    if not receivers:
        return None
    ranks = [source, *receivers]
    if group.rank not in ranks:
        return None
    chain = _Chain(ranks, group.rank)
    tensors: dict[str, torch.Tensor] = {}
    header = torch.empty(0, dtype=torch.uint8)
    if group.rank == source:
        skeleton, tensors = flatten(state)
        layout = {key: [str(value.dtype).removeprefix("torch."), list(value.shape)] for key, value in tensors.items()}
        text = json.dumps({"skeleton": skeleton, "layout": layout}).encode()
        header = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    size = chain.pass_on(torch.tensor([len(header)]))
    header = chain.pass_on(header if group.rank == source else torch.empty(int(size), dtype=torch.uint8))
    received = json.loads(header.numpy().tobytes())
    for key, (dtype, shape) in received["layout"].items():
        if group.rank == source:
            value = tensors[key].detach().contiguous()
        else:
            value = tensors[key] = torch.empty(shape, dtype=getattr(torch, dtype))
        if value.numel():
            # As bytes, as gloo does not know every dtype, and in pieces: the source holds no second copy on the host.
            for piece in value.reshape(-1).view(torch.uint8).split(CHUNK_BYTES):
                chain.pass_on(piece.cpu())
    chain.finish()
    return None if group.rank == source else unflatten(received["skeleton"], tensors)


class _Chain:
    """Ranks of which each gives what it gets to the next one."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        place = ranks.index(rank)
        self._before = ranks[place - 1] if place else None
        self._next = ranks[place + 1] if place + 1 < len(ranks) else None
        self._sent: dist.Work | None = None
        self._piece: torch.Tensor | None = None

    def pass_on(self, piece: torch.Tensor) -> torch.Tensor:
        """A tensor on the CPU: the first rank's own, and on the others filled with that."""
        if self._before is not None:
            dist.recv(piece, self._before)
        self.finish()
        if self._next is not None:
            self._sent, self._piece = dist.isend(piece, self._next), piece
        return piece

    def finish(self) -> None:
        """Until everything has gone."""
        if self._sent is not None:
            self._sent.wait()
        self._sent = self._piece = None


def check_same_model(module: torch.nn.Module, group: ProcessGroup) -> None:
    """Raises a ConfigError that names the parameter and the rank where models differ. Every rank calls it."""
    mine = [
        f"{name} {tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')} "
        f"requires_grad={parameter.requires_grad}"
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
