"""A cluster on this machine. Ray's own autoscaler starts nodes of it when they are needed, and ends them when not."""

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
"""A node on which nothing is used for so long is ended."""
START_S = 60.0
_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
"""Ray's own, of nodes that are processes of this machine. By its short name it is not in Ray's wheel as a whole."""
_COMMANDS = [f"{which}_commands" for which in ("initialization", "setup", "head_setup", "worker_setup")]
_COMMANDS += [f"{which}_start_ray_commands" for which in ("head", "worker")]
"""What a configuration has to have, and nobody runs."""
_HEAD_ID = "f" * 51 + "00000"
"""By which it knows the head."""


@contextmanager
def autoscaling() -> Iterator[str]:
    """The address of a cluster that lives for the block: a head without room for workers, and an autoscaler that may
    start nodes with room for one worker each."""
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
        # As this process talks to clusters: with a token, if it has started one itself.
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
        _end_what_is_left(folder)
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
    """As soon as it can be."""

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
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.5)


def draining() -> set[str]:
    """Nodes that are to go. A cloud would take them; here they live on."""
    return set(ray._private.state.state.get_draining_nodes())


def num_nodes() -> int:
    """That are alive, but for the head and those that are to go."""
    return len({each["NodeID"] for each in ray.nodes() if each["Alive"]} - draining()) - 1


def nodes_of(actor_class: str) -> set[str]:
    """Where actors of a class are alive."""
    actors = ray._private.state.actors().values()
    return {
        each["Address"]["NodeID"]
        for each in actors
        if each["ActorClassName"] == actor_class and each["State"] == "ALIVE"
    }


def _spare_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _end_what_is_left(folder: str) -> None:
    """Nodes that the autoscaler has started are nobody's children. Each process of theirs names its folder."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if folder.encode() in command.read_bytes():
                os.kill(int(command.parent.name), signal.SIGKILL)
