"""Starts a run's workers with Ray Train. Workers import this module, so it is small."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import ray.train
import torch

from elastic_ddp.data.user_code import ship
from elastic_ddp.rendezvous import standby_process
from elastic_ddp.rendezvous.actor import RendezvousHandle
from elastic_ddp.rendezvous.members import Member
from elastic_ddp.worker.job import Job, WorkerContext
from elastic_ddp.worker.main import work


def run_workers(job: Job, rendezvous: RendezvousHandle, on_controller: Callable[[Any], None]) -> None:
    """Runs a job on Ray Train workers until all of them return.

    Raises `ray.train.TrainingFailedError` if more workers fail than `max_restarts` allows, or none can start.
    `on_controller` is called with Ray Train's controller actor; killing it ends all workers.
    """
    from elastic_ddp.ray_internals.torch_trainer import (
        ElasticTorchTrainer,  # workers import this module, and do not need it
    )

    transform = None if job.transform is None else ship(job.transform, "transform")
    collate_fn = None if job.collate_fn is None else ship(job.collate_fn, "collate_fn")
    job = replace(job, train=ship(job.train, "train"), transform=transform, collate_fn=collate_fn)
    function = partial(_run_worker, job, rendezvous)
    ElasticTorchTrainer(function, job.config, job.storage, rendezvous, on_controller).fit()


def _run_worker(job: Job, rendezvous: RendezvousHandle) -> None:
    """Ray Train's training function, which it calls in every worker."""
    from elastic_ddp.ray_internals.worker_group import device_of_worker

    train_context = ray.train.get_context()
    runtime = ray.get_runtime_context()
    node_id = runtime.get_node_id()
    is_standby = not standby_process.has_place()
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
