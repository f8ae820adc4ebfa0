"""A job server of Ray Jobs in memory, and the GCS that has its records."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ray.dashboard.modules.job.common import JobInfoStorageClient
from ray.job_submission import JobDetails, JobErrorType, JobStatus, JobType

from elastic_ddp.ray_internals.this_job import RUN

DIED = JobErrorType.JOB_SUPERVISOR_ACTOR_DIED
EXITED = JobErrorType.JOB_ENTRYPOINT_COMMAND_ERROR


@dataclass
class JobServer:
    """A job server and its client. `logs` has the chunks of each connection that follows a job's log, in order."""

    jobs: dict[str, JobDetails] = field(default_factory=dict)
    submitted: list[dict[str, Any]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    logs: dict[str, list[list[str]]] = field(default_factory=dict)
    is_down: bool = False
    dead: list[str] = field(default_factory=list)
    """Jobs that died with the previous head. A new head records it at the first request to submit a job."""

    def get_address(self) -> str:
        return "http://head:8265"

    def submit_job(self, **request: Any) -> str:
        name = request["submission_id"]
        while self.dead:
            self.end(self.dead.pop(), DIED)
        if name in self.jobs:
            raise RuntimeError(f"Job with submission_id {name} already exists")
        self.submitted.append(request)
        facts = {"entrypoint": request["entrypoint"], "runtime_env": request.get("runtime_env")}
        self.add(name, metadata=dict(request["metadata"]), **facts)
        return name

    def add(self, name: str, status: JobStatus = JobStatus.RUNNING, **facts: Any) -> None:
        details = {"entrypoint": "python train.py", "metadata": {}, "start_time": len(self.jobs), **facts}
        self.jobs[name] = JobDetails(type=JobType.SUBMISSION, submission_id=name, status=status, **details)

    def end(self, name: str, error: JobErrorType | None = None, code: int | None = None) -> None:
        status = JobStatus.SUCCEEDED if error is None else JobStatus.FAILED
        error_type = error.value if error is not None else None
        changes = {"status": status, "error_type": error_type, "driver_exit_code": code}
        self.jobs[name] = self.jobs[name].model_copy(update=changes)

    def begin_run(self, name: str, run: str) -> None:
        metadata = self.jobs[name].metadata or {}
        self.jobs[name] = self.jobs[name].model_copy(update={"metadata": {**metadata, RUN + run: "s3://runs"}})

    def list_jobs(self) -> list[JobDetails]:
        if self.is_down:
            raise ConnectionError("refused")
        return list(self.jobs.values())

    def stop_job(self, name: str) -> bool:
        self.stopped.append(name)
        return True

    def get_job_logs(self, name: str) -> str:
        if not self.logs.get(name):
            raise RuntimeError("Request failed with status code 500")
        return "".join(self.logs[name][-1])

    async def tail_job_logs(self, name: str) -> AsyncIterator[str]:
        for chunk in self.logs[name].pop(0) if self.logs.get(name) else []:
            yield chunk
        raise RuntimeError("WebSocket connection closed unexpectedly")


@dataclass
class Gcs:
    """The part of the GCS that has the records of a server's jobs."""

    server: JobServer

    def internal_kv_keys(self, prefix: bytes, *_: Any) -> list[bytes]:
        return [prefix + name.encode() for name in self.server.jobs]

    def internal_kv_get(self, key: bytes, *_: Any) -> bytes | None:
        job = self.server.jobs.get(_name(key))
        return None if job is None else job.model_dump_json(exclude={"type", "submission_id"}).encode()

    def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, *_: Any) -> int:
        if _name(key) in self.server.jobs and not overwrite:
            return 0
        facts = {name: given for name, given in json.loads(value).items() if name in JobDetails.model_fields}
        self.server.add(_name(key), **facts)
        return 1


def _name(key: bytes) -> str:
    return key.decode().removeprefix(JobInfoStorageClient.JOB_DATA_KEY_PREFIX)
