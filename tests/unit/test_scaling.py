"""What Ray is asked for on behalf of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.exceptions import ActorDiedError
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision, autoscaling_coordinator_client

from elastic_ddp.ray_internals.scaling import LimitedScalingPolicy, managed_nodes

NOWHERE: Any = {"nodes": [], "avoid": [], "out_of_use": {}}
CPU = {"CPU": 1.0}


def test_no_more_room_is_asked_for_than_the_run_may_use() -> None:
    policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 4)))
    assert policy._get_num_workers_for_resource_request() == 4
    assert policy.is_news(2, **NOWHERE)
    assert policy._get_num_workers_for_resource_request() == 2
    assert policy.is_news(9, **NOWHERE) and not policy.is_news(5, **NOWHERE)
    assert policy._get_num_workers_for_resource_request() == 4


def test_room_on_a_node_that_is_avoided_is_none_and_is_asked_for_beside_the_rest() -> None:
    policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 1}))
    room = {"drained": {"CPU": 2.0}, "healthy": {"CPU": 3.0}}
    away: Any = {"nodes": [], "avoid": ["drained", "gone"], "out_of_use": {"drained": room["drained"]}}
    assert policy._count_possible_workers(room) == 4
    assert policy.is_news(4, **away)
    # Ray hands out room on its first nodes first.
    assert policy._get_num_workers_for_resource_request() == 4 + 2
    assert policy._count_possible_workers(room) == 3
    assert policy._count_possible_workers({"drained": room["drained"]}) == 0
    assert policy.is_news(2, **away)
    assert policy._count_possible_workers(room) == 2


def test_five_workers_of_two_fifths_of_a_cpu_fit_two_cpus() -> None:
    """Not so where floating-point numbers are divided, as Ray Train does."""
    policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 8), resources_per_worker={"CPU": 0.4}))
    assert policy._count_possible_workers({"one": {"CPU": 2.0}}) == 5
    assert policy._count_possible_workers({"one": {"CPU": 2.0}, "two": {"CPU": 2.0}}) == 8
    assert policy.is_news(8, nodes=[], avoid=["one"], out_of_use={"one": {"CPU": 2.0}})
    assert policy.num_out_of_use == 5


def test_who_knows_of_room_is_looked_for_again_when_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[mock.Mock] = []

    def get_or_create() -> mock.Mock:
        made.append(mock.Mock())
        return made[-1]

    answers: list[Any] = [{"one": {"CPU": 3.0}}, ActorDiedError(), {"two": {"CPU": 2.0}}]
    monkeypatch.setattr(autoscaling_coordinator_client, "get_or_create_autoscaling_coordinator", get_or_create)
    monkeypatch.setattr("ray.get", mock.Mock(side_effect=answers))
    policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 1}))
    policy.GET_RESERVED_RESOURCES_INTERVAL_S = 0
    policy._coordinator_client = autoscaling_coordinator_client.TrainAutoscalingCoordinatorClient("run")
    assert policy._get_reserved_resources() == {"one": {"CPU": 3.0}}
    assert policy._get_reserved_resources() is None and len(made) == 1
    assert policy._get_reserved_resources() == {"two": {"CPU": 2.0}} and len(made) == 2


def test_nodes_that_an_autoscaler_started_are_known_by_the_names_of_their_machines(
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
    assert managed_nodes() == {"node-i-1"}


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Who knows of room."""
    coordinator = mock.Mock()
    monkeypatch.setattr(
        autoscaling_coordinator_client, "get_or_create_autoscaling_coordinator", mock.Mock(return_value=coordinator)
    )
    monkeypatch.setattr("ray.get", mock.Mock(return_value={"one": CPU}))
    return coordinator


@pytest.fixture
def asked(coordinator: mock.Mock) -> mock.Mock:
    """Takes what Ray is asked for."""
    ask: mock.Mock = coordinator.request_resources.remote
    return ask


def test_ray_looks_at_the_cluster_anew_before_a_group_is_started(coordinator: mock.Mock) -> None:
    policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 1}))
    policy._coordinator_client = autoscaling_coordinator_client.TrainAutoscalingCoordinatorClient("run")
    policy._requester_id = "run"
    decision = policy.make_decision_for_non_running_worker_group()
    assert isinstance(decision, ResizeDecision) and decision.num_workers == 1
    looks = [mock.call("run", recompute=True), mock.call("run")]
    assert coordinator.get_reserved_resources.remote.mock_calls == looks
    policy.make_decision_for_non_running_worker_group()
    assert coordinator.get_reserved_resources.remote.mock_calls == looks, "it was asked a moment ago"


def a_policy(**scaling: Any) -> LimitedScalingPolicy:
    policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 4), resources_per_worker=CPU, **scaling))
    policy._coordinator_client = autoscaling_coordinator_client.TrainAutoscalingCoordinatorClient("run")
    return policy


def test_room_for_workers_that_there_are_is_asked_for_where_they_are(asked: mock.Mock) -> None:
    """So that the autoscaler does not keep an empty node in the place of one of theirs."""
    policy = a_policy()
    policy.ask()
    assert asked.call_args.kwargs["resources"] == [CPU] * 4
    assert asked.call_args.kwargs["label_selectors"] is None
    on_two: Any = NOWHERE | {"nodes": ["two", "one", "two"]}
    assert policy.is_news(4, **on_two) and not policy.is_news(4, **on_two)
    policy.ask()
    on_one, on_the_other = {"ray.io/node-id": "one"}, {"ray.io/node-id": "two"}
    assert asked.call_args.kwargs["resources"] == [CPU] * 4
    assert asked.call_args.kwargs["label_selectors"] == [on_one, on_the_other, on_the_other, {}]
    assert policy.is_news(2, **on_two)
    policy._maybe_send_resource_request()
    assert asked.call_count == 2, "not so soon again"
    policy.ask()
    assert asked.call_args.kwargs["resources"] == [CPU] * 2
    assert asked.call_args.kwargs["label_selectors"] == [on_one, on_the_other]
    assert policy.is_news(2, **NOWHERE)
    policy.ask()
    assert asked.call_args.kwargs["label_selectors"] is None


def test_what_workers_ask_of_their_nodes_is_asked_as_well(asked: mock.Mock) -> None:
    policy = a_policy(label_selector={"zone": "b"})
    assert policy.is_news(2, **NOWHERE | {"nodes": ["one"]})
    policy.ask()
    assert asked.call_args.kwargs["label_selectors"] == [{"zone": "b", "ray.io/node-id": "one"}, {"zone": "b"}]
