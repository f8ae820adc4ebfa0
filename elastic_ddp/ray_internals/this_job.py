"""The job of Ray Jobs whose driver this process is: what it was submitted with, and the runs that it has begun."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray

from elastic_ddp.ray_internals import ANSWERS_WITHIN_S

RUN = "elastic_ddp.run/"
"""A job's metadata has this prefix and the name of each run that its driver has begun, with the run's folder."""
COPIES = "/runtime_resources/working_dir_files/"
"""Part of the path of each copy that Ray makes of a working directory."""


def metadata_of_this_job() -> Mapping[str, str]:
    """Returns the metadata of the job of Ray Jobs whose driver this process is; empty for other processes."""
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    config = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR) or "{}")
    metadata: Mapping[str, str] = config.get("metadata") or {}
    return metadata


def this_job() -> str | None:
    """Returns the submission id of the job of Ray Jobs whose driver this process is; None for other processes."""
    return metadata_of_this_job().get("job_submission_id")


def record_run(name: str, folder: str) -> None:
    """Adds a run to the metadata of the job whose driver this process is, if any. This process is connected to Ray."""
    from ray._private.ray_constants import KV_NAMESPACE_JOB
    from ray.dashboard.modules.job.common import JobInfoStorageClient

    if (job := this_job()) is None:
        return
    worker: Any = ray._private.worker.global_worker
    gcs = worker.gcs_client
    key = JobInfoStorageClient.JOB_DATA_KEY.format(job_id=job).encode()
    with suppress(ray.exceptions.RayError):  # the GCS is busy: the job is then known by its id alone
        if (stored := gcs.internal_kv_get(key, KV_NAMESPACE_JOB, ANSWERS_WITHIN_S)) is not None:
            info = json.loads(stored)
            info["metadata"] = {**(info.get("metadata") or {}), RUN + name: folder}
            gcs.internal_kv_put(key, json.dumps(info).encode(), True, KV_NAMESPACE_JOB, ANSWERS_WITHIN_S)
