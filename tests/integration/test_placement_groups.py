"""What a run holds of the cluster is free when it is over, however that came."""

from __future__ import annotations

import pytest
from ray.util import placement_group, placement_group_table

from elastic_ddp.ray_internals.worker_group import release_placement_groups

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]


def test_rooms_of_a_controller_that_was_ended_are_given_back_and_nobody_elses() -> None:
    groups = {name: placement_group([{"CPU": 1}], name=name) for name in ("run-1-a", "run-1-b", "run-2-a")}
    assert all(group.wait(30) for group in groups.values())
    placement_group([{"CPU": 1}], name="run-1-c")  # for which there is no room
    release_placement_groups("run-1-")
    states = {each["name"]: each["state"] for each in placement_group_table().values()}
    assert states == {**dict.fromkeys(("run-1-a", "run-1-b", "run-1-c"), "REMOVED"), "run-2-a": "CREATED"}
    assert placement_group([{"CPU": 2}]).wait(30), "there is room again"
