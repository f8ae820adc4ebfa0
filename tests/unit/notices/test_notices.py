"""A cloud's notice becomes one drain of this machine's Ray nodes, before the machine goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ddp.errors import ConfigError
from elastic_ddp.notices.metadata import Notice, find_service
from elastic_ddp.notices.watch import DrainError, Watch
from elastic_ddp.ray_internals.drain import drain, local_nodes
from tests.metadata_server import (
    INTERRUPTION,
    MAINTENANCE,
    PREEMPTED,
    REBALANCE,
    MetadataServer,
    interruption,
    rebalance,
    serving,
)

NOW = datetime(2026, 5, 1, 8, 20, 0, tzinfo=UTC).timestamp()
IN_TWO_MINUTES = "2026-05-01T08:22:00Z"
ON_GCP = {PREEMPTED: "FALSE", MAINTENANCE: "NONE"}


class Watched:
    """A watch of a fake server. It records drains, and fails them while `error` is set."""

    def __init__(self, server: MetadataServer, drain_on_rebalance: bool = False) -> None:
        self.server = server
        self.lines: list[str] = []
        self.deadlines: list[float | None] = []
        """Of the drains, as Unix times."""
        self.error: str | None = None
        self.now = NOW

        def clock() -> float:
            return self.now

        service = find_service(server.environment, clock=clock)
        self._watch = Watch(service, self._drain, self.lines.append, drain_on_rebalance=drain_on_rebalance, clock=clock)

    def _drain(self, notice: Notice) -> str:
        if self.error is not None:
            raise DrainError(self.error)
        self.deadlines.append(notice.deadline)
        return "f00d"

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self._watch.poll()


@contextmanager
def aws(*, drain_on_rebalance: bool = False) -> Iterator[Watched]:
    with serving() as server:
        yield Watched(server, drain_on_rebalance)


@contextmanager
def gcp() -> Iterator[Watched]:
    with serving(ON_GCP) as server:
        watched = Watched(server)
        watched.poll()  # does not wait
        yield watched


@pytest.mark.parametrize("action", ["terminate", "hibernate"])
def test_a_spot_interruption_notice_drains_the_node_once_with_its_deadline(action: str) -> None:
    with aws() as watched:
        watched.poll(2)
        assert not watched.deadlines and not watched.lines
        watched.server.put(INTERRUPTION, interruption(IN_TWO_MINUTES, action))
        watched.poll(3)
    assert watched.deadlines == [NOW + 120]
    assert watched.lines == [f"AWS will {action} this machine at {IN_TWO_MINUTES}; draining Ray node f00d, 120 s left"]


def test_a_new_interruption_time_drains_the_node_again() -> None:
    with aws() as watched:
        for time in (IN_TWO_MINUTES, "2026-05-01T08:21:00Z"):
            watched.server.put(INTERRUPTION, interruption(time))
            watched.poll(2)
    assert watched.deadlines == [NOW + 120, NOW + 60]


def test_a_rebalance_recommendation_is_logged_and_drains_only_on_request() -> None:
    for drain_on_rebalance, deadlines in ((False, []), (True, [None])):
        with aws(drain_on_rebalance=drain_on_rebalance) as watched:
            watched.server.put(REBALANCE, rebalance(IN_TWO_MINUTES))
            watched.poll(2)
            assert watched.deadlines == deadlines and len(watched.lines) == 1
            assert "rebalance recommendation" in watched.lines[0]
            watched.server.put(INTERRUPTION, interruption(IN_TWO_MINUTES))
            watched.poll(2)
        assert watched.deadlines == [*deadlines, NOW + 120]


def test_a_rebalance_recommendation_does_not_replace_the_deadline_of_an_interruption() -> None:
    with aws(drain_on_rebalance=True) as watched:
        watched.server.put(INTERRUPTION, interruption(IN_TWO_MINUTES))
        watched.server.put(REBALANCE, rebalance(IN_TWO_MINUTES))
        watched.poll(3)
    assert watched.deadlines == [NOW + 120]


def test_an_expired_token_is_renewed() -> None:
    with aws() as watched:
        watched.poll()
        watched.server.tokens.clear()
        watched.server.put(INTERRUPTION, interruption(IN_TWO_MINUTES))
        watched.poll(2)
        assert watched.server.num_tokens == 2
    assert watched.deadlines == [NOW + 120]


def test_the_watch_outlives_a_restart_of_the_metadata_service() -> None:
    with aws() as watched:
        watched.poll()
        port = watched.server.server_port
    watched.poll(2)
    assert len(watched.lines) == 1 and "the metadata service of AWS fails" in watched.lines[0]
    with serving({INTERRUPTION: interruption(IN_TWO_MINUTES)}, port):  # it knows no token
        watched.poll(2)
    assert watched.deadlines == [NOW + 120]


@pytest.mark.parametrize("body", ["", "{}"])
def test_a_notice_that_cannot_be_read_is_logged_and_read_again(body: str) -> None:
    with aws() as watched:
        watched.server.put(INTERRUPTION, body)
        watched.poll(2)
        assert len(watched.lines) == 1 and "fails" in watched.lines[0]
        watched.server.put(INTERRUPTION, interruption(IN_TWO_MINUTES))
        watched.poll()
    assert watched.deadlines == [NOW + 120]


def test_advice_that_cannot_be_read_does_not_hide_an_interruption() -> None:
    with aws() as watched:
        watched.server.put(REBALANCE, "oops")
        watched.server.put(INTERRUPTION, interruption(IN_TWO_MINUTES))
        watched.poll(2)
    assert watched.deadlines == [NOW + 120]


def test_a_drain_that_fails_is_repeated_and_logged_once() -> None:
    with aws() as watched:
        watched.error = "Ray does not respond"
        watched.server.put(INTERRUPTION, interruption(IN_TWO_MINUTES))
        watched.poll(3)
        watched.error = None
        watched.poll(2)
    assert watched.deadlines == [NOW + 120]
    failure, drained, _ = watched.lines
    assert "but the drain fails (Ray does not respond)" in failure and "draining Ray node f00d" in drained


def test_a_preemption_drains_the_machine_once_and_its_deadline_counts_from_its_first_notice() -> None:
    with gcp() as watched:
        watched.poll()
        assert not watched.deadlines
        watched.error = "Ray does not respond"
        watched.server.put(PREEMPTED, "TRUE")
        watched.poll()
        watched.now += 20
        watched.error = None
        watched.poll(3)
    assert watched.deadlines == [NOW + 30]
    assert watched.lines[1] == "GCP preempts this machine; draining Ray node f00d, 10 s left"


def test_host_maintenance_drains_a_machine_that_it_stops_but_not_one_that_migrates() -> None:
    with gcp() as watched:
        watched.server.put(MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE")
        watched.poll()
        assert not watched.deadlines
        watched.server.put(MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
        watched.poll(2)
        assert watched.deadlines == [NOW + 60]
        watched.server.put(PREEMPTED, "TRUE")
        watched.poll(2)
    assert watched.deadlines == [NOW + 60, NOW + 30]


def test_a_machine_outside_a_cloud_is_refused_in_one_sentence() -> None:
    with serving() as server:
        environment = server.environment
    pauses: list[float] = []
    with pytest.raises(ConfigError, match=r"no metadata service of AWS .* or GCP .* responds") as refused:
        find_service(environment, sleep=pauses.append)
    assert pauses == [1.0, 1.0] and server.host in str(refused.value)


def test_a_metadata_service_that_is_slow_to_start_is_found() -> None:
    with serving(ON_GCP) as server:
        server.is_failing = True

        def start(_: float) -> None:
            server.is_failing = False

        assert find_service(server.environment, sleep=start).name == "GCP"


@pytest.fixture
def cluster() -> Any:
    """A fake Ray cluster: this machine with two nodes, and another machine."""
    addresses = {b"a": "127.0.0.1", b"b": "127.0.0.1", b"c": "198.51.100.9"}
    nodes = {name: SimpleNamespace(node_manager_address=address) for name, address in addresses.items()}
    drained: list[tuple[Any, ...]] = []
    cluster = SimpleNamespace(nodes=nodes, drained=drained, rejection="")
    cluster.get_all_node_info = lambda **_: cluster.nodes

    def drain_node(*request: Any) -> tuple[bool, str]:
        drained.append(request)
        return not cluster.rejection, cluster.rejection

    cluster.drain_node = drain_node
    return cluster


def test_the_ray_nodes_of_this_machine_are_drained_and_no_others(cluster: Any) -> None:
    drain(cluster, local_nodes(cluster), "why", 1234)
    assert [(node, why, deadline) for node, _, why, deadline in cluster.drained] == [
        (b"a".hex(), "why", 1234),
        (b"b".hex(), "why", 1234),
    ]


def test_a_drain_without_a_node_on_this_machine_or_that_ray_rejects_is_an_error(cluster: Any) -> None:
    cluster.rejection = "the node is the head"
    with pytest.raises(ConfigError, match="rejects the drain of node a: the node is the head"):
        drain(cluster, ["a"], "why", 0)
    cluster.nodes = {key: node for key, node in cluster.nodes.items() if key == b"c"}
    with pytest.raises(ConfigError, match=r"no node with an address of this machine; .*198\.51\.100\.9"):
        local_nodes(cluster)


def test_the_command_logs_why_a_drain_would_fail_and_ends_on_sigterm() -> None:
    with serving({INTERRUPTION: interruption(IN_TWO_MINUTES)}) as server:
        command = [sys.executable, "-m", "elastic_ddp.cli.main", "watch-notices"]
        environment = {**os.environ, **server.environment, "RAY_ADDRESS": "nonsense"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            lines = [watching.stdout.readline() for _ in range(2)]
            watching.terminate()
            assert watching.wait(10) == -signal.SIGTERM
    assert "watching the notices of AWS" in lines[0] and "a drain would fail now: " in lines[0]
    assert f"AWS will terminate this machine at {IN_TWO_MINUTES}, but the drain fails (" in lines[1]
    assert all("Invalid address format: nonsense" in line for line in lines)
