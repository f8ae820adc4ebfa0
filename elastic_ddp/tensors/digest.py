"""`digest_bits`: a digest of a tensor's bits, computed on its device."""

from __future__ import annotations

import functools

import torch

from elastic_ddp.tensors.state_tree import INTEGERS, ravel

_CHUNK = 1 << 20
_FACTOR = -7046029254386353131
"""2**64 divided by the golden ratio, as a signed number: multiples of it look like random numbers."""


@torch.no_grad()
def digest_bits(tensor: torch.Tensor) -> int:
    """Returns the sum of a dense tensor's elements, as integers of their size, each times a weight of its place.

    Modulo 2**64, so the order of the additions does not matter. Equal tensors have equal digests. Others do only by
    chance: weights are odd, so a change of one element always changes the digest.
    """
    flat = ravel(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    bits = flat.view(INTEGERS[flat.itemsize])
    weights = _weights(bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, chunk in enumerate(bits.split(_CHUNK)):
        total += (chunk.long() * weights[: len(chunk)]).sum() * (2 * number + 1)
    return int(total)


@functools.lru_cache(maxsize=2)
def _weights(device: torch.device) -> torch.Tensor:
    """Returns odd numbers, one for each place in a chunk."""
    return (torch.arange(1, _CHUNK + 1, device=device) * _FACTOR) | 1
