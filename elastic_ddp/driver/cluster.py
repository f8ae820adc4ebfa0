"""How a process gets onto a Ray cluster: that which it is told of, one on this machine or, for a driver, its own."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

import ray

from elastic_ddp.errors import ConfigError
from elastic_ddp.ray_internals import check_ray_version, has_started_ray, use_token_on_this_machine
from elastic_ddp.rendezvous.actor import ANSWERS_WITHIN_S, NAMESPACE

_started: list[str] = []
"""Addresses of the clusters that this process has started."""
RESUMES = "the same command resumes it from its newest commit"


def connect_or_start(note: Callable[[str], None]) -> bool:
    """Connects a driver to the cluster that `RAY_ADDRESS` names, or that `ray start` began on this machine; otherwise
    starts one here. Nothing where it is connected.

    Args:
        note: tells a person at the terminal which it is.

    Returns:
        Whether the cluster is one that this function started, of this machine alone.

    Raises:
        ConfigError: nobody answers at `RAY_ADDRESS`, or it is one of Ray Client.
    """
    if ray.is_initialized():
        return ray.get_runtime_context().gcs_address in _started
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS={address!r}: Ray Client cannot drive a run, which has to be within the cluster; run the "
            "program on one of its nodes, or by ray job submit"
        )
    try:
        _reach(address)
        ray.init(log_to_driver=True, logging_level=logging.WARNING)
    except ConnectionError as error:
        where = f"RAY_ADDRESS={address!r}: no Ray cluster answers there" if address else "the Ray of this machine fails"
        raise ConfigError(
            f"{where} ({error}); set RAY_ADDRESS to the address of a cluster that answers, or to local, which starts "
            "one on this machine"
        ) from error
    address = ray.get_runtime_context().gcs_address
    if not has_started_ray():
        note(f"using Ray at {address} (RAY_ADDRESS names another cluster, RAY_ADDRESS=local starts one here)")
        return False
    note(f"started Ray on this machine, at {address} (RAY_ADDRESS names a cluster to use instead)")
    _started.append(address)
    return True


def connect(address: str | None = None) -> None:
    """Connects whoever asks about runs to a cluster; by default to that of `RAY_ADDRESS`, or of this machine. Nothing
    where it is connected.

    Raises:
        ConfigError: there is none, or another Ray is installed.
    """
    if ray.is_initialized():
        return
    check_ray_version()
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if address == "local":
        raise ConfigError("RAY_ADDRESS=local is no cluster to ask; set it to the address that the run printed")
    try:
        _reach(address)
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
    except OSError:
        raise ConfigError(
            f"there is no Ray cluster {'' if address == 'auto' else f'at {address} '}to ask; set RAY_ADDRESS to the "
            "address that the run printed, or run this on a node of the cluster. What a run starts ends with it: "
            "`elastic-ddp show <storage>/<name>` tells what became of the run. If its driver was killed, "
            f"{RESUMES}"
        ) from None


def _reach(address: str) -> None:
    """Raises a ConnectionError if nobody answers at a host and port: Ray itself would knock for minutes. Whatever else
    an address may be is left to Ray."""
    host, _, port = address.rpartition(":")
    if "/" not in host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS_WITHIN_S).close()
        except (OSError, OverflowError) as error:  # a name that nobody has, a port that there cannot be
            raise ConnectionError(str(error)) from error
    use_token_on_this_machine(address)
