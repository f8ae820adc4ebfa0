"""The facts about a cluster that the checks judge. Plain values, which travel from the nodes to the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

IDLE_MIB = 1024
"""A GPU with more memory in use than this is not idle. The driver itself may reserve a few hundred MiB."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, as `nvidia-smi` lists it."""

    index: int
    model: str
    used_mib: int
    total_mib: int


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
    """What a process on a node finds out without other nodes."""

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
    cpu_model: str
    usable_cpus: float
    """CPUs that the process may use, by its affinity and its control group."""
    shm_bytes: int
    """The size of /dev/shm."""
    open_files: int
    """The soft limit of open files."""
    locked_bytes: int | None
    """The limit of locked memory; None if there is none."""
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
    """A node's clock against that of the driver's machine, in seconds."""

    offset_s: float
    uncertainty_s: float
    """Half of the round trip in which it was read."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A matrix product on one device."""

    device: str
    """ "CPU", or "GPU 0"."""
    model: str
    tflops: float


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """How fast a node writes to and reads from the storage, in MiB/s, while all other nodes do the same."""

    write: float
    read: float
    """Of an object that another node wrote, on a cluster of several nodes."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of the cluster, and what is known about it."""

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
    throughput: Throughput | None = None
    speeds: tuple[Speed, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    """Measurements that failed on this node, and why."""


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The result of an all-reduce on one rank, to which rank r adds r + 1."""

    smallest: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """A process group over nodes, one rank on each."""

    nodes: tuple[str, ...]
    """Their names, in rank order."""
    results: tuple[Reduced | str, ...]
    """For each rank, the result of the all-reduce, or why there is none."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Messages between two nodes, in both directions in turn."""

    backend: str
    nodes: tuple[str, str]
    latency_ms: float
    """One way."""
    mib_per_s: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All facts."""

    nodes: tuple[Node, ...]
    storage: str | None = None
    """The URI that was checked."""
    storage_problem: str | None = None
    """Why the machine that ran the check cannot use it."""
    data: str | None = None
    """The path or URI that was checked."""
    data_problem: str | None = None
    num_files: int = 0
    """The number of data files that each node read."""
    groups: Mapping[str, Group] = field(default_factory=dict)
    """By backend."""
    links: tuple[Link, ...] = ()


def can_work(node: Node) -> bool:
    """Returns whether a node has resources for a worker. A head often has none."""
    return any(node.resources.get(name, 0.0) > 0 for name in ("CPU", "GPU"))


def idle_gpus(node: Node) -> tuple[Gpu, ...]:
    """Returns the GPUs on a node that torch can use and no process does. None without GPUs in Ray's resources."""
    if node.facts is None or node.facts.gpu_error is not None or not node.resources.get("GPU"):
        return ()
    return tuple(gpu for gpu in node.facts.gpus if gpu.used_mib <= IDLE_MIB)
