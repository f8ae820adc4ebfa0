"""The one place that touches Ray's internals, and the guard that it meets the Ray it was written for.

`dataset` runs Ray Data's executor; `controller` and `worker_group` change the number of Ray Train's workers in place.
With another Ray none of them is imported, and what Ray makes public has to do: see `ray_train` and `data.pipeline`.
"""

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

WRITTEN_FOR = "2.60"
ANSWERS_WITHIN_S = 5.0
"""What a cluster is given to answer."""


def are_known() -> bool:
    """Whether the Ray that is installed is the one whose internals these are."""
    return ray.__version__.rpartition(".")[0] == WRITTEN_FOR


def has_started_ray(session_dir: str) -> bool:
    """Whether this process has started the cluster that it is connected to, whose session has that folder."""
    if not are_known():
        return session_dir.endswith(f"_{os.getpid()}")  # which may be that of a process in another container
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
    if not are_known():
        return
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
