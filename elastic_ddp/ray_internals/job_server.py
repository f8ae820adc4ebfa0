"""Connects to the job server of a cluster: the dashboard of its head, which needs `ray[default]`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import aiohttp
import ray
from ray.job_submission import JobSubmissionClient

from elastic_ddp.errors import ConfigError
from elastic_ddp.ray_internals import (
    ANSWERS_WITHIN_S,
    RAY_VERSION,
    check_port,
    is_local,
    use_token_on_this_machine,
)
from elastic_ddp.ray_internals.private_token import enable_token

_ADDRESS = "RAY_API_SERVER_ADDRESS"
_FORWARD = (
    "Run the command on the head, or forward the head's port 8265 to this machine, with `ssh -L`, `kubectl "
    f"port-forward` or `ray dashboard CLUSTER.yaml`, and set {_ADDRESS}=http://127.0.0.1:8265."
)


def connect_to_jobs(address: str | None = None) -> JobSubmissionClient:
    """Connects to the job server of a cluster, by default at `RAY_API_SERVER_ADDRESS`, `RAY_ADDRESS`, or here.

    Raises ConfigError if no cluster responds, it has no dashboard that this machine can reach, or it rejects the token.
    """
    address = address or os.environ.get(_ADDRESS) or os.environ.get("RAY_ADDRESS") or "auto"
    session = None
    if "://" not in address:
        address, session = _find_dashboard(address)
    elif not address.startswith("http"):
        raise ConfigError(f"{address!r} is not the address of a dashboard. Set {_ADDRESS}, as http://HOST:8265.")
    url = urlsplit(address)
    try:
        check_port(f"{url.hostname}:{url.port or 80}")
    except (ConnectionError, ValueError) as error:
        if session is not None:
            raise _no_dashboard(address) from None
        raise ConfigError(
            f"no dashboard responds at {address} ({error}). Set {_ADDRESS} to the dashboard of the cluster."
        ) from None
    client = _create_client(address)
    if session is not None and client._do_request("GET", "/api/version").json()["session_name"] != session:
        raise _no_dashboard(address)  # it is the dashboard of another cluster on that machine
    return client


def _no_dashboard(address: str) -> ConfigError:
    return ConfigError(
        f"the head of the cluster runs no dashboard (at {address}), which submitted jobs need. On the head, call `pip "
        f"install 'ray[default]=={RAY_VERSION}.*'`, and `ray start --head` with --include-dashboard=true."
    )


def _find_dashboard(address: str) -> tuple[str, str]:
    """Returns the URL of a cluster's dashboard, and the name of the cluster's session."""
    from ray._private import ray_constants as names
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        gcs_address: str = ray._private.services.canonicalize_bootstrap_address_or_die(address)
        check_port(gcs_address)
    except (OSError, ValueError) as error:
        place = "on this machine" if address == "auto" else f"at {address}"
        raise ConfigError(f"no Ray cluster responds {place} ({error}). {_FORWARD}") from None
    use_token_on_this_machine(gcs_address)
    gcs = GcsClient(address=gcs_address)
    try:
        session = gcs.internal_kv_get(b"session_name", names.KV_NAMESPACE_SESSION, ANSWERS_WITHIN_S)
        dashboard = gcs.internal_kv_get(
            names.DASHBOARD_ADDRESS.encode(), names.KV_NAMESPACE_DASHBOARD, ANSWERS_WITHIN_S
        )
    except ray.exceptions.AuthenticationError:
        raise _wrong_token(gcs_address) from None
    if not dashboard:
        raise _no_dashboard("an unknown address")
    place = dashboard.decode()
    is_loopback = place.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
    if is_loopback and not is_local(gcs_address.rpartition(":")[0].strip("[]")):
        raise ConfigError(
            f"the dashboard of the cluster at {gcs_address} listens on {place} of the head only, and this machine is "
            f"not the head. {_FORWARD}"
        )
    return f"http://{place}", session.decode()


def _wrong_token(address: str) -> ConfigError:
    return ConfigError(
        f"the cluster at {address} rejects this process: it checks Ray's token. Set RAY_AUTH_MODE=token, and put the "
        "token of the cluster into ~/.ray/auth_token."
    )


def _create_client(address: str) -> JobSubmissionClient:
    while True:
        try:
            with _overridden(_ADDRESS, address):  # `RAY_ADDRESS` has precedence over the argument
                return JobSubmissionClient(address)
        except ray.exceptions.AuthenticationError:
            may_enable = "RAY_AUTH_MODE" not in os.environ and is_local(urlsplit(address).hostname or "")
            if not (may_enable and enable_token()):
                raise _wrong_token(address) from None
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"no dashboard of Ray responds at {address} ({error}).") from error


@contextmanager
def _overridden(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def follow_log(client: JobSubmissionClient, job: str, start: int, write: Callable[[str], None]) -> int:
    """Passes the log of a job, from its character `start` on, to `write` until the job ends or the connection breaks.

    Returns the number of the next character.
    """

    async def follow() -> int:
        chunks = aiter(client.tail_job_logs(job))
        position = 0
        while True:
            try:
                chunk = await anext(chunks)
            except (StopAsyncIteration, RuntimeError, OSError, aiohttp.ClientError):
                return max(start, position)
            position += len(chunk)
            if position > start:
                write(chunk[start - position :])

    return asyncio.run(follow())
