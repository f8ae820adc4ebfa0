"""What the doctor finds wrong between nodes: storage, data, interfaces, and process groups."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from elastic_ddp.doctor.checks import judge
from elastic_ddp.doctor.facts import ALL, Reduced
from tests.unit.doctor.doctor_facts import BAD, NAMES, cluster, findings, group, problem, with_facts, with_node

RIGHT, WRONG, LACKING = (Reduced(smallest=low, largest=high) for low, high in ((6.0, 6.0), (4.0, 6.0), (3.0, 3.0)))


@pytest.mark.parametrize("check", ["storage", "data"])
def test_storage_and_data_that_a_node_or_the_checking_machine_cannot_use_fail(check: str) -> None:
    found = problem(with_node(**{f"{check}_problem": "does not see it"}), check)
    assert (found.verdict, found.node, found.text) == ("fail", BAD, "does not see it")
    found = problem(cluster(**{f"{check}_problem": "no such bucket"}), check)
    assert (found.verdict, found.node, found.text) == ("fail", ALL, "no such bucket")
    assert check not in {each.check for each in judge(cluster(**{check: None}))}, "it is not given"


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_process_group_that_does_not_form_or_adds_up_wrong_values_fails(backend: str) -> None:
    for result, text in ((WRONG, "from 4 to 6 instead of 6"), ("connect timeout", "connect timeout")):
        found = problem(cluster(groups={**cluster().groups, backend: group(RIGHT, result, RIGHT)}), backend)
        assert (found.verdict, found.node) == ("fail", BAD) and text in found.text
    all_wrong = findings(cluster(groups={**cluster().groups, backend: group(LACKING, LACKING, LACKING)}), backend)
    assert [each.verdict for each in all_wrong] == ["fail"] * 3, "a rank was left out"


def test_a_node_that_does_not_reach_the_store_fails_alone() -> None:
    found = [
        each for each in judge(with_node(connect_problem="cannot connect to 203.0.113.1:4711")) if each.node == BAD
    ]
    assert [(each.check, each.verdict) for each in found] == [("gloo", "fail")]
    assert "Open all ports" in found[0].text


def test_nodes_whose_gpus_are_in_no_group_of_nccl_are_named() -> None:
    found = problem(cluster(groups={"gloo": group()}), "nccl")
    assert found.verdict == "warn" and ", ".join(NAMES) in found.text


@pytest.mark.parametrize(
    ("environment", "verdict", "text"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "fail", "GLOO_SOCKET_IFNAME=ib0 names none of the interfaces lo, eth0"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "fail", "NCCL_SOCKET_IFNAME==eth names none"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "warn", "has the variables NCCL_SOCKET_IFNAME=eth, and others none"),
    ],
)
def test_settings_of_interfaces_are_checked(environment: Mapping[str, str], verdict: str, text: str) -> None:
    found = findings(with_facts(environment=environment), "network")
    assert found[0].verdict == verdict and found[0].node == BAD and text in found[0].text


def test_infiniband_that_nccl_cannot_use_is_a_warning_with_advice() -> None:
    changes = {"infiniband": ("mlx5_0/1",), "environment": {"NCCL_IB_DISABLE": "1"}, "locked_bytes": 65536}
    texts = "\n".join(each.text for each in findings(with_facts(**changes, has_ibverbs=False), "network"))
    for advice in ("NCCL_IB_DISABLE keeps NCCL off", "Install libibverbs1", "limited to 64 KiB", "ulimit -l unlimited"):
        assert advice in texts
    assert findings(with_facts(infiniband=("mlx5_0/1",)), "network")[0].verdict == "ok"
