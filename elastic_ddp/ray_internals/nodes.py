"""The nodes of a Ray cluster: which are on this machine, and which Ray drains."""

from __future__ import annotations

import time
from typing import Any

import ray

from elastic_ddp.ray_internals import ANSWERS_WITHIN_S

_POLL_S = 0.5


def nodes_if_none_is_here(address: str) -> list[str] | None:
    """Returns the addresses of a cluster's live nodes if none is on this machine; None if one is, or that is unknown.

    A process joins a cluster through a node on its own machine. Ray finds it by the processes of this machine, and
    waits for one for a minute. This function waits for `ANSWERS_WITHIN_S`: a node may be starting. A cluster whose head
    node has not joined yet is starting, and this machine may be its head.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

    services: Any = ray._private.services
    end = time.monotonic() + ANSWERS_WITHIN_S
    while True:
        here = services.find_node_ids()
        try:
            nodes = GcsClient(address=address).get_all_node_info(
                timeout=ANSWERS_WITHIN_S, state_filter=GcsNodeInfo.GcsNodeState.ALIVE
            )
        except ray.exceptions.AuthenticationError:
            return None if here else []
        except Exception:  # of many types; `ray.init` reports it better
            return None
        has_head = any(node.is_head_node for node in nodes.values())
        if not has_head or here.intersection(node_id.hex() for node_id in nodes):
            return None
        if time.monotonic() >= end:
            return sorted({node.node_manager_address for node in nodes.values()})
        time.sleep(_POLL_S)


def draining_nodes() -> dict[str, int]:
    """Returns the nodes that Ray drains (spot notice, autoscaler, `ray drain-node`), by node id, with their deadlines.

    A deadline is a Unix time in milliseconds, 0 for none.
    """
    deadlines: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return deadlines
