"""The manifests under cluster/kuberay/ are valid, and Ray's autoscaler understands them.

`KUBERAY_CRDS` names a file with KubeRay's custom resource definitions, against which they are checked as well:
`helm show crds kuberay/kuberay-operator --version 1.5.1 > crds.yaml`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightkube.models.apps_v1 as apps
import lightkube.models.core_v1 as core
import lightkube.models.networking_v1 as networking
import lightkube.models.policy_v1 as policy
import msgspec
import pytest
import typer
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from elastic_ddp.cli.main import app
from elastic_ddp.ray_internals import RAY_VERSION
from tests.unit.cluster.kuberay import RayCluster, RayJob, checked_by_definitions

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs/guides/kubernetes.md").read_text()
KINDS: dict[str, Any] = {
    "NetworkPolicy": networking.NetworkPolicy,
    "PodDisruptionBudget": policy.PodDisruptionBudget,
    "Service": core.Service,
    "StatefulSet": apps.StatefulSet,
}


def manifests(name: str) -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((ROOT / "cluster/kuberay" / name).read_text())
    return {f"{document['kind']}/{document['metadata']['name']}": document for document in documents}


CLUSTER = manifests("raycluster.yaml")["RayCluster/elastic-ddp"]
JOB = manifests("rayjob.yaml")["RayJob/elastic-ddp"]
REDIS = manifests("redis.yaml")
BUDGETS = manifests("disruption-budgets.yaml")
POLICIES = manifests("network-policy.yaml")
CRDS = os.environ.get("KUBERAY_CRDS")
SPECS = {"raycluster.yaml": CLUSTER["spec"], "rayjob.yaml": JOB["spec"]["rayClusterSpec"]}


def pod_templates() -> Iterator[Any]:
    for name, spec in SPECS.items():
        yield pytest.param(spec["headGroupSpec"]["template"], id=f"{name}-head")
        for group in spec["workerGroupSpecs"]:
            yield pytest.param(group["template"], id=f"{name}-{group['groupName']}")
    yield pytest.param(JOB["spec"]["submitterPodTemplate"], id="submitter")
    yield pytest.param(REDIS["StatefulSet/elastic-ddp-redis"]["spec"]["template"], id="redis")


def check(document: Any, model: Any) -> None:
    """Raises if a value has another type than in Kubernetes' schema, or if the schema lacks a name."""
    known = msgspec.to_builtins(msgspec.convert(document, model))
    assert_contains(known, document, "")


def assert_contains(known: Any, document: Any, place: str) -> None:
    if isinstance(document, dict):
        for name, value in document.items():
            assert name in known, f"there is no {place}.{name}"
            assert_contains(known[name], value, f"{place}.{name}")
    elif isinstance(document, list):
        for index, (have, value) in enumerate(zip(known, document, strict=True)):
            assert_contains(have, value, f"{place}[{index}]")


@pytest.mark.parametrize("template", list(pod_templates()))
def test_kubernetes_accepts_the_pods(template: dict[str, Any]) -> None:
    check(template, core.PodTemplateSpec)


@pytest.mark.parametrize("document", [*REDIS.values(), *BUDGETS.values(), *POLICIES.values()])
def test_kubernetes_accepts_what_is_beside_the_ray_cluster(document: dict[str, Any]) -> None:
    check(document, KINDS[document["kind"]])


def test_kubernetes_accepts_the_container_that_watches_spot_notices() -> None:
    text = (ROOT / "cluster/kuberay/raycluster.yaml").read_text()
    with_container = re.sub(r"^( +)# (- name: watch|  )", r"\1\2", text, flags=re.MULTILINE)
    [group] = yaml.safe_load(with_container)["spec"]["workerGroupSpecs"]
    check(group["template"], core.PodTemplateSpec)
    _, container = group["template"]["spec"]["containers"]
    assert container["image"] == group["template"]["spec"]["containers"][0]["image"]
    assert container["command"][1] in typer.main.get_command(app).commands
    address = container["env"][0]["value"]
    assert address == f"{CLUSTER['metadata']['name']}-head-svc:6379"  # KubeRay's name for the head's service


@pytest.mark.parametrize(("document", "model"), [(CLUSTER, RayCluster), (JOB, RayJob)], ids=SPECS)
def test_kuberay_has_every_field_of_its_resources_with_this_type(document: dict[str, Any], model: Any) -> None:
    msgspec.convert(document, model)


@pytest.mark.skipif(CRDS is None, reason="needs KUBERAY_CRDS, a file that `helm show crds` made")
@pytest.mark.parametrize("document", [CLUSTER, JOB], ids=SPECS)
def test_kuberays_own_definitions_accept_its_resources(document: dict[str, Any]) -> None:
    assert CRDS is not None
    assert list(checked_by_definitions(document, Path(CRDS))) == []


def test_a_misspelled_setting_is_found() -> None:
    with pytest.raises(AssertionError, match=r"there is no \.spec\.containers\[0\]\.imagee"):
        check({"spec": {"containers": [{"name": "a", "imagee": "b"}]}}, core.PodTemplateSpec)
    with pytest.raises(msgspec.ValidationError, match="unknown field `rayVersions`"):
        msgspec.convert({**CLUSTER, "spec": {**CLUSTER["spec"], "rayVersions": "2.60.0"}}, RayCluster)


@pytest.mark.parametrize("template", list(pod_templates()))
def test_pods_keep_the_restricted_security_standard(template: dict[str, Any]) -> None:
    pod = template["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_rays_autoscaler_scales_gpu_workers_and_none_on_the_head(spec: dict[str, Any]) -> None:
    types = _derive_autoscaling_config_from_ray_cr({"metadata": {"name": "a", "namespace": "b"}, "spec": spec})
    head, workers = types["available_node_types"]["headgroup"], types["available_node_types"]["gpu"]
    assert head["resources"]["CPU"] == head["resources"]["GPU"] == head["max_workers"] == 0
    assert workers["resources"]["CPU"] == 4 and workers["resources"]["GPU"] == 1
    assert (workers["min_workers"], workers["max_workers"]) == (0, 8)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_ray_ends_before_kubernetes_kills_it(spec: dict[str, Any]) -> None:
    for group, variable in (
        (spec["headGroupSpec"], "RAY_JOB_STOP_WAIT_TIME_S"),
        (spec["workerGroupSpecs"][0], "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"),
    ):
        pod = group["template"]["spec"]
        values = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
        assert 60 <= int(values[variable]) < pod["terminationGracePeriodSeconds"]


def test_head_and_redis_are_on_no_spot_node_and_workers_may_be_on_any() -> None:
    head, worker = (
        group["template"]["spec"]
        for group in (CLUSTER["spec"]["headGroupSpec"], CLUSTER["spec"]["workerGroupSpecs"][0])
    )
    [term] = head["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    avoided = {expression["key"]: expression["values"] for expression in term["matchExpressions"]}
    assert {expression["operator"] for expression in term["matchExpressions"]} == {"NotIn"}
    preferred = worker["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert avoided == {
        expression["key"]: expression["values"]
        for entry in preferred
        for expression in entry["preference"]["matchExpressions"]
    }
    assert "tolerations" not in head
    assert {each["key"] for each in worker["tolerations"]} >= {"nvidia.com/gpu", "cloud.google.com/gke-spot"}
    [stateful] = [document for name, document in REDIS.items() if name.startswith("StatefulSet/")]
    assert stateful["spec"]["template"]["spec"]["affinity"] == head["affinity"]


def test_a_job_has_the_same_cluster_without_redis() -> None:
    without_redis = {key: value for key, value in CLUSTER["spec"].items() if key != "gcsFaultToleranceOptions"}
    assert JOB["spec"]["rayClusterSpec"] == without_redis
    assert JOB["spec"]["backoffLimit"] > 0 and "--name" in JOB["spec"]["entrypoint"]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_drivers_on_every_pod_have_the_same_storage(spec: dict[str, Any]) -> None:
    pods = [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    variables = [{each["name"]: each["value"] for each in pod["containers"][0]["env"]} for pod in pods]
    assert {each["ELASTIC_DDP_STORAGE"] for each in variables} == {"s3://BUCKET/runs"}


def test_the_cluster_names_the_redis_that_exists_and_no_password() -> None:
    options = CLUSTER["spec"]["gcsFaultToleranceOptions"]
    host, _, port = options["redisAddress"].partition(":")
    assert int(port) == REDIS[f"Service/{host}"]["spec"]["ports"][0]["port"]
    [container] = REDIS[f"StatefulSet/{host}"]["spec"]["template"]["spec"]["containers"]
    assert options["redisPassword"] == {"valueFrom": container["env"][0]["valueFrom"]}


def test_disruption_budgets_hold_the_head_and_redis_and_no_worker() -> None:
    head, redis = (document["spec"] for document in BUDGETS.values())
    # For owners without a `scale` subresource, any other kind of budget refuses every eviction.
    assert head["minAvailable"] == 1 and "maxUnavailable" not in head
    labels = dict(head["selector"]["matchLabels"])
    added = {"ray.io/node-type": "head", "ray.io/cluster": CLUSTER["metadata"]["name"]}  # by KubeRay
    assert labels == added | CLUSTER["spec"]["headGroupSpec"]["template"]["metadata"]["labels"]
    [stateful] = [document for name, document in REDIS.items() if name.startswith("StatefulSet/")]
    assert redis["selector"] == stateful["spec"]["selector"]


def reachable(labels: dict[str, str], namespace: str, target: dict[str, str], port: int) -> bool:
    """Whether the policies let a pod with these labels reach a port of a pod of the cluster's namespace, `default`."""

    def selects(selector: dict[str, Any], given: dict[str, str]) -> bool:
        return selector.get("matchLabels", {}).items() <= given.items()

    def is_from(peer: dict[str, Any]) -> bool:
        names = peer.get("namespaceSelector", {"matchLabels": {"kubernetes.io/metadata.name": "default"}})
        pods = selects(peer.get("podSelector", {}), labels)
        return pods and selects(names, {"kubernetes.io/metadata.name": namespace})

    specs = [policy["spec"] for policy in POLICIES.values() if selects(policy["spec"]["podSelector"], target)]
    assert all(spec["policyTypes"] == ["Ingress"] for spec in specs), "DNS, the bucket and the metadata service"
    rules = [rule for spec in specs for rule in spec["ingress"]]
    allowing = [rule for rule in rules if any(map(is_from, rule["from"]))]
    ports = [{entry["port"] for entry in rule.get("ports", [{"port": port}])} for rule in allowing]
    return not specs or any(port in each for each in ports)


def test_the_network_policy_lets_only_the_cluster_and_the_operator_reach_rays_ports() -> None:
    operator = {"app.kubernetes.io/name": "kuberay-operator"}  # of its Helm chart
    [guide] = re.findall(r"helm install kuberay-operator .*?--namespace (\S+)", GUIDE.replace("\\\n", " "))
    pods = [SPECS["raycluster.yaml"]["headGroupSpec"], *(spec["workerGroupSpecs"][0] for spec in SPECS.values())]
    labels = [pod["template"]["metadata"]["labels"] for pod in pods]
    submitter = JOB["spec"]["submitterPodTemplate"]["metadata"]["labels"]
    [stateful] = [document for name, document in REDIS.items() if name.startswith("StatefulSet/")]
    redis = stateful["spec"]["template"]["metadata"]["labels"]
    for target in labels:
        for port in (6379, 8265, 10001, 8080, 40000):
            assert all(reachable(each, "default", target, port) for each in (*labels, submitter))
            assert not reachable({"app": "other"}, "default", target, port)
            assert not reachable(labels[0], "other", target, port)
            assert reachable(operator, guide, target, port) == (port == 8265)
    assert reachable(labels[0], "default", redis, 6379) and not reachable(operator, guide, redis, 6379)


def test_prometheus_scrapes_all_pods_of_ray() -> None:
    monitor = manifests("pod-monitor.yaml")["PodMonitor/elastic-ddp"]["spec"]
    added = {"ray.io/is-ray-node": "yes"}  # by KubeRay, which also adds the port to pods that lack it
    ports = set()
    for spec in SPECS.values():
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            assert monitor["selector"]["matchLabels"] == added | group["template"]["metadata"]["labels"]
        [head] = spec["headGroupSpec"]["template"]["spec"]["containers"]
        ports |= {port["name"] for port in head["ports"]}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} < ports


def test_image_and_ray_version_are_those_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = {
        container["image"]
        for spec in SPECS.values()
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
        for container in group["template"]["spec"]["containers"]
    }
    assert images == {f"REGISTRY/elastic-ddp:{version}"}
    for spec in SPECS.values():
        assert spec["rayVersion"].startswith(RAY_VERSION)
        assert f"\nray=={spec['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    script = JOB["spec"]["entrypoint"].split()[1]
    assert (ROOT / script.removeprefix("/home/ray/elastic_ddp/")).exists()
