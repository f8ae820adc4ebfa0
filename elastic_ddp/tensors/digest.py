"""`digest_bits`: a digest of a tensor's bits, computed on its device."""

from __future__ import annotations

import functools

import torch

from elastic_ddp.tensors.state_tree import ravel

_WORDS = 1 << 16
"""Words of 8 bytes in a row. A CPU keeps a row, its weights and their products in its cache."""
_ROWS = {"cpu": 1}
"""Rows that are added up at once, by the type of the device."""


@torch.no_grad()
def digest_bits(tensor: torch.Tensor) -> int:
    """Returns the sum of a dense tensor's bits as words of 8 bytes, each times a weight of its place, modulo 2**64.

    Equal tensors have equal digests, also on different devices. Others do only by chance: the weights are odd, so a
    change of one word always changes the digest.
    """
    content = ravel(tensor).view(torch.uint8)
    if content.storage_offset() % 8:
        content = content.clone()
    size, num_rows = 8 * _WORDS, len(content) // (8 * _WORDS)
    rest = torch.zeros(size, dtype=torch.uint8, device=content.device)
    rest[: len(content) - num_rows * size] = content[num_rows * size :]
    weights = _weights(content.device)
    total = (rest.view(torch.int64) * weights).sum() * (2 * num_rows + 1)
    rows = content[: num_rows * size].view(torch.int64).view(num_rows, _WORDS)
    first = 0
    for part in rows.split(_ROWS.get(content.device.type, 64)):
        factors = torch.arange(first, first + len(part), device=content.device) * 2 + 1
        total += ((part * weights).sum(dim=1) * factors).sum()
        first += len(part)
    return int(total)


@functools.lru_cache(maxsize=2)
def _weights(device: torch.device) -> torch.Tensor:
    """Returns an odd number for each place in a row: multiples of 2**64 divided by the golden ratio."""
    return (torch.arange(1, _WORDS + 1, device=device) * -7046029254386353131) | 1
