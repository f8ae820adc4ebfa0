"""What Ray, and its autoscaler, are asked for on behalf of a run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

import ray
from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]
from ray.data._internal.cluster_autoscaler.base_autoscaling_coordinator import ReservedResources, ResourceDict
from ray.train.v2._internal.execution.scaling_policy import (
    ScalingDecision,
    autoscaling_coordinator_client,
    elastic,
)
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy
from ray.train.v2.api.config import ScalingConfig

from elastic_ddp.config.capacity import workers_that_fit

SAID_AGAIN_S, BELIEVED_S = 5, 15
"""How often Ray is told how many workers the run would have, and for how long it keeps room for them. By default 20 s
and 180 s: so long a driver that was killed would stand in the way of the one that goes on with the run."""
ROOM_IS_TOLD_WITHIN_S = 2
"""How long the controller waits for Ray to say what room there is, which is on another node perhaps. By default 5 s."""
NODE_ID = "ray.io/node-id"
"""A label that every node has."""


def shorten_intervals() -> None:
    """Has Ray Train's policies in this process ask as often, and wait as briefly, as is said above."""
    autoscaling_coordinator_client.AUTOSCALING_REQUESTS_INTERVAL_S = SAID_AGAIN_S
    autoscaling_coordinator_client.AUTOSCALING_REQUESTS_EXPIRE_TIME_S = BELIEVED_S
    autoscaling_coordinator_client.AUTOSCALING_REQUESTS_GET_TIMEOUT_S = ROOM_IS_TOLD_WITHIN_S
    elastic.AUTOSCALING_REQUESTS_GET_TIMEOUT_S = ROOM_IS_TOLD_WITHIN_S  # type: ignore[attr-defined] # a copy


def managed_nodes() -> set[str]:
    """Nodes that are alive and that an autoscaler has started, which gives each the name of its machine."""
    worker: Any = ray._private.worker.global_worker
    known = worker.gcs_client.get_all_node_info()
    alive = GcsNodeInfo.GcsNodeState.ALIVE
    return {node.hex() for node, each in known.items() if each.instance_id and each.state == alive}


class _Request(ScalingConfig):
    """Of a run with workers on `nodes`: room for these is asked for there.

    Otherwise the autoscaler counts it against any node, and keeps one that is empty while it takes no other that a
    worker is on. Autoscalers before Ray's second one do not look at it; that one grants nothing of a request which
    names a node that it does not manage, or is about to take.
    """

    nodes: tuple[str, ...] = ()

    def _label_selector_per_worker(self, num_workers: int) -> list[dict[str, str]] | None:
        given = super()._label_selector_per_worker(num_workers)
        if not self.nodes:
            return given
        selectors = [dict(each) for each in given or [{}] * num_workers]
        selectors += [{} for _ in range(num_workers - len(selectors))]  # Ray Train's list ends at `max_workers`
        for selector, node in zip(selectors, self.nodes, strict=False):
            selector[NODE_ID] = node
        return selectors


class LimitedScalingPolicy(ElasticScalingPolicy):
    """Asks for room for as many workers as the run may have now, which is not always `max_workers`, beside what there
    is of it on nodes that the run has to avoid: Ray would hand out that as well, which is not counted.

    Where a group is to be started, Ray looks at the cluster anew: what it says otherwise is up to 20 s old, and with a
    node in it that is dead every try would wait for workers that cannot be."""

    limit: int | None = None
    avoid: frozenset[str] = frozenset()
    num_out_of_use = 0
    """Workers for which there is room on nodes to avoid."""

    def __init__(self, scaling_config: ScalingConfig) -> None:
        fields = {each.name: getattr(scaling_config, each.name) for each in dataclasses.fields(scaling_config)}
        self._request = _Request(**fields)
        super().__init__(self._request)

    def is_news(
        self, limit: int, *, nodes: Collection[str], avoid: Collection[str], out_of_use: ReservedResources
    ) -> bool:
        """Whether Ray is to be asked for something else than before.

        Args:
            limit: workers that the run may have.
            nodes: those on which its workers are and stay, once for each; an autoscaler has started them.
            avoid: nodes on which there is no room for the run.
            out_of_use: what there is on these.
        """
        before = (self._get_num_workers_for_resource_request(), self._request.nodes)
        self.limit, self.avoid = limit, frozenset(avoid)
        self._request.nodes = tuple(sorted(nodes))
        self.num_out_of_use = self._count_workers(out_of_use.values())
        return (self._get_num_workers_for_resource_request(), self._request.nodes) != before

    def ask(self) -> None:
        """Asks Ray now, and not at the next interval."""
        self._send_resource_request()

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._maybe_send_resource_request()
        if time.monotonic() - self._latest_reserved_resources_query_time >= self.GET_RESERVED_RESOURCES_INTERVAL_S:
            with suppress(Exception):  # whatever Ray's coordinator meets: the question below says it, and waits
                look = self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=True)
                ray.get(look, timeout=ROOM_IS_TOLD_WITHIN_S)
        return super().make_decision_for_non_running_worker_group()

    def _get_reserved_resources(self) -> ReservedResources | None:
        reserved: ReservedResources | None = super()._get_reserved_resources()
        if reserved is None and self._coordinator_client is not None:
            # The actor that knows lives on the node that first asked for it, which may be lost. Ray makes another.
            vars(self._coordinator_client).pop("_autoscaling_coordinator", None)
        return reserved

    def _get_num_workers_for_resource_request(self) -> int:
        return self._limited(super()._get_num_workers_for_resource_request()) + self.num_out_of_use

    def _count_possible_workers(self, reserved_resources: ReservedResources) -> int:
        usable = [each for node, each in reserved_resources.items() if node not in self.avoid]
        return self._limited(self._count_workers(usable))

    def _count_workers(self, nodes: Iterable[ResourceDict]) -> int:
        """How many there is room for. Ray Train divides floating-point numbers: to it, 2 CPUs are not 5 times 0.4."""
        needs = self.scaling_config._resources_per_worker_not_none
        return min(sum(workers_that_fit(each, needs) for each in nodes), self.scaling_config.max_workers)

    def _limited(self, num_workers: int) -> int:
        return num_workers if self.limit is None else min(self.limit, num_workers)
