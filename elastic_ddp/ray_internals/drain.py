"""Drains the Ray nodes of this machine: `python -m elastic_ddp.ray_internals.drain [WHY DEADLINE_MS]`.

Without arguments, it only prints their ids. A process of its own, because Ray's client can hang or abort its process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

from elastic_ddp.errors import ConfigError, format_exception
from elastic_ddp.ray_internals import (
    ANSWERS_WITHIN_S,
    check_ray_version,
    is_local,
    use_token_on_this_machine,
)


def local_nodes(client: Any) -> list[str]:
    """Returns the ids of live Ray nodes with an address of this machine. Several are drained together."""
    nodes = client.get_all_node_info(timeout=ANSWERS_WITHIN_S, state_filter=GcsNodeInfo.GcsNodeState.ALIVE)
    found = [node_id.hex() for node_id, node in nodes.items() if is_local(node.node_manager_address)]
    if not found:
        addresses = sorted({node.node_manager_address for node in nodes.values()})
        raise ConfigError(f"the cluster has no node with an address of this machine; its nodes are {addresses}")
    return found


def drain(client: Any, node_ids: list[str], why: str, deadline_ms: int) -> None:
    """Drains nodes until a Unix time in milliseconds; 0 means without a deadline."""
    preemption = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")  # which a node cannot reject
    for node_id in node_ids:
        accepted, reason = client.drain_node(node_id, preemption, why, deadline_ms)
        if not accepted:
            raise ConfigError(f"Ray rejects the drain of node {node_id}: {reason}")


def main(arguments: list[str]) -> None:
    """Drains with WHY and DEADLINE_MS, and prints the nodes' ids. Errors are one line on standard error."""
    try:
        check_ray_version()
        address = os.environ.get("RAY_ADDRESS") or "auto"
        use_token_on_this_machine(address)
        services: Any = ray._private.services
        client = GcsClient(address=services.canonicalize_bootstrap_address_or_die(address))
        node_ids = local_nodes(client)
        if arguments:
            drain(client, node_ids, arguments[0], int(arguments[1]))
    except Exception as error:  # of many types, in Ray's client
        text = str(error) if isinstance(error, ConfigError) else format_exception(error)
        raise SystemExit(" ".join(text.split())) from None
    print(*node_ids, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
