"""The one place that touches Ray's internals, and the guard that it meets the Ray it was written for.

`dataset` runs Ray Data's executor; `controller` and `worker_group` change the number of Ray Train's workers in place.
With another Ray none of them is imported, and what Ray makes public has to do: see `ray_train` and `data.pipeline`.
"""

import logging
import os
import socket

import ray

WRITTEN_FOR = "2.60"


def are_known() -> bool:
    """Whether the Ray that is installed is the one whose internals these are."""
    return ray.__version__.rpartition(".")[0] == WRITTEN_FOR


def use_token_on_this_machine(address: str) -> None:
    """For a cluster whose address is given; before `ray.init`.

    One that `ray.init()` started asks for a token by default. Ray takes that into account where it finds a cluster by
    itself, but not where it is told the address.

    Args:
        address: host and port of a cluster. Of one on another machine it is not known whether it asks for a token:
            `RAY_AUTH_MODE=token` says so.
    """
    host = address.rpartition(":")[0].strip("[]")
    if "RAY_AUTH_MODE" in os.environ or not are_known() or not host or not _is_here(host):
        return
    from ray._private.authentication import authentication_token_setup as tokens

    tokens.logger.setLevel(logging.ERROR)  # it would warn that there is one
    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _is_here(host: str) -> bool:
    """Whether this machine has that address."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as any_port:
            any_port.bind(place)
    except OSError:
        return False
    return True
