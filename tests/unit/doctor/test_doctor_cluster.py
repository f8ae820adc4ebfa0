"""What the doctor finds wrong between nodes: storage, data, interfaces, and process groups."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from elastic_ddp.doctor.checks import judge
from elastic_ddp.doctor.facts import Reduced
from tests.unit.doctor_facts import BAD, NAMES, cluster, findings, group, problem, with_facts, with_node

SUM = Reduced(smallest=6.0, largest=6.0)


def test_a_node_that_does_not_see_the_storage_or_the_data_fails() -> None:
    for check in ("storage", "data"):
        found = problem(with_node(**{f"{check}_problem": "does not see it"}), check)
        assert (found.verdict, found.node, found.text) == ("fail", BAD, "does not see it")


def test_storage_and_data_that_the_checking_machine_cannot_use_fail() -> None:
    for check in ("storage", "data"):
        found = problem(cluster(**{f"{check}_problem": "no such bucket"}), check)
        assert (found.verdict, found.text) == ("fail", "no such bucket")


def test_storage_and_data_that_are_not_given_are_not_reported() -> None:
    assert {"storage", "data"}.isdisjoint(each.check for each in judge(cluster(storage=None, data=None)))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_wrong_sum_fails_on_the_rank_that_has_it(backend: str) -> None:
    wrong = group(SUM, Reduced(smallest=4.0, largest=6.0), SUM)
    found = problem(cluster(groups={**cluster().groups, backend: wrong}), backend)
    assert (found.verdict, found.node) == ("fail", BAD)
    assert "from 4 to 6 instead of 6" in found.text


def test_a_sum_that_leaves_a_rank_out_fails_everywhere() -> None:
    three = Reduced(smallest=3.0, largest=3.0)
    assert [each.verdict for each in findings(cluster(groups={"gloo": group(three, three, three)} | NCCL), "gloo")] == [
        "fail"
    ] * 3


NCCL = {"nccl": group()}


def test_a_process_group_that_does_not_form_fails_with_its_error() -> None:
    found = problem(cluster(groups={"gloo": group(SUM, "connect timeout", SUM)} | NCCL), "gloo")
    assert (found.verdict, found.node) == ("fail", BAD)
    assert "connect timeout" in found.text


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
        ({"NCCL_SOCKET_IFNAME": "^docker"}, "warn", "others none"),
    ],
)
def test_settings_of_interfaces_are_checked(environment: Mapping[str, str], verdict: str, text: str) -> None:
    found = findings(with_facts(environment=environment), "network")
    assert found[0].verdict == verdict and found[0].node == BAD and text in found[0].text


def test_a_node_without_an_interface_of_its_address_is_a_warning() -> None:
    found = problem(with_facts(interface=None), "network")
    assert (found.verdict, found.node) == ("warn", BAD)
    assert f"no interface has the address {BAD}" in found.text


def test_infiniband_that_nccl_cannot_use_is_a_warning_with_advice() -> None:
    changes = {"infiniband": ("mlx5_0/1",), "environment": {"NCCL_IB_DISABLE": "1"}, "locked_bytes": 65536}
    texts = "\n".join(each.text for each in findings(with_facts(**changes, has_ibverbs=False), "network"))
    for advice in ("NCCL_IB_DISABLE keeps NCCL off", "Install libibverbs1", "limited to 64 KiB", "ulimit -l unlimited"):
        assert advice in texts
    assert findings(with_facts(infiniband=("mlx5_0/1",)), "network")[0].verdict == "ok"
