"""The default process group of torch.distributed, formed for one generation and replaced for the next."""

from __future__ import annotations

import datetime
import gc
import json
import re
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic_ddp import torch_internals
from elastic_ddp.distributed import nccl
from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.gloo_waits import MessageWaits, wait_for_collective
from elastic_ddp.distributed.sockets import Socket, shut_down, tcp_sockets
from elastic_ddp.distributed.torch_store import StoreConnection
from elastic_ddp.errors import PeerFailedError, text_of
from elastic_ddp.tensors.state_tree import ravel

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Torch 2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor`; 2.11 has only the old names."""

GLOO_ENDS_S, NCCL_ENDS_S = 0.5, 10.0
"""Timeouts for the threads of an aborted group to end. Afterwards the worker continues without them."""
FORM_TIMEOUT_S = 1.0
"""Timeout of the first attempt to connect the ranks of a group, after all of them have arrived."""
NCCL_CONNECTS_S, _RETRY_S = 10.0, 0.05
"""How long, and how often, `abort` shuts down the sockets over which NCCL connects the ranks."""
_PACKAGE_FOLDER, _TORCH_FOLDER = Path(__file__).parents[1], Path(torch.__file__).parent

_NO_GROUP = "default process group has not been initialized"
_GLOO_ERROR = re.compile(r"\[\S*gloo/transport/\S+:\d+\] ")
"""The beginning of gloo's own errors. Waiting for a `Work` raises them from no Python file of torch."""
_PEER_FAILURE_SIGNS = (
    "gloo/transport",  # while a group forms, torch puts its own text before gloo's
    "nccl communicator was aborted",
    _NO_GROUP,  # the group was aborted
)
"""Texts of torch for failures of a peer that have no exception type of their own."""


@dataclass
class ProcessGroup:
    """The process group of a generation. Created by `form`, which every rank calls."""

    assignment: Assignment
    device: torch.device
    store: StoreConnection = field(repr=False)
    """The connection to the store, which outlives the group."""
    shares_device: bool = False
    """Whether ranks may share a GPU that NCCL cannot share. Gloo then copies CUDA tensors to the host."""
    _timeout: datetime.timedelta = field(default=datetime.timedelta(), repr=False)
    _sockets: frozenset[Socket] = field(default=frozenset(), repr=False)
    _before_nccl: frozenset[Socket] | None = field(default=None, repr=False)
    """This process's sockets before NCCL began to connect the ranks; None if it does not connect them now."""
    aborted: bool = False
    """Whether this rank aborted the group, because a peer failed."""
    shard_group: dist.ProcessGroup | None = field(default=None, repr=False)
    """The neighbouring ranks that share a sharded state with this one; None if all ranks share it."""
    _nccl: list[Any] = field(default_factory=list, repr=False)
    """The backends of CUDA tensors, from the end of `form` until the group is aborted."""
    _count: Callable[[], int] | None = field(default=None, repr=False)
    """Counts the collectives that this rank has begun, from the end of `form` until the group is closed."""
    _waits: MessageWaits = field(default_factory=MessageWaits, repr=False)

    @property
    def rank(self) -> int:
        return self.assignment.rank

    @property
    def world_size(self) -> int:
        return self.assignment.world_size

    @property
    def transfer_device(self) -> torch.device:
        """The device of tensors that the group sends without a copy."""
        return torch.device("cpu") if self.shares_device else self.device

    @classmethod
    def form(
        cls,
        assignment: Assignment,
        *,
        store: StoreConnection,
        device: torch.device,
        timeout_s: float,
        shares_device: bool = False,
        attempt: int = 0,
        on_forming: Callable[[ProcessGroup], None] = lambda group: None,
    ) -> ProcessGroup:
        """Forms the group of a generation: gloo for CPU tensors and, if each rank has a GPU, NCCL for CUDA tensors.

        All generations use one store, hosted by the rendezvous, with a key prefix for each. Ranks first wait for each
        other in the store, where `abort` ends the wait. Then they connect to each other with a short timeout. A rank
        that fails in between, with its address published, blocks gloo for five times that timeout.

        Args:
            store: this worker's connection. A failed attempt drops it, since nothing else ends a wait in the store.
            timeout_s: the timeout of every collective and message, in seconds.
            shares_device: whether other ranks may use the same GPU. Gloo then replaces NCCL, unless NCCL can share it.
            attempt: the number of failed attempts in a row. Each doubles the timeout for connecting.
            on_forming: receives the group before it waits for its peers, so that another thread can abort it.

        Raises:
            Exception: a peer failed; see `is_peer_failure`.
        """
        group = cls(assignment, device, store, shares_device and nccl.why_not_share_gpus() is not None)
        try:
            group._form(timeout_s, min(timeout_s, FORM_TIMEOUT_S * 2**attempt), on_forming)
            return group
        except BaseException:
            store.drop()
            raise

    def _form(self, timeout_s: float, forming_s: float, on_forming: Callable[[ProcessGroup], None]) -> None:
        assignment = self.assignment
        has_nccl = self.device.type == "cuda" and not self.shares_device
        store = self.store.connect(assignment.store_host, assignment.store_port)
        store.set_timeout(datetime.timedelta(seconds=timeout_s))
        before = tcp_sockets().keys()
        self._sockets = self.store.sockets
        on_forming(self)
        prefixed = dist.PrefixStore(f"generation{assignment.generation}", store)
        if prefixed.add("arrived", 1) == assignment.world_size:
            prefixed.set("complete", "")
        prefixed.wait(["complete"])
        torch_internals.restart_group_numbers()
        if has_nccl:
            nccl.set_up()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
            store=prefixed,
            rank=assignment.rank,
            world_size=assignment.world_size,
            timeout=datetime.timedelta(seconds=forming_s),
        )
        self._timeout = datetime.timedelta(seconds=timeout_s)
        torch_internals.set_collective_timeout(self._timeout)
        if assignment.num_shards < assignment.world_size:
            first = self.rank // assignment.num_shards * assignment.num_shards
            self.shard_group = dist.new_group(
                list(range(first, first + assignment.num_shards)),
                timeout=datetime.timedelta(seconds=forming_s),
                use_local_synchronization=True,
            )
            torch_internals.set_collective_timeout(self._timeout, self.shard_group)
        # The heartbeat may not have noticed yet that a peer failed here.
        store.set_timeout(datetime.timedelta(seconds=forming_s))
        self._sockets = self._find_sockets(prefixed, before)
        if has_nccl:
            groups = [None] if self.shard_group is None else [None, self.shard_group]
            self._nccl = [torch_internals.backend_of(self.device, group) for group in groups]
        self._count = torch_internals.CollectiveCounter(self.device)
        if self.aborted:
            raise PeerFailedError("a peer failed while the process group formed")
        dist.barrier()
        if has_nccl and self.world_size > 1:
            store.set_timeout(self._timeout)  # the first use of NCCL in a process may take longer than connecting
            self._form_communicator()

    def _form_communicator(self) -> None:
        """Makes NCCL connect the ranks. Torch would do that in the first collective, where nothing ends the wait for a
        rank that has failed. Here `abort` ends the wait."""
        own = self._sockets
        self._before_nccl = frozenset(tcp_sockets())
        self._sockets = own | self.store.sockets
        try:
            if self.aborted:  # before `abort` could see these sockets
                raise PeerFailedError("a peer failed before NCCL connected the ranks")
            dist.all_reduce(torch.zeros(1, device=self.device))
            if self.shard_group is not None:
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.shard_group)
        finally:
            self._sockets = own
            self._before_nccl = None
        if self.aborted:
            raise PeerFailedError("a peer failed while NCCL connected the ranks")

    def _find_sockets(self, store: dist.Store, before: Collection[Socket]) -> frozenset[Socket]:
        """Returns the group's connections, among the connections opened since the group began to form.

        Collective. Other threads open connections meanwhile, to the storage for example, and `abort` must spare them.
        One end of each of gloo's connections is an address on which some rank began to listen, so ranks exchange these
        addresses. Listening sockets are left out: shutting them down ends the process.
        """
        if self.world_size == 1:
            return frozenset()
        opened = {key: ends for key, ends in tcp_sockets().items() if key not in before}
        listening = [ends.local for ends in opened.values() if ends.remote is None]
        store.set(f"listening{self.rank}", json.dumps(listening))
        replies = store.multi_get([f"listening{rank}" for rank in range(self.world_size)])
        addresses = {tuple(address) for reply in replies for address in json.loads(reply)}
        connected = {key: ends for key, ends in opened.items() if ends.remote is not None}
        own = frozenset(key for key, ends in connected.items() if addresses & set(ends))
        # Fewer connections than peers: a NAT translates addresses. Abort all, or a rank could wait for a failed peer.
        return own if len(own) >= self.world_size - 1 else frozenset(connected)

    def close(self, *, intact: bool) -> None:
        """Leaves the group. First drop all references to it, from DDP and tracebacks for example.

        `intact`: all ranks passed a barrier and close the group too. Otherwise `abort` ends the peers' collectives.
        """
        self._count = None
        self._waits.close()
        if not dist.is_initialized():
            return
        if not intact:
            self.abort()
        # DDP's reducer, in a reference cycle, must not be the last to refer to the group: it would end gloo's threads
        # and wait for them with the GIL held, which they need to free tensors.
        gc.collect()
        if dist.is_initialized():
            lost = [dist.group.WORLD, self.shard_group] if not intact else []
            self.shard_group = None
            dist.destroy_process_group()
            if lost:
                # The last reference ends gloo's threads and waits for them. One may wait for a message that gloo lost.
                ending = threading.Thread(target=lost.clear, name="end of a group", daemon=True)
                ending.start()
                ending.join(NCCL_ENDS_S if self.transfer_device.type == "cuda" else GLOO_ENDS_S)

    def num_collectives(self) -> int | None:
        """Returns how many collectives this rank has begun; None if the group is closed. Callable from any thread."""
        count = self._count
        return None if count is None else count()

    def barrier(self) -> None:
        """Waits for every rank. Required before `close`: gloo may abort a peer right after its last collective."""
        dist.barrier()

    def vote(self) -> None:
        """Returns after every rank has called it. If a rank fails, it may return on some ranks and raise on others.

        Raises:
            Exception: a peer failed; see `is_peer_failure`.
        """
        self._finish(dist.all_reduce(torch.zeros(1, device="cpu"), async_op=True))

    def abort(self) -> None:
        """Makes every collective in flight fail, on this rank and on its peers. Callable from any thread."""
        self.aborted = True
        shut_down(self._sockets)
        end = time.monotonic() + NCCL_CONNECTS_S
        while (before := self._before_nccl) is not None and time.monotonic() < end:
            shut_down(tcp_sockets().keys() - before)  # repeated, because NCCL opens its sockets one after the other
            time.sleep(_RETRY_S)
        backends = self._nccl  # abort once, and this group's, which may not be the default one now
        self._nccl = []
        for backend in backends:
            backend.abort()

    def synchronize(self, number: torch.Tensor | None = None) -> float | None:
        """Waits until the device has finished its work; with a number of `to_host`, the work before that copy. Returns
        the number. An aborted NCCL collective leaves arbitrary values, so the call raises PeerFailedError if the group
        was aborted."""
        value = None if number is None else read(number)
        if self.device.type == "cuda":
            if number is None:
                torch.cuda.current_stream(self.device).synchronize()
            if self.aborted:
                raise PeerFailedError("a peer failed before the device had reduced the gradients")
        return value

    def wait(self, work: dist.Work) -> None:
        """Waits for a collective that was begun with `async_op=True`, on NCCL as its `wait` does.

        Raises:
            Exception: a peer failed; see `is_peer_failure`.
        """
        if self.transfer_device.type == "cuda":
            work.wait()
        else:
            wait_for_collective(work, lambda: self.aborted)

    def finish(self, messages: Sequence[dist.Work]) -> None:
        """Waits until messages, whose tensors are on the CPU, are received, or their sender may change them.

        Call it once for each message: gloo blocks a second time.

        Raises:
            Exception: a peer failed; see `is_peer_failure`.
        """

        def wait() -> None:
            for message in messages:
                message.wait(self._timeout)

        if messages:
            self._waits.wait(wait, lambda: self.aborted)

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """Returns the bytes of rank `source` on every rank. Collective; other ranks pass None."""
        if self.world_size == 1:
            assert data is not None
            return data
        size = torch.tensor([len(data or b"")], device="cpu")  # whatever the default device of the user's code is
        self._finish(dist.broadcast(size, source, async_op=True))
        content = _padded(data or b"", int(size))
        self._finish(dist.broadcast(content, source, async_op=True))
        return content.numpy().tobytes()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns the bytes of every rank, in rank order. Collective; lengths may differ."""
        if self.world_size == 1:
            return [data]
        sizes = self.all_gather(torch.tensor(len(data), device="cpu"))
        gathered = self.all_gather(_padded(data, int(sizes.max())))
        return [row[:size].numpy().tobytes() for row, size in zip(gathered, sizes.tolist(), strict=True)]

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensors of all ranks, shape (ranks, …), on their device. Collective; they are of one shape."""
        if self.world_size == 1:
            return tensor.unsqueeze(0)
        # As bytes, because gloo does not support every dtype.
        sent = ravel(tensor.cpu() if self.shares_device else tensor).view(torch.uint8)
        gathered = sent.new_empty(self.world_size, len(sent))
        work = all_gather_single(gathered.view(-1), sent, async_op=True)
        if sent.is_cuda:
            self.wait(work)
        else:
            self._finish(work)
        return gathered.to(tensor.device).view(tensor.dtype).view(self.world_size, *tensor.shape)

    def _finish(self, work: dist.Work) -> None:
        wait_for_collective(work, lambda: self.aborted)


def _padded(data: bytes, size: int) -> torch.Tensor:
    """Returns bytes as a tensor of `size` bytes; the rest are zeros."""
    return torch.frombuffer(bytearray(data.ljust(max(size, 1), b"\0")), dtype=torch.uint8)[:size]


def is_peer_failure(error: BaseException) -> bool:
    """Returns whether a collective failed because a peer is gone, and not because of the user's code."""
    if isinstance(error, PeerFailedError | dist.DistNetworkError | dist.DistBackendError | dist.DistStoreError):
        return True
    text = text_of(error)
    if isinstance(error, RuntimeError) and _GLOO_ERROR.match(text):
        return True
    has_sign = isinstance(error, RuntimeError | ValueError) and any(
        sign in text.lower() for sign in _PEER_FAILURE_SIGNS
    )
    return has_sign and _is_raised_by_torch(error)


def is_missing_group(error: BaseException) -> bool:
    """Returns whether the error is torch's for a collective, or a query of the rank, without a process group."""
    return isinstance(error, ValueError) and _NO_GROUP in text_of(error).lower() and _is_raised_by_torch(error)


def _is_raised_by_torch(error: BaseException) -> bool:
    """Whether torch or this package raised the error. A user's function may raise one with the same text."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = Path(frames[-1].f_code.co_filename) if frames else Path()
    return raised_in.is_relative_to(_PACKAGE_FOLDER) or raised_in.is_relative_to(_TORCH_FOLDER)


def to_host(number: torch.Tensor) -> torch.Tensor:
    """Starts to copy one number from the device to the host. `read` waits for the work before the copy only.

    For the loss of a micro-batch, `read` waits for the forward, while the device computes the backward.
    """
    if number.device.type != "cuda":
        return number
    host = torch.empty(1, dtype=number.dtype, pin_memory=True)
    host.copy_(number.reshape(1), non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    host.copied = copied  # type: ignore[attr-defined]
    return host


def read(host: torch.Tensor) -> float:
    """Returns a number of `to_host`, after its copy."""
    if hasattr(host, "copied"):
        host.copied.synchronize()
    return float(host)
