"""The 2-norm of sharded gradients, with the same bits at every world size.

FSDP shards along dimension 0, so a row lies on one rank, whatever the world size is. The squares of a row are added by
halves: the second half to the first one, element by element, until one number is left. The sums of all rows, gathered
from all ranks, are added in the same way. Element by element, no kernel chooses the order of the additions.

Source: N. J. Higham, "The accuracy of floating point summation", SIAM J. Sci. Comput. 14 (1993), on pairwise summation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from elastic_ddp import torch_internals
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.tensors.state_tree import local_part


@torch.no_grad()
def row_norm(gradients: Sequence[torch.Tensor], group: ProcessGroup) -> torch.Tensor:
    """Returns the 2-norm of all gradients together, float32, on their device, equal on all ranks. Collective.

    The gradients are DTensors that are sharded along dimension 0, with at least one dimension.
    """
    num_shards = group.assignment.num_shards
    chunks = [-(-len(gradient) // num_shards) for gradient in gradients]  # rows of each that a rank holds at most
    own = torch.zeros(sum(chunks), dtype=torch.float64, device=local_part(gradients[0]).device)
    targets = own.split(chunks)
    for target, total in zip(targets, _row_sums([local_part(gradient) for gradient in gradients]), strict=True):
        target[: len(total)] = total
    by_gradient = group.all_gather(own)[:num_shards].split(chunks, dim=1)
    rows = torch.cat([sums.flatten()[: len(gradient)] for sums, gradient in zip(by_gradient, gradients, strict=True)])
    return _add_halves([rows.unsqueeze(0)])[0].sqrt().float().reshape(())


@torch.no_grad()
def infinite_unless_finite(gradients: Sequence[torch.Tensor], group: ProcessGroup) -> torch.Tensor:
    """Returns 0 if all gradients of all ranks are finite, and infinity otherwise; float32. Collective, and cheap."""
    largest = torch_internals.largest_values([local_part(gradient) for gradient in gradients])
    count = (~largest.isfinite()).sum().float().to(group.transfer_device)
    if group.world_size > 1:
        group.wait(dist.all_reduce(count, async_op=True))
    return torch.where(count > 0, torch.inf, 0.0).to(local_part(gradients[0]).device)


def _row_sums(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the sum of the squares of each row of each shard, float64 of shape (rows,)."""
    flat = [shard.reshape(len(shard), shard.shape[1:].numel()) for shard in shards]
    halves = [-(-values.shape[1] // 2) for values in flat]
    # The squares of both halves are added at once, so that they take the memory of half the gradients.
    firsts = [values[:, :half].float().square() for values, half in zip(flat, halves, strict=True)]
    for first, values, half in zip(firsts, flat, halves, strict=True):
        second = values[:, half:].float()
        first[:, : second.shape[1]].addcmul_(second, second)
    return [values.double().squeeze(1) for values in _add_halves(firsts)]


def _add_halves(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the sum of each row of each matrix, shape (rows, 1). Works in place."""
    while long := [position for position, matrix in enumerate(matrices) if matrix.shape[1] > 1]:
        firsts = []
        seconds = []
        for position in long:
            matrix = matrices[position]
            half = -(-matrix.shape[1] // 2)
            matrices[position] = matrix[:, :half]
            firsts.append(matrix[:, : matrix.shape[1] - half])
            seconds.append(matrix[:, half:])
        torch_internals.add_pairwise(firsts, seconds)
    return matrices
