"""How a driver connects to a Ray cluster."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from elastic_ddp.driver import cluster
from elastic_ddp.driver.cluster import connect, connect_or_start
from elastic_ddp.driver.trainer import ElasticTrainer
from elastic_ddp.errors import ConfigError
from elastic_ddp.ray_internals import nodes


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
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return ray_is


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("auto", ConnectionError("Could not find any Ray"), r"RAY_ADDRESS='auto': .*Could not find any Ray"),
        # Ray found its address in files of an earlier cluster.
        ("", ConnectionError("not reachable"), r"Ray on this machine fails \(not reachable\).* RAY_ADDRESS .* local"),
        ("", OSError("AF_UNIX path length cannot exceed 107 bytes"), "AF_UNIX path length"),
    ],
)
def test_an_error_of_ray_is_shown(
    ray_is: Any, monkeypatch: pytest.MonkeyPatch, address: str, error: OSError, message: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    ray_is.error = error
    with pytest.raises(ConfigError if isinstance(error, ConnectionError) else OSError, match=message):
        connect_or_start(print)


def test_a_ray_client_address_is_refused(ray_is: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.9:10001")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS='ray://10\.0\.0\.9:10001': Ray Client"):
        connect_or_start(print)


@pytest.mark.parametrize(("is_head", "note"), [(True, "started Ray on this machine, at "), (False, "using Ray at ")])
def test_a_cluster_that_this_process_started_is_its_own_also_in_the_next_run(
    ray_is: Any, is_head: bool, note: str
) -> None:
    notes: list[str] = []
    ray_is.is_head = is_head
    assert connect_or_start(notes.append) is connect_or_start(notes.append) is is_head
    assert len(notes) == 1 and notes[0].startswith(f"{note}{ray_is.address} (RAY_ADDRESS selects another")


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


@pytest.mark.parametrize("version", ["2.59.1", "2.61.0", "2.600.0"])
def test_another_ray_version_is_refused_with_the_version_to_install(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(ray, "__version__", version)
    message = rf"Ray {re.escape(version)} is installed.*ray==2\.60\.\*.*pip install 'ray\[train\]==2\.60\.\*'"
    for start in (connect, lambda: ElasticTrainer(print, "data", {})):
        with pytest.raises(ConfigError, match=message):
            start()


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A cluster of two nodes at `address`; nodes in `here` run on this machine. `error` is raised by its GCS."""
    away = SimpleNamespace(here=set(), error=None, nodes=["10.0.0.2", "10.0.0.1"], has_head=True)

    def nodes_of(**_: Any) -> dict[Any, Any]:
        if away.error is not None:
            raise away.error
        return {
            bytes([n]): SimpleNamespace(node_manager_address=each, is_head_node=away.has_head and n == 1)
            for n, each in enumerate(away.nodes, 1)
        }

    monkeypatch.setattr("ray._raylet.GcsClient", lambda **_: SimpleNamespace(get_all_node_info=nodes_of))
    monkeypatch.setattr("ray._private.services.find_node_ids", lambda: away.here)
    monkeypatch.setattr(nodes, "ANSWERS_WITHIN_S", 0.0)
    monkeypatch.setattr(cluster, "use_token_on_this_machine", lambda address: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        away.address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", away.address)
        yield away


def test_a_driver_that_is_on_no_node_of_the_cluster_is_refused_with_the_nodes(away: SimpleNamespace) -> None:
    """Ray would wait for a minute for a node on this machine."""
    message = rf"not a node of .* at {away.address}\. Its nodes are 10\.0\.0\.1, 10\.0\.0\.2\. .*`elastic-ddp submit"
    with pytest.raises(ConfigError, match=message):
        connect_or_start(print)
    with pytest.raises(ConfigError, match=r"^this machine is not a node"):
        connect_or_start(print, {"pip": ["wandb"]})
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1, 10\.0\.0\.2\. Run this command on one of them"):
        connect()
    away.nodes = [f"10.0.0.{n}" for n in range(10, 90)]
    with pytest.raises(ConfigError, match=r"10\.0\.0\.14, …\. Run"):
        connect()


def test_a_driver_elsewhere_is_refused_also_without_the_token(away: SimpleNamespace) -> None:
    away.error = ray.exceptions.AuthenticationError("no token")
    with pytest.raises(ConfigError, match=r"not a node of the Ray cluster at \S+\. Run the program"):
        connect_or_start(print)


@pytest.mark.parametrize(
    "cluster_is",
    [
        {"here": {"02", "ff"}},
        {"error": RuntimeError("the GCS is busy")},
        {"here": {"ff"}, "error": ray.exceptions.AuthenticationError("no token")},
        {"nodes": []},
        {"has_head": False},  # the GCS responds, and other nodes join, seconds before the head's raylet has started
    ],
)
def test_a_driver_is_refused_only_if_surely_no_node_is_on_its_machine(
    away: SimpleNamespace, ray_is: Any, monkeypatch: pytest.MonkeyPatch, cluster_is: dict[str, Any]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", away.address)
    ray_is.is_head = False
    vars(away).update(cluster_is)
    connect_or_start(print)
    assert ray_is.up
