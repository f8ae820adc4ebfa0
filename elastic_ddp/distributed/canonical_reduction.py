"""The canonical gradient reduction: a DDP communication hook whose bits do not depend on the world size.

The gradient of a step is the sum of its micro-batch gradients along the tree of `reduction_tree`, divided once.
A rank takes each micro-batch's gradient but the last off the parameters and folds it into the sums of subtrees. In
the backward of its last micro-batch, for each of DDP's buckets as it becomes ready, ranks exchange their subtree sums
chunk by chunk (`all_to_all_single`), fold the rest of the tree on their own chunk and gather the result. A bucket
costs the traffic of a reduce-scatter and an all-gather, like an all-reduce, times the subtrees a rank is left with
(one, when M and W are powers of two).
"""

# No `from __future__ import annotations`: DDP checks the hook's annotations as objects.
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from elastic_ddp import torch_internals
from elastic_ddp.distributed.process_group import ProcessGroup, all_gather_single
from elastic_ddp.distributed.reduction_tree import Node, fold_in, fold_to_root, maximal_subtrees


def _add_lists(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    torch_internals.add_pairwise(left, right)
    return left


_TAKEN = torch.empty(0)
Sum = torch.Tensor | Callable[[], torch.Tensor]
"""A subtree's sum of a bucket, flat, or what makes it so: once, when it is needed, and without a copy that stays."""


def _now(value: Sum) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value()


def _add(left: Sum, right: Sum) -> Sum:
    return _now(left).add_(_now(right))


class CanonicalReduction:
    """Holds a rank's partial sums during a step and reduces DDP's buckets along the tree.

    Call `begin` before a step's first backward, `fold` for every backward without synchronization, and `expect`
    before the one with it. The hook then leaves the weighted mean in DDP's gradients.

    Args:
        parameters: those that DDP reduces, in any order.
        ranges: the micro-batches of every rank.
        group: the generation's process group.
        may_be_unused: not every micro-batch uses every parameter; `drop_unused_gradients` is called.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        ranges: Sequence[range],
        group: ProcessGroup,
        *,
        may_be_unused: bool = False,
    ) -> None:
        self._parameters = list(parameters)
        self._position = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        self._ranges = list(ranges)
        self._group = group
        self._sums: dict[Node, list[torch.Tensor]] = {}
        """By parameter; `_TAKEN` where a bucket has it."""
        self._unfinished: list[Callable[[], None]] = []
        self._last: int | None = None
        self._used: set[int] = set()
        self._may_be_unused = may_be_unused
        self._reduced: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        """With parameters that may be unused: every bucket's parameters and mean."""

    def begin(self, *, num_leaves: int, divisor: float) -> None:
        """A new step, whose micro-batches 0..num_leaves-1 have rows and whose sum is to be divided by `divisor`."""
        self._num_leaves, self._divisor = num_leaves, divisor
        self._subtrees = [maximal_subtrees(range(r.start, min(r.stop, num_leaves))) for r in self._ranges]
        self._sums.clear()
        self._unfinished.clear()
        self._used.clear()
        self._reduced.clear()

    def fold(self, micro_batch: int, loss: torch.Tensor, *, past_hooks: bool = False) -> None:
        """The backward of a micro-batch that does not synchronize; folds its gradients into the sums.

        Args:
            micro_batch: its number.
            loss: weighted by its rows.
            past_hooks: compute the gradients past DDP's hooks, which would take the parameters it uses for used by the
                synchronizing micro-batch too. Reentrant activation checkpointing does not work that way.
        """
        if past_hooks:
            found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            # Parameters that are added to each other are given one and the same tensor, which is added into below.
            gradients: list[torch.Tensor | None] = [None if each is None else each.clone() for each in found]
        else:
            loss.backward()
            gradients = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None
        self._used.update(place for place, gradient in enumerate(gradients) if gradient is not None)
        # An unused parameter counts as zeros at every world size: left out, it would keep a -0.0 at some of them.
        filled = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        fold_in(self._sums, Node(0, micro_batch), filled, _add_lists)

    def expect(self, micro_batch: int | None) -> None:
        """Says whose gradient the next backward brings to the hook; None for one that is to be ignored."""
        self._last = micro_batch

    def drop_unused_gradients(self) -> None:
        """After the last backward of a model that does not use all its parameters in every micro-batch. Collective.

        DDP knows only whether the last micro-batches used a parameter, and drops its gradient if none of them did.
        Here a parameter has a gradient if any micro-batch of the step used it, and none at all otherwise.
        """
        used = torch.tensor([p.grad is not None or k in self._used for k, p in enumerate(self._parameters)])
        used = used.to(torch.uint8)
        if self._group.world_size > 1:
            dist.all_reduce(used, op=dist.ReduceOp.MAX)
        reduced, self._reduced = self._reduced, []
        for parameters, mean in reduced:
            sizes = [parameter.numel() for parameter in parameters]
            for parameter, piece in zip(parameters, mean[: sum(sizes)].split(sizes), strict=True):
                if not used[self._position[id(parameter)]]:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = torch.as_strided(piece, parameter.size(), torch.empty_like(parameter).stride())

    def hook(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The communication hook, for `DistributedDataParallel.register_comm_hook(None, reduction.hook)`."""
        buffer, is_last = bucket.buffer(), bucket.is_last()
        sums = self._subtree_sums(bucket)
        if is_last:
            self._sums.clear()
        done = _future(buffer.device)
        if self._group.world_size == 1:
            # gloo's all_to_all_single hangs here at world size 1, and there is nobody to exchange with.
            mean = _now(fold_to_root(sums, self._num_leaves, _add)).div_(self._divisor)
            done.set_result(mean)
            self._keep(bucket.parameters(), mean)
            return done
        # Collectives have to be issued in the same order on every rank. One that is launched from a future's callback
        # is not, so each bucket first issues the gather of the one before it, and the last bucket its own as well.
        if self._unfinished:
            self._unfinished.pop()()
        finish = self._exchange(bucket, sums, done)
        if is_last:
            finish()
        else:
            self._unfinished.append(finish)
        return done

    def _keep(self, parameters: list[torch.Tensor], mean: torch.Tensor) -> None:
        if self._may_be_unused:
            self._reduced.append((parameters, mean))

    def _subtree_sums(self, bucket: dist.GradBucket) -> dict[Node, Sum]:
        """This rank's subtree sums of a bucket, flat like the bucket's buffer."""
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        places = [self._position[id(parameter)] for parameter in parameters]

        def taker(held: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
            def take() -> torch.Tensor:
                gradients = [held[place] for place in places]
                for place in places:
                    held[place] = _TAKEN
                return _flatten(gradients, parameters)

            return take

        sums: dict[Node, Sum] = {node: taker(held) for node, held in self._sums.items()}
        if self._last is not None:
            fold_in(sums, Node(0, self._last), buffer, _add_into(buffer))
        return sums

    def _exchange(
        self, bucket: dist.GradBucket, sums: dict[Node, Sum], done: torch.futures.Future[torch.Tensor]
    ) -> Callable[[], None]:
        """Starts the exchange of a bucket; the returned function folds what came and starts the gather."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        world_size, size = self._group.world_size, buffer.numel()
        chunk = -(-size // world_size)
        mine = self._subtrees[self._group.rank]
        if len(mine) == 1 and size == chunk * world_size:
            send = _now(sums[mine[0]])
        else:
            send = buffer.new_zeros(world_size, len(mine), chunk)
            for place, node in enumerate(mine):
                full, rest = divmod(size, chunk)
                flat = _now(sums[node])
                send[:full, place] = flat[: full * chunk].view(full, chunk)
                if rest:
                    send[full, place, :rest] = flat[full * chunk :]
            send = send.view(-1)
        carrier = self._group.transfer_device
        send = send.to(carrier)
        output_sizes = [len(subtrees) * chunk for subtrees in self._subtrees]
        received = send.new_empty(sum(output_sizes))
        exchange = dist.all_to_all_single(received, send, output_sizes, [len(mine) * chunk] * world_size, async_op=True)
        nodes = [node for subtrees in self._subtrees for node in subtrees]

        def finish() -> None:
            exchange.wait()
            pieces = dict(zip(nodes, received.to(buffer.device).split(chunk), strict=True))
            mean = fold_to_root(pieces, self._num_leaves, _add).div_(self._divisor)
            whole = buffer if size == chunk * world_size else buffer.new_empty(world_size * chunk)
            self._keep(parameters, whole)
            carried = torch.empty_like(whole, device=carrier) if self._group.shares_device else whole
            gather = all_gather_single(carried, mean.to(carrier), async_op=True)

            def settle(gathered: torch.futures.Future[object]) -> None:
                try:
                    gathered.value()
                    if carried is not whole:
                        whole.copy_(carried)
                    done.set_result(whole[:size])
                except Exception as error:  # handed on: DDP would wait for `done` forever
                    done.set_exception(error)  # type: ignore[arg-type]

            gather.get_future().then(settle)

        return finish


def _future(device: torch.device) -> torch.futures.Future[torch.Tensor]:
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


def _add_into(buffer: torch.Tensor) -> Callable[[Sum, Sum], Sum]:
    """An addition whose result replaces `buffer`, one of its two operands: the sum needs no memory of its own."""

    def add(left: Sum, right: Sum) -> Sum:
        return torch.add(_now(left), _now(right), out=buffer)

    return add


def _flatten(gradients: list[torch.Tensor], parameters: list[torch.Tensor]) -> torch.Tensor:
    """Gradients laid out like a bucket's buffer, in which each follows the strides of its parameter."""
    pieces = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if not parameter.is_contiguous():
            gradient = torch.empty_like(parameter).copy_(gradient).as_strided((parameter.numel(),), (1,))
        pieces.append(gradient.reshape(-1))
    return torch.cat(pieces)
