"""Connects a process to a Ray cluster, or starts one on this machine."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray

from elastic_ddp.driver.display import print_note
from elastic_ddp.errors import ConfigError, shorten
from elastic_ddp.ray_internals import (
    check_port,
    check_ray_version,
    has_started_ray,
    separate_daemons,
    use_token_on_this_machine,
)
from elastic_ddp.ray_internals.nodes import nodes_if_none_is_here
from elastic_ddp.ray_internals.private_token import init_ray
from elastic_ddp.rendezvous.actor import NAMESPACE

_runtime_envs: dict[str, Mapping[str, Any]] = {}
"""The runtime environment that `connect_or_start` gave to each Ray job of this process."""
RESUMES = "the same command resumes it from its newest commit"
_NODES_SHOWN = 5
"""Number of node addresses in an error message."""
_SUBMIT = "with `elastic-ddp submit SCRIPT -- ARGS` or `ray job submit`"


@contextmanager
def tolerated_deprecations() -> Iterator[None]:
    """Ignores deprecations inside Ray, which are errors with `python -W error` or a filter of pytest."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=r"ray(\.|$)")
        yield


def connect_or_start(note: Callable[[str], None], runtime_env: Mapping[str, Any] | None = None) -> bool:
    """Connects a driver to the Ray cluster at `RAY_ADDRESS` or on this machine, or starts one on this machine.

    Returns whether this process has started the cluster, which then consists of this machine alone. `note` prints which
    cluster is used. All processes of this driver get Ray's `runtime_env`. If this process is connected already,
    this only checks that the process has this `runtime_env`.
    """
    if ray.is_initialized():
        if runtime_env and _runtime_envs.get(ray.get_runtime_context().get_job_id()) != runtime_env:
            raise ConfigError(
                f"runtime_env with {', '.join(sorted(runtime_env))} comes too late: this process is connected to Ray "
                "already, with another one. Pass it to the program's own ray.init, or remove that call."
            )
        return has_started_ray()
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS={address!r}: Ray Client cannot drive a run. Run the program on a node of the cluster, or "
            f"{_SUBMIT}."
        )
    try:
        _prepare_connection(address, f"Run the program on one of them, or {_SUBMIT}.")
        with separate_daemons():
            init_ray(log_to_driver=True, logging_level=logging.WARNING, runtime_env=dict(runtime_env or {}) or None)
    except ValueError as error:
        if not runtime_env or isinstance(error, ConfigError):
            raise
        raise ConfigError(f"Ray refuses runtime_env with {', '.join(sorted(runtime_env))}: {error}") from error
    except ConnectionError as error:
        cluster = f"RAY_ADDRESS={address!r}: no Ray cluster responds" if address else "Ray on this machine fails"
        raise ConfigError(
            f"{cluster} ({error}). Set RAY_ADDRESS to the address of a cluster, or to local to start one on this "
            "machine."
        ) from error
    if runtime_env:
        _runtime_envs[ray.get_runtime_context().get_job_id()] = dict(runtime_env)
    address = ray.get_runtime_context().gcs_address
    if has_started_ray():
        note(f"started Ray on this machine, at {address} (RAY_ADDRESS selects another cluster)")
    else:
        note(f"using Ray at {address} (RAY_ADDRESS selects another cluster, RAY_ADDRESS=local starts one)")
    return has_started_ray()


def cluster_has_gpus() -> bool:
    """Returns whether a node of the Ray cluster that `ElasticTrainer.fit` uses has a GPU.

    Connects to the cluster, or starts one on this machine, as `fit` does. If the cluster has no node with CPUs or GPUs
    yet, as shortly after `ray up`, it waits for the first one, and an autoscaler starts one. Where only some nodes have
    GPUs, this depends on which have joined.
    """
    connect_or_start(print_note)
    if not any(ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")):
        print_note("waiting for a node with CPUs or GPUs")
        task: Any = ray.remote(num_cpus=1, max_retries=-1)(lambda: None)  # for which autoscalers start a node
        ray.get(task.remote())
    return ray.cluster_resources().get("GPU", 0) > 0


def connect(address: str | None = None) -> None:
    """Connects a process that controls or inspects runs to a Ray cluster, by default as `RAY_ADDRESS` or Ray finds it.

    Does nothing if the process is connected already.
    """
    if ray.is_initialized():
        return
    check_ray_version()
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if address == "local":
        raise ConfigError("RAY_ADDRESS=local does not name a cluster. Set it to the address that the run printed.")
    try:
        _prepare_connection(
            address,
            "Run this command on one of them, for example `ray exec CLUSTER.yaml 'elastic-ddp status'`. `elastic-ddp "
            "logs` and `stop` also find submitted runs from other machines, if RAY_API_SERVER_ADDRESS is the address "
            "of the dashboard.",
        )
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
    except OSError:
        place = "on this machine" if address == "auto" else f"at {address}"
        raise ConfigError(
            f"no Ray cluster responds {place}. Set RAY_ADDRESS to the address that the run printed, or run this "
            "command on a node of the cluster. If the run has ended, `elastic-ddp show <storage>/<name>` shows how. If "
            f"its driver was killed, {RESUMES}."
        ) from None


def _prepare_connection(address: str, elsewhere: str) -> None:
    """Loads the cluster's token, and finds out early what Ray would wait for during a minute or more.

    Raises ConnectionError if no process listens at the address, and ConfigError if this machine is not a node of the
    cluster; its message ends with `elsewhere`.
    """
    host, _, port = address.rpartition(":")
    has_port = "/" not in host and port.isdecimal()
    if has_port:
        check_port(address)
    use_token_on_this_machine(address)
    nodes = nodes_if_none_is_here(address) if has_port else None
    if nodes is not None:
        which = f" Its nodes are {shorten(nodes, _NODES_SHOWN)}." if nodes else ""
        raise ConfigError(f"this machine is not a node of the Ray cluster at {address}.{which} {elsewhere}")
