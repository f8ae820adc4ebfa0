"""Facts about a healthy cluster, of which tests of the doctor spoil one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic_ddp.doctor.checks import judge
from elastic_ddp.doctor.facts import Clock, Cluster, Finding, Gpu, Node, NodeFacts, Reduced, Token

NAMES = ("203.0.113.1", "203.0.113.2", "203.0.113.3")
BAD = NAMES[1]
"""The node that a test spoils."""
GPU = Gpu(index=0, model="NVIDIA L4", used_mib=4, total_mib=23034)


def node_facts(address: str) -> NodeFacts:
    return NodeFacts(
        versions={"Python": "3.12.8", "elastic_ddp": "0.1.0 (source 0a1b2c3d)", "torch": "2.13.0", "ray": "2.60.0"},
        cuda="13.0",
        nccl="2.30",
        driver="580.95.05",
        driver_cuda=13000,
        gpus=(GPU,),
        gpu_error=None,
        token=Token(auth_mode="token", path="/home/ray/.ray/auth_token", permissions=0o600),
        usable_cpus=4.0,
        shm_bytes=8 << 30,
        open_files=65536,
        locked_bytes=-1,
        address=address,
        interface="eth0",
        interfaces=("lo", "eth0"),
        environment={},
        infiniband=(),
        has_ibverbs=True,
    )


def healthy_node(name: str) -> Node:
    resources = {"CPU": 4.0, "GPU": 1.0, "object_store_memory": float(4 << 30)}
    return Node(
        name=name,
        resources=resources,
        free=resources,
        facts=node_facts(name),
        clock=Clock(offset_s=0.001, uncertainty_s=0.0005),
    )


def group(*results: Reduced | str) -> dict[str, Reduced | str]:
    return dict(zip(NAMES, results or [Reduced(smallest=6.0, largest=6.0)] * 3, strict=True))


def cluster(**changes: Any) -> Cluster:
    """A healthy cluster with these changes."""
    values: dict[str, Any] = {
        "nodes": tuple(map(healthy_node, NAMES)),
        "storage": "s3://bucket/runs",
        "data": "s3://bucket/train",
        "num_files": 8,
        "groups": {"gloo": group(), "nccl": group()},
    }
    return Cluster(**{**values, **changes})


def with_node(**changes: Any) -> Cluster:
    """A cluster whose node `BAD` has other values."""
    return cluster(nodes=tuple(replace(each, **changes) if each.name == BAD else each for each in cluster().nodes))


def with_facts(**changes: Any) -> Cluster:
    """A cluster in which the process on node `BAD` reports other facts."""
    return with_node(facts=replace(node_facts(BAD), **changes))


def findings(cluster: Cluster, check: str) -> list[Finding]:
    """The findings of one check. The other checks must be fine."""
    found = judge(cluster)
    others = [each for each in found if each.check != check and each.verdict != "ok"]
    assert not others, others
    return [each for each in found if each.check == check]


def problem(cluster: Cluster, check: str) -> Finding:
    """The only finding of one check, which is not fine. The other checks must be."""
    (finding,) = findings(cluster, check)
    assert finding.verdict != "ok"
    return finding
