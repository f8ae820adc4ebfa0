"""A run's requests to Ray and the autoscaler, and the capacity that Ray reserves for the run."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]
from ray.data._internal.cluster_autoscaler.base_autoscaling_coordinator import ReservedResources, ResourceDict
from ray.train.v2._internal.execution.scaling_policy import (
    ResizeDecision,
    ScalingDecision,
    autoscaling_coordinator_client,
    elastic,
)
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerGroupState
from ray.train.v2.api.config import ScalingConfig

from elastic_ddp.config.capacity import workers_that_fit
from elastic_ddp.ray_internals.nodes import free_resources

REQUEST_INTERVAL_S, REQUEST_EXPIRY_S = 5, 15
"""How often a run renews its request for resources, and for how long Ray keeps them reserved. With Ray's defaults of
20 s and 180 s, a killed driver would block the one that resumes the run."""
RESERVATION_TIMEOUT_S = 2
"""How long the controller waits for Ray's coordinator, which can be on another node; by default 5 s."""
NODE_ID = "ray.io/node-id"
"""A label of every node."""


def shorten_intervals() -> None:
    """Sets the intervals above for Ray Train's policies in this process."""
    autoscaling_coordinator_client.AUTOSCALING_REQUESTS_INTERVAL_S = REQUEST_INTERVAL_S
    autoscaling_coordinator_client.AUTOSCALING_REQUESTS_EXPIRE_TIME_S = REQUEST_EXPIRY_S
    autoscaling_coordinator_client.AUTOSCALING_REQUESTS_GET_TIMEOUT_S = RESERVATION_TIMEOUT_S
    elastic.AUTOSCALING_REQUESTS_GET_TIMEOUT_S = RESERVATION_TIMEOUT_S  # type: ignore[attr-defined] # a copy


def autoscaled_nodes() -> set[str]:
    """Returns the ids of the live nodes that an autoscaler has started. Only such nodes have an instance id."""
    worker: Any = ray._private.worker.global_worker
    nodes = worker.gcs_client.get_all_node_info()
    alive = GcsNodeInfo.GcsNodeState.ALIVE
    return {node_id.hex() for node_id, info in nodes.items() if info.instance_id and info.state == alive}


class _ResourceRequest(ScalingConfig):
    """Asks for the resources of running workers on the nodes where they run.

    Otherwise the autoscaler could match them to an empty node, keep that one, and terminate a node with a worker.
    Autoscaler v1 ignores the label. Autoscaler v2 rejects a whole request that names a node which it does not manage or
    is about to terminate.
    """

    nodes: tuple[str, ...] = ()
    """The node of each running worker."""

    def _label_selector_per_worker(self, num_workers: int) -> list[dict[str, str]] | None:
        if not self.nodes:
            return None
        selectors = [{NODE_ID: node} for node in self.nodes[:num_workers]]
        return selectors + [{} for _ in range(num_workers - len(selectors))]


class LimitedScalingPolicy(ElasticScalingPolicy):
    """Requests resources for the workers that the run may have now, which can be fewer than `max_workers`.

    The request includes the resources of nodes that the run must avoid, which it ignores: Ray reserves them first.
    Before a group starts, Ray refreshes its view of the cluster, which could be 20 s old and contain a dead node.
    """

    limit = sys.maxsize
    avoid: frozenset[str] = frozenset()
    num_avoided = 0
    """Workers that fit on the nodes to avoid."""
    _free: Mapping[str, ResourceDict] | None = None
    """Free resources of each node, while the size of a group is decided after another group has not started."""
    _has_tried = False
    """Whether a group was to start, and none has run since."""

    def __init__(self, scaling_config: ScalingConfig) -> None:
        values = {field.name: getattr(scaling_config, field.name) for field in dataclasses.fields(scaling_config)}
        self._request = _ResourceRequest(**values)
        super().__init__(self._request)

    def update(
        self, limit: int, *, nodes: Collection[str], avoid: Collection[str], avoided_resources: ReservedResources
    ) -> bool:
        """Updates the request. Returns whether it has changed, so that it must be sent.

        `nodes` has the node of each worker that stays, if an autoscaler started it.
        """
        before = (self._get_num_workers_for_resource_request(), self._request.nodes)
        self.limit = limit
        self.avoid = frozenset(avoid)
        self._request.nodes = tuple(sorted(nodes))
        self.num_avoided = self._count_workers(avoided_resources.values())
        return (self._get_num_workers_for_resource_request(), self._request.nodes) != before

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._maybe_send_resource_request()
        if time.monotonic() - self._latest_reserved_resources_query_time >= self.GET_RESERVED_RESOURCES_INTERVAL_S:
            with suppress(Exception):  # any error of Ray's coordinator; the query below reports it, and waits
                refresh = self._autoscaling_coordinator.get_reserved_resources.remote(
                    self._requester_id, recompute=True
                )
                ray.get(refresh, timeout=RESERVATION_TIMEOUT_S)
        self._free = free_resources() if self._has_tried else None
        try:
            decision = super().make_decision_for_non_running_worker_group()
        finally:
            self._free = None
        self._has_tried = self._has_tried or isinstance(decision, ResizeDecision)
        return decision

    def make_decision_for_running_worker_group(
        self, worker_group_state: WorkerGroupState, worker_group_status: WorkerGroupPollStatus
    ) -> ScalingDecision:
        self._has_tried = False
        return super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)

    def _get_reserved_resources(self) -> ReservedResources | None:
        reserved: ReservedResources | None = super()._get_reserved_resources()
        if reserved is None and self._coordinator_client is not None:
            # The coordinator's node may have died. Without the cached handle, Ray creates another coordinator.
            vars(self._coordinator_client).pop("_autoscaling_coordinator", None)
        return reserved

    def _get_num_workers_for_resource_request(self) -> int:
        return min(self.limit, super()._get_num_workers_for_resource_request()) + self.num_avoided

    def _count_possible_workers(self, reserved_resources: ReservedResources) -> int:
        usable = [self._free_part(node, each) for node, each in reserved_resources.items() if node not in self.avoid]
        return min(self.limit, self._count_workers(usable))

    def _free_part(self, node: str, reserved: ResourceDict) -> ResourceDict:
        """Returns the free resources of a node: Ray also reserves resources that actors of other jobs hold.

        A group of too many workers does not start, and Ray Train would try the same number again.
        """
        if self._free is None or node not in self._free:
            return reserved
        return {name: min(amount, self._free[node].get(name, 0.0)) for name, amount in reserved.items()}

    def _count_workers(self, nodes: Iterable[ResourceDict]) -> int:
        """Returns how many workers fit. Ray Train divides floats, so that 2 CPUs hold 4 workers of 0.4 CPUs."""
        resources_per_worker = self.scaling_config._resources_per_worker_not_none
        num_workers = sum(workers_that_fit(resources, resources_per_worker) for resources in nodes)
        return min(num_workers, self.scaling_config.max_workers)
