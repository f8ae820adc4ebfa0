"""What the doctor finds wrong with a single node, each from facts that differ from a healthy cluster's in one place."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ddp.doctor.checks import judge
from elastic_ddp.doctor.facts import ALL, Clock, Finding, Gpu, Node, Token
from tests.unit.doctor.doctor_facts import (
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
CLOCK = Clock(offset_s=0.0, uncertainty_s=0.0)
TOKEN = "/home/ray/.ray/auth_token"
OFF = Token(auth_mode="", path=TOKEN, permissions=None)


def test_a_healthy_cluster_passes_every_check_with_one_row_each() -> None:
    found = judge(cluster())
    assert {each.verdict for each in found} == {"ok"}
    assert [each.check for each in found] == [
        *("nodes", "versions", "driver", "token", "clock", "storage", "data", "GPUs", "CPUs", "/dev/shm", "open files"),
        *("network", "gloo", "nccl"),
    ]
    assert "3 in Ray, 3 for workers (CPU=12, GPU=3)" in {each.text for each in found}


@pytest.mark.parametrize(
    ("check", "facts", "verdict", "text"),
    [
        ("versions", {"cuda": "12.8"}, "fail", "torch's CUDA is 12.8"),
        ("versions", {"nccl": "2.27"}, "fail", "NCCL is 2.27"),
        ("versions", {"driver": "590.10"}, "warn", "NVIDIA's driver is 590.10"),
        ("token", {"token": Token(auth_mode="token", path=TOKEN, permissions=None)}, "fail", f"{TOKEN} is missing"),
        ("token", {"token": Token(auth_mode="token", path=TOKEN, permissions=0o644)}, "fail", f"Run chmod 600 {TOKEN}"),
        ("token", {"token": OFF}, "warn", "start Ray with RAY_AUTH_MODE=token"),
        ("GPUs", {"gpus": (GPU, Gpu(index=1, model="L4", used_mib=4, total_mib=9))}, "warn", "--num-gpus=2"),
        ("GPUs", {"gpus": (), "gpu_error": "none listed"}, "fail", "Ray has GPU=1, and 0 are present (none listed)"),
        ("/dev/shm", {"shm_bytes": 64 << 20}, "fail", "64 MiB, and Ray's object store is 4,096 MiB"),
        ("/dev/shm", {"shm_bytes": 1 << 30}, "warn", "1,024 MiB, and Ray's object store is 4,096 MiB"),
        ("open files", {"open_files": 1024}, "warn", "1,024, and a large run needs 65,536. Call `ulimit -n 65536`"),
        ("network", {"interface": None}, "warn", f"no interface has the address {BAD}"),
    ],
)
def test_a_wrong_fact_of_a_node_is_found(check: str, facts: dict[str, Any], verdict: str, text: str) -> None:
    found = problem(with_facts(**facts), check)
    assert (found.verdict, found.node) == (verdict, BAD) and text in found.text


def test_a_node_on_which_no_process_starts_fails() -> None:
    found = problem(with_node(facts=None, problem="No module named 'elastic_ddp'."), "nodes")
    assert (found.verdict, found.node) == ("fail", BAD) and "No module named 'elastic_ddp'" in found.text


def test_a_cluster_without_nodes_for_workers_is_a_warning() -> None:
    head = Node(name=NAMES[0], resources={"CPU": 0.0}, free={}, facts=node_facts(NAMES[0]), clock=CLOCK)
    assert "no node has CPUs or GPUs" in problem(cluster(nodes=(head,), groups={}), "nodes").text


def test_a_node_with_another_version_fails_and_both_versions_are_named() -> None:
    text = "torch is 0.0.9, and 2.13.0 on 2 of 3 nodes. Install the same version on all nodes."
    found = problem(with_facts(versions={**node_facts(BAD).versions, "torch": "0.0.9"}), "versions")
    assert found == Finding("versions", "fail", text, BAD)


def test_cuda_nccl_and_driver_of_a_node_without_gpus_are_not_compared() -> None:
    facts = with_facts(cuda=None, nccl=None, driver=None).nodes[1].facts
    node = Node(name=BAD, resources={"CPU": 4.0}, free={}, facts=facts, clock=CLOCK)
    assert {each.verdict for each in judge(cluster(nodes=(*cluster().nodes[::2], node)))} == {"ok"}


@pytest.mark.parametrize(
    ("check", "facts", "text"),
    [
        (
            "driver",
            {"driver": "570.86.15", "driver_cuda": 12080},
            "driver is 570.86.15, and torch is built for CUDA 13.0. Install driver R580 or newer",
        ),
        (
            "driver",
            {"driver": "570.86.15", "driver_cuda": None},
            "driver is 570.86.15, and torch is built for CUDA 13.0. Install driver R580 or newer",
        ),
        (
            "driver",
            {"driver": None, "driver_cuda": None, "gpus": (), "gpu_error": "nvidia-smi fails"},
            "no NVIDIA driver responds: nvidia-smi fails. Install driver R580",
        ),
        ("driver", {"cuda": None}, "a build without CUDA"),
        ("GPUs", {"gpu_error": "torch cannot use the GPUs (too old)"}, "too old"),
    ],
)
def test_a_node_with_gpus_needs_a_driver_and_a_torch_that_can_use_them(
    check: str, facts: dict[str, Any], text: str
) -> None:
    [found] = [each for each in judge(with_facts(**facts)) if each.check == check]  # other checks may fail, too
    assert (found.verdict, found.node) == ("fail", BAD) and text in found.text


def test_memory_in_use_on_a_gpu_that_ray_has_not_given_out_fails() -> None:
    busy = (Gpu(index=0, model="NVIDIA L4", used_mib=20_000, total_mib=23_034),)
    (found,) = (each for each in judge(with_facts(gpus=busy)) if each.check == "GPUs")
    assert (found.verdict, found.node) == ("fail", BAD)
    assert "GPU 0 (20,000 of 23,034 MiB), but Ray has given out only 0" in found.text
    in_a_run = with_node(facts=with_facts(gpus=busy).nodes[1].facts, free={"CPU": 3.0})
    (found,) = (each for each in judge(in_a_run) if each.check == "GPUs")
    assert (found.verdict, found.node) == ("warn", BAD) and "in use by Ray jobs" in found.text


def test_a_token_in_the_environment_is_one_and_a_cluster_without_any_is_one_warning() -> None:
    assert findings(with_facts(token=Token(auth_mode="token", path="", permissions=None)), "token")[0].verdict == "ok"
    nodes = [with_facts(token=OFF).nodes[1]] * 2
    assert problem(cluster(nodes=tuple(nodes)), "token").node == ALL


def test_a_clock_that_is_off_is_named_unless_it_was_read_in_a_long_round_trip() -> None:
    for offset_s, verdict in ((-1.5, "warn"), (30.0, "fail")):
        found = problem(with_node(clock=Clock(offset_s=offset_s, uncertainty_s=0.01)), "clock")
        assert (found.verdict, found.node) == (verdict, BAD) and f"{offset_s:+.1f} s off" in found.text
    assert findings(with_node(clock=Clock(offset_s=1.5, uncertainty_s=1.0)), "clock")[0].verdict == "ok"
    assert problem(with_node(clock=None), "clock").verdict == "fail"


def test_cpus_are_left_for_the_data_and_exist() -> None:
    few = problem(with_node(resources={**RESOURCES, "CPU": 1.0}), "CPUs")
    assert few.verdict == "warn" and few.node == BAD and "CPU=1 for 1 worker" in few.text
    many = problem(with_node(resources={**RESOURCES, "CPU": 8.0}), "CPUs")
    assert many.verdict == "warn" and "--num-cpus=4" in many.text
