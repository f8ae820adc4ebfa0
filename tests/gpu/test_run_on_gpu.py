"""Runs on one GPU: pinned copies, NCCL, canonical reduction, bf16, and two workers that share the GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray

import elastic_ddp as ed
from elastic_ddp.errors import ConfigError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger
from elastic_ddp.telemetry.events import PhasesMeasured
from tests.chaos.runs import until
from tests.integration import jobs

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

Calm = Callable[..., Mapping[str, Any]]
ALONE, SHARED = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "data").mkdir()
    jobs.write_rows(str(folder / "data"))
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="WARNING")
    yield folder
    ray.shutdown()


def fit(
    folder: Path,
    name: str,
    resources: dict[str, float],
    train: Callable[..., None] | None = None,
    *,
    workers: int = 1,
    **changes: Any,
) -> Mapping[str, Any]:
    settings = {"resources_per_worker": resources, "min_workers": 1, "resize_interval_s": 1.0, **changes}
    config = jobs.settings(str(folder / "runs"), name, workers, **settings)
    trainer = ed.ElasticTrainer(train or jobs.make_train(), str(folder / "data"), config, transform=jobs.jitter)
    return trainer.fit().summary


@pytest.fixture(scope="module")
def calm(folder: Path) -> Calm:
    """Returns the summary of an undisturbed run by precision and resources. Each is trained once."""

    @cache
    def fit_calm(precision: str, gpu: float, workers: int = 1) -> Mapping[str, Any]:
        resources = {"CPU": 1.0, "GPU": gpu}
        return fit(folder, f"calm-{precision}-{gpu}-{workers}", resources, workers=workers, precision=precision)

    return fit_calm


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_run_is_reproducible_and_uses_the_samples_of_a_cpu_run(folder: Path, calm: Calm, precision: str) -> None:
    again = fit(folder, f"{precision}-again", ALONE, precision=precision)
    assert jobs.same_bits(calm(precision, 1.0), again)
    assert again["samples_sha256"] == calm(precision, 0.0)["samples_sha256"]


def test_the_ledger_of_a_gpu_run_has_its_phases_and_its_memory(folder: Path, calm: Calm) -> None:
    calm("fp32", 1.0)
    run = Storage(str(folder / "runs" / "calm-fp32-1.0-1"))
    measured = [event for event in read_ledger(run) if isinstance(event, PhasesMeasured)]
    assert measured and all(event.memory_bytes and event.memory_bytes[0] > 0 for event in measured)
    assert all(event.phases["forward"] > 0 and event.phases["backward"] > 0 for event in measured)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_workers_on_a_gpu_give_the_bits_of_one(calm: Calm, precision: str) -> None:
    assert jobs.same_bits(calm(precision, 0.5, 2), calm(precision, 1.0))


@pytest.mark.parametrize(("precision", "rank"), [("fp32", 0), ("bf16", 1)])
def test_a_killed_worker_on_a_shared_gpu_is_replaced_with_the_same_bits(
    folder: Path, tmp_path: Path, calm: Calm, precision: str, rank: int
) -> None:
    fault = jobs.kill_and_replace(tmp_path / "killed", rank=rank, step=13)
    killed = fit(folder, f"killed-{rank}", SHARED, jobs.make_train(fault), workers=2, precision=precision)
    assert jobs.same_bits(killed, calm(precision, 1.0))
    assert killed["workers_failed"] == 1
    assert [generation["world_size"] for generation in killed["generations"]] == [2, 1, 2]


def test_the_replacement_of_the_only_worker_resumes_from_the_newest_commit(
    folder: Path, tmp_path: Path, calm: Calm
) -> None:
    fault = jobs.kill_once(str(tmp_path / "killed"), rank=0, step=23)
    killed = fit(folder, "alone-killed", ALONE, jobs.make_train(fault), precision="fp32")
    assert killed["workers_failed"] == 1
    assert jobs.same_bits(killed, calm("fp32", 1.0))


def test_fsdp_shards_on_a_gpu_are_restored_by_fewer_workers(folder: Path, tmp_path: Path) -> None:
    calm = fit(folder, "fsdp-calm", SHARED, workers=2, strategy="fsdp", precision="bf16")
    fault = jobs.kill_once(str(tmp_path / "killed"), rank=1, step=23)
    killed = fit(folder, "fsdp-killed", SHARED, jobs.make_train(fault), workers=2, strategy="fsdp", precision="bf16")
    assert killed["workers_failed"] == 1
    assert killed["samples_sha256"] == calm["samples_sha256"]
    assert killed["loss"]["last"] == pytest.approx(calm["loss"]["last"], rel=0.05)


def uses_cuda(pid: int) -> bool:
    """Whether a process has loaded the CUDA driver, which opens a device that NVML does not use."""
    links = list[str]()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            links.append(os.readlink(descriptor))
    return "/dev/nvidia-uvm" in links


def test_a_standby_uses_no_gpu_before_it_takes_the_place_of_a_killed_worker(folder: Path, calm: Calm) -> None:
    def pids(of: str) -> list[int]:
        try:
            return [worker["pid"] for worker in ed.get_run("gpu-standby").status()[of]]
        except ConfigError:  # it is starting
            return []

    marker = folder / "gpu-standby.end"
    train = jobs.make_train(jobs.hold(str(marker), step=20))
    with ThreadPoolExecutor(1) as thread:
        result: Any = thread.submit(fit, folder, "gpu-standby", ALONE, train, standby_workers=1)
        until(lambda: len(pids("standbys")) == 1, result)
        [worker], [standby] = pids("members"), pids("standbys")
        assert uses_cuda(worker) and not uses_cuda(standby)
        os.kill(worker, signal.SIGKILL)
        until(lambda: pids("members") == [standby], result)
        marker.touch()
        summary = result.result()
    assert jobs.same_bits(summary, calm("fp32", 1.0)) and summary["recoveries"] == 1
