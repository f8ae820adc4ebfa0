"""A Ray cluster of several nodes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from ray.cluster_utils import Cluster

from peers.system import System, tree

NOTICE_S = 10
"""Seconds between a node's notice and its end."""
_WORKERS_OF_HEAD = 2


class Nodes:
    """A head with two CPUs, on which the driver runs, and further nodes with one CPU each."""

    def __init__(self, num_workers: int, system_config: dict[str, Any] | None = None) -> None:
        head = {
            "num_cpus": min(num_workers, _WORKERS_OF_HEAD),
            "include_dashboard": False,
            "object_store_memory": 3 * 10**8,
            "_system_config": system_config or {},
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._others: list[Any] = []
        for _ in range(num_workers - _WORKERS_OF_HEAD):
            self.add()

    @property
    def address(self) -> str:
        address: str = self._cluster.address
        return address

    @property
    def newest(self) -> str:
        """Ray's id of the newest node."""
        name: str = self._others[-1].node_id
        return name

    def add(self) -> None:
        self._others.append(self._cluster.add_node(num_cpus=1, object_store_memory=10**8))

    def drain_newest(self) -> None:
        """Drains the newest node through Ray, as a cloud does, and removes it at the deadline."""
        node = self._others.pop()
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.address]
        command += ["--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        command += ["--reason-message", "spot", "--deadline-remaining-seconds", str(NOTICE_S)]
        subprocess.run(command, check=True, capture_output=True)
        time.sleep(NOTICE_S)
        self._cluster.remove_node(node)

    def pop_newest(self) -> set[int]:
        """Removes the newest node from the list, and returns the ids of its processes."""
        kinds = self._others.pop().all_processes.values()
        return set().union(*(tree(info.process.pid) for infos in kinds for info in infos))

    def shut_down(self) -> None:
        self._cluster.shutdown()


class RaySystem(System):
    """A system that runs on a Ray cluster."""

    system_config: ClassVar[dict[str, Any]] = {}
    _nodes: Nodes | None = None

    def start(self, num_workers: int) -> None:
        self._nodes = Nodes(num_workers, self.system_config)
        self.start_driver(self._nodes.address)

    def start_driver(self, address: str) -> None:
        raise NotImplementedError

    def add_worker(self) -> None:
        assert self._nodes is not None
        self._nodes.add()

    def drain_worker(self) -> None:
        assert self._nodes is not None
        self._nodes.drain_newest()

    def newest_machine(self) -> set[int]:
        assert self._nodes is not None
        return self._nodes.pop_newest()

    def stop(self) -> None:
        super().stop()
        if self._nodes is not None:
            self._nodes.shut_down()
        for pid in {end.pid for end in self.step_ends()}:  # workers of a removed node may still run
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                    os.kill(pid, signal.SIGKILL)
