"""A cluster on this machine whose nodes Ray's autoscaler starts and stops on demand."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray

MOST_NODES = 4
IDLE_S = 3.0
"""Seconds after which the autoscaler stops an unused node."""
START_S = 60.0
_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
"""Ray's provider of nodes that are processes of this machine. Its short name does not work in Ray's wheel."""
_COMMANDS = [f"{which}_commands" for which in ("initialization", "setup", "head_setup", "worker_setup")]
_COMMANDS += [f"{which}_start_ray_commands" for which in ("head", "worker")]
"""Keys that a configuration must have; the provider ignores them."""
_HEAD_ID = "f" * 51 + "00000"
"""By which the provider identifies the head."""


@contextmanager
def autoscaling() -> Iterator[str]:
    """Runs a cluster for a block and gives its address: a head without CPUs, and an autoscaler that may start nodes
    with one CPU each."""
    folder = tempfile.mkdtemp(prefix="ed-")
    address = f"{ray.util.get_node_ip_address()}:{_spare_port()}"
    config = Path(folder, "autoscaling.json")
    config.write_text(json.dumps(_config(address)))
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "0"]
    command += ["--port", address.rpartition(":")[2], "--temp-dir", folder, "--include-dashboard", "false"]
    command += ["--object-store-memory", "100000000", "--autoscaling-config", str(config)]
    environment = {
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        # The mode of this process, which uses a token if it has started a cluster itself.
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled"),
    }
    with Path(folder, "head.log").open("wb") as log:
        head = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment, start_new_session=True)
    try:
        yield address
    finally:
        head.terminate()
        with suppress(subprocess.TimeoutExpired):
            head.wait(START_S)
        _kill_leftovers(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _config(address: str) -> dict[str, object]:
    types = {
        "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0},
        "worker": {"resources": {"CPU": 1, "object_store_memory": 10**8}, "node_config": {}, "max_workers": MOST_NODES},
    }
    provider = {
        "type": "external",
        "module": _PROVIDER,
        "gcs_address": address,
        "head_node_id": _HEAD_ID,
        "launch_multiple": True,
        "disable_node_updaters": True,
    }
    return {
        "cluster_name": "test",
        "max_workers": MOST_NODES,
        "idle_timeout_minutes": IDLE_S / 60,
        "upscaling_speed": MOST_NODES,
        "provider": provider,
        "available_node_types": types,
        "head_node_type": "ray.head.default",
        "auth": {},
        **{key: {} for key in ("docker", "file_mounts")},
        "cluster_synced_files": [],
        **{key: [] for key in _COMMANDS},
    }


def connect(address: str) -> None:
    """Connects to a cluster as soon as it accepts connections."""

    def connects() -> bool:
        try:
            ray.init(address, logging_level="ERROR", log_to_driver=False)
        except (ConnectionError, RuntimeError):
            return False
        return True

    wait_until(connects)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < end, f"not true within {START_S} s"
        time.sleep(0.5)


def draining() -> set[str]:
    """Returns Ray's ids of draining nodes. A cloud would remove them; here they stay alive."""
    return set(ray._private.state.state.get_draining_nodes())


def num_nodes() -> int:
    """Returns the number of live nodes, without the head and draining ones."""
    return len({node["NodeID"] for node in ray.nodes() if node["Alive"]} - draining()) - 1


def nodes_of(actor_class: str) -> set[str]:
    """Returns Ray's ids of the nodes with live actors of a class."""
    actors = ray._private.state.actors().values()
    return {
        actor["Address"]["NodeID"]
        for actor in actors
        if actor["ActorClassName"] == actor_class and actor["State"] == "ALIVE"
    }


def _spare_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _kill_leftovers(folder: str) -> None:
    """Kills the processes of nodes that the autoscaler has started; their command lines name the folder."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if folder.encode() in command.read_bytes():
                os.kill(int(command.parent.name), signal.SIGKILL)
