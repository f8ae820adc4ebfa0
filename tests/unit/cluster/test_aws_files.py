"""The policies under cluster/iam/ and cluster/cluster.yaml, with Ray's AWS code on moto's fake of AWS."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore import xform_name
from botocore.awsrequest import AWSPreparedRequest
from moto import mock_aws
from ray.autoscaler._private.aws.config import bootstrap_aws
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler._private.aws.utils import client_cache, resource_cache
from ray.autoscaler._private.util import prepare_config
from ray.autoscaler.tags import NODE_KIND_WORKER, TAG_RAY_CLUSTER_NAME, TAG_RAY_NODE_KIND, TAG_RAY_NODE_NAME
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil

ROOT = Path(__file__).parents[3]
IAM = ROOT / "cluster/iam"
POLICIES = ["storage.json", "head.json", "launcher.json"]
CONFIG = yaml.safe_load((ROOT / "cluster/cluster.yaml").read_text())


def statements(name: str) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = json.loads((IAM / name).read_text())["Statement"]
    return result


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def actions(name: str) -> set[str]:
    return {action for statement in statements(name) for action in listed(statement["Action"])}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[set[str]]:
    """The API calls so far on a fake of AWS, as IAM names them."""
    made: set[str] = set()
    prepare = AWSPreparedRequest.__init__

    def note(request: AWSPreparedRequest, *arguments: Any, **options: Any) -> None:
        prepare(request, *arguments, **options)
        host, body = request.url.split("/")[2], request.body or b""
        action = re.search(r"Action=(\w+)", body if isinstance(body, str) else body.decode())
        made.add(f"{host.split('.')[0]}:{action[1] if action else request.method}")

    environment = {
        **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "testing"),
        "AWS_DEFAULT_REGION": CONFIG["provider"]["region"],
        "HOME": str(tmp_path_factory.mktemp("home")),  # Ray stores the key there
        "MOTO_EC2_LOAD_DEFAULT_AMIS": "false",  # they take seconds
    }
    caches = (client_cache, resource_cache)
    for cache in caches:
        cache.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in environment.items():
            patch.setenv(variable, value)
        for variable in ("AWS_PROFILE", "AWS_ENDPOINT_URL"):
            patch.delenv(variable, raising=False)
        patch.setattr(AWSPreparedRequest, "__init__", note)
        with mock_aws():
            yield made
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(scope="module")
def bootstrapped(calls: set[str]) -> dict[str, Any]:
    """What `ray up` makes of cluster.yaml before it starts instances, with what it names."""
    call_iam_as_in_the_guide()
    ec2 = boto3.client("ec2")
    group = ec2.create_security_group(GroupName="elastic-ddp", Description="elastic-ddp")["GroupId"]
    image = ec2.register_image(Name="image")["ImageId"]  # moto cannot resolve ssm
    calls.clear()
    config = copy.deepcopy(CONFIG)
    for node_type in config["available_node_types"].values():
        node_type["node_config"].update(SecurityGroupIds=[group], ImageId=image)
    return dict(bootstrap_aws(prepare_config(config)))


def use(config: dict[str, Any], node_type: str) -> None:
    """Starts, lists, tags and terminates an instance, as Ray's autoscaler does."""
    tags = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER, TAG_RAY_NODE_NAME: "worker"}
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    [node] = provider.create_node(copy.deepcopy(config["available_node_types"][node_type]["node_config"]), tags, 1)
    assert provider.non_terminated_nodes({}) == [node]
    provider.set_node_tags(node, {"ray-node-status": "up-to-date"})
    provider.terminate_node(node)
    assert provider.non_terminated_nodes({}) == []


def test_launcher_and_head_may_make_each_call_of_ray_up_and_of_rays_autoscaler(
    bootstrapped: dict[str, Any], calls: set[str]
) -> None:
    use(bootstrapped, "head")
    assert {"ec2:CreateKeyPair", "ec2:DescribeSubnets"} <= calls
    assert calls <= actions("launcher.json")
    calls.clear()
    for node_type in ("gpu-spot", "gpu-on-demand"):
        use(bootstrapped, node_type)
    assert {"ec2:RunInstances", "ec2:DescribeInstances", "ec2:CreateTags", "ec2:TerminateInstances"} <= calls
    assert calls <= actions("head.json")


def test_nodes_may_start_in_every_zone(bootstrapped: dict[str, Any]) -> None:
    zone_of = {
        subnet["SubnetId"]: subnet["AvailabilityZone"] for subnet in boto3.client("ec2").describe_subnets()["Subnets"]
    }
    for node_type in bootstrapped["available_node_types"].values():
        zones = {zone_of[subnet] for subnet in node_type["node_config"]["SubnetIds"]}
        assert len(zones) == len(set(zone_of.values())) > 1


@pytest.mark.parametrize(("on_demand", "launched"), [(0, {"gpu-spot": 4}), (2, {"gpu-spot": 2, "gpu-on-demand": 2})])
def test_workers_are_spot_except_the_on_demand_ones_that_are_asked_for(
    on_demand: int, launched: dict[str, int]
) -> None:
    config = copy.deepcopy(CONFIG)
    config["available_node_types"]["gpu-on-demand"]["min_workers"] = on_demand
    prepared = AutoscalingConfig(prepare_config(config), skip_content_hash=True)
    requests = ResourceRequestUtil.group_by_count([ResourceRequestUtil.make({"CPU": 1, "GPU": 1})] * 4)
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=prepared.get_node_type_configs(),
        max_num_nodes=prepared.get_max_num_nodes(),
        resource_requests=requests,
    )
    to_launch = ResourceDemandScheduler(None).schedule(request).to_launch
    assert {launch.instance_type: launch.count for launch in to_launch} == launched


@pytest.mark.parametrize("name", ["head.json", "launcher.json"])
def test_only_instances_of_this_cluster_can_be_started_or_terminated(name: str) -> None:
    condition = {"ray-cluster-name": CONFIG["cluster_name"]}
    assert TAG_RAY_CLUSTER_NAME == "ray-cluster-name"
    for statement in statements(name):
        instances = any(
            fnmatchcase("arn:aws:ec2:r:a:instance/i", resource) for resource in listed(statement["Resource"])
        )
        changes = [action for action in listed(statement["Action"]) if not action.startswith("ec2:Describe")]
        if not instances or not changes:
            continue
        equals = statement["Condition"]["StringEquals"]
        assert equals in (
            {f"aws:RequestTag/{key}": value for key, value in condition.items()},
            {f"aws:ResourceTag/{key}": value for key, value in condition.items()},
            {"ec2:CreateAction": "RunInstances"},
        )


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_allows_more_than_named_actions(name: str) -> None:
    for statement in statements(name):
        assert statement["Effect"] == "Allow"
        assert all(re.fullmatch(r"\w+:\w+", action) for action in listed(statement["Action"]))
        if "*" in listed(statement["Resource"]):
            assert all(action.startswith("ec2:Describe") for action in listed(statement["Action"]))


def test_instances_get_the_roles_that_ray_may_give_them() -> None:
    head, *workers = (
        node_type["node_config"]["IamInstanceProfile"]["Name"] for node_type in CONFIG["available_node_types"].values()
    )
    for name, profiles in (("head.json", workers), ("launcher.json", [head, *workers])):
        [given] = [
            listed(statement["Resource"]) for statement in statements(name) if statement["Action"] == "iam:PassRole"
        ]
        assert {arn.rpartition("/")[2] for arn in given} == set(profiles)


def test_the_image_is_one_that_the_policies_allow_to_look_up() -> None:
    image = CONFIG["available_node_types"]["head"]["node_config"]["ImageId"]
    arn = f"arn:aws:ssm:us-west-2::parameter{image.removeprefix('resolve:ssm:')}"
    for name in ("head.json", "launcher.json"):
        [allowed] = [
            statement["Resource"] for statement in statements(name) if statement["Action"] == "ssm:GetParameters"
        ]
        assert fnmatchcase(arn, allowed)


def test_the_iam_commands_of_the_guide_make_both_instance_profiles(bootstrapped: dict[str, Any]) -> None:
    iam = boto3.client("iam")
    for name, policies in (("elastic-ddp-worker", {"storage"}), ("elastic-ddp-head", {"storage", "head"})):
        [role] = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Roles"]
        assert role["RoleName"] == name
        assert set(iam.list_role_policies(RoleName=name)["PolicyNames"]) == policies


def call_iam_as_in_the_guide() -> None:
    """Makes the calls of the guide's `aws iam` commands, whose options are named like the API's."""
    page = (ROOT / "docs/guides/cluster-cloud.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^aws iam .*", unrolled(page), re.MULTILINE)
    assert len(lines) > 5
    for line in lines:
        _, service, command, *options = shlex.split(line, comments=True)
        client = boto3.client(service)
        operation = next(name for name in client.meta.service_model.operation_names if xform_name(name, "-") == command)
        members = client.meta.service_model.operation_model(operation).input_shape.members
        names = {xform_name(member, "-"): member for member in members}
        pairs = zip(*[iter(options)] * 2, strict=True)
        getattr(client, xform_name(operation))(**{names[name[2:]]: read(value) for name, value in pairs})


def unrolled(page: str) -> str:
    """Writes out a loop of the page over words: `for name in a b; do … $name …; done`."""

    def repeat(loop: re.Match[str]) -> str:
        return "\n".join(loop[3].replace(f"${loop[1]}", word) for word in loop[2].split())

    text = re.sub(r"^for (\w+) in (.*); do\n(.*?)^done$", repeat, page, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^ +(?=aws )", "", text, flags=re.MULTILINE)


def read(value: str) -> str:
    """Returns an option's value; a file's text if it is `file://`."""
    if not value.startswith("file://"):
        return value
    return (ROOT / value.removeprefix("file://")).read_text().replace("BUCKET", "my-bucket")
