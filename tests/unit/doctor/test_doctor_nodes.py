"""What the doctor finds wrong with a single node, each from facts that differ from a healthy cluster's in one place."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ddp.doctor.checks import judge
from elastic_ddp.doctor.facts import ALL, Clock, Finding, Gpu, Node, Token
from tests.unit.doctor_facts import (
    BAD,
    GPU,
    NAMES,
    cluster,
    findings,
    healthy_node,
    node_facts,
    problem,
    with_facts,
    with_node,
)

RESOURCES = healthy_node(BAD).resources


def test_a_healthy_cluster_passes_every_check_with_one_row_each() -> None:
    found = judge(cluster())
    assert {each.verdict for each in found} == {"ok"}
    assert [each.check for each in found] == [
        *("nodes", "versions", "driver", "token", "clock", "storage", "data", "GPUs", "CPUs", "/dev/shm", "open files"),
        *("network", "gloo", "nccl"),
    ]
    assert "3 in Ray, 3 for workers (CPU=12, GPU=3)" in {each.text for each in found}


def test_a_node_on_which_no_process_starts_fails() -> None:
    found = problem(with_node(facts=None, problem="No module named 'elastic_ddp'."), "nodes")
    assert (found.verdict, found.node) == ("fail", BAD)
    assert "No module named 'elastic_ddp'" in found.text


def test_a_cluster_without_nodes_for_workers_is_a_warning() -> None:
    head = Node(name=NAMES[0], resources={"CPU": 0.0}, free={}, facts=node_facts(NAMES[0]), clock=CLOCK)
    assert "no node has CPUs or GPUs" in problem(cluster(nodes=(head,), groups={}), "nodes").text


CLOCK = Clock(offset_s=0.0, uncertainty_s=0.0)


@pytest.mark.parametrize("package", ["Python", "elastic_ddp", "torch", "ray"])
def test_a_node_with_another_version_fails_and_both_versions_are_named(package: str) -> None:
    versions = node_facts(BAD).versions
    found = problem(with_facts(versions={**versions, package: "0.0.9"}), "versions")
    assert found == Finding(
        "versions",
        "fail",
        f"{package} is 0.0.9, and {versions[package]} on 2 of 3 nodes. Install the same version on all nodes.",
        BAD,
    )


@pytest.mark.parametrize(
    ("fact", "value", "name", "verdict"),
    [
        ("cuda", "12.8", "torch's CUDA", "fail"),
        ("nccl", "2.27", "NCCL", "fail"),
        ("driver", "590.10", "NVIDIA's driver", "warn"),
    ],
)
def test_cuda_nccl_and_driver_are_compared_on_nodes_with_gpus(fact: str, value: str, name: str, verdict: str) -> None:
    changes: dict[str, Any] = {fact: value}
    found = problem(with_facts(**changes), "versions")
    assert (found.verdict, found.node) == (verdict, BAD)
    assert f"{name} is {value}" in found.text
    without_gpu = Node(
        name=BAD, resources={"CPU": 4.0}, free={}, facts=with_facts(**changes).nodes[1].facts, clock=CLOCK
    )
    assert {each.verdict for each in judge(cluster(nodes=(*cluster().nodes[::2], without_gpu)))} == {"ok"}


def test_a_driver_too_old_for_the_cuda_of_torch_fails() -> None:
    found = [each for each in judge(with_facts(driver="570.86.15", driver_cuda=12080)) if each.check == "driver"]
    assert [(each.verdict, each.node) for each in found] == [("fail", BAD)]
    assert "driver is 570.86.15, and torch is built for CUDA 13.0. Install driver R580 or newer" in found[0].text


def test_a_node_with_gpus_needs_a_driver_and_a_build_of_torch_with_cuda() -> None:
    def texts(**changes: Any) -> list[str]:
        return [each.text for each in judge(with_facts(**changes)) if each.check == "driver" and each.node == BAD]

    assert (
        "no NVIDIA driver responds: nvidia-smi fails. Install driver R580"
        in texts(driver=None, driver_cuda=None, gpus=(), gpu_error="nvidia-smi fails")[0]
    )
    assert "a build without CUDA" in texts(cuda=None)[0]


def test_gpus_that_ray_counts_and_the_node_lacks_fail() -> None:
    found = problem(with_facts(gpus=(), gpu_error="nvidia-smi lists no GPU"), "GPUs")
    assert (found.verdict, found.node) == ("fail", BAD)
    assert "Ray has GPU=1, and 0 are present (nvidia-smi lists no GPU)" in found.text
    assert "start Ray with --num-gpus=0" in found.text


def test_gpus_that_torch_cannot_use_fail() -> None:
    found = [
        each for each in judge(with_facts(gpu_error="torch cannot use the GPUs (too old)")) if each.check == "GPUs"
    ]
    assert [(each.verdict, each.node) for each in found] == [("fail", BAD)]
    assert "too old" in found[0].text


def test_gpus_that_ray_leaves_out_are_a_warning() -> None:
    found = problem(with_facts(gpus=(GPU, Gpu(index=1, model="NVIDIA L4", used_mib=4, total_mib=23034))), "GPUs")
    assert found.verdict == "warn" and "--num-gpus=2" in found.text


def test_memory_in_use_on_a_gpu_that_ray_has_not_given_out_fails() -> None:
    busy = (Gpu(index=0, model="NVIDIA L4", used_mib=20_000, total_mib=23_034),)
    (found,) = (each for each in judge(with_facts(gpus=busy)) if each.check == "GPUs")
    assert (found.verdict, found.node) == ("fail", BAD)
    assert "GPU 0 (20,000 of 23,034 MiB), but Ray has given out only 0" in found.text
    in_a_run = with_node(facts=with_facts(gpus=busy).nodes[1].facts, free={"CPU": 3.0})
    (found,) = (each for each in judge(in_a_run) if each.check == "GPUs")
    assert (found.verdict, found.node) == ("warn", BAD)
    assert "in use by Ray jobs" in found.text


def test_a_token_that_is_missing_or_that_others_can_read_fails() -> None:
    path = "/home/ray/.ray/auth_token"
    missing = problem(with_facts(token=Token(auth_mode="token", path=path, permissions=None)), "token")
    assert missing.verdict == "fail" and f"{path} is missing" in missing.text
    readable = problem(with_facts(token=Token(auth_mode="token", path=path, permissions=0o644)), "token")
    assert readable.verdict == "fail" and readable.text.endswith(f"Run chmod 600 {path}")
    assert findings(with_facts(token=Token(auth_mode="token", path="", permissions=None)), "token")[0].verdict == "ok"


def test_a_cluster_without_a_token_is_a_warning() -> None:
    off = Token(auth_mode="", path="/home/ray/.ray/auth_token", permissions=None)
    found = problem(with_facts(token=off), "token")
    assert found.verdict == "warn" and found.node == BAD and "RAY_AUTH_MODE=token" in found.text
    nodes = [with_facts(token=off).nodes[1]] * 2
    assert problem(cluster(nodes=tuple(nodes), groups=cluster().groups), "token").node == ALL


@pytest.mark.parametrize(("offset_s", "verdict"), [(-1.5, "warn"), (30.0, "fail")])
def test_a_clock_that_is_off_is_named_with_its_offset(offset_s: float, verdict: str) -> None:
    found = problem(with_node(clock=Clock(offset_s=offset_s, uncertainty_s=0.01)), "clock")
    assert (found.verdict, found.node) == (verdict, BAD)
    assert f"{offset_s:+.1f} s off" in found.text


def test_a_clock_read_in_a_long_round_trip_is_not_blamed() -> None:
    assert findings(with_node(clock=Clock(offset_s=1.5, uncertainty_s=1.0)), "clock")[0].verdict == "ok"
    assert problem(with_node(clock=None), "clock").verdict == "fail"


def test_cpus_are_left_for_the_data_and_exist() -> None:
    few = problem(with_node(resources={**RESOURCES, "CPU": 1.0}), "CPUs")
    assert few.verdict == "warn" and few.node == BAD and "CPU=1 for 1 worker" in few.text
    many = problem(with_node(resources={**RESOURCES, "CPU": 8.0}), "CPUs")
    assert many.verdict == "warn" and "--num-cpus=4" in many.text


@pytest.mark.parametrize(("size", "verdict"), [(64 << 20, "fail"), (1 << 30, "warn")])
def test_a_small_shared_memory_folder_is_found(size: int, verdict: str) -> None:
    found = problem(with_facts(shm_bytes=size), "/dev/shm")
    assert (found.verdict, found.node) == (verdict, BAD)
    assert f"{size >> 20:,} MiB, and Ray's object store is 4,096 MiB" in found.text


def test_a_low_limit_of_open_files_is_a_warning() -> None:
    found = problem(with_facts(open_files=1024), "open files")
    assert (found.verdict, found.node) == ("warn", BAD)
    assert "1,024" in found.text and "ulimit -n 65536" in found.text
