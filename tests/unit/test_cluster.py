"""How a driver connects to a Ray cluster."""

from __future__ import annotations

import re
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from elastic_ddp.driver import cluster
from elastic_ddp.driver.cluster import connect, connect_or_start
from elastic_ddp.driver.trainer import ElasticTrainer
from elastic_ddp.errors import ConfigError


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "[::1]:{port}", "127.0.0.1:70000", "no-such-host.invalid:1"])
def test_an_address_at_which_no_cluster_responds_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Ray itself would retry for minutes."""
    with socket.socket() as bound:  # but not listening
        bound.bind(("127.0.0.1", 0))
        address = address.format(port=bound.getsockname()[1])
        monkeypatch.setenv("RAY_ADDRESS", address)
        message = f"RAY_ADDRESS='{re.escape(address)}': no Ray cluster responds .* or to local"
        with pytest.raises(ConfigError, match=message):
            connect_or_start(print)


@pytest.fixture
def ray_is(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake Ray: `is_head` if this process started it, and `error` is raised by `ray.init`."""
    ray_is = SimpleNamespace(is_head=True, address="10.0.0.9:6379", error=None, up=False)

    def init(**options: Any) -> None:
        if ray_is.error is not None:
            raise ray_is.error
        ray_is.options = options
        ray_is.up = True

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr("ray._private.worker._global_node", SimpleNamespace(is_head=lambda: ray_is.is_head))
    monkeypatch.setattr(ray, "is_initialized", lambda: ray_is.up)
    context = lambda: SimpleNamespace(gcs_address=ray_is.address, get_job_id=lambda: "01000000")  # noqa: E731
    monkeypatch.setattr(ray, "get_runtime_context", context)
    monkeypatch.setattr(cluster, "_runtime_envs", {})
    monkeypatch.setattr(cluster, "_started", [])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return ray_is


def test_the_error_of_ray_is_shown_if_it_finds_no_cluster(ray_is: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    ray_is.error = ConnectionError("Could not find any running Ray instance")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS='auto': .*Could not find any running"):
        connect_or_start(print)


def test_a_cluster_on_this_machine_that_does_not_respond_is_refused(ray_is: Any) -> None:
    """Ray found its address in files of an earlier cluster."""
    ray_is.error = ConnectionError("ray cluster at 10.0.0.9:6379 is not reachable")
    with pytest.raises(ConfigError, match=r"Ray on this machine fails \(.*not reachable\).* RAY_ADDRESS .* local"):
        connect_or_start(print)


def test_an_error_of_starting_ray_is_passed_on(ray_is: Any) -> None:
    ray_is.error = OSError("AF_UNIX path length cannot exceed 107 bytes")
    with pytest.raises(OSError, match="AF_UNIX path length"):
        connect_or_start(print)


def test_a_ray_client_address_is_refused(ray_is: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.9:10001")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS='ray://10\.0\.0\.9:10001': Ray Client"):
        connect_or_start(print)


def test_a_cluster_that_this_process_started_is_still_its_own_in_the_next_run(ray_is: Any) -> None:
    notes: list[str] = []
    assert connect_or_start(notes.append) and connect_or_start(notes.append)
    assert notes == [f"started Ray on this machine, at {ray_is.address} (RAY_ADDRESS selects another cluster)"]
    ray_is.address = "10.0.0.10:6379"  # another cluster
    assert not connect_or_start(notes.append)


def test_a_cluster_that_another_process_started_may_grow(ray_is: Any) -> None:
    notes: list[str] = []
    ray_is.is_head = False
    assert not connect_or_start(notes.append) and not connect_or_start(notes.append)
    assert len(notes) == 1 and notes[0].startswith("using Ray at 10.0.0.9:6379 ")


def test_ray_gets_the_runtime_env_once_and_another_one_comes_too_late(ray_is: Any) -> None:
    given = {"working_dir": "."}
    connect_or_start(print, given)
    assert ray_is.options["runtime_env"] == given
    connect_or_start(print, {"working_dir": "."})
    connect_or_start(print)
    with pytest.raises(ConfigError, match=r"runtime_env with pip comes too late: .*own ray\.init"):
        connect_or_start(print, {"pip": ["einops"]})


def test_a_runtime_env_that_ray_refuses_is_an_error_of_the_configuration(ray_is: Any) -> None:
    ray_is.error = ValueError("Failed to merge the Job's runtime env")  # as of `ray job submit --working-dir`
    with pytest.raises(ConfigError, match=r"Ray refuses runtime_env with working_dir: Failed to merge"):
        connect_or_start(print, {"working_dir": "."})


@pytest.mark.parametrize("version", ["2.59.1", "2.61.0", "2.600.0", "3.0.0.dev0"])
def test_another_ray_version_is_refused_with_the_version_to_install(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(ray, "__version__", version)
    message = rf"Ray {re.escape(version)} is installed.*ray==2\.60\.\*.*pip install 'ray\[train\]==2\.60\.\*'"
    for start in (connect, lambda: ElasticTrainer(print, "data", {})):
        with pytest.raises(ConfigError, match=message):
            start()
