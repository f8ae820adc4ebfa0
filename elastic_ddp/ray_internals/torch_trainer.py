"""The Ray Train trainer that a driver starts: it starts `ElasticController`, which starts the workers."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator
from ray.data._internal.stats import get_or_create_stats_actor
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy
from ray.train.v2.api.config import FailureConfig, ScalingConfig
from ray.train.v2.api.config import RunConfig as RayRunConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.errors import StorageError
from elastic_ddp.ray_internals.controller import CountingFailurePolicy, ElasticController
from elastic_ddp.ray_internals.dataset import exports_metrics
from elastic_ddp.ray_internals.nodes import placement_group_prefix
from elastic_ddp.ray_internals.scaling_policy import NODE_ID, LimitedScalingPolicy
from elastic_ddp.ray_internals.worker_group import release_placement_groups
from elastic_ddp.storage.storage import Storage

_SETTINGS = {
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
_UNUSED_CALLBACKS = ("PlacementGroupCleanerCallback", "DatasetsCallback", "StateManagerCallback")


class ElasticTorchTrainer(DataParallelTrainer):
    """Ray Train's trainer with `ElasticController`, and without three of Ray Train's callbacks.

    The placement group cleaner needs the dashboard, which `ray[train]` does not install, and logs a warning every
    second. `fit` removes its placement groups itself. Another callback shards data sets of Ray Train, which are not
    used here, and starts a process for each new worker. The third one would store the text of all arguments of the
    training function, among them values of `env`, in an actor.
    `on_controller` is called with the controller actor.
    """

    def __init__(
        self,
        function: Callable[[], None],
        config: RunConfig,
        storage: Storage,
        rendezvous: Any,
        on_controller: Callable[[Any], None],
    ) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        # The name is unique, so that Ray Train finds no state of an earlier session to resume from.
        session = f"session-{uuid.uuid4().hex[:8]}"
        filesystem, path = storage.at("ray_train").filesystem_and_path()
        scaling: dict[str, Any] = {"num_workers": config.max_workers}
        if config.min_workers != config.max_workers:
            scaling = {
                "num_workers": (config.min_workers, config.max_workers),
                "elastic_resize_monitor_interval_s": config.resize_interval_s,
            }
        super().__init__(  # without a backend: each generation forms its own process group
            function,
            scaling_config=ScalingConfig(
                use_gpu=config.use_gpu, resources_per_worker=dict(config.resources_per_worker), **scaling
            ),
            run_config=RayRunConfig(  # type: ignore[arg-type]
                name=session,
                storage_path=path,
                storage_filesystem=filesystem,
                failure_config=FailureConfig(max_failures=config.max_restarts),
                worker_runtime_env={"env_vars": dict(config.env)},  # which the tasks for their data inherit
            ),
        )
        self._config = config
        self._rendezvous = rendezvous
        self._on_controller = on_controller
        self._delete_files = partial(storage.delete_tree, f"ray_train/{session}")

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()
        return [callback for callback in callbacks if type(callback).__name__ not in _UNUSED_CALLBACKS]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        if exports_metrics():
            # Otherwise Ray Data creates this actor on a worker's node, which the autoscaler then never finds idle.
            get_or_create_stats_actor()
        get_or_create_autoscaling_coordinator()  # the controller waits for it, and meanwhile it starts
        prefix = placement_group_prefix(self._config.name, uuid.uuid4().hex)
        arguments["failure_policy"] = CountingFailurePolicy(arguments["failure_policy"].failure_config)
        policy = arguments["scaling_policy"]
        if isinstance(policy, ElasticScalingPolicy):
            arguments["scaling_policy"] = LimitedScalingPolicy(policy.scaling_config)
        this_node = {NODE_ID: ray.get_runtime_context().get_node_id()}
        # Not in a runtime environment: Ray starts a process that has one with two imports of Ray instead of one.
        environment = {**get_env_vars_to_propagate(), "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"}
        actor_class: Any = ray.remote(ElasticController)
        controller = actor_class.options(num_cpus=0, label_selector=this_node).remote(
            rendezvous=self._rendezvous,
            placement_group_prefix=prefix,
            save_within_s=self._config.drain_deadline_s,
            standby_workers=self._config.standby_workers,
            environment=environment,
            **arguments,
        )
        self._on_controller(controller)
        try:
            ray.get(controller.run.remote())
            return ray.get(controller.get_result.remote())
        finally:
            release_placement_groups(prefix)
            with suppress(StorageError):
                self._delete_files()
