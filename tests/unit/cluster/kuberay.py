"""The resources of KubeRay's API ray.io/v1, with the fields that the files under cluster/kuberay/ use.

Names, types and required fields are those of the custom resource definitions of KubeRay 1.5.1
(github.com/ray-project/kuberay, Apache-2.0). A field that is not here is refused: add it as the definitions have it.
`checked_by_definitions` checks a document against the definitions themselves, where they are at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import lightkube.models.core_v1 as core
import lightkube.models.meta_v1 as meta
import msgspec
import yaml


class Resource(msgspec.Struct, forbid_unknown_fields=True, rename="camel", kw_only=True):
    """A part of a resource. Field names are in camel case in the files."""


class AuthOptions(Resource):
    mode: Literal["disabled", "token"] = "disabled"


class AutoscalerOptions(Resource):
    version: Literal["v1", "v2"] | None = None
    idle_timeout_seconds: int | None = None
    security_context: core.SecurityContext | None = None


class RedisCredential(Resource):
    value_from: core.EnvVarSource | None = None


class GcsFaultToleranceOptions(Resource):
    redis_address: str
    redis_password: RedisCredential | None = None


class HeadGroupSpec(Resource):
    template: core.PodTemplateSpec
    ray_start_params: dict[str, str] = {}


class WorkerGroupSpec(Resource):
    group_name: str
    max_replicas: int
    min_replicas: int
    template: core.PodTemplateSpec
    replicas: int = 0
    ray_start_params: dict[str, str] = {}


class RayClusterSpec(Resource):
    head_group_spec: HeadGroupSpec
    worker_group_specs: list[WorkerGroupSpec] = []
    ray_version: str = ""
    auth_options: AuthOptions | None = None
    gcs_fault_tolerance_options: GcsFaultToleranceOptions | None = None
    enable_in_tree_autoscaling: bool | None = None
    autoscaler_options: AutoscalerOptions | None = None


class RayJobSpec(Resource):
    entrypoint: str = ""
    backoff_limit: int = 0
    shutdown_after_job_finishes: bool = False
    ttl_seconds_after_finished: int = 0
    submitter_pod_template: core.PodTemplateSpec | None = None
    ray_cluster_spec: RayClusterSpec | None = None


class RayCluster(Resource):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: meta.ObjectMeta
    spec: RayClusterSpec


class RayJob(Resource):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: meta.ObjectMeta
    spec: RayJobSpec


def checked_by_definitions(document: dict[str, Any], definitions: Path) -> Iterator[str]:
    """Yields the errors of a document by a file of custom resource definitions, such as `helm show crds` prints."""
    for definition in yaml.load_all(definitions.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if definition and definition["spec"]["names"]["kind"] == document["kind"]:
            versions = {version["name"]: version["schema"] for version in definition["spec"]["versions"]}
            schema = _as_json_schema(versions[document["apiVersion"].partition("/")[2]]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {}  # Kubernetes' own
            for error in jsonschema.Draft7Validator(schema).iter_errors(document):
                yield f"{error.json_path}: {error.message}"
            return
    yield f"{definitions} does not define {document['kind']}"


def _as_json_schema(schema: Any) -> Any:
    """Returns a schema of Kubernetes as a JSON Schema that refuses fields without a name in it, as `kubectl` does."""
    if isinstance(schema, list):
        return [_as_json_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: _as_json_schema(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result
