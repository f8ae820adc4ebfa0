"""The only package that uses Ray's private APIs, and the check that the installed Ray has the version of these APIs.

`controller` adds and removes Ray Train workers while the others train; start reading there. `dataset` runs Ray Data.
"""

import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray

from elastic_ddp.errors import ConfigError

RAY_VERSION = "2.60"
"""The release whose private APIs this package uses."""
ANSWERS_WITHIN_S = 5.0
"""How long a cluster may take to answer."""


def check_ray_version() -> None:
    """Raises ConfigError for another Ray version. Call it before any module of this package is imported."""
    if not ray.__version__.startswith(f"{RAY_VERSION}."):
        raise ConfigError(
            f"Ray {ray.__version__} is installed, but elastic_ddp uses private APIs of ray=={RAY_VERSION}.*. "
            f"Run pip install 'ray[train]=={RAY_VERSION}.*' on all nodes."
        )


def check_home_folder() -> None:
    """Raises ConfigError for a user without a home folder, as in a container whose user is not in /etc/passwd.

    Without a home folder the import of Ray Train fails.
    """
    try:
        Path.home()
    except RuntimeError as error:
        raise ConfigError("This user has no home folder, and Ray needs one. Set HOME to a folder.") from error


def has_started_ray() -> bool:
    """Returns whether this process has started the cluster that it is connected to."""
    node: Any = ray._private.worker._global_node
    return node is not None and bool(node.is_head())


def has_ray_ended(*, is_ending: bool = False) -> bool:
    """Returns whether the cluster that this process has started has lost a process without which it cannot work.

    With `is_ending`, any of Ray's processes counts: after SIGTERM these two may wait for each other for a minute.
    """
    node: Any = ray._private.worker._global_node
    ended = node.dead_processes() if node is not None else []
    return any(is_ending or kind in ("gcs_server", "raylet") for kind, _ in ended)


@contextmanager
def separate_daemons() -> Iterator[None]:
    """Starts Ray's processes in sessions of their own in the `with` block.

    SIGTERM to the driver's process group, or the end of its terminal, would end Ray, and so the run before it commits.
    """
    services: Any = ray._private.services
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def use_token_on_this_machine(address: str) -> None:
    """Enables token authentication if the cluster at `address`, host:port or auto, needs it. Call it before `ray.init`.

    A cluster that `ray.init()` has started requires a token. Ray loads the token if it finds the cluster by itself, but
    not from a given address. A cluster without authentication rejects processes that enable it. This machine's token is
    not sent to other machines, unless `RAY_AUTH_MODE=token` is set.
    """
    from ray._private.authentication import authentication_token_setup

    from elastic_ddp.ray_internals.private_token import enable_token

    authentication_token_setup.logger.setLevel(logging.ERROR)  # it warns that a token exists
    if address == "auto":
        with suppress(ConnectionError):  # no cluster, or several; `ray.init` reports that better
            address = ray._private.services.canonicalize_bootstrap_address_or_die("auto")
    host = address.rpartition(":")[0].strip("[]")
    if "RAY_AUTH_MODE" not in os.environ and host and is_local(host) and _requires_token(address):
        enable_token()


def _requires_token(address: str) -> bool:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    with _silenced_stderr():  # Ray's C++ code logs the rejection
        try:
            GcsClient(address=address).internal_kv_get(b"session_name", b"session", timeout=ANSWERS_WITHIN_S)
        except ray.exceptions.AuthenticationError:
            return True
        except Exception:  # no cluster; `ray.init` reports that better
            return False
    return False


@contextmanager
def _silenced_stderr() -> Iterator[None]:
    """Discards what native code writes to standard error."""
    sys.stderr.flush()
    original = os.dup(2)
    try:
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), 2)
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)


def check_port(address: str, timeout_s: float = ANSWERS_WITHIN_S) -> None:
    """Opens and closes a connection to `address`, host:port. Raises ConnectionError if no process accepts it."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except (OSError, ValueError, OverflowError) as error:  # also an unknown host, or a port above 65535
        raise ConnectionError(*error.args) from error


def is_local(host: str) -> bool:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def start_at_zero(counter: Any, tags: Mapping[str, str]) -> None:
    """Exports a counter before its first increment, without which Prometheus' `increase` misses that increment."""
    counter._record(0.0, dict(tags))  # `inc` refuses 0
