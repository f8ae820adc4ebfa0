"""Starts a run's workers with Ray Train."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import ray.train
import torch

from elastic_ddp.data.user_code import ship
from elastic_ddp.errors import StorageError
from elastic_ddp.rendezvous import standby
from elastic_ddp.rendezvous.actor import RendezvousHandle
from elastic_ddp.rendezvous.members import Member
from elastic_ddp.worker.job import Job, WorkerContext
from elastic_ddp.worker.main import work

_RAY_TRAIN_SETTINGS = {
    # How often the controller polls its workers, while none is starting; by default every 2 s.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1.0",
    # The controller's log would interrupt the progress display; its decisions are in the ledger.
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    # How long the controller blocks until its first workers have capacity; by default 60 s.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    # It reports preemptions to functions that ask Ray Train for them; our workers do not.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # It makes each line that a worker prints appear twice.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # The working directory is the driver's: see `data/user_code.py`.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""Environment variables that Ray Train reads in the driver. Values that the user has set take precedence."""


def run_workers(job: Job, rendezvous: RendezvousHandle, on_controller: Callable[[Any], None]) -> None:
    """Runs a job on Ray Train workers until all of them return.

    Raises `ray.train.TrainingFailedError` if more workers fail than `max_restarts` allows, or none can start.
    `on_controller` is called with Ray Train's controller actor; killing it ends all workers.
    """
    config = job.config
    transform = None if job.transform is None else ship(job.transform, "transform")
    collate_fn = None if job.collate_fn is None else ship(job.collate_fn, "collate_fn")
    job = replace(job, train=ship(job.train, "train"), transform=transform, collate_fn=collate_fn)
    # The name is unique, so that Ray Train finds no state of an earlier session to resume from.
    session = f"session-{uuid.uuid4().hex[:8]}"
    filesystem, path = job.storage.at("ray_train").filesystem_and_path()
    scaling: dict[str, Any] = {"num_workers": config.max_workers}
    if config.min_workers != config.max_workers:
        scaling = {
            "num_workers": (config.min_workers, config.max_workers),
            "elastic_resize_monitor_interval_s": config.resize_interval_s,
        }
    for name, value in _RAY_TRAIN_SETTINGS.items():
        os.environ.setdefault(name, value)
    # The tasks that workers start for their data inherit it.
    environment: dict[str, Any] = {"worker_runtime_env": {"env_vars": dict(config.env)}}
    # Imported late: with another Ray version the import fails, and `check_ray_version` explains that better.
    from elastic_ddp.ray_internals.trainer import ElasticTorchTrainer

    trainer = ElasticTorchTrainer(
        partial(_run_worker, job, rendezvous),
        run_name=config.name,
        rendezvous=rendezvous,
        save_within_s=config.drain_deadline_s,
        standby_workers=config.standby_workers,
        on_controller=on_controller,
        scaling_config=ray.train.ScalingConfig(
            use_gpu=config.use_gpu, resources_per_worker=dict(config.resources_per_worker), **scaling
        ),
        run_config=ray.train.RunConfig(
            name=session,
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=ray.train.FailureConfig(max_failures=config.max_restarts),
            **environment,
        ),
    )
    try:
        trainer.fit()
    finally:
        with suppress(StorageError):
            job.storage.delete_tree(f"ray_train/{session}")


def _run_worker(job: Job, rendezvous: RendezvousHandle) -> None:
    """Ray Train's training function, which it calls in every worker."""
    from elastic_ddp.ray_internals.worker_group import device_of_worker

    train_context = ray.train.get_context()
    runtime = ray.get_runtime_context()
    node_id, is_standby = runtime.get_node_id(), not standby.has_place()
    member = Member(
        id=str(runtime.get_actor_id()),
        rank_in_group=0 if is_standby else train_context.get_world_rank(),
        group_size=1 if is_standby else train_context.get_world_size(),
        node=ray.util.get_node_ip_address(),
        node_id=str(node_id),
        pid=os.getpid(),
        is_standby=is_standby,
    )
    resources: dict[str, float] = next((node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id), {})
    # A standby will see one GPU, and must not look for it before it has a place.
    device = torch.device("cuda:0") if is_standby and job.config.use_gpu else device_of_worker()
    work(job, rendezvous, WorkerContext(member, device, resources))
