"""Runs a function on several ranks: processes in one group, without Ray."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.torch_store import StoreConnection

PROCESSES = multiprocessing.get_context("forkserver")
# Otherwise each process imports these, in a second or more of CPU time. The first DDP imports torch._dynamo, the first
# shard of FSDP torch.distributed.checkpoint, and the module of most tests Ray Data.
PROCESSES.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "pytest",
        "ray.data",
        "elastic_ddp.distributed.ddp",
        "elastic_ddp.distributed.fsdp",
        "elastic_ddp.worker.main",
    ]
)

CPU = torch.device("cpu")
OTHERS_FAIL_S = 0.5
"""After one rank has failed, how long to wait for the errors of others."""


def run_ranks(
    world_size: int, body: Callable[..., Any], *args: Any, generation: int = 1, device: torch.device = CPU
) -> list[Any]:
    """Returns the results of `body(group, *args)` on every rank, in rank order. A GPU is shared by all ranks.

    A rank that raises or dies fails the call and ends the other ranks, which may wait for it.
    """
    store = empty_store()
    processes, answers = [], {}
    for rank in range(world_size):
        assignment = Assignment(
            generation=generation,
            rank=rank,
            world_size=world_size,
            store_host="127.0.0.1",
            store_port=store.port,
            reason="start",
        )
        answer, results = PROCESSES.Pipe(duplex=False)
        processes.append(PROCESSES.Process(target=_rank, args=(assignment, device, body, args, results)))
        processes[-1].start()
        results.close()  # so that the pipe ends when the rank dies
        answers[answer] = rank
    try:
        return _results(answers)
    finally:
        for process in processes:
            process.kill()  # after its answer a rank has nothing left to do
            process.join()


def _results(answers: dict[Any, int]) -> list[Any]:
    """Returns the results of all ranks, or fails with the errors of those that failed."""
    by_rank: dict[int, Any] = {}
    errors: list[str] = []
    while answers and (ready := wait(list(answers), OTHERS_FAIL_S if errors else None)):
        for answer in ready:
            rank = answers.pop(answer)
            try:
                by_rank[rank], error = answer.recv()
            except EOFError:
                error = "it died"
            if error is not None:
                errors.append(f"rank {rank}: {error}")
    assert not errors, "\n".join(errors)
    return [by_rank[rank] for rank in sorted(by_rank)]


def form(group: ProcessGroup, generation: int, timeout_s: float = 60, **options: Any) -> ProcessGroup:
    """Forms the group of another generation with the connection of a closed group."""
    assignment = replace(group.assignment, generation=generation)
    return ProcessGroup.form(assignment, store=group.store, device=CPU, timeout_s=timeout_s, **options)


def abort_when(group: ProcessGroup, key: str) -> None:
    """Aborts the group when a rank sets a key of the store, as the rendezvous does when a worker has failed."""
    place = group.assignment
    store = dist.TCPStore(place.store_host, place.store_port, is_master=False)

    def wait_and_abort() -> None:
        store.wait([key])
        group.abort()

    threading.Thread(target=wait_and_abort, daemon=True).start()


def set_key(group: ProcessGroup, key: str) -> None:
    place = group.assignment
    dist.TCPStore(place.store_host, place.store_port, is_master=False).set(key, "")


def single_rank_group() -> ProcessGroup:
    """Returns the group of a run's only rank. It need not be formed."""
    place = Assignment(generation=1, rank=0, world_size=1, store_host="127.0.0.1", store_port=0, reason="start")
    return ProcessGroup(place, CPU, StoreConnection())


def empty_store() -> dist.TCPStore:
    """Returns the store that all tests use, one after the other."""
    store = _store()
    for key in store.list_keys():
        store.delete_key(key)
    return store


@cache
def _store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _rank(
    assignment: Assignment, device: torch.device, body: Callable[..., Any], args: tuple[Any, ...], results: Any
) -> None:
    gc.freeze()  # closing a group collects garbage, which takes a second or more with all modules
    torch.set_num_threads(1)
    try:
        store = StoreConnection()
        store.connect_with_retry(lambda: (assignment.store_host, assignment.store_port))
        options: Any = {"store": store, "device": device, "timeout_s": 60, "shares_device": device != CPU}
        group = ProcessGroup.form(assignment, **options)
        value = body(group, *args)
        if dist.is_initialized():  # the body may have closed it
            group.barrier()
        group.close(intact=True)
        results.send((value, None))
    except BaseException:
        results.send((None, traceback.format_exc()))
