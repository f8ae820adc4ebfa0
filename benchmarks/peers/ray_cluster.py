"""A Ray cluster of several nodes on this machine, for the systems that run on Ray."""

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
"""Between a node's notice and its end."""
_WORKERS_OF_HEAD = 2


class RaySystem(System):
    """A node with two CPUs, where the driver runs, and others with one each, which come and go."""

    system_config: ClassVar[dict[str, Any]] = {}
    _cluster: Cluster | None = None

    def start(self, num_workers: int) -> None:
        head = {
            "num_cpus": min(num_workers, _WORKERS_OF_HEAD),
            "include_dashboard": False,
            "object_store_memory": 3 * 10**8,
            "_system_config": self.system_config,
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._add_node() for _ in range(num_workers - _WORKERS_OF_HEAD)]
        self.start_driver(self._cluster.address)

    def start_driver(self, address: str) -> None:
        raise NotImplementedError

    def _add_node(self) -> Any:
        assert self._cluster is not None
        return self._cluster.add_node(num_cpus=1, object_store_memory=10**8)

    def add_worker(self) -> None:
        self._nodes.append(self._add_node())

    def drain_worker(self) -> None:
        """Ray is told as a cloud would tell it, and the node ends when the time is over."""
        assert self._cluster is not None
        node = self._nodes.pop()
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self._cluster.address]
        command += ["--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        command += ["--reason-message", "spot", "--deadline-remaining-seconds", str(NOTICE_S)]
        subprocess.run(command, check=True, capture_output=True)
        time.sleep(NOTICE_S)
        self._cluster.remove_node(node)

    def newest_machine(self) -> set[int]:
        return set().union(
            *(tree(each.process.pid) for kind in self._nodes.pop().all_processes.values() for each in kind)
        )

    def stop(self) -> None:
        super().stop()
        if self._cluster is not None:
            self._cluster.shutdown()
        for pid in {end.pid for end in self.step_ends()}:  # one whose node is gone may live on for a while
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                    os.kill(pid, signal.SIGKILL)
