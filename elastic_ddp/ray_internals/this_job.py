"""Records of Ray Jobs in the GCS, which every node reaches: the record of this process's job, and all records."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray._private.ray_constants import KV_NAMESPACE_JOB as _TABLE

from elastic_ddp.ray_internals import ANSWERS_WITHIN_S

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

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
    job = this_job()
    if job is None:
        return
    gcs = _gcs()
    key = _key(job)
    with suppress(ray.exceptions.RayError):  # the GCS is busy: the job is then known by its id alone
        stored = gcs.internal_kv_get(key, _TABLE, ANSWERS_WITHIN_S)
        if stored is not None:
            info = json.loads(stored)
            info["metadata"] = {**(info.get("metadata") or {}), RUN + name: folder}
            gcs.internal_kv_put(key, json.dumps(info).encode(), True, _TABLE, ANSWERS_WITHIN_S)


def recorded_jobs() -> list[JobDetails]:
    """Returns the submitted jobs of the cluster that this process is connected to, in any order."""
    from ray.job_submission import JobDetails, JobType  # 0.1 s

    gcs = _gcs()
    prefix = _key("")
    found = []
    for key in gcs.internal_kv_keys(prefix, _TABLE, ANSWERS_WITHIN_S):
        stored = gcs.internal_kv_get(key, _TABLE, ANSWERS_WITHIN_S)
        if stored is not None:
            facts = {name: value for name, value in json.loads(stored).items() if name in JobDetails.model_fields}
            name = key.decode().removeprefix(prefix.decode())
            found.append(JobDetails(type=JobType.SUBMISSION, submission_id=name, **facts))
    return found


def add_job(name: str, **facts: Any) -> bool:
    """Records a job that runs nothing. Returns False if a job of this id exists."""
    from ray.job_submission import JobInfo

    record = json.dumps(JobInfo(**facts).to_json()).encode()
    return bool(_gcs().internal_kv_put(_key(name), record, False, _TABLE, ANSWERS_WITHIN_S))


def _gcs() -> Any:
    worker: Any = ray._private.worker.global_worker
    return worker.gcs_client


def _key(job: str) -> bytes:
    from ray.dashboard.modules.job.common import JobInfoStorageClient

    return JobInfoStorageClient.JOB_DATA_KEY.format(job_id=job).encode()
