"""The nodes of a Ray cluster: which are on this machine, which Ray drains, and who uses their resources."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Collection
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from elastic_ddp.config.capacity import ClusterUse
from elastic_ddp.ray_internals import ANSWERS_WITHIN_S

_POLL_S = 0.5
_NAME = re.compile(r"elastic_ddp-(.+)-[0-9a-f]{32}-[0-9a-f]{32}")


def nodes_if_none_is_here(address: str) -> list[str] | None:
    """Returns the addresses of a cluster's live nodes if none is on this machine; None if one is, or if unknown.

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


def placement_group_prefix(run: str, unique: str) -> str:
    """Returns the start of the names of a run's placement groups; 32 hexadecimal digits follow, as in `unique`."""
    return f"elastic_ddp-{run}-{unique}-"


def free_resources() -> dict[str, dict[str, float]]:
    """Returns the resources of each node that no task, actor or placement group holds, by the node's id."""
    return ray._private.state.available_resources_per_node()


def read_cluster_use(run: str, avoid: Collection[str]) -> ClusterUse:
    """Returns the resources of each node except the ids in `avoid`, and the resources reserved for the workers of each
    run."""
    total = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    free = free_resources()
    held: dict[str, Counter[str]] = {}
    num_own = 0
    for group in placement_group_table().values():
        name = _NAME.fullmatch(group["name"])
        if name is None or group["state"] != "CREATED":
            continue
        if name[1] == run:
            num_own += 1
            continue
        for bundle in group["bundles"].values():
            held.setdefault(name[1], Counter()).update(bundle)
    nodes = [node for node in total if node not in avoid]
    return ClusterUse(
        total=[total[node] for node in nodes],
        free=[free.get(node, {}) for node in nodes],
        held=held,
        num_own=num_own,
        num_draining=len(total) - len(nodes),
    )
