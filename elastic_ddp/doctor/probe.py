"""Code that runs on each node: it gathers facts, tries storage and data, and joins process groups.

This module does not import Ray. `examination` runs a `Probe` as an actor on each node.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_ddp.data.access import check_data, check_storage
from elastic_ddp.data.files import DataFile
from elastic_ddp.distributed import nccl
from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.sockets import interface_addresses, use_interface_of
from elastic_ddp.distributed.torch_store import StoreConnection
from elastic_ddp.doctor.facts import Gpu, NodeFacts, Reduced, Token
from elastic_ddp.storage.storage import Storage

FORM_S = 20.0
"""How long ranks wait for each other, and how long a collective may take."""
_ATTEMPT = 3
"""Gloo may take 2**3 s to connect the ranks, as in the fourth attempt of a run."""
_ELEMENTS = 1 << 18
PACKAGES = ("torch", "ray", "pyarrow", "numpy")
_NVIDIA_SMI_S = 10.0
_VARIABLES = ("GLOO_", "NCCL_")


class Probe:
    """Gathers the facts of one node, and represents the node as a rank in process groups."""

    def __init__(self, address: str) -> None:
        """`address` is the node's address in Ray."""
        self._address = address
        self._store = StoreConnection()
        self._store_address = ("", 0)

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


def gather(address: str) -> NodeFacts:
    """Returns the facts of this node, whose address in Ray is given."""
    addresses = interface_addresses()
    gpus, driver, gpu_error = list_gpus(os.environ)
    if gpus:
        gpu_error = _why_torch_has_no_gpu()
    return NodeFacts(
        versions={
            "Python": platform.python_version(),
            "elastic_ddp": f"{version('elastic-ddp')} (source {_source_hash()})",
            **{name: version(name).partition("+")[0] for name in PACKAGES},
        },
        cuda=torch.version.cuda,
        nccl=".".join(map(str, nccl.version() or ())) or None,
        driver=driver,
        driver_cuda=_driver_cuda(),
        gpus=gpus,
        gpu_error=gpu_error,
        token=find_token(os.environ),
        usable_cpus=_usable_cpus(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        address=address,
        interface=next((name for name, each in addresses.items() if each == address), None),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
        infiniband=_active_ports(Path("/sys/class/infiniband")),
        has_ibverbs=_can_load("libibverbs.so.1"),
    )


def find_token(environment: Mapping[str, str]) -> Token:
    """Returns where Ray finds its token, in Ray's own order."""
    mode = environment.get("RAY_AUTH_MODE", "")
    if "RAY_AUTH_TOKEN" in environment:
        return Token(auth_mode=mode, path="", permissions=None)
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray/auth_token")
    permissions = None
    with suppress(OSError):
        permissions = path.stat().st_mode & 0o777
    return Token(auth_mode=mode, path=str(path), permissions=permissions)


def list_gpus(environment: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str | None, str | None]:
    """Returns the GPUs that this process may use, NVIDIA's driver, and why `nvidia-smi` does not list any."""
    query = ["nvidia-smi", "--query-gpu=name,memory.used,memory.total,driver_version", "--format=csv,noheader,nounits"]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible:
        query.append(f"--id={visible}")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), None, f"nvidia-smi does not run ({error})"
    if done.returncode != 0:
        return (), None, f"nvidia-smi fails ({' '.join((done.stdout + done.stderr).split())})"
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    gpus = tuple(
        Gpu(index=index, model=model, used_mib=_number(used), total_mib=_number(total))
        for index, (model, used, total, _) in enumerate(rows)
    )
    return gpus, rows[0][3] if rows else None, None if rows else "nvidia-smi lists no GPU"


def _number(text: str) -> int:
    """Returns a field of `nvidia-smi` as a number; 0 for "[N/A]", which MIG and some integrated GPUs report."""
    return int(text) if text.isdecimal() else 0


def _why_torch_has_no_gpu() -> str | None:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build without CUDA
        return f"torch cannot use the GPUs ({error})"
    return None


def _driver_cuda() -> int | None:
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return number.value if status == 0 else None


def _source_hash() -> str:
    """Returns a hash of this package's source: two copies of one version may differ."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def _usable_cpus() -> float:
    allowed = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):  # no control groups v2, or no limit ("max")
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(allowed, int(quota) / int(period))
    with suppress(OSError, ValueError):
        quota_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        period_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        return min(allowed, quota_us / period_us) if quota_us > 0 else allowed
    return allowed


def _active_ports(devices: Path) -> tuple[str, ...]:
    """Returns the ports of InfiniBand and RoCE devices with a link, as `device/port`."""
    ports = sorted(devices.glob("*/ports/*/state"))
    return tuple(f"{port.parts[-4]}/{port.parts[-2]}" for port in ports if "ACTIVE" in port.read_text())


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
