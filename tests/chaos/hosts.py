"""Two hosts on one machine: network namespaces, with a link between them that can be disconnected."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ADDRESSES = ("198.51.100.253", "198.51.100.254")
"""Of the head and the other host, from a block reserved for documentation."""
PORT = 6391
START_S = 60.0


def can_be_made() -> bool:
    """Whether this process may create network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("unshare") is not None


class Hosts:
    """A Ray cluster of two hosts with one CPU each."""

    def __init__(self, names: tuple[str, str], folder: str) -> None:
        self._names, self._folder = names, folder

    def start_ray(self) -> None:
        """Starts a Ray node on each host."""
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1"]
        ray += ["--object-store-memory", "100000000"]
        head = ["--head", "--node-ip-address", ADDRESSES[0], "--port", str(PORT), "--include-dashboard", "false"]
        self.start(0, *ray, *head, "--temp-dir", self._folder)
        self._wait_for_nodes(1)
        # Ray keeps a host's address in its temporary folder, so each host mounts its own at that path.
        own_folder = f'mount -t tmpfs tmpfs {self._folder} && exec "$@"'
        other = ["--address", f"{ADDRESSES[0]}:{PORT}", "--node-ip-address", ADDRESSES[1]]
        self.start(1, "unshare", "--mount", "sh", "-c", own_folder, "-", *ray, *other)
        self._wait_for_nodes(2)

    def _wait_for_nodes(self, num_nodes: int) -> None:
        count = "import ray; ray.init(logging_level='ERROR'); print(sum(node['Alive'] for node in ray.nodes()))"
        end = time.monotonic() + START_S
        while True:
            counting = self.start(0, sys.executable, "-c", count, stdout=subprocess.PIPE)
            if counting.communicate(timeout=START_S)[0].strip() == str(num_nodes):
                return
            assert time.monotonic() < end, "Ray did not start"

    def start(self, host: int, *command: str, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """Starts a process on a host. RAY_ADDRESS is the head's."""
        address = f"{ADDRESSES[0]}:{PORT}"
        return subprocess.Popen(
            ["ip", "netns", "exec", self._names[host], *command],
            stdout=stdout,
            stderr=stdout if stdout == subprocess.DEVNULL else subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
            # No other process can reach these hosts, so they need no token.
            env={**os.environ, "RAY_AUTH_MODE": "disabled", **({} if "start" in command else {"RAY_ADDRESS": address})},
            start_new_session=True,
        )

    def reconnect(self) -> None:
        """Restores the link, whichever end was disconnected."""
        for name in self._names:
            subprocess.run(["ip", "-n", name, "link", "set", "eth0", "up"], check=True)
            # A link that goes down loses its routes.
            other = ADDRESSES[1 - self._names.index(name)]
            subprocess.run(["ip", "-n", name, "route", "replace", "default", "via", other], check=True)


def cut() -> None:
    """Disconnects the link, from a process on one of the hosts."""
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Creates the hosts for a block, and removes them with all their processes."""
    names = (f"ed-{os.getpid()}-a", f"ed-{os.getpid()}-b")
    folder = tempfile.mkdtemp(prefix="ed-")
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        ends = [["eth0", "netns", names[0]], ["type", "veth", "peer", "name", "eth0", "netns", names[1]]]
        subprocess.run(["ip", "link", "add", *ends[0], *ends[1]], check=True)
        for name, address in zip(names, ADDRESSES, strict=True):
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
            subprocess.run(["ip", "-n", name, "addr", "add", f"{address}/25", "dev", "eth0"], check=True)
        hosts = Hosts(names, folder)
        hosts.reconnect()
        hosts.start_ray()
        yield hosts
    finally:
        for name in names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in map(int, pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
