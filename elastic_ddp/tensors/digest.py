"""Digests of tensors' bits, computed on their devices."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch

from elastic_ddp.tensors.state_tree import local_part, ravel

_WORDS = 1 << 16
"""Words of 8 bytes in a row. A CPU keeps a row, its weights and their products in its cache."""
_ROWS = {"cpu": 1}
"""Rows that are added up at once, by the type of the device."""


def digest_tensors(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """Returns the digest of each dense tensor, int64 of shape (tensors,), without a wait for the device.

    A digest sums the tensor's bits as words of 8 bytes, each times a weight of its place, modulo 2**64. The order of
    elements in memory does not matter. Equal tensors have equal digests on all devices; different tensors, only by
    chance: the weights are odd, so a change of one word always changes the digest. None has the digest of zeros.
    """
    digests = [torch.zeros((), dtype=torch.int64, device="cpu") if each is None else _digest(each) for each in tensors]
    devices = {digest.device for digest in digests} - {torch.device("cpu")}
    device = devices.pop() if devices else torch.device("cpu")
    return torch.stack([digest.to(device) for digest in digests]) if digests else torch.zeros(0, dtype=torch.int64)


def digest_named(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Returns the digests of the dense tensors by name; of a DTensor, the digest of the part on this rank."""
    local = {name: local_part(tensor.detach()) for name, tensor in tensors.items()}
    dense = {name: tensor for name, tensor in local.items() if tensor.layout is torch.strided}
    return dict(zip(dense, digest_tensors(dense.values()).tolist(), strict=True))


@torch.no_grad()
def _digest(tensor: torch.Tensor) -> torch.Tensor:
    content = ravel(tensor).view(torch.uint8)
    if content.storage_offset() % 8:
        content = content.clone()
    size = 8 * _WORDS
    num_rows = len(content) // (8 * _WORDS)
    rest = content[num_rows * size :]
    if len(rest) % 8:
        rest = torch.cat([rest, rest.new_zeros(-len(rest) % 8)])
    weights = _weights(content.device)
    total = (rest.view(torch.int64) * weights[: len(rest) // 8]).sum() * (2 * num_rows + 1)
    if not num_rows:
        return total
    rows = content[: num_rows * size].view(torch.int64).view(num_rows, _WORDS)
    first = 0
    for part in rows.split(_ROWS.get(content.device.type, 64)):
        factors = torch.arange(first, first + len(part), device=content.device) * 2 + 1
        total += ((part * weights).sum(dim=1) * factors).sum()
        first += len(part)
    return total


@functools.lru_cache(maxsize=2)
def _weights(device: torch.device) -> torch.Tensor:
    """Returns an odd number for each place in a row: multiples of 2**64 divided by the golden ratio."""
    return (torch.arange(1, _WORDS + 1, device=device) * -7046029254386353131) | 1
