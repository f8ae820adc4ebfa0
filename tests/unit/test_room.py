"""Room for workers, and for what feeds them."""

from __future__ import annotations

import pytest

from elastic_ddp.config import DataConfig
from elastic_ddp.errors import ConfigError
from elastic_ddp.room import check_cpus, workers_that_fit


def test_a_node_has_room_for_as_many_workers_as_its_scarcest_resource() -> None:
    node = {"CPU": 8.0, "GPU": 2.0}
    assert workers_that_fit(node, {"CPU": 2.0}) == 4
    assert workers_that_fit(node, {"CPU": 2.0, "GPU": 1.0}) == 2
    assert workers_that_fit(node, {"CPU": 0.0, "GPU": 0.5}) == 4, "what is not reserved does not count"
    assert workers_that_fit(node, {"CPU": 2.0, "TPU": 1.0}) == 0


def cpus(nodes: list[dict[str, float]], *, per_task: float, concurrency: int = 1, **options: float) -> None:
    check_cpus(
        nodes,
        resources_per_worker={"CPU": 2.0, "GPU": options.get("gpu", 0.0)},
        max_workers=int(options.get("max_workers", 4)),
        options=DataConfig(num_cpus_per_task=per_task, concurrency=concurrency),
        has_transform=True,
    )


def test_pipelines_that_could_never_get_a_cpu_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        cpus([{"CPU": 8.0}], per_task=1)
    assert "data.num_cpus_per_task=1: 4 worker(s) hold 8 of the 8 CPUs of a node" in str(caught.value)
    assert "use data.num_cpus_per_task=0" in str(caught.value)
    with pytest.raises(
        ConfigError, match=r"3 worker.s. hold 6 of the 8 CPUs of a node, and their pipelines need 6 more"
    ):
        cpus([{"CPU": 8.0}], per_task=1, concurrency=2, max_workers=3)


@pytest.mark.parametrize(
    "free",
    [
        {"per_task": 0},
        {"per_task": 1, "max_workers": 2},
        {"per_task": 0.25, "concurrency": 2, "max_workers": 3},
        {"per_task": 1, "gpu": 1.0},
    ],
)
def test_pipelines_that_find_a_cpu_are_let_through(free: dict[str, float]) -> None:
    cpus([{"CPU": 8.0, "GPU": 2.0}], **free)  # type: ignore[arg-type]
