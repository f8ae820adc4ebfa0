"""Starting a rendezvous on a cluster that already has one with the name of the run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from elastic_ddp.errors import ConfigError
from elastic_ddp.rendezvous import actor as start_module
from elastic_ddp.rendezvous.actor import start_rendezvous
from elastic_ddp.rendezvous.messages import RendezvousOptions
from elastic_ddp.storage.lease import DriverLease
from elastic_ddp.storage.storage import Storage

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_ray")]


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """A Ray cluster owned by this process. All tests use it, with different run names."""
    ray.init("local", num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def name() -> str:
    return f"lm-{uuid.uuid4().hex[:6]}"


def driven_from(uri: str) -> RendezvousOptions:
    driver = {"uri": uri, "pid": 123, "host": "old-head", "job": None}
    return RendezvousOptions(min_workers=1, max_workers=1, heartbeat_timeout_s=5.0, driver=driver)


def test_a_new_driver_waits_until_ray_has_ended_the_rendezvous_of_a_dead_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = start_rendezvous(name, 10, driven_from(f"file:///runs/{name}"))
    waits = []

    def sleep(seconds: float) -> None:
        if not waits:  # as Ray does some time after the machine of the driver has died
            ray.kill(old)
        waits.append(seconds)
        original(seconds)

    original = time.sleep
    monkeypatch.setattr(start_module.time, "sleep", sleep)
    new = start_rendezvous(name, 20, driven_from(f"file:///runs/{name}"))
    assert waits
    assert ray.get(new.status.remote())["total_steps"] == 20


@pytest.mark.parametrize("by", ["folder", "RAY_ADDRESS"])
def test_status_finds_a_run_on_a_cluster_that_requires_a_token(name: str, by: str, tmp_path: Path) -> None:
    """By default, a cluster that `ray.init()` starts requires one."""
    assert os.environ["RAY_AUTH_MODE"] == "token"
    uri = f"file://{tmp_path}/{name}"
    _held = start_rendezvous(name, 10, driven_from(uri))
    address = ray.get_runtime_context().gcs_address
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
    if by == "RAY_ADDRESS":
        environment["RAY_ADDRESS"] = address
    line = [sys.executable, "-m", "elastic_ddp.cli.main", "status", uri if by == "folder" else name]
    with DriverLease(Storage(uri), name, lambda _: "session", print) as lease:
        lease.acquire()
        lease.renew(ray_address=address)
        result = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert name in result.stdout and f"Ray at {address}" in result.stdout
    assert not result.stderr


@pytest.mark.parametrize("mode", ["token", pytest.param("disabled", marks=pytest.mark.chaos)])
def test_token_authentication_is_enabled_only_for_clusters_that_require_it(mode: str) -> None:
    """This machine has a token of another cluster in both cases."""
    start = "import ray; ray.init('local', num_cpus=1, include_dashboard=False, logging_level='ERROR'); print('at', "
    start += "ray.get_runtime_context().gcs_address, flush=True); input()"
    use = "import os, ray; from elastic_ddp.ray_internals import use_token_on_this_machine as use; "
    use += "use(os.environ['RAY_ADDRESS']); ray.init(logging_level='ERROR'); "
    use += "A = type('A', (), {'ask': lambda self: 'answered'}); a = ray.remote(num_cpus=0)(A).remote(); "
    use += "print(ray.get(a.ask.remote(), timeout=60))"
    bare = {name: value for name, value in os.environ.items() if name not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", start], env={**bare, "RAY_AUTH_MODE": mode}, **piped) as cluster:
        assert cluster.stdout is not None
        address = next(line.split()[1] for line in cluster.stdout if line.startswith("at "))
        environment = {**bare, "RAY_ADDRESS": address}
        used = subprocess.run([sys.executable, "-c", use], env=environment, capture_output=True, text=True, timeout=90)
        cluster.communicate("\n")
    assert "answered" in used.stdout, used.stderr


def test_a_rendezvous_that_does_not_end_is_a_live_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_module, "OLD_ACTOR_TIMEOUT_S", 0.5)
    held = start_rendezvous(name, 10, driven_from(f"file:///runs/{name}"))
    with pytest.raises(ConfigError, match=rf"{name}.* is live .*file:///runs/{name}.* pid 123 on old-head"):
        start_rendezvous(name, 20, driven_from(f"file:///runs/{name}"))
    assert ray.get(held.status.remote())["total_steps"] == 10


def test_a_rendezvous_with_another_storage_is_another_run(name: str) -> None:
    held = start_rendezvous(name, 10, driven_from(f"file:///runs/{name}"))
    with pytest.raises(ConfigError, match="use another name"):
        start_rendezvous(name, 20, driven_from(f"file:///elsewhere/{name}"))
    assert ray.get(held.status.remote())["total_steps"] == 10
