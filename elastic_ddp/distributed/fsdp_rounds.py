"""The collectives of FSDP's units: gathers of parameters, and the reduction of gradients after every micro-batch.

Round k of a step has the micro-batches from k * W to k * W + W - 1, one for each rank. The backward of a round brings a
unit's W gradients to the ranks that add them up: each rank sends part r of its gradient to rank r, the bytes of a
reduce-scatter. These gradients are neighbouring leaves of the tree in `reduction_tree`, so a rank adds them at once, as
a binary counter carries. Between two rounds a rank holds at most log2(M) + 1 shards of a unit. The last round leaves
the sum in the gradients. Its bits do not depend on the world size.

Usually, part r is the shard of rank r. With hybrid sharding, part r is a piece of that shard, and the last round
assembles the shard from its pieces, with the same bits.

FSDP2 takes these objects by `set_custom_all_gather` and `set_custom_reduce_scatter`. Unlike torch's own collectives,
each wait ends if this rank aborts the process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elastic_ddp.distributed.process_group import ProcessGroup, all_gather_single, reduce_scatter_single
from elastic_ddp.distributed.reduction_tree import Node, fold_in, fold_to_root


@dataclass
class Round:
    """The state of the current backward that all units share."""

    group: ProcessGroup
    num_leaves: int = 0
    """Number of micro-batches of the step with rows."""
    number: int = -1
    """Number of the round in the step; -1 before the first."""
    is_zero: bool = False
    """Whether zeros replace this rank's gradients."""

    @property
    def num_shards(self) -> int:
        return self.group.assignment.num_shards

    @property
    def num_groups(self) -> int:
        """Number of groups of ranks that each hold all shards."""
        return self.group.world_size // self.num_shards

    @property
    def is_last(self) -> bool:
        return self.number + 1 == -(-self.num_leaves // self.group.world_size)

    @property
    def leaves(self) -> range:
        """The micro-batches of the round that count."""
        first = self.number * self.group.world_size
        return range(first, min(first + self.group.world_size, self.num_leaves))


class _Collective:
    """The allocation that FSDP2 requests from `Gather` and `Reduction`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@dataclass
class Gather(_Collective):
    """Gathers the parameters of a unit."""

    group: ProcessGroup

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        gathered = torch.empty_like(output_tensor, device="cpu") if self.group.shares_device else output_tensor
        sent = input_tensor.to(gathered.device)
        work = all_gather_single(gathered, sent, group=self.group.shard_group, async_op=True)
        if async_op and gathered is output_tensor:
            return work
        self.group.wait(work)
        if gathered is not output_tensor:
            output_tensor.copy_(gathered)
        return None


class Reduction(_Collective):
    """Adds up the gradients of a unit over the rounds of a step, for the rows that this rank holds.

    It adds along the reduction tree. Unless `is_canonical`, torch's own reduce-scatter adds up each round, and the
    rounds are added in order.
    """

    def __init__(self, current: Round, *, is_canonical: bool) -> None:
        self._round = current
        self._is_canonical = is_canonical
        self.num_exchanges = 0
        """Number of exchanges in this round."""
        self._sums: dict[Node, torch.Tensor] = {}  # of subtrees, or one of all rounds so far

    def clear(self) -> None:
        """Forgets the sums of an earlier step, which was interrupted."""
        self._sums.clear()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        self.num_exchanges += 1
        if self._round.group.world_size == 1:
            output_tensor.copy_(input_tensor)  # some versions of torch do this by themselves
            return
        if self._round.is_zero:
            input_tensor.zero_()
        if self._is_canonical:
            self._exchange(self._by_rank(input_tensor))
        else:
            self._reduce_scatter(self._by_rank(input_tensor))
        if self._round.is_last:
            total = fold_to_root(self._sums, self._round.num_leaves if self._is_canonical else 1, torch.Tensor.add_)
            self._sums.clear()
            output_tensor.copy_(self._joined(total, len(output_tensor)))

    def _by_rank(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns a gradient, the shards in order, as parts of equal size in the order of the ranks that add them."""
        num_shards, num_groups = self._round.num_shards, self._round.num_groups
        if num_groups == 1:
            return gradient
        shards = gradient.view(num_shards, -1)
        length = -(-shards.shape[1] // num_groups)
        parts = gradient.new_zeros(num_groups, num_shards, length)
        for part, piece in zip(parts, shards.split(length, dim=1), strict=False):
            part[:, : piece.shape[1]] = piece
        return parts.view(-1)

    def _joined(self, part: torch.Tensor, length: int) -> torch.Tensor:
        """Returns this rank's shard, with a number of elements, from the parts of it that each group has."""
        group = self._round.group
        num_shards, num_groups = self._round.num_shards, self._round.num_groups
        if num_groups == 1:
            return part
        sizes = [len(part) if rank % num_shards == group.rank % num_shards else 0 for rank in range(group.world_size)]
        sent = part.to(group.transfer_device).repeat(num_groups)
        received = torch.empty_like(sent)
        group.wait(dist.all_to_all_single(received, sent, sizes, sizes, async_op=True))
        return received[:length].to(part.device)

    def _exchange(self, gradient: torch.Tensor) -> None:
        """Exchanges the gradients of a round, and adds the gradients of this rank's rows to the sums."""
        group = self._round.group
        sent = gradient.to(group.transfer_device)
        received = torch.empty_like(sent)
        group.wait(dist.all_to_all_single(received, sent, async_op=True))
        received = received.to(gradient.device)
        for micro_batch, leaf in zip(self._round.leaves, received.chunk(group.world_size), strict=False):
            fold_in(self._sums, Node(0, micro_batch), leaf, torch.Tensor.add_)
        if not self._round.is_last:  # what is left must not keep the memory of the other leaves
            storage = received.untyped_storage().data_ptr()
            for node, value in self._sums.items():
                if value.untyped_storage().data_ptr() == storage:
                    self._sums[node] = value.clone()

    def _reduce_scatter(self, gradient: torch.Tensor) -> None:
        group = self._round.group
        all_rounds = Node(0, 0)
        sent = gradient.to(group.transfer_device)
        received = sent.new_empty(sent.numel() // group.world_size)
        group.wait(reduce_scatter_single(received, sent, async_op=True))
        received = received.to(gradient.device)
        self._sums[all_rounds] = self._sums[all_rounds].add_(received) if self._sums else received
