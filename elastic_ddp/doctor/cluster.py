"""Gathers the facts about a cluster through one actor on each node. They use no CPU or GPU resources."""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ddp.data.access import announce, check_data, check_storage
from elastic_ddp.data.files import DataFile, list_files
from elastic_ddp.distributed.hosted_store import HostedStore
from elastic_ddp.distributed.sockets import use_interface_of
from elastic_ddp.doctor.facts import (
    Clock,
    Cluster,
    Gpu,
    Group,
    Link,
    Node,
    NodeFacts,
    Reduced,
    Speed,
    Throughput,
    can_work,
    idle_gpus,
)
from elastic_ddp.doctor.gather import gather
from elastic_ddp.doctor.measure import FORM_S, Network, matmul_speeds, read_speed, write_speed
from elastic_ddp.errors import ElasticDDPError, format_exception
from elastic_ddp.ray_internals.cluster_use import free_resources
from elastic_ddp.storage.storage import Storage

START_S, ANSWER_S, STORAGE_S, LINKS_S = 90.0, 15.0, 60.0, 60.0
"""Timeouts: of the first answer of a node, which imports torch; of later ones; of the storage; of all links. Tens of
seconds for the first one: a new cloud disk is slow."""
_CLOCK_READS = 5
MAX_FILES = 8
"""The number of data files that each node reads."""
_COLORS = re.compile(r"\x1b\[[\d;]*m")

T = TypeVar("T")


@dataclass(frozen=True)
class Failed:
    """Why a node did not answer a call."""

    reason: str


class Probe:
    """An actor on one node."""

    def __init__(self) -> None:
        self._address = ray.util.get_node_ip_address()
        self._network: Network | None = None

    def gather(self) -> NodeFacts:
        return gather(self._address)

    def now(self) -> float:
        return time.time()

    def check_storage(self, storage: Storage, session: str) -> None:
        check_storage(storage, session)
        storage.check_writable()

    def check_data(self, files: Sequence[DataFile]) -> None:
        check_data(files)

    def write_speed(self, storage: Storage, key: str) -> float:
        return write_speed(storage, key)

    def read_speed(self, storage: Storage, key: str) -> float:
        return read_speed(storage, key)

    def speeds(self, gpus: Sequence[Gpu], cpu_model: str) -> tuple[Speed, ...]:
        return matmul_speeds(gpus, cpu_model)

    def connect(self, store: tuple[str, int], device: str) -> None:
        use_interface_of(self._address)
        self._network = Network(store, torch.device(device))

    def all_reduce(self, names: Sequence[str], rank: int, generation: int) -> Reduced:
        assert self._network is not None
        return self._network.all_reduce(names, rank, generation)

    def links(self) -> list[Link]:
        assert self._network is not None
        return self._network.links()

    def leave(self, *, intact: bool) -> None:
        if self._network is not None:
            self._network.close(intact=intact)
            self._network = None


class Probes:
    """The actors of all nodes, by the nodes' names."""

    def __init__(self, node_ids: Mapping[str, str]) -> None:
        """Starts them. `node_ids` has Ray's id of each node."""
        self._actors: dict[str, Any] = {
            name: ray.remote(Probe)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
            .remote()
            for name, node_id in node_ids.items()
        }

    def call(
        self, method: str, arguments: Mapping[str, tuple[Any, ...]], timeout_s: float, **options: Any
    ) -> dict[str, Any]:
        """Calls a method on nodes at the same time, and returns what each returned, or `Failed`."""
        calls = {name: getattr(self._actors[name], method).remote(*each, **options) for name, each in arguments.items()}
        ready, _ = ray.wait([*calls.values()], num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
        done = set(ready)
        return {
            name: _result(call) if call in done else Failed(f"no answer within {timeout_s:g} s")
            for name, call in calls.items()
        }

    def end(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)


def _result(call: Any) -> Any:
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        return Failed(str(cause) if isinstance(cause, ElasticDDPError) else format_exception(cause))
    except ray.exceptions.RayError as error:
        if missing := re.search(r"No module named '[^']+'", str(error)):
            return Failed(f"{missing[0]}. Install elastic_ddp there in the version of this machine.")
        return Failed(_COLORS.sub("", str(error)).strip().splitlines()[0])


def node_names(addresses: Mapping[str, str]) -> dict[str, str]:
    """Returns a name of each node id: its address, with the id if several nodes have the address."""
    count = Counter(addresses.values())
    return {
        node_id: address if count[address] == 1 else f"{address} ({node_id[:6]})"
        for node_id, address in addresses.items()
    }


def sample(items: Sequence[T], limit: int) -> list[T]:
    """Returns at most `limit` items, evenly spread, with the first and the last."""
    if len(items) <= limit:
        return [*items]
    return [items[number * (len(items) - 1) // (limit - 1)] for number in range(limit)]


def examine(*, data: str | None, storage: Storage | None, note: Callable[[str], None]) -> Cluster:
    """Returns the facts about all live nodes of the cluster that this process is connected to.

    GPUs that a process uses are not measured, so live runs keep theirs. `note` is called before each part.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    names = node_names({node["NodeID"]: node["NodeManagerAddress"] for node in alive})
    free = free_resources()
    nodes = {
        names[node["NodeID"]]: Node(
            name=names[node["NodeID"]], resources=node["Resources"], free=free.get(node["NodeID"], {})
        )
        for node in alive
    }
    store = HostedStore(ray.util.get_node_ip_address())
    probes = Probes({name: node_id for node_id, name in names.items()})
    try:
        return Examination(nodes, probes, (store.host, store.port)).run(data=data, storage=storage, note=note)
    finally:
        probes.end()


class Examination:
    """Fills in the facts, part by part. What fails on a node becomes a fact, and the other parts go on."""

    def __init__(self, nodes: dict[str, Node], probes: Probes, store: tuple[str, int]) -> None:
        """`store` is the address of a store, in which process groups form."""
        self._nodes, self._probes, self._store = nodes, probes, store
        self._groups: dict[str, Group] = {}
        self._links: list[Link] = []

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
        note("measuring devices")
        self._measure_devices()
        note("measuring the network")
        self._measure_network()
        return Cluster(nodes=tuple(self._nodes.values()), groups=self._groups, links=tuple(self._links), **found)

    def _all(self, *arguments: Any) -> dict[str, tuple[Any, ...]]:
        """Returns the same arguments for each node that has answered."""
        return {name: arguments for name, node in self._nodes.items() if node.facts is not None}

    def _set(self, name: str, **values: Any) -> None:
        self._nodes[name] = replace(self._nodes[name], **values)

    def _set_failure(self, name: str, part: str, reason: str) -> None:
        self._set(name, failures={**self._nodes[name].failures, part: reason})

    def _gather(self) -> None:
        for name, facts in self._probes.call("gather", dict.fromkeys(self._nodes, ()), START_S).items():
            if isinstance(facts, Failed):
                self._set(name, problem=facts.reason)
                continue
            self._set(name, facts=facts)
            reads = [clock for _ in range(_CLOCK_READS) if (clock := self._read_clock(name)) is not None]
            self._set(name, clock=min(reads, key=lambda clock: clock.uncertainty_s, default=None))

    def _read_clock(self, name: str) -> Clock | None:
        start, started_at = time.perf_counter(), time.time()
        now = self._probes.call("now", {name: ()}, ANSWER_S)[name]
        half = (time.perf_counter() - start) / 2
        return None if isinstance(now, Failed) else Clock(offset_s=now - (started_at + half), uncertainty_s=half)

    def _check_storage(self, storage: Storage) -> dict[str, Any]:
        session = f"doctor-{uuid.uuid4().hex}"
        folder = storage.at(session)
        try:
            storage.check_writable()
            with ExitStack() as stack:
                stack.callback(storage.delete_tree, session)
                announce(folder, session)
                for name, result in self._probes.call("check_storage", self._all(folder, session), STORAGE_S).items():
                    if isinstance(result, Failed):
                        self._set(name, storage_problem=result.reason.replace(folder.uri, storage.uri))
                self._measure_storage(folder)
        except ElasticDDPError as error:
            return {"storage": storage.uri, "storage_problem": str(error)}
        return {"storage": storage.uri}

    def _measure_storage(self, folder: Storage) -> None:
        names = [name for name in self._all() if self._nodes[name].storage_problem is None]
        keys = {name: f"node-{number}" for number, name in enumerate(names)}
        written = self._succeeded("storage", "write_speed", {name: (folder, keys[name]) for name in names}, STORAGE_S)
        nexts = dict(zip(written, [*written][1:] + [*written][:1], strict=True))
        others = {name: (folder, keys[other]) for name, other in nexts.items()}
        read = self._succeeded("storage", "read_speed", others, STORAGE_S)
        for name, speed in read.items():
            self._set(name, throughput=Throughput(write=written[name], read=speed))

    def _succeeded(
        self, part: str, method: str, arguments: Mapping[str, tuple[Any, ...]], timeout_s: float
    ) -> dict[str, Any]:
        """Calls a method, records its failures, and returns the other results."""
        results = self._probes.call(method, arguments, timeout_s)
        for name, result in results.items():
            if isinstance(result, Failed):
                self._set_failure(name, part, result.reason)
        return {name: result for name, result in results.items() if not isinstance(result, Failed)}

    def _check_data(self, data: str) -> dict[str, Any]:
        try:
            files = sample(list_files(data), MAX_FILES)
        except ElasticDDPError as error:
            return {"data": data, "data_problem": str(error)}
        for name, result in self._probes.call("check_data", self._all(files), STORAGE_S).items():
            if isinstance(result, Failed):
                self._set(name, data_problem=result.reason)
        return {"data": data, "num_files": len(files)}

    def _measure_devices(self) -> None:
        arguments = {
            node.name: (idle_gpus(node), node.facts.cpu_model)
            for node in self._workers()
            if node.facts is not None and (idle_gpus(node) or not node.resources.get("GPU"))
        }
        for name, speeds in self._succeeded("speed", "speeds", arguments, ANSWER_S).items():
            self._set(name, speeds=speeds)

    def _workers(self) -> list[Node]:
        return [node for node in self._nodes.values() if node.facts is not None and can_work(node)]

    def _measure_network(self) -> None:
        """Measures gloo on all nodes for workers, then NCCL on one idle GPU of each that has one."""
        workers = self._workers()
        gpus = {node.name: idle[0].index for node in workers if (idle := idle_gpus(node))}
        if self._measure_group("gloo", {node.name: (self._store, "cpu") for node in workers}):
            self._measure_group("nccl", {name: (self._store, f"cuda:{index}") for name, index in gpus.items()})

    def _measure_group(self, backend: str, arguments: Mapping[str, tuple[Any, ...]]) -> bool:
        """Returns whether all nodes can form another group."""
        names = [*self._succeeded(backend, "connect", arguments, ANSWER_S)]
        generation = len(self._groups) + 1
        ranks = {name: (names, rank, generation) for rank, name in enumerate(names)}
        reduced = self._probes.call("all_reduce", ranks, 3 * FORM_S)
        results = tuple(each.reason if isinstance(each, Failed) else each for each in reduced.values())
        intact = all(isinstance(each, Reduced) for each in results)
        if names:
            self._groups[backend] = Group(nodes=tuple(names), results=results)
        if intact and len(names) > 1:
            found = self._succeeded("links", "links", dict.fromkeys(names, ()), LINKS_S)
            self._links += [link for links in found.values() for link in links]
            intact = len(found) == len(names)
        self._probes.call("leave", dict.fromkeys(names, ()), ANSWER_S, intact=intact)
        return intact
