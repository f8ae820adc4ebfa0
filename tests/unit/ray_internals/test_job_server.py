"""The connection to a cluster's job server, which is its dashboard."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._raylet import AuthenticationTokenLoader, Config

from elastic_ddp.errors import ConfigError
from elastic_ddp.ray_internals import job_server as jobs
from elastic_ddp.ray_internals.job_server import connect_to_jobs


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A dashboard on this machine. It checks `token` if that is set, and records what it has received."""
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    facts = SimpleNamespace(token=None, received=[])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = self.headers.get("Authorization")
            facts.received.append((self.path, given))
            is_allowed = facts.token is None or given == f"Bearer {facts.token}"
            self.send_response(200 if is_allowed else 401)
            self.end_headers()
            answer = {"version": "4", "ray_version": ray.__version__, "ray_commit": "", "session_name": "session_1"}
            self.wfile.write(json.dumps(answer).encode() if is_allowed else b"Unauthorized")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("0.0.0.0", 0), Handler) as server:
        facts.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield facts
        server.shutdown()


@pytest.fixture
def gcs(dashboard: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cluster that RAY_ADDRESS names, on this machine; its GCS knows the dashboard's address and the session."""
    place = dashboard.address.removeprefix("http://")
    gcs = SimpleNamespace(known={b"session_name": b"session_1", b"dashboard": place.encode()})
    monkeypatch.setattr(
        "ray._raylet.GcsClient", lambda **_: SimpleNamespace(internal_kv_get=lambda key, *_: gcs.known.get(key))
    )
    monkeypatch.setattr(jobs, "use_token_on_this_machine", lambda address: None)
    monkeypatch.setenv("RAY_ADDRESS", place)  # a port at which something listens
    return gcs


def test_the_dashboard_is_found_by_its_own_address(dashboard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", dashboard.address)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert connect_to_jobs().get_address() == dashboard.address


def test_the_dashboard_is_found_by_the_address_of_the_cluster(dashboard: Any, gcs: Any) -> None:
    assert connect_to_jobs().get_address() == dashboard.address


def test_a_cluster_without_a_dashboard_is_an_error_with_what_to_install_and_to_start(gcs: Any) -> None:
    """Ray records an address also if no process listens at it."""
    message = r"runs no dashboard.*pip install 'ray\[default\]==2\.60\.\*'.*--include-dashboard=true"
    gcs.known[b"dashboard"] = b"127.0.0.1:1"
    with pytest.raises(ConfigError, match=message):
        connect_to_jobs()
    del gcs.known[b"dashboard"]
    with pytest.raises(ConfigError, match=message):
        connect_to_jobs()


def test_a_job_is_never_submitted_to_another_cluster_whose_dashboard_has_the_port(gcs: Any) -> None:
    gcs.known[b"session_name"] = b"session_2"
    with pytest.raises(ConfigError, match="runs no dashboard"):
        connect_to_jobs()


def test_a_dashboard_that_listens_on_the_head_only_is_an_error_elsewhere(
    gcs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "is_local", lambda host: False)
    ways = r"forward the head's port 8265 .*`ssh -L`, `kubectl port-forward` or `ray dashboard CLUSTER\.yaml`"
    with pytest.raises(ConfigError, match=rf"of the head only.*{ways}.*RAY_API_SERVER_ADDRESS"):
        connect_to_jobs()


@pytest.mark.parametrize(
    ("address", "message"),
    [("http://127.0.0.1:1", "no dashboard responds at http"), ("ray://a:10001", "http://HOST:8265")],
)
def test_an_address_without_a_dashboard_is_an_error(
    dashboard: Any, monkeypatch: pytest.MonkeyPatch, address: str, message: str
) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address)
    with pytest.raises(ConfigError, match=message):
        connect_to_jobs()


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The token of this user, in Ray's place for it."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    monkeypatch.delenv("RAY_AUTH_MODE")
    Config.initialize("")  # Ray's C++ code keeps the mode and the token of earlier tests
    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()
    yield "secret"
    monkeypatch.undo()
    Config.initialize("")
    loader.reset_cache()


def test_the_token_of_this_user_is_sent_to_a_dashboard_on_this_machine_that_needs_it(
    dashboard: Any, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard.token = token
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", dashboard.address)
    assert connect_to_jobs().get_version() == "4"
    assert dashboard.received[0][1] is None and dashboard.received[-1][1] == f"Bearer {token}"


def test_the_token_is_not_sent_to_another_machine_unless_that_is_asked_for(
    dashboard: Any, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard.token = token
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", dashboard.address)
    monkeypatch.setattr(jobs, "is_local", lambda host: False)
    with pytest.raises(ConfigError, match=r"checks Ray's token\. Set RAY_AUTH_MODE=token"):
        connect_to_jobs()
    assert {given for _, given in dashboard.received} == {None}
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    Config.initialize("")
    assert connect_to_jobs().get_version() == "4"
