"""The resources that a run requests from Ray."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.exceptions import ActorDiedError
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision, autoscaling_coordinator_client

from elastic_ddp.ray_internals.scaling_policy import LimitedScalingPolicy, autoscaled_nodes

NO_NODES: Any = {"nodes": [], "avoid": [], "avoided_resources": {}}
CPU = {"CPU": 1.0}


def test_no_more_resources_are_requested_than_the_run_may_use() -> None:
    policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 4)))
    assert policy._get_num_workers_for_resource_request() == 4
    assert policy.update(2, **NO_NODES)
    assert policy._get_num_workers_for_resource_request() == 2
    assert policy.update(9, **NO_NODES) and not policy.update(5, **NO_NODES)
    assert policy._get_num_workers_for_resource_request() == 4


def test_resources_of_avoided_nodes_do_not_count_and_are_requested_in_addition() -> None:
    policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 1}))
    capacity = {"drained": {"CPU": 2.0}, "healthy": {"CPU": 3.0}}
    avoided: Any = {"nodes": [], "avoid": ["drained", "gone"], "avoided_resources": {"drained": capacity["drained"]}}
    assert policy._count_possible_workers(capacity) == 4
    assert policy.update(4, **avoided)
    # Ray reserves its first nodes first.
    assert policy._get_num_workers_for_resource_request() == 4 + 2
    assert policy._count_possible_workers(capacity) == 3
    assert policy._count_possible_workers({"drained": capacity["drained"]}) == 0
    assert policy.update(2, **avoided)
    assert policy._count_possible_workers(capacity) == 2


def test_five_workers_of_0_4_cpus_fit_on_two_cpus() -> None:
    """Ray Train divides floats and counts four."""
    policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 8), resources_per_worker={"CPU": 0.4}))
    assert policy._count_possible_workers({"one": {"CPU": 2.0}}) == 5
    assert policy._count_possible_workers({"one": {"CPU": 2.0}, "two": {"CPU": 2.0}}) == 8
    assert policy.update(8, nodes=[], avoid=["one"], avoided_resources={"one": {"CPU": 2.0}})
    assert policy.num_avoided == 5


def test_a_new_coordinator_is_used_after_the_first_one_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[mock.Mock] = []

    def get_or_create() -> mock.Mock:
        created.append(mock.Mock())
        return created[-1]

    answers: list[Any] = [{"one": {"CPU": 3.0}}, ActorDiedError(), {"two": {"CPU": 2.0}}]
    monkeypatch.setattr(autoscaling_coordinator_client, "get_or_create_autoscaling_coordinator", get_or_create)
    monkeypatch.setattr("ray.get", mock.Mock(side_effect=answers))
    policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 1}))
    policy.GET_RESERVED_RESOURCES_INTERVAL_S = 0
    policy._coordinator_client = autoscaling_coordinator_client.TrainAutoscalingCoordinatorClient("run")
    assert policy._get_reserved_resources() == {"one": {"CPU": 3.0}}
    assert policy._get_reserved_resources() is None and len(created) == 1
    assert policy._get_reserved_resources() == {"two": {"CPU": 2.0}} and len(created) == 2


def test_autoscaled_nodes_are_live_and_have_an_instance_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def node(**facts: Any) -> tuple[Any, Any]:
        return SimpleNamespace(hex=lambda: f"node-{facts['instance_id'] or 'by-hand'}"), GcsNodeInfo(**facts)

    alive, dead = GcsNodeInfo.GcsNodeState.ALIVE, GcsNodeInfo.GcsNodeState.DEAD
    nodes = [
        node(instance_id="i-1", state=alive),
        node(instance_id="", state=alive),
        node(instance_id="i-2", state=dead),
    ]
    known = SimpleNamespace(items=lambda: nodes)
    gcs = SimpleNamespace(get_all_node_info=lambda: known)
    monkeypatch.setattr("ray._private.worker.global_worker", SimpleNamespace(gcs_client=gcs))
    assert autoscaled_nodes() == {"node-i-1"}


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Ray's coordinator, which reserves resources."""
    coordinator = mock.Mock()
    monkeypatch.setattr(
        autoscaling_coordinator_client, "get_or_create_autoscaling_coordinator", mock.Mock(return_value=coordinator)
    )
    monkeypatch.setattr("ray.get", mock.Mock(return_value={"one": CPU}))
    monkeypatch.setattr("elastic_ddp.ray_internals.scaling_policy.free_resources", lambda: {"one": CPU})
    return coordinator


@pytest.fixture
def requests(coordinator: mock.Mock) -> mock.Mock:
    """The calls that request resources."""
    requests: mock.Mock = coordinator.request_resources.remote
    return requests


def test_ray_refreshes_its_view_of_the_cluster_before_a_group_starts(coordinator: mock.Mock) -> None:
    policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 1}))
    policy._coordinator_client = autoscaling_coordinator_client.TrainAutoscalingCoordinatorClient("run")
    policy._requester_id = "run"
    decision = policy.make_decision_for_non_running_worker_group()
    assert isinstance(decision, ResizeDecision) and decision.num_workers == 1
    queries = [mock.call("run", recompute=True), mock.call("run")]
    assert coordinator.get_reserved_resources.remote.mock_calls == queries
    policy.make_decision_for_non_running_worker_group()
    assert coordinator.get_reserved_resources.remote.mock_calls == queries, "it was refreshed a moment ago"


def test_a_group_that_did_not_start_is_tried_with_the_workers_for_which_resources_are_free(
    coordinator: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray reserves what actors of other jobs hold as well."""
    nodes = {"one": {"CPU": 2.0, "GPU": 1.0}, "two": {"CPU": 2.0}, "new": {"CPU": 1.0}}
    monkeypatch.setattr("ray.get", mock.Mock(return_value=nodes))
    free = {"one": {"CPU": 1.0}, "two": {"memory": 1.0}}
    monkeypatch.setattr("elastic_ddp.ray_internals.scaling_policy.free_resources", lambda: free)
    policy = a_policy()
    sizes = [policy.make_decision_for_non_running_worker_group() for _ in range(3)]
    assert [size.num_workers for size in sizes if isinstance(size, ResizeDecision)] == [4, 2, 2]
    monkeypatch.setattr(policy, "_latest_monitor_time", time.monotonic())
    policy.make_decision_for_running_worker_group(
        worker_group_state=mock.Mock(start_time=0.0), worker_group_status=None
    )
    again = policy.make_decision_for_non_running_worker_group()
    assert isinstance(again, ResizeDecision) and again.num_workers == 4, "what is free is known late after a failure"


def a_policy() -> LimitedScalingPolicy:
    policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 4), resources_per_worker=CPU))
    policy._coordinator_client = autoscaling_coordinator_client.TrainAutoscalingCoordinatorClient("run")
    return policy


def test_resources_of_running_workers_are_requested_on_their_nodes(requests: mock.Mock) -> None:
    """Otherwise the autoscaler could keep an empty node and terminate one with a worker."""
    policy = a_policy()
    policy._send_resource_request()
    assert requests.call_args.kwargs["resources"] == [CPU] * 4
    assert requests.call_args.kwargs["label_selectors"] is None
    three_workers: Any = NO_NODES | {"nodes": ["two", "one", "two"]}
    assert policy.update(4, **three_workers) and not policy.update(4, **three_workers)
    policy._send_resource_request()
    on_one, on_two = {"ray.io/node-id": "one"}, {"ray.io/node-id": "two"}
    assert requests.call_args.kwargs["resources"] == [CPU] * 4
    assert requests.call_args.kwargs["label_selectors"] == [on_one, on_two, on_two, {}]
    assert policy.update(2, **three_workers)
    policy._maybe_send_resource_request()
    assert requests.call_count == 2, "the interval has not passed"
    policy._send_resource_request()
    assert requests.call_args.kwargs["resources"] == [CPU] * 2
    assert requests.call_args.kwargs["label_selectors"] == [on_one, on_two]
    assert policy.update(2, **NO_NODES)
    policy._send_resource_request()
    assert requests.call_args.kwargs["label_selectors"] is None
