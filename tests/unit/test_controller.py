"""What the controller decides without a cluster: how long it waits, and for how many workers it asks."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import ScalingConfig

from elastic_ddp.elastic.messages import Orders
from elastic_ddp.ray_internals.controller import (
    PAUSES_S,
    InPlaceController,
    LimitedScalingPolicy,
    counts_as_failure,
)


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that stands still at a time of 0."""
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    controller: Any = object.__new__(InPlaceController)
    controller._num_failed, controller._have_trained, controller._not_before = 0, set(), 0.0
    return controller


def test_the_more_newcomers_are_lost_the_longer_the_pause(controller: Any) -> None:
    pauses = []
    for _ in range(2000):
        controller._wait_after(1)
        pauses.append(controller._not_before)
    assert tuple(pauses[: len(PAUSES_S)]) == PAUSES_S
    assert set(pauses[len(PAUSES_S) :]) == {PAUSES_S[-1]}


def test_one_that_gets_to_train_ends_that(controller: Any) -> None:
    controller._see_who_has_trained({"a"})
    controller._wait_after(4)
    controller._see_who_has_trained({"a"})
    controller._wait_after(1)
    assert controller._not_before == PAUSES_S[4]
    controller._see_who_has_trained({"a", "b"})
    controller._wait_after(1)
    assert controller._not_before == PAUSES_S[0]
    controller._see_who_has_trained({"b"})
    controller._wait_after(1)
    assert controller._not_before == PAUSES_S[1], "a loss is none that trains"


def test_no_more_room_is_asked_for_than_the_run_may_use() -> None:
    policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 4)))
    assert policy._get_num_workers_for_resource_request() == 4
    assert policy.is_news(2, [], {})
    assert policy._get_num_workers_for_resource_request() == 2
    assert policy.is_news(9, [], {}) and not policy.is_news(5, [], {})
    assert policy._get_num_workers_for_resource_request() == 4


def test_room_on_a_node_that_is_avoided_is_none_and_is_asked_for_beside_the_rest() -> None:
    policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 1}))
    room = {"drained": {"CPU": 2.0}, "healthy": {"CPU": 3.0}}
    assert policy._count_possible_workers(room) == 4
    assert policy.is_news(4, ["drained", "gone"], {"drained": room["drained"]})
    # Ray hands out room on its first nodes first.
    assert policy._get_num_workers_for_resource_request() == 4 + 2
    assert policy._count_possible_workers(room) == 3
    assert policy._count_possible_workers({"drained": room["drained"]}) == 0
    assert policy.is_news(2, ["drained", "gone"], {"drained": room["drained"]})
    assert policy._count_possible_workers(room) == 2


def test_newcomers_and_what_goes_with_a_drained_node_are_no_failures_of_the_run() -> None:
    def worker(name: str, node_id: str) -> Any:
        actor = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: name))
        return SimpleNamespace(actor=actor, metadata=SimpleNamespace(node_id=node_id))

    orders = Orders(lost={}, newcomers=["new"], dismissed=[], leaving=[], avoid=["drained"], limit=3, is_over=False)
    counted = {
        (name, node): counts_as_failure(worker(name, node), orders)
        for name in ("old", "new")
        for node in ("healthy", "drained")
    }
    assert [place for place, counts in counted.items() if counts] == [("old", "healthy")]
