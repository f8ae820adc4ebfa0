"""A run releases its resources when it is over, also if its controller was killed."""

from __future__ import annotations

import pytest
import ray
from ray.util import placement_group, placement_group_table

from elastic_ddp.config.capacity import explain_wait
from elastic_ddp.ray_internals.nodes import placement_group_prefix, read_cluster_use
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


def test_a_waiting_run_names_the_runs_and_jobs_that_hold_the_resources() -> None:
    def reserve(run: str) -> None:
        assert placement_group([{"CPU": 1}], name=placement_group_prefix(run, "a" * 32) + "b" * 32).wait(30)

    reserve("lm")
    reserve("a-run.2")
    actor = ray.remote(num_cpus=1)(type("Actor", (), {"ping": lambda self: None})).remote()
    ray.get(actor.ping.remote())
    use = read_cluster_use("lm", [])
    assert (use.num_own, use.held) == (1, {"a-run.2": {"CPU": 1.0}})
    text = explain_wait(use, {"CPU": 1.0}, 2, is_late=False)
    assert text is not None and "1 of min_workers=2 workers of CPU=1 fit" in text
    assert "In use: run 'a-run.2' (CPU=1), other Ray jobs (CPU=1)." in text
    this_node = ray.get_runtime_context().get_node_id()
    without = explain_wait(read_cluster_use("lm", [this_node]), {"CPU": 1.0}, 2, is_late=False)
    assert without is not None and without.endswith("(1 nodes are being drained)")
