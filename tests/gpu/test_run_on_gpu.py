"""A whole run on a GPU: pinned copies, NCCL, the canonical reduction and bf16 on the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import elastic_ddp as ed
from tests.integration import jobs

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "data").mkdir()
    jobs.write_rows(str(folder / "data"))
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="WARNING")
    yield folder
    ray.shutdown()


def fit(folder: Path, name: str, resources: dict[str, float], precision: str) -> ed.RunResult:
    config = jobs.settings(str(folder / "runs"), name, 1, resources_per_worker=resources, precision=precision)
    return ed.ElasticTrainer(jobs.make_train(), str(folder / "data"), config, transform=jobs.jitter).fit()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_on_a_gpu_repeats_its_bits_and_sees_the_samples_of_one_on_a_cpu(folder: Path, precision: str) -> None:
    gpu = {"CPU": 1.0, "GPU": 1.0}
    first, again = (fit(folder, f"{precision}-{number}", gpu, precision) for number in range(2))
    assert first.weights_sha256 == again.weights_sha256
    on_cpu = fit(folder, f"{precision}-cpu", {"CPU": 1.0}, precision)
    assert first.samples_sha256 == on_cpu.samples_sha256
