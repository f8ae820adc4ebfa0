"""A run releases its resources when it is over, also if its controller was killed."""

from __future__ import annotations

import pytest
from ray.util import placement_group, placement_group_table

from elastic_ddp.ray_internals.worker_group import release_placement_groups

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]


def test_placement_groups_of_a_killed_controller_are_released_and_no_others() -> None:
    groups = {name: placement_group([{"CPU": 1}], name=name) for name in ("run-1-a", "run-1-b", "run-2-a")}
    assert all(group.wait(30) for group in groups.values())
    placement_group([{"CPU": 1}], name="run-1-c")  # which does not fit
    release_placement_groups("run-1-")
    states = {group["name"]: group["state"] for group in placement_group_table().values()}
    assert states == {**dict.fromkeys(("run-1-a", "run-1-b", "run-1-c"), "REMOVED"), "run-2-a": "CREATED"}
    assert placement_group([{"CPU": 2}]).wait(30), "the resources are free again"
