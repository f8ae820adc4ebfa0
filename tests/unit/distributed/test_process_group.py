"""Process groups: forming after a failure, aborting, errors of failed peers, and bytes between ranks."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.distributed import nccl, process_group
from elastic_ddp.distributed.process_group import ProcessGroup, is_peer_failure
from elastic_ddp.distributed.state_transfer import begin_transfer
from elastic_ddp.rendezvous.standby_process import process_state
from tests.ranks import abort_when, form, run_ranks, set_key, single_rank_group

CPU = torch.device("cpu")


def form_after_a_failure(group: ProcessGroup) -> str:
    """Rank 1 alone tries to form generation 2, then both ranks form generation 3, which `run_ranks` closes."""
    group.barrier()
    group.close(intact=True)
    if group.rank == 1:
        with pytest.raises(RuntimeError) as caught:
            form(group, 2, timeout_s=0.5)
        assert is_peer_failure(caught.value)
    return b"".join(form(group, 3, timeout_s=20).all_gather_bytes(bytes([group.rank]))).hex()


def test_a_rank_that_failed_to_form_a_group_forms_the_next_one_with_its_peers() -> None:
    assert run_ranks(2, form_after_a_failure) == ["0001", "0001"]


def replica_lives_when_its_group_ends(group: ProcessGroup) -> list[bool]:
    replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    replica.self_reference = [replica]  # like the cycle that a caught exception makes
    find, destroy, lives = weakref.ref(replica), dist.destroy_process_group, []
    del replica

    def destroy_and_look() -> None:
        lives.append(find() is not None)
        destroy()

    dist.destroy_process_group = destroy_and_look
    group.close(intact=True)
    return lives


def test_no_reducer_outlives_its_group_where_it_would_wait_for_gloo_with_the_gil() -> None:
    assert run_ranks(1, replica_lives_when_its_group_ends) == [[False]]


class FailsAfterPublishing(dist.Store):
    """A store through which a rank publishes its address, and then fails before it connects to its peers."""

    def __init__(self, prefix: str, store: Any) -> None:
        super().__init__()
        self._store = _PrefixStore(prefix, store)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, *arguments: Any) -> None:
        self._store.wait(*arguments)

    def get(self, key: str) -> bytes:
        raise RuntimeError("power failure: connection closed by peer")


_PrefixStore = dist.PrefixStore


def fail_to_form(group: ProcessGroup, place: str) -> list[float]:
    """Rank 0, then rank 1 fails at a place. Returns the seconds until this rank notices. In the end a group forms."""
    process_group.FORM_TIMEOUT_S = 0.3  # in this process, which ends with the test
    group.barrier()
    group.close(intact=True)
    seconds = []
    for victim in (0, 1):
        begun = time.monotonic()
        forming: list[ProcessGroup] = []
        with pytest.MonkeyPatch.context() as patch, pytest.raises((RuntimeError, ValueError)) as caught:
            if group.rank == victim and place == "after it published its address":
                patch.setattr(process_group.dist, "PrefixStore", FailsAfterPublishing)
            elif group.rank == victim:  # before it reports its address
                patch.setattr(ProcessGroup, "_find_sockets", lambda *_: int("power failure"))
            elif place == "after it connected":
                threading.Timer(0.5, lambda forming=forming: forming[0].abort()).start()
            form(group, 2 + 2 * victim, on_forming=forming.append)
        forming[0].close(intact=False)
        seconds.append(time.monotonic() - begun)
        assert group.rank == victim or is_peer_failure(caught.value), caught.value
        del caught
        formed = form(group, 3 + 2 * victim)
        if group.rank == 1:
            time.sleep(1.5 * process_group.FORM_TIMEOUT_S)  # its peers wait for a slow rank
        formed.all_gather_bytes(b"")
        formed.barrier()
        formed.close(intact=True)
    return seconds


@pytest.mark.parametrize("place", ["after it published its address", "after it connected"])
def test_a_rank_that_fails_while_a_group_forms_does_not_block_its_peers(place: str) -> None:
    assert max(itertools.chain(*run_ranks(2, fail_to_form, place))) < 30


NUM_BYTES = 128 << 20


def transfer(group: ProcessGroup, data: torch.Tensor, how: str) -> None:
    """Sends data from rank 1 to rank 0."""
    if how == "broadcast":
        group.wait(dist.broadcast(data, 1, async_op=True))
    elif how == "message":
        group.finish(begin_transfer(data.numpy().data, group, tag=0, source=1, ranks=[0, 1]))


def abort_in_the_middle_of_a_message(group: ProcessGroup, how: str) -> tuple[bool, float]:
    """Rank 0 stops rank 1 while it receives from it, and aborts. Returns whether that worked, and seconds after it."""
    sender = int(group.all_gather_bytes(str(os.getpid()).encode())[1])
    aborted_at: list[float] = []

    def stop_the_sender(data: torch.Tensor) -> None:
        while not data[1 << 20]:
            time.sleep(1e-4)
        os.kill(sender, signal.SIGSTOP)
        while process_state(sender) != "T":
            time.sleep(1e-3)
        time.sleep(0.1)  # the bytes that it has sent arrive
        if not data[-1]:
            aborted_at.append(time.monotonic())
            group.abort()
        os.kill(sender, signal.SIGCONT)

    if group.rank == 1:
        abort_when(group, "rank 0 aborted")
    failed = False
    while not failed:  # until rank 1 was stopped in time
        group.barrier()
        data = torch.full([NUM_BYTES], group.rank, dtype=torch.uint8)
        stopping = threading.Thread(target=stop_the_sender, args=(data,))
        if group.rank == 0:
            stopping.start()
        try:
            transfer(group, data, how)
        except Exception as error:
            assert is_peer_failure(error), error
            failed = True
        if group.rank == 0:
            stopping.join()
    if group.rank == 0:
        set_key(group, "rank 0 aborted")
    seconds = time.monotonic() - aborted_at[0] if aborted_at else 0.0
    group.close(intact=False)
    return bool(aborted_at), seconds


@pytest.mark.parametrize("how", ["broadcast", "message"])
def test_an_abort_ends_the_wait_for_a_message_of_which_a_part_was_received(how: str) -> None:
    (did_abort, seconds), _ = run_ranks(2, abort_in_the_middle_of_a_message, how)
    assert did_abort and seconds < 30  # the group's timeout is 60 s


def abort_a_group_with_other_connections(group: ProcessGroup) -> float:
    """Another thread opens connections while the group forms. Returns the seconds until a collective fails."""
    group.barrier()
    group.close(intact=True)
    listener = socket.create_server(("127.0.0.1", 0))
    pairs: list[tuple[socket.socket, socket.socket]] = []

    def connect() -> None:
        pairs.append((socket.create_connection(listener.getsockname()), listener.accept()[0]))

    def in_another_thread(*_: Any, **__: Any) -> None:
        thread = threading.Thread(target=connect)
        thread.start()
        thread.join()

    def init_process_group(*arguments: Any, **options: Any) -> None:
        in_another_thread()
        init(*arguments, **options)
        in_another_thread()

    init = dist.init_process_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group.dist, "init_process_group", init_process_group)
        group = form(group, 2)
    begun = time.monotonic()
    if group.rank == 0:
        group.abort()
    with pytest.raises(RuntimeError) as caught:
        dist.barrier()
    seconds = time.monotonic() - begun
    assert is_peer_failure(caught.value)
    group.close(intact=False)
    assert len(pairs) == 2
    for one, other in pairs:
        one.sendall(b"sent")
        other.sendall(other.recv(4))
        assert one.recv(4) == b"sent"
    return seconds


def test_abort_spares_connections_that_other_threads_opened_while_the_group_formed() -> None:
    assert max(run_ranks(3, abort_a_group_with_other_connections)) < 30


def wait_for_works_of_a_failed_peer(group: ProcessGroup) -> list[bool]:
    """Waits for `Work` objects, as an optimizer that overlaps communication. Returns what `is_peer_failure` returns."""
    group.barrier()
    noticed = []
    for _ in range(2 if group.rank == 0 else 0):
        with pytest.raises(RuntimeError) as caught:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            assert work is not None
            work.wait()
        noticed.append(is_peer_failure(caught.value))
    group.close(intact=False)
    form(group, 2)
    return noticed


def test_an_error_from_waiting_for_a_work_counts_as_a_peer_failure() -> None:
    assert run_ranks(2, wait_for_works_of_a_failed_peer) == [[True, True], []]


SIZES = (0, 1, 300_000)


def bytes_of(rank: int, size: int) -> bytes:
    return bytes(rank + 1 + place % 100 for place in range(size))


def send_bytes(group: ProcessGroup) -> list[bool]:
    sources = [(size, source) for size in SIZES for source in range(group.world_size)]
    received = [
        group.broadcast_bytes(bytes_of(group.rank, size) if group.rank == source else None, source)
        for size, source in sources
    ]
    return [data == bytes_of(source, size) for data, (size, source) in zip(received, sources, strict=True)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_bytes_of_any_length_are_broadcast_to_every_rank(world_size: int) -> None:
    assert run_ranks(world_size, send_bytes) == [[True] * len(SIZES) * world_size] * world_size


def send_late(group: ProcessGroup) -> int:
    """The first rank sends after the timeout for forming has passed. Returns what the last rank received."""
    process_group.FORM_TIMEOUT_S = 0.3  # in this process, which ends with the test
    group.barrier()
    group.close(intact=True)
    group = form(group, 2)
    data = bytearray([7 * (group.rank == 0)])
    if group.rank == 0:
        time.sleep(2 * process_group.FORM_TIMEOUT_S)
    group.finish(begin_transfer(memoryview(data), group, tag=1, source=0, ranks=[1]))
    return data[0]


def test_a_message_has_the_timeout_of_collectives() -> None:
    assert run_ranks(2, send_late) == [7, 7]


def test_a_users_error_that_quotes_gloo_is_no_peer_failure() -> None:
    text = "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5"
    for quote in (f"the optimizer failed: {text}", "see gloo/transport/tcp/pair.cc:553"):
        assert not is_peer_failure(RuntimeError(quote))
    assert is_peer_failure(RuntimeError(text))


@pytest.mark.parametrize(
    "text",
    ["ProcessGroupNCCL only supports CUDA tensors", "Distributed package doesn't have NCCL built in", "Broken pipe"],
)
def test_an_error_of_torch_about_the_users_call_is_no_peer_failure(text: str) -> None:
    """Torch raises it for a tensor on the CPU, or for a group of another backend, for example."""
    in_torch = compile(f"raise RuntimeError({text!r})", str(torch.__file__), "exec")
    with pytest.raises(RuntimeError) as caught:
        exec(in_torch)
    assert not is_peer_failure(caught.value)


def test_a_collective_without_a_group_is_a_peer_failure_but_a_users_error_is_not() -> None:
    """On a GPU another thread aborts the group, and the next collective finds none."""
    with pytest.raises(ValueError, match="not been initialized") as caught:
        dist.barrier()
    assert is_peer_failure(caught.value)
    with pytest.raises(ValueError, match="not been initialized") as users:
        raise ValueError(str(caught.value))
    assert not is_peer_failure(users.value)


def test_the_nccl_backend_is_aborted_once() -> None:
    class Backend:
        aborted = 0

        def abort(self) -> None:
            self.aborted += 1

    group, backend = single_rank_group(), Backend()
    group.abort()  # it never formed
    group._nccl = [backend]
    group.abort()
    group.abort()
    assert backend.aborted == 1


def test_ranks_that_share_a_gpu_transfer_tensors_through_the_host() -> None:
    group = single_rank_group()
    group.device = torch.device("cuda", 0)
    assert group.transfer_device == group.device
    group.shares_device = True
    assert group.transfer_device == CPU


@pytest.mark.parametrize(
    ("enabled", "version", "reason"),
    [
        ("1", (2, 30), None),
        ("1", (2, 28), "NCCL 2.28 is loaded, and 2.30 or newer is needed"),
        ("1", None, "no NCCL library is loaded"),
        ("0", (2, 31), "NCCL_MULTI_RANK_GPU_ENABLE is not 1"),
    ],
)
def test_ranks_share_a_gpu_over_nccl_only_if_it_can(
    monkeypatch: pytest.MonkeyPatch, enabled: str, version: tuple[int, int] | None, reason: str | None
) -> None:
    monkeypatch.setattr(nccl, "version", lambda: version)
    assert nccl.why_not_share_gpus({nccl.SHARING_VARIABLE: enabled}) == reason


def test_settings_of_nccl_that_the_user_has_set_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"TORCH_NCCL_ENABLE_MONITORING": "1"})
    nccl.set_up()
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_an_abort_ends_the_wait_for_a_rank_that_failed_while_nccl_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake collective waits as NCCL does, on a socket of its own that it opens after the abort."""
    group, begun, aborted = single_rank_group(), threading.Event(), threading.Event()
    other = socket.create_server(("127.0.0.1", 0))

    def wait_for_a_peer(value: torch.Tensor) -> None:
        begun.set()
        assert aborted.wait(10)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(10)
            try:
                listener.accept()
            except OSError as error:
                raise dist.DistBackendError("NCCL error") from error

    def abort() -> None:
        assert begun.wait(10)
        threading.Timer(0.1, aborted.set).start()
        group.abort()

    monkeypatch.setattr(dist, "all_reduce", wait_for_a_peer)
    thread = threading.Thread(target=abort)
    thread.start()
    since = time.monotonic()
    with pytest.raises(dist.DistBackendError):
        group._form_communicator()
    thread.join(10)
    assert time.monotonic() - since < 5 and not thread.is_alive()
    socket.create_connection(other.getsockname()).close()  # it still listens
    other.close()
