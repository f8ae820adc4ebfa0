"""torch.distributed's default process group, for the length of one generation."""

from __future__ import annotations

import datetime
import gc
import json
import os
import re
import struct
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic_ddp import torch_internals
from elastic_ddp.distributed.sockets import Socket, shut_down, tcp_sockets
from elastic_ddp.distributed.store import StoreConnection
from elastic_ddp.errors import PeerFailedError

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed it; 2.11 knows only the old name."""

FORM_S = 1.0
"""How long the ranks of a group, all of which have come, may take to connect to each other, the first time they try."""
SHORT_BYTES = 128 << 10
"""What has no more travels with its length: each round costs processes that share cores a few milliseconds."""
_LENGTH = struct.Struct("<Q")
_OURS, _TORCHS = Path(__file__).parents[1], Path(torch.__file__).parent

_NO_GROUP = "default process group has not been initialized"
_GLOO = re.compile(r"\[\S*gloo/transport/\S+:\d+\] ")
"""How gloo's own errors begin. Who waits for a collective's `Work` meets them in no file of torch's."""
_LOST_PEER_SIGNS = (
    "gloo/transport",  # torch has words of its own around it where a group forms
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "application timeout caused pair closure",
    "timed out waiting",
    "nccl",
    "connection was likely closed",
    "failed to recv",
    _NO_GROUP,  # it was aborted
)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A member's place in a generation, as handed out by the rendezvous."""

    generation: int
    rank: int
    world_size: int
    store_host: str
    store_port: int
    source: int | None = None
    """The rank whose state all begin with; None if nobody holds any, and the newest commit counts."""
    receivers: tuple[int, ...] = ()
    """The ranks that are to get it."""
    first_step: int | None = None
    """Steps done in that state."""
    handover_only: bool = False
    """The generation makes no step: its members hand the state over, or commit it, and come back for another."""
    same_members: bool = False
    """It has the members of the one before it."""
    in_collective_task: bool = False
    """Some of them do something together outside of steps, and others may have done it already."""
    reason: str
    """Why this generation was formed, for the record."""


class Message:
    """A tensor on its way from one rank to another."""

    def __init__(self, work: dist.Work | None, timeout: datetime.timedelta) -> None:
        assert work is not None, "this rank is in the group"
        self._work, self._timeout = work, timeout

    def wait(self) -> None:
        """Until it has come, or may be changed where it came from. Once: gloo would wait for another one."""
        self._work.wait(self._timeout)


@dataclass
class ProcessGroup:
    """The open process group of a generation. Form it with `form`; every rank has to call it."""

    assignment: Assignment
    device: torch.device
    store: StoreConnection = field(repr=False)
    """Outlives the group."""
    shares_device: bool = False
    """Other ranks may be on the same GPU, which NCCL refuses: gloo carries CUDA tensors, through the host."""
    _timeout: datetime.timedelta = field(default=datetime.timedelta(), repr=False)
    """For every collective and message, once it is formed."""
    _sockets: frozenset[Socket] = field(default=frozenset(), repr=False)
    _is_cut: bool = False
    _nccl: Any = field(default=None, repr=False)
    """The backend for CUDA tensors, once the group is formed, until it is aborted."""

    @property
    def rank(self) -> int:
        return self.assignment.rank

    @property
    def world_size(self) -> int:
        return self.assignment.world_size

    @property
    def transfer_device(self) -> torch.device:
        """Where tensors have to be to travel without a copy."""
        return torch.device("cpu") if self.shares_device else self.device

    @property
    def timeout_s(self) -> float:
        """For every collective and message."""
        return self._timeout.total_seconds()

    @property
    def aborted(self) -> bool:
        """Whether it was broken here, as a peer is lost."""
        return self._is_cut

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
        """Joins the generation's group: gloo for CPU tensors and, with a GPU to itself, NCCL for CUDA tensors.

        The store is a long-lived one in the rendezvous; a prefix for each generation makes forming a group take
        milliseconds, and keeps a stale member of an older generation out of it.

        A rank that dies after it has published its address, and before it has connected, leaves gloo waiting where
        nothing frees it, for five times the group's timeout. So ranks meet in the store first, where a wait can be cut,
        and then connect within a short timeout, which is `timeout_s` from there on.

        Args:
            store: this process's connection. A peer that is lost while the group forms costs it, because a wait in the
                store ends in no other way.
            timeout_s: for every collective and message.
            shares_device: other ranks may be on the same GPU.
            attempt: how often in a row that has failed; each time it may take twice as long.
            on_forming: told of the group before it waits for its peers, so that it can be cut from there on.
        """
        group = cls(assignment, device, store, shares_device)
        try:
            group._form(timeout_s, min(timeout_s, FORM_S * 2**attempt), on_forming)
            return group
        except BaseException:
            store.drop()
            raise

    def _form(self, timeout_s: float, forming_s: float, on_forming: Callable[[ProcessGroup], None]) -> None:
        assignment, has_nccl = self.assignment, self.device.type == "cuda" and not self.shares_device
        everyones = self.store.connect(assignment.store_host, assignment.store_port)
        everyones.set_timeout(datetime.timedelta(seconds=timeout_s))
        before = tcp_sockets().keys()
        self._sockets = self.store.sockets
        on_forming(self)
        own = dist.PrefixStore(f"generation{assignment.generation}", everyones)
        if own.add("here", 1) == assignment.world_size:
            own.set("all", "")
        own.wait(["all"])
        # Peers look for each other in the store under the group's number in its process, and torch counts one that
        # could not be formed too: who failed once would never meet who did not.
        torch_internals.restart_group_numbers()
        if has_nccl:
            # A collective that breaks is cut by us. By default torch ends the process.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
            store=own,
            rank=assignment.rank,
            world_size=assignment.world_size,
            timeout=datetime.timedelta(seconds=forming_s),
        )
        self._timeout = datetime.timedelta(seconds=timeout_s)
        torch_internals.set_collective_timeout(self._timeout)  # of collectives, and not of messages
        everyones.set_timeout(datetime.timedelta(seconds=forming_s))  # a peer that fails here may not be missed yet
        self._sockets = self._find_sockets(own, before)
        if has_nccl:
            self._nccl = torch_internals.default_backend(self.device)
        if self._is_cut:
            raise PeerFailedError("a peer was lost while the group was formed")
        dist.barrier()

    def _find_sockets(self, own: dist.Store, before: Collection[Socket]) -> frozenset[Socket]:
        """The group's connections, among those that some thread of this process has opened since it began to form. The
        others are not its to cut: a save's to the storage, for example. Every rank calls it.

        Gloo tells nobody which they are. Each rank has begun to listen meanwhile, and one end of all of them is where
        some rank does. Not listeners themselves: gloo ends the process when its own is shut.
        """
        if self.world_size == 1:
            return frozenset()
        new = {each: ends for each, ends in tcp_sockets().items() if each not in before}
        own.set(f"listens{self.rank}", json.dumps([ends.local for ends in new.values() if ends.remote is None]))
        everyones = own.multi_get([f"listens{rank}" for rank in range(self.world_size)])
        addresses = {tuple(address) for each in everyones for address in json.loads(each)}
        opened = {each: ends for each, ends in new.items() if ends.remote is not None}
        found = frozenset(each for each, ends in opened.items() if addresses & set(ends))
        # Fewer than peers: something on the way translates addresses, and who waits for a peer has to be freed.
        return found if len(found) >= self.world_size - 1 else frozenset(opened)

    def close(self, *, intact: bool) -> None:
        """Leaves the group. Callers drop what holds on to it (DDP, tracebacks) first.

        Args:
            intact: all ranks have met, and close too. Otherwise the connections are cut, so that a peer that is
                blocked in a collective with this rank fails at once instead of at its timeout.
        """
        if not dist.is_initialized():
            return
        if not intact:
            self.abort()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()

    def barrier(self) -> None:
        """Waits until every rank is here, as they have to before `close`: a gloo group that is torn down right after
        its last collective now and then aborts a peer."""
        dist.barrier()

    def abort(self) -> None:
        """Breaks every collective in flight, on this rank and on its peers. From any thread."""
        self._is_cut = True
        shut_down(self._sockets)
        nccl, self._nccl = self._nccl, None  # of this group, whatever torch's default one is by now, and once
        if nccl is not None:
            nccl.abort()

    def synchronize(self) -> None:
        """Waits until the device has done what it was given: collectives of NCCL are over for the host before they are
        for the device, and one that was cut leaves anything behind.

        Raises:
            PeerFailedError: the group was cut meanwhile.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
            if self._is_cut:
                raise PeerFailedError("the generation broke before the device had reduced the gradients")

    def begin_send(self, tensor: torch.Tensor, rank: int, tag: int) -> Message:
        """Begins to send a tensor to a rank, which receives it by the same tag."""
        return Message(dist.isend(tensor, rank, tag=tag), self._timeout)

    def begin_receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Message:
        """Begins to receive a tensor from a rank, which sends it by the same tag."""
        return Message(dist.irecv(tensor, rank, tag=tag), self._timeout)

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """The bytes of rank `source`, on every rank."""
        if self.world_size == 1:
            assert data is not None
            return data
        begin = bytearray(_LENGTH.size + SHORT_BYTES)
        if data is not None:
            begin[: _LENGTH.size] = _LENGTH.pack(len(data))
            begin[_LENGTH.size : _LENGTH.size + len(data)] = data[:SHORT_BYTES]
        dist.broadcast(torch.frombuffer(begin, dtype=torch.uint8), source)
        [length] = _LENGTH.unpack_from(begin)
        if length <= SHORT_BYTES:
            return bytes(begin[_LENGTH.size : _LENGTH.size + length])
        rest = bytearray(length - SHORT_BYTES if data is None else data[SHORT_BYTES:])
        dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), source)
        return bytes(begin[_LENGTH.size :] + rest)

    def begin_all_gather(self, data: bytes) -> Callable[[], list[bytes]]:
        """What waits for the bytes of every rank, in rank order: as many of each. They travel meanwhile."""
        if self.world_size == 1:
            return lambda: [data]
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = torch.empty(self.world_size * len(data), dtype=torch.uint8)
        work = all_gather_single(everyone, mine, async_op=True)

        def gathered() -> list[bytes]:
            work.wait()
            return [each.numpy().tobytes() for each in everyone.view(self.world_size, -1)]

        return gathered

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, in rank order, on every rank."""
        if self.world_size == 1:
            return [data]
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes)
        longest = int(sizes.max())
        if longest == 0:
            return [b""] * self.world_size
        everyones = self.begin_all_gather(data.ljust(longest, b"\0"))()
        return [each[: int(size)] for each, size in zip(everyones, sizes, strict=True)]


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error says that a collective broke because a peer is gone, rather than that user code is wrong."""
    if isinstance(error, PeerFailedError | dist.DistNetworkError | dist.DistBackendError | dist.DistStoreError):
        return True
    text = str(error)
    if isinstance(error, RuntimeError) and _GLOO.match(text):
        return True
    return (
        isinstance(error, RuntimeError | ValueError)
        and any(sign in text.lower() for sign in _LOST_PEER_SIGNS)
        and _is_torchs(error)
    )


def is_missing_group(error: BaseException) -> bool:
    """Whether an error says that a collective, or a question for the rank, came where there is no process group."""
    return isinstance(error, ValueError) and _NO_GROUP in str(error).lower() and _is_torchs(error)


def _is_torchs(error: BaseException) -> bool:
    """Whether an error was raised in torch or here, and not by a user's function in words like theirs."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = Path(frames[-1].f_code.co_filename) if frames else Path()
    return raised_in.is_relative_to(_OURS) or raised_in.is_relative_to(_TORCHS)
