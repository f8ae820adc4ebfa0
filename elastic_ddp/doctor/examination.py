"""Gathers the facts about a cluster through one actor on each node. The actors use no CPU or GPU resources."""

from __future__ import annotations

import math
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ddp.data.access import announce
from elastic_ddp.data.files import list_files
from elastic_ddp.distributed.hosted_store import HostedStore
from elastic_ddp.doctor.facts import Clock, Cluster, Node, Reduced
from elastic_ddp.doctor.probe import FORM_S, Probe
from elastic_ddp.errors import ElasticDDPError, format_exception
from elastic_ddp.ray_internals.nodes import free_resources
from elastic_ddp.storage.storage import Storage

START_S, ANSWER_S, STORAGE_S = 90.0, 15.0, 60.0
"""Timeouts: of the first answer of a node, which imports torch; of later ones; of the storage. Tens of seconds for the
first one: a new cloud disk is slow."""
_CLOCK_READS = 5
MAX_FILES = 8
"""The number of data files that each node reads, evenly spread over all."""
_COLORS = re.compile(r"\x1b\[[\d;]*m")


class Probes:
    """The actors of all nodes, by the nodes' names."""

    def __init__(self, nodes: Mapping[str, Mapping[str, Any]]) -> None:
        """Starts the actors. `nodes` has Ray's entry of each node."""
        self._actors: dict[str, Any] = {
            name: ray.remote(Probe)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
            .remote(node["NodeManagerAddress"])
            for name, node in nodes.items()
        }

    def call(self, method: str, arguments: Mapping[str, tuple[Any, ...]], timeout_s: float) -> dict[str, Any]:
        """Calls a method on nodes at the same time. Returns the result of each node, or a string: why there is none."""
        calls = {name: getattr(self._actors[name], method).remote(*each) for name, each in arguments.items()}
        ready, _ = ray.wait([*calls.values()], num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
        done = set(ready)
        return {
            name: _result(call) if call in done else f"no answer within {timeout_s:g} s" for name, call in calls.items()
        }

    def end(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)


def _result(call: Any) -> Any:
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        return str(cause) if isinstance(cause, ElasticDDPError) else format_exception(cause)
    except ray.exceptions.RayError as error:
        missing = re.search(r"No module named '[^']+'", str(error))
        if missing:
            return f"{missing[0]}. Install elastic_ddp there in the version of this machine."
        return _COLORS.sub("", str(error)).strip().splitlines()[0]


def node_names(addresses: Mapping[str, str]) -> dict[str, str]:
    """Returns a name of each node id: its address, with the id if several nodes have the address."""
    count = Counter(addresses.values())
    return {
        node_id: address if count[address] == 1 else f"{address} ({node_id[:6]})"
        for node_id, address in addresses.items()
    }


def examine(*, data: str | None, storage: Storage | None, note: Callable[[str], None]) -> Cluster:
    """Returns the facts about all live nodes of the cluster that this process is connected to.

    GPUs that a process uses are not touched, so live runs keep theirs. `note` is called before each part.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    names = node_names({node["NodeID"]: node["NodeManagerAddress"] for node in alive})
    listed = {names[node["NodeID"]]: node for node in alive}
    free = free_resources()
    nodes = {
        name: Node(name=name, resources=node["Resources"], free=free.get(node["NodeID"], {}))
        for name, node in listed.items()
    }
    store = HostedStore(ray.util.get_node_ip_address())
    probes = Probes(listed)
    try:
        return Examination(nodes, probes, (store.host, store.port)).run(data=data, storage=storage, note=note)
    finally:
        probes.end()


class Examination:
    """Fills in the facts, part by part. A failure on a node becomes a fact, and the other parts continue."""

    def __init__(self, nodes: dict[str, Node], probes: Probes, store: tuple[str, int]) -> None:
        """`store` is the address of a store, in which process groups form."""
        self._nodes = nodes
        self._probes = probes
        self._store = store

    def run(self, *, data: str | None, storage: Storage | None, note: Callable[[str], None]) -> Cluster:
        note(f"starting a process on {len(self._nodes)} nodes")
        self._gather()
        found: dict[str, Any] = {}
        if storage is not None:
            note(f"writing to and reading from {storage.uri}")
            found |= self._check_storage(storage)
        if data is not None:
            note(f"reading {data}")
            found |= self._check_data(data)
        note("forming process groups")
        groups = self._form_groups()
        return Cluster(nodes=tuple(self._nodes.values()), groups=groups, **found)

    def _all(self, *arguments: Any) -> dict[str, tuple[Any, ...]]:
        """Returns the same arguments for each node that has answered."""
        return {name: arguments for name, node in self._nodes.items() if node.facts is not None}

    def _gather(self) -> None:
        for name, facts in self._probes.call("gather", dict.fromkeys(self._nodes, ()), START_S).items():
            node = self._nodes[name]
            if isinstance(facts, str):
                node.problem = facts
                continue
            node.facts = facts
            reads = [clock for _ in range(_CLOCK_READS) if (clock := self._read_clock(name)) is not None]
            node.clock = min(reads, key=lambda clock: clock.uncertainty_s, default=None)

    def _read_clock(self, name: str) -> Clock | None:
        start = time.perf_counter()
        started_at = time.time()
        now = self._probes.call("now", {name: ()}, ANSWER_S)[name]
        half = (time.perf_counter() - start) / 2
        return None if isinstance(now, str) else Clock(offset_s=now - (started_at + half), uncertainty_s=half)

    def _check_storage(self, storage: Storage) -> dict[str, Any]:
        session = f"doctor-{uuid.uuid4().hex}"
        folder = storage.at(session)
        try:
            storage.check_writable()
            try:
                announce(folder, session)
                results = self._probes.call("check_storage", self._all(folder, session), STORAGE_S)
            finally:
                storage.delete_tree(session)
        except ElasticDDPError as error:
            return {"storage": storage.uri, "storage_problem": str(error)}
        for name, problem in results.items():
            if problem is not None:
                self._nodes[name].storage_problem = problem.replace(folder.uri, storage.uri)
        return {"storage": storage.uri}

    def _check_data(self, data: str) -> dict[str, Any]:
        try:
            files = list_files(data)
        except ElasticDDPError as error:
            return {"data": data, "data_problem": str(error)}
        files = files[:: math.ceil(len(files) / MAX_FILES)]
        for name, problem in self._probes.call("check_data", self._all(files), STORAGE_S).items():
            self._nodes[name].data_problem = problem
        return {"data": data, "num_files": len(files)}

    def _form_groups(self) -> dict[str, dict[str, Reduced | str]]:
        """Forms a group of gloo over all nodes for workers, then one of NCCL with an idle GPU of each that has one."""
        workers = [name for name in self._all() if self._nodes[name].can_work]
        for name, problem in self._probes.call("connect", dict.fromkeys(workers, self._store), ANSWER_S).items():
            self._nodes[name].connect_problem = problem
        connected = [self._nodes[name] for name in workers if self._nodes[name].connect_problem is None]
        if not connected:
            return {}
        groups = {"gloo": self._all_reduce({node.name: torch.device("cpu") for node in connected}, generation=1)}
        gpus = {node.name: torch.device("cuda", node.idle_gpus[0].index) for node in connected if node.idle_gpus}
        if gpus and all(isinstance(result, Reduced) for result in groups["gloo"].values()):
            groups["nccl"] = self._all_reduce(gpus, generation=2)
        return groups

    def _all_reduce(self, devices: Mapping[str, torch.device], generation: int) -> dict[str, Reduced | str]:
        ranks = {name: (device, rank, len(devices), generation) for rank, (name, device) in enumerate(devices.items())}
        return self._probes.call("all_reduce", ranks, 3 * FORM_S)
