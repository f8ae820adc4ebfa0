"""Reads who uses the resources of a Ray cluster. It needs no dashboard, unlike Ray's state API."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

import ray
from ray.util.placement_group import placement_group_table

from elastic_ddp.config.capacity import ClusterUse

_NAME = re.compile(r"elastic_ddp-(.+)-[0-9a-f]{32}-[0-9a-f]{32}")


def placement_group_prefix(run: str, unique: str) -> str:
    """Returns the start of the names of a run's placement groups; 32 hexadecimal digits follow, as in `unique`."""
    return f"elastic_ddp-{run}-{unique}-"


def free_resources() -> dict[str, dict[str, float]]:
    """Returns the resources of each node that no task, actor or placement group holds, by the node's id."""
    return ray._private.state.available_resources_per_node()


def read_cluster_use(run: str, avoid: Collection[str]) -> ClusterUse:
    """Returns what nodes have, without those with the ids `avoid`, and what is reserved for the workers of each run."""
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
