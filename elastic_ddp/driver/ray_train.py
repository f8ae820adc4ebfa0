"""How a run meets Ray Train: how a run's workers are started, and what a worker learns of its place."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.errors import StorageError
from elastic_ddp.rendezvous.actor import RendezvousHandle
from elastic_ddp.rendezvous.members import Member
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.context import WorkerContext

_RAY_TRAIN_SETTINGS = {
    # How often the controller looks after its workers, while none is on its way; by default every 2 s.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1.0",
    # The controller's own log would run through our progress display; what it decides shows in the ledger.
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    # How long it waits for room for its first workers, and does nothing else meanwhile. By default 60 s.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    # It reports preemptions to training functions that ask Ray Train for them, which ours do not.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Workers stay where the driver is, so that relative paths mean the same in both.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""Ray Train reads these from the driver's environment; what a person has set there counts."""


class _NoProcessGroup(TorchConfig):
    """Ray Train would form a process group for the whole group's life; each generation forms its own."""

    @property
    def backend_cls(self) -> type[Backend]:
        return Backend


def run_workers(
    work: Callable[[Any, RendezvousHandle, WorkerContext], None],
    job: Any,
    rendezvous: RendezvousHandle,
    *,
    config: RunConfig,
    storage: Storage,
    on_controller: Callable[[Any], None],
) -> None:
    """Runs `work(job, rendezvous, context)` on Ray Train workers until all of them return.

    It blocks meanwhile.

    Args:
        work: importable by the workers.
        job, rendezvous: handed to every worker.
        config: for the number of workers, their resources and how often they may be lost.
        storage: the run's folder; Ray Train's own files are in a folder in it meanwhile.
        on_controller: told of Ray Train's controller actor; to kill it ends all workers.

    Raises:
        ray.train.TrainingFailedError: workers were lost more often than `max_restarts`, or could not be started.
    """
    # A name of its own for each session: what Ray Train would resume from is not ours.
    session = f"session-{uuid.uuid4().hex[:8]}"
    filesystem, path = storage.at("ray_train").filesystem_and_path()
    scaling: dict[str, Any] = {"num_workers": config.max_workers}
    if config.min_workers != config.max_workers:
        scaling = {
            "num_workers": (config.min_workers, config.max_workers),
            "elastic_resize_monitor_interval_s": config.resize_interval_s,
        }
    for name, value in _RAY_TRAIN_SETTINGS.items():
        os.environ.setdefault(name, value)
    # Imported here: with another Ray version the import fails, and `check_ray_version` explains that better.
    from elastic_ddp.ray_internals.controller import ElasticTorchTrainer

    trainer = ElasticTorchTrainer(
        _run_worker,
        rendezvous=rendezvous,
        save_within_s=config.drain_deadline_s,
        on_controller=on_controller,
        train_loop_config={"work": work, "job": job, "rendezvous": rendezvous},
        torch_config=_NoProcessGroup(),
        scaling_config=ray.train.ScalingConfig(
            use_gpu=config.use_gpu,
            resources_per_worker=dict(config.resources_per_worker),
            **scaling,
        ),
        run_config=ray.train.RunConfig(
            name=session,
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=ray.train.FailureConfig(max_failures=config.max_restarts),
        ),
    )
    try:
        trainer.fit()
    finally:
        with suppress(StorageError):
            storage.delete_tree(f"ray_train/{session}")


def _run_worker(arguments: dict[str, Any]) -> None:
    """Ray Train's train function, in every worker."""
    of_train = ray.train.get_context()
    runtime = ray.get_runtime_context()
    member = Member(
        id=str(runtime.get_actor_id()),
        rank_in_group=of_train.get_world_rank(),
        group_size=of_train.get_world_size(),
        node=ray.util.get_node_ip_address(),
        node_id=str(runtime.get_node_id()),
        pid=os.getpid(),
    )
    here = runtime.get_node_id()
    resources: dict[str, float] = next((node["Resources"] for node in ray.nodes() if node["NodeID"] == here), {})
    context = WorkerContext(member, ray.train.torch.get_device(), resources)
    arguments["work"](arguments["job"], arguments["rendezvous"], context)
