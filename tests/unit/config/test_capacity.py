"""Capacity of a cluster for workers and their data pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from elastic_ddp.config.capacity import ClusterUse, check_cpus, explain_shortage, explain_wait, workers_that_fit
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.errors import ConfigError


def test_the_scarcest_resource_limits_the_workers_of_a_node() -> None:
    node = {"CPU": 8.0, "GPU": 2.0}
    assert workers_that_fit(node, {"CPU": 2.0}) == 4
    assert workers_that_fit(node, {"CPU": 2.0, "GPU": 1.0}) == 2
    assert workers_that_fit(node, {"CPU": 0.0, "GPU": 0.5}) == 4, "a resource of 0 does not count"
    assert workers_that_fit(node, {"CPU": 2.0, "TPU": 1.0}) == 0
    assert workers_that_fit({"CPU": 2.0}, {"CPU": 0.4}) == 5 and workers_that_fit({"CPU": 1.0}, {"CPU": 0.1}) == 10


def test_a_shortage_names_the_lacking_resource_and_the_setting_to_change() -> None:
    nodes = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0}]
    assert explain_shortage(nodes, {"CPU": 2.0}, 4) is None
    assert explain_shortage(nodes, {"CPU": 4.0, "GPU": 0.0}, 2) is None
    few = explain_shortage(nodes, {"CPU": 2.0, "GPU": 1.0}, 2) or ""
    assert few.startswith("1 workers of ") and "lower min_workers" in few and "min_workers=2" in few
    none = explain_shortage(nodes, {"CPU": 2.0, "GPU": 2.0}, 1) or ""
    assert "resources_per_worker GPU=2 (the largest node has 1)" in none
    assert "CPU=8 (the largest node has 4), GPU=2" in (explain_shortage(nodes, {"CPU": 8.0, "GPU": 2.0}, 1) or "")
    assert "GPU=1 (the largest node has 0)" in (explain_shortage([], {"GPU": 1.0}, 1) or "")


def explained(total: list[dict[str, float]], free: list[dict[str, float]], is_late: bool = False, **use: Any) -> str:
    known: dict[str, Any] = {"held": {}, "num_own": 0, **use}
    return explain_wait(ClusterUse(total, free, **known), {"CPU": 2.0, "GPU": 1.0}, 2, is_late=is_late) or ""


def test_a_run_that_waits_names_what_it_lacks_and_who_holds_it() -> None:
    node = {"CPU": 8.0, "GPU": 2.0, "memory": 1e9}
    assert explained([node], [node]) == "", "its workers are starting"
    assert explained([node], [{}], num_own=2) == ""
    late = explained([node], [node], is_late=True)
    assert late.startswith("waiting for Ray: min_workers=2 workers of CPU=2, GPU=1 fit")
    late = explained([node], [{}], num_own=2, is_late=True)
    assert late.startswith("waiting for workers to start: 2 have their resources. Nodes may be installing")
    assert explained([], []).startswith("waiting for nodes: no node has resources_per_worker CPU=2")
    drained = explained([{"CPU": 8.0, "GPU": 1.0}], [], num_draining=1)
    assert drained.startswith("waiting for nodes: 1 workers of ") and drained.endswith("(1 nodes are being drained)")
    held = explained([node], [{"CPU": 3.0}], held={"gpt": {"CPU": 2.0, "GPU": 1.0, "memory": 5.0}})
    assert held.startswith("waiting for resources: 0 of min_workers=2 workers of CPU=2, GPU=1 fit. In use: ")
    assert "In use: run 'gpt' (CPU=2, GPU=1), other Ray jobs (CPU=3, GPU=1). " in held
    own = explained([node], [{"CPU": 4.0}], num_own=1, held={"gpt": {"CPU": 2.0, "GPU": 1.0}})
    assert "1 of min_workers=2" in own and "other" not in own


def check(
    nodes: list[dict[str, float]],
    *,
    per_task: float,
    num_tasks: int = 1,
    max_workers: int = 4,
    worker: Mapping[str, float] = MappingProxyType({"CPU": 2.0}),
) -> None:
    sizes = {"global_batch_size": 32, "micro_batch_size": 1, "max_workers": max_workers}
    data = {"num_cpus_per_task": per_task}
    config = RunConfig(name="lm", storage="runs", steps=1, resources_per_worker=dict(worker), data=data, **sizes)
    check_cpus(nodes, config, num_tasks)


def test_data_pipelines_that_could_never_get_a_cpu_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.num_cpus_per_task=1: 4 workers .* 8 of the 8 CPUs .* need 4 more"):
        check([{"CPU": 8.0}], per_task=1)
    with pytest.raises(ConfigError, match=r"3 workers reserve 6 of the 8 CPUs .* need 6 more"):
        check([{"CPU": 8.0}], per_task=1, num_tasks=2, max_workers=3)


def test_data_pipelines_with_enough_cpus_are_accepted() -> None:
    node = {"CPU": 8.0, "GPU": 2.0}
    check([node], per_task=0)
    check([node], per_task=1, max_workers=2)
    check([node], per_task=0.25, num_tasks=2, max_workers=3)
    check([node], per_task=1, worker={"CPU": 2.0, "GPU": 1.0})
    check([{"CPU": 7.0}], per_task=0, max_workers=25, worker={"CPU": 0.28})  # in floating point, these exceed 7
