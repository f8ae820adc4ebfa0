"""Room for workers, and for what feeds them."""

from __future__ import annotations

import pytest

from elastic_ddp.config.capacity import check_cpus, explain_shortage, workers_that_fit
from elastic_ddp.config.run_config import DataConfig
from elastic_ddp.errors import ConfigError


def test_a_node_has_room_for_as_many_workers_as_its_scarcest_resource() -> None:
    node = {"CPU": 8.0, "GPU": 2.0}
    assert workers_that_fit(node, {"CPU": 2.0}) == 4
    assert workers_that_fit(node, {"CPU": 2.0, "GPU": 1.0}) == 2
    assert workers_that_fit(node, {"CPU": 0.0, "GPU": 0.5}) == 4, "what is not reserved does not count"
    assert workers_that_fit(node, {"CPU": 2.0, "TPU": 1.0}) == 0
    assert workers_that_fit({"CPU": 2.0}, {"CPU": 0.4}) == 5 and workers_that_fit({"CPU": 1.0}, {"CPU": 0.1}) == 10


def test_what_a_cluster_lacks_is_named_with_what_to_change() -> None:
    nodes = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0}]
    assert (
        explain_shortage(nodes, {"CPU": 2.0}, 4) is None
        and explain_shortage(nodes, {"CPU": 4.0, "GPU": 0.0}, 2) is None
    )
    few = explain_shortage(nodes, {"CPU": 2.0, "GPU": 1.0}, 2) or ""
    assert few.startswith(
        "there is room for 1 of the 2 workers of min_workers=2, each of {'CPU': 2.0, 'GPU': 1.0}; lower"
    )
    none = explain_shortage(nodes, {"CPU": 2.0, "GPU": 2.0}, 1) or ""
    assert none.startswith("no node has resources_per_worker GPU=2 (the most that one has: 1); ask for less")
    assert "CPU=8 (the most that one has: 4), GPU=2" in (explain_shortage(nodes, {"CPU": 8.0, "GPU": 2.0}, 1) or "")
    assert "GPU=1 (the most that one has: 0)" in (explain_shortage([], {"GPU": 1.0}, 1) or "")


def cpus(nodes: list[dict[str, float]], *, per_task: float, concurrency: int = 1, **options: float) -> None:
    check_cpus(
        nodes,
        resources_per_worker={"CPU": 2.0, "GPU": options.get("gpu", 0.0)},
        max_workers=int(options.get("max_workers", 4)),
        options=DataConfig(num_cpus_per_task=per_task, concurrency=concurrency),
        has_transform=True,
    )


def test_what_floating_point_numbers_lack_of_a_whole_is_no_lack() -> None:
    options = DataConfig(num_cpus_per_task=0)
    share = {"CPU": 0.28}  # 25 of them are a bit more than 7
    check_cpus([{"CPU": 7.0}], resources_per_worker=share, max_workers=25, options=options, has_transform=False)


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
