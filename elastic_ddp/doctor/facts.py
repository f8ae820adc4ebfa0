"""The facts about a cluster, which travel from the nodes to the driver, and the findings about them. Plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from elastic_ddp.errors import shorten

IDLE_MIB = 1024
"""A GPU with more memory in use than this is not idle. The driver itself may reserve a few hundred MiB."""
Verdict = Literal["ok", "warn", "fail"]
ALL = "all"
"""In place of a node's name: the finding is about all nodes."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, as `nvidia-smi` lists it."""

    index: int
    model: str
    used_mib: int
    total_mib: int

    @property
    def is_idle(self) -> bool:
        return self.used_mib <= IDLE_MIB


@dataclass(frozen=True, kw_only=True)
class Token:
    """Ray's authentication on a node. The token itself is not read."""

    auth_mode: str
    """`RAY_AUTH_MODE` of Ray's processes; empty if it is not set."""
    path: str
    """The token's file; empty if the token is in the environment."""
    permissions: int | None
    """The file's mode; None if there is no file."""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """The facts that a process on a node finds out without other nodes."""

    versions: Mapping[str, str]
    """Python and the packages that all nodes must have in the same version, by name."""
    cuda: str | None
    """CUDA of torch's build, such as "13.0"; None for a build without CUDA."""
    nccl: str | None
    driver: str | None
    """NVIDIA's driver, such as "580.95.05"."""
    driver_cuda: int | None
    """The newest CUDA that the driver supports, such as 13000 for 13.0."""
    gpus: tuple[Gpu, ...]
    gpu_error: str | None
    """Why `nvidia-smi` or torch cannot use the GPUs."""
    token: Token
    usable_cpus: float
    """CPUs that the process may use, by its affinity and its control group."""
    shm_bytes: int
    """The size of /dev/shm."""
    open_files: int
    """The soft limit of open files; -1 if there is none."""
    locked_bytes: int
    """The soft limit of locked memory; -1 if there is none."""
    address: str
    """The node's address in Ray."""
    interface: str | None
    """The network interface with this address."""
    interfaces: tuple[str, ...]
    environment: Mapping[str, str]
    """The variables of gloo and NCCL, by name."""
    infiniband: tuple[str, ...]
    """Active ports of InfiniBand or RoCE devices, such as "mlx5_0/1"."""
    has_ibverbs: bool
    """Whether the library with which NCCL uses InfiniBand can be loaded."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A node's clock relative to the clock of the driver's machine, in seconds."""

    offset_s: float
    uncertainty_s: float
    """Half of the round trip in which the clock was read."""


@dataclass(kw_only=True)
class Node:
    """A node of the cluster, and what is known about it so far."""

    name: str
    resources: Mapping[str, float]
    """All resources, by Ray's names."""
    free: Mapping[str, float]
    """Resources that no task or actor holds."""
    facts: NodeFacts | None = None
    problem: str | None = None
    """Why no process on the node reports facts."""
    clock: Clock | None = None
    storage_problem: str | None = None
    data_problem: str | None = None
    connect_problem: str | None = None
    """Why the node cannot reach the store in which process groups form."""

    @property
    def can_work(self) -> bool:
        """Whether the node has resources for a worker. A head often has none."""
        return any(self.resources.get(name, 0.0) > 0 for name in ("CPU", "GPU"))

    @property
    def num_gpus(self) -> int:
        """GPUs in Ray's resources."""
        return int(self.resources.get("GPU", 0.0))

    @property
    def idle_gpus(self) -> tuple[Gpu, ...]:
        """GPUs that torch can use and that no process uses. None without GPUs in Ray's resources."""
        if self.facts is None or self.facts.gpu_error is not None or not self.num_gpus:
            return ()
        return tuple(gpu for gpu in self.facts.gpus if gpu.is_idle)


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The result of an all-reduce on one rank, to which rank r adds r + 1."""

    smallest: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All facts."""

    nodes: tuple[Node, ...]
    storage: str | None = None
    """The URI of the storage that was checked."""
    storage_problem: str | None = None
    """Why the machine that ran the check cannot use it."""
    data: str | None = None
    """The path or URI of the data that was checked."""
    data_problem: str | None = None
    num_files: int = 0
    """The number of data files that each node read."""
    groups: Mapping[str, Mapping[str, Reduced | str]] = field(default_factory=dict)
    """By backend and node: the result in a process group with a rank on each of these nodes, or why there is none."""

    @property
    def known(self) -> list[tuple[Node, NodeFacts]]:
        """The nodes whose process has reported facts."""
        return [(node, node.facts) for node in self.nodes if node.facts is not None]


@dataclass(frozen=True)
class Finding:
    """One row of the report."""

    check: str
    verdict: Verdict
    text: str
    """The fact; for a problem also the rule, and the change to make."""
    node: str = ALL


def differing(values: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Returns the value that most nodes have, and the values of the other nodes. `values` is not empty."""
    counts = Counter(values.values())
    common = max(counts, key=lambda value: counts[value])
    return common, {node: value for node, value in values.items() if value != common}


def names(nodes: Iterable[str]) -> str:
    return shorten([*nodes], 5)
