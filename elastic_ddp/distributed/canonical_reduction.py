"""The canonical gradient reduction: a DDP communication hook whose result has the same bits at every world size.

Let g_m be the gradient of micro-batch m, weighted by its rows. The mean gradient of a step is T(g_0, ..., g_{L-1}) / d:
T is the sum along the binary tree of `reduction_tree`, L the number of micro-batches with rows, and d the divisor of
the step. None of these depends on the world size W. Each rank owns a contiguous range of the M micro-batches.

1. Accumulate. After each backward but its last, a rank takes the gradients off the parameters. It adds them into the
   sums of its subtrees, as a binary counter carries: at most ceil(log2(M/W)) + 1 copies of the gradients exist.
2. Exchange. The last backward goes through DDP, which calls the hook for each bucket as it becomes ready. The hook cuts
   each of the rank's S subtree sums into W chunks and sends chunk r to rank r (`all_to_all_single`).
3. Reduce. Rank r adds chunk r of all subtree sums up to the root of the tree, and divides by d.
4. Gather. `all_gather` returns the mean gradient to all ranks.

With NCCL, steps 3 and 4 run on a CUDA stream of their own, beside the backward. DDP waits for the result of each bucket
at the end of the backward.

For a bucket of n elements, each rank sends (S + 1) n (W-1)/W elements. S is 1 if M and W are powers of two.

Sources: N. J. Higham, "The accuracy of floating point summation", SIAM J. Sci. Comput. 14 (1993); R. Rabenseifner,
"Optimization of collective reduction operations", ICCS 2004;
https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

# No `from __future__ import annotations`: DDP checks the hook's annotations as objects.
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

from elastic_ddp import torch_internals
from elastic_ddp.distributed.process_group import ProcessGroup, all_gather_single
from elastic_ddp.distributed.reduction_tree import Node, fold_in, fold_to_root, maximal_subtrees, with_rows
from elastic_ddp.distributed.strategy import gradients_of, ignore, own_backward_error
from elastic_ddp.tensors.digest import digest_tensors

Record = Callable[[int, torch.Tensor], None]
"""Gets a micro-batch, and the digests of its gradients, int64 of shape (parameters,)."""
_MOVED = torch.empty(0)
"""Stands in a subtree's sum for a gradient that was moved into its bucket."""


class CanonicalReduction:
    """Holds a rank's subtree sums during a step and reduces DDP's buckets along the tree.

    Call `begin` before a step's first backward, `fold` for every backward but the last, and `expect` before the last.
    The hook then leaves the weighted mean in DDP's gradients. `ranges` are the micro-batches of every rank. With
    `may_be_unused`, call `drop_unused_gradients` after each step.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        ranges: Sequence[range],
        group: ProcessGroup,
        *,
        may_be_unused: bool = False,
        enter_phase: Callable[[str], str] = ignore,
    ) -> None:
        self._parameters = list(parameters)
        self._position = {id(parameter): position for position, parameter in enumerate(self._parameters)}
        self._ranges = list(ranges)
        self._group = group
        # With NCCL, a stream of its own waits for the exchanges and adds the chunks, so that the backward continues.
        has_stream = group.device.type == "cuda" and not group.shares_device and group.world_size > 1
        self._stream = torch.cuda.Stream(group.device) if has_stream else None
        self._may_be_unused = may_be_unused
        # On a stream of its own, waiting does not hold up the backward.
        self._enter_phase = enter_phase if self._stream is None else ignore

    def begin(self, *, num_leaves: int, divisor: float) -> None:
        """Begins a step, in which micro-batches 0 to L-1 have rows and the sum is divided by d."""
        self._num_leaves = num_leaves
        self._divisor = divisor
        self._subtrees = [maximal_subtrees(with_rows(owned, num_leaves)) for owned in self._ranges]
        self._is_expected = False  # whether the last backward of the step runs
        self._sums: dict[Node, list[torch.Tensor]] = {}  # of each subtree, a tensor or `_MOVED` for each parameter
        self._pending_gathers: list[Callable[[], None]] = []
        self._gathers: list[dist.Work] = []  # that run on gloo
        self._used: set[int] = set()  # positions of the parameters that a folded micro-batch used
        self._means: list[tuple[list[torch.Tensor], torch.Tensor]] = []  # of each bucket, if parameters may be unused
        self._watched: Collection[int] = ()
        self._last_digests: dict[int, torch.Tensor] = {}  # of the last micro-batch, by the parameter's position

    def watch(self, micro_batches: Collection[int], record: Record) -> None:
        """Makes the step call `record` with each of these micro-batches of this rank, and the digests of its gradients.

        The digests are of the gradient alone, one for each parameter.
        """
        self._watched = micro_batches
        self._record = record

    def fold(self, micro_batch: int, loss: torch.Tensor, *, past_hooks: bool = False, is_zero: bool = False) -> None:
        """Adds the gradients of a micro-batch's weighted loss to the sums. The arguments are as in `compute`."""
        gradients = self.compute(loss, past_hooks=past_hooks, is_zero=is_zero)
        if micro_batch in self._watched:
            self._record(micro_batch, digest_tensors(gradients))
        fold_in(self._sums, Node(0, micro_batch), gradients, torch_internals.add_pairwise)

    def compute(self, loss: torch.Tensor, *, past_hooks: bool = False, is_zero: bool = False) -> list[torch.Tensor]:
        """Runs a backward without DDP, and takes the gradients off the parameters.

        With `is_zero`, the gradients are zeros, whatever the backward returns.

        With `past_hooks`, DDP's hooks do not run: the hooks would count the parameters that this backward uses as used
        by the synchronizing one. Reentrant activation checkpointing does not support this.
        """
        if past_hooks:
            returned = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            # Autograd returns one tensor for parameters that are added to each other. The sums are changed in place.
            gradients: list[torch.Tensor | None] = [None if one is None else one.clone() for one in returned]
        else:
            loss.backward()
            gradients = gradients_of(self._parameters)
            for parameter in self._parameters:
                parameter.grad = None
        if self._may_be_unused:
            self._used.update(position for position, gradient in enumerate(gradients) if gradient is not None)
        # The gradient of an unused parameter is zeros. Left out, it would keep a -0.0 at some world sizes only.
        return [
            torch.zeros_like(parameter) if gradient is None or is_zero else gradient
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]

    def expect(self, micro_batch: int | None, *, divides: bool = True, is_zero: bool = False) -> None:
        """Sets the micro-batch whose gradient the hook gets from the next backward. None: the hook ignores it.

        Without `divides`, the hook leaves the sum, and not the mean, in DDP's gradients. `is_zero` is as in `fold`.
        """
        self._last_micro_batch = micro_batch
        self._is_zero = is_zero
        self._divisor = self._divisor if divides else 1.0
        self._is_expected = True

    def drop_unused_gradients(self) -> None:
        """Sets the gradient of parameters that no micro-batch of the step used to None. Collective.

        DDP knows only which parameters the last micro-batches used, and drops the gradients of all others. This method
        sets them again for parameters that an earlier micro-batch of any rank used.
        """
        in_use = [p.grad is not None or position in self._used for position, p in enumerate(self._parameters)]
        used = torch.tensor(in_use).to(torch.uint8)
        if self._group.world_size > 1:
            dist.all_reduce(used, op=dist.ReduceOp.MAX)
        for parameters, mean in self._means:
            for parameter, gradient in zip(parameters, _unflatten(mean, parameters), strict=True):
                if not used[self._position[id(parameter)]]:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = gradient
        self._means = []

    def hook(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook for `DistributedDataParallel.register_comm_hook`."""
        if not self._is_expected:
            raise own_backward_error()
        buffer = bucket.buffer()
        is_last = bucket.is_last()
        sums = self._bucket_sums(bucket)
        if is_last:
            self._sums.clear()
            self._is_expected = False
            if self._last_digests and self._last_micro_batch is not None:
                in_order = [self._last_digests[position] for position in range(len(self._parameters))]
                self._record(self._last_micro_batch, torch.stack(in_order))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        if self._group.world_size == 1:
            # There is no peer, and gloo's all_to_all_single hangs at world size 1.
            mean = self._mean(sums)
            done.set_result(mean)
            if self._may_be_unused:
                self._means.append((bucket.parameters(), mean))
            return done
        # All ranks must issue collectives in the same order, which callbacks of futures do not guarantee. So the hook
        # issues the gather of the bucket before this one, and for the last bucket its own as well.
        if self._pending_gathers:
            self._pending_gathers.pop()()
        reduce_and_gather = self._exchange(bucket, sums, done)
        if is_last:
            reduce_and_gather()
            self._finish_gathers()
        else:
            self._pending_gathers.append(reduce_and_gather)
        return done

    def _finish_gathers(self) -> None:
        """Waits for gathers on gloo. DDP would wait for them as well, but no abort would end its wait."""
        before = self._enter_phase("communication")
        for gather in self._gathers:
            self._group.wait(gather)
        self._gathers.clear()
        self._enter_phase(before)

    def _mean(self, sums: dict[Node, torch.Tensor]) -> torch.Tensor:
        """Returns the mean gradient, from subtree sums that together cover all micro-batches. It works in place."""
        total = fold_to_root(sums, self._num_leaves, torch.Tensor.add_)
        return total if self._divisor == 1.0 else total.div_(self._divisor)

    def _bucket_sums(self, bucket: dist.GradBucket) -> dict[Node, torch.Tensor]:
        """Returns this rank's subtree sums of a bucket, laid out like the bucket's buffer."""
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        positions = [self._position[id(parameter)] for parameter in parameters]

        sums = {}
        for node, subtree_sum in self._sums.items():
            sums[node] = _flatten([subtree_sum[position] for position in positions], parameters)
            for position in positions:
                subtree_sum[position] = _MOVED
        if self._last_micro_batch is not None:
            if self._is_zero:
                buffer.zero_()
            if self._last_micro_batch in self._watched:
                own = digest_tensors(_unflatten(buffer, parameters))
                self._last_digests.update(zip(positions, own.unbind(), strict=True))
            # The sum needs no memory of its own: one operand is the buffer.
            add = partial(torch.add, out=buffer)
            fold_in(sums, Node(0, self._last_micro_batch), buffer, add)
        return sums

    def _exchange(
        self, bucket: dist.GradBucket, sums: dict[Node, torch.Tensor], done: torch.futures.Future[torch.Tensor]
    ) -> Callable[[], None]:
        """Starts the exchange of a bucket. Returns a function that reduces this rank's chunk and starts the gather."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        world_size, size = self._group.world_size, buffer.numel()
        chunk = -(-size // world_size)
        transfer_device = self._group.transfer_device
        num_own = len(self._subtrees[self._group.rank])
        # Allocated before the exchange begins. The exchange, and so the gather, waits for all that the stream of the
        # backward was given until now, which includes kernels that still use this memory for freed tensors.
        mean = buffer if size == chunk * world_size else buffer.new_empty(world_size * chunk)
        send = self._chunks_to_send(buffer, sums, chunk).to(transfer_device)
        output_sizes = [len(subtrees) * chunk for subtrees in self._subtrees]
        received = send.new_empty(sum(output_sizes))
        exchange = dist.all_to_all_single(received, send, output_sizes, [num_own * chunk] * world_size, async_op=True)
        nodes = [node for subtrees in self._subtrees for node in subtrees]

        def reduce_and_gather() -> None:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                before = self._enter_phase("communication")
                self._group.wait(exchange)
                self._enter_phase(before)
                if self._stream is not None:
                    # After `wait`, the exchange no longer keeps its tensors. Their memory is from the stream of the
                    # backward, which has not waited. So it is not reused until this stream is past its work so far.
                    send.record_stream(self._stream)
                    received.record_stream(self._stream)
                chunks = dict(zip(nodes, received.to(buffer.device).split(chunk), strict=True))
                own_mean = self._mean(chunks)
                gathered = torch.empty_like(mean, device=transfer_device) if self._group.shares_device else mean
                gather = all_gather_single(gathered, own_mean.to(transfer_device), async_op=True)
            if transfer_device.type == "cpu":
                self._gathers.append(gather)
            if self._may_be_unused:
                self._means.append((parameters, mean))

            def finish(work: torch.futures.Future[object]) -> None:
                try:
                    work.value()
                    if gathered is not mean:
                        mean.copy_(gathered)
                    done.set_result(mean[:size])
                except Exception as error:  # without it, DDP would wait for `done` forever
                    done.set_exception(error)  # type: ignore[arg-type]

            gather.get_future().then(finish)

        return reduce_and_gather

    def _chunks_to_send(self, buffer: torch.Tensor, sums: dict[Node, torch.Tensor], chunk: int) -> torch.Tensor:
        """Returns this rank's subtree sums of a bucket, flat, ordered by the rank that receives the chunk."""
        world_size, size = self._group.world_size, buffer.numel()
        own = self._subtrees[self._group.rank]
        if len(own) == 1 and size == chunk * world_size:
            return sums[own[0]]
        send = buffer.new_zeros(world_size, len(own), chunk)
        full, rest = divmod(size, chunk)
        for row, node in enumerate(own):
            flat = sums[node]
            send[:full, row] = flat[: full * chunk].view(full, chunk)
            if rest:
                send[full, row, :rest] = flat[full * chunk :]
        return send.view(-1)


def _unflatten(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the gradients in a bucket's buffer, in which each has the strides of its parameter."""
    sizes = [parameter.numel() for parameter in parameters]
    return [
        torch.as_strided(piece, parameter.size(), torch.empty_like(parameter).stride(), piece.storage_offset())
        for parameter, piece in zip(parameters, flat[: sum(sizes)].split(sizes), strict=True)
    ]


def _flatten(gradients: list[torch.Tensor], parameters: list[torch.Tensor]) -> torch.Tensor:
    """Returns gradients laid out like a bucket's buffer, in which each has the strides of its parameter."""
    pieces = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if not parameter.is_contiguous():
            gradient = torch.empty_like(parameter).copy_(gradient).as_strided((parameter.numel(),), (1,))
        pieces.append(gradient.reshape(-1))
    return torch.cat(pieces)
