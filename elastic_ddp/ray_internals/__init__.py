"""The only package that uses Ray's private APIs, and the check that the installed Ray is the version they belong to.

`controller` adds and removes Ray Train workers while the others train; start reading there. `dataset` runs Ray Data.
"""

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from elastic_ddp.errors import ConfigError

RAY_VERSION = "2.60"
"""The release whose private APIs this package uses."""
ANSWERS_WITHIN_S = 5.0
"""What a cluster is given to answer."""


def check_ray_version() -> None:
    """Checks the installed Ray version. Call it before any module of this package is imported.

    Raises:
        ConfigError: another version is installed.
    """
    if not ray.__version__.startswith(f"{RAY_VERSION}."):
        raise ConfigError(
            f"Ray {ray.__version__} is installed, but elastic_ddp uses private APIs of ray=={RAY_VERSION}.*. "
            f"Run pip install 'ray[train]=={RAY_VERSION}.*' on all nodes."
        )


def has_started_ray() -> bool:
    """Whether this process has started the cluster that it is connected to."""
    node: Any = ray._private.worker._global_node
    return bool(node.is_head())


def use_token_on_this_machine(address: str) -> None:
    """For a cluster whose address is given; before `ray.init`.

    One that `ray.init()` started asks for a token by default. Ray takes that into account where it finds a cluster by
    itself, but not where it is told the address. A cluster that asks for none could not reach a process that does.

    Args:
        address: host and port of a cluster. One on another machine is not sent this one's token: `RAY_AUTH_MODE=token`
            says that it is to be.
    """
    from ray._private.authentication import authentication_token_setup as tokens

    tokens.logger.setLevel(logging.ERROR)  # it would warn that there is one
    host = address.rpartition(":")[0].strip("[]")
    if "RAY_AUTH_MODE" in os.environ or not host or not _is_here(host) or not _asks_token(address):
        return
    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _asks_token(address: str) -> bool:
    """Whether a cluster refuses a question that comes without one."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    with _silence():  # Ray's C++ writes down the refusal that is looked for
        try:
            GcsClient(address=address).internal_kv_get(b"session_name", b"session", timeout=ANSWERS_WITHIN_S)
        except ray.exceptions.AuthenticationError:
            return True
        except Exception:  # there is none, which `ray.init` says better
            return False
    return False


@contextmanager
def _silence() -> Iterator[None]:
    """For what writes to the process' standard error past Python."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _is_here(host: str) -> bool:
    """Whether this machine has that address."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as any_port:
            any_port.bind(place)
    except OSError:
        return False
    return True
