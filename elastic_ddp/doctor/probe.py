"""What an actor of the doctor does on its node. No Ray: `cluster` starts the actors."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from elastic_ddp.data.access import check_data, check_storage
from elastic_ddp.data.files import DataFile
from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.sockets import use_interface_of
from elastic_ddp.distributed.torch_store import StoreConnection
from elastic_ddp.doctor.facts import NodeFacts, Reduced
from elastic_ddp.doctor.gather import gather
from elastic_ddp.storage.storage import Storage

FORM_S = 20.0
"""How long ranks wait for each other, and how long a collective may take."""
_ATTEMPT = 3
"""Gloo may take 2**3 s to connect the ranks, as in the fourth attempt of a run."""
_ELEMENTS = 1 << 18


class Probe:
    """Gathers the facts of one node, and is its rank in process groups."""

    def __init__(self, address: str) -> None:
        """`address` is the node's address in Ray."""
        self._address = address
        self._store, self._store_address = StoreConnection(), ("", 0)

    def gather(self) -> NodeFacts:
        return gather(self._address)

    def now(self) -> float:
        return time.time()

    def check_storage(self, storage: Storage, session: str) -> None:
        check_storage(storage, session)
        storage.check_writable()

    def check_data(self, files: Sequence[DataFile]) -> None:
        check_data(files)

    def connect(self, host: str, port: int) -> None:
        """Connects to the store, over which the ranks of a process group find each other.

        Raises:
            torch.distributed.DistError: the store cannot be reached.
        """
        use_interface_of(self._address)
        self._store.connect(host, port)
        self._store_address = host, port

    def all_reduce(self, device: torch.device, rank: int, world_size: int, generation: int) -> Reduced:
        """Forms a process group as workers do, and adds up a tensor in which rank r has r + 1 everywhere.

        Collective. `generation` must be new to the store.

        Raises:
            Exception: the group does not form, or the all-reduce fails.
        """
        if device.type == "cuda":
            torch.cuda.set_device(device)
        host, port = self._store_address
        assignment = Assignment(
            generation=generation, rank=rank, world_size=world_size, store_host=host, store_port=port, reason="doctor"
        )
        group = ProcessGroup.form(assignment, store=self._store, device=device, timeout_s=FORM_S, attempt=_ATTEMPT)
        intact = False
        try:
            values = torch.full((_ELEMENTS,), rank + 1.0, device=device)
            dist.all_reduce(values)
            reduced = Reduced(smallest=float(values.min()), largest=float(values.max()))
            group.barrier()
            intact = True
        finally:
            group.close(intact=intact)
        return reduced
