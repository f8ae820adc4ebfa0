"""The Ray Train trainer that a driver starts: it starts `ElasticController`, which starts the workers."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator
from ray.data._internal.stats import get_or_create_stats_actor
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from elastic_ddp.ray_internals.controller import CountingFailurePolicy, ElasticController
from elastic_ddp.ray_internals.dataset import exports_metrics
from elastic_ddp.ray_internals.nodes import placement_group_prefix
from elastic_ddp.ray_internals.scaling import NODE_ID, LimitedScalingPolicy
from elastic_ddp.ray_internals.worker_group import release_placement_groups

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
        *args: Any,
        run_name: str,
        rendezvous: Any,
        save_within_s: float,
        standby_workers: int,
        on_controller: Callable[[Any], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)  # without a backend: each generation forms its own process group
        self._run_name = run_name
        self._controller_arguments = {
            "rendezvous": rendezvous,
            "save_within_s": save_within_s,
            "standby_workers": standby_workers,
        }
        self._on_controller = on_controller

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()
        return [callback for callback in callbacks if type(callback).__name__ not in _UNUSED_CALLBACKS]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        if exports_metrics():
            # Otherwise Ray Data creates this actor on a worker's node, which the autoscaler then never finds idle.
            get_or_create_stats_actor()
        get_or_create_autoscaling_coordinator()  # the controller waits for it, and meanwhile it starts
        prefix = placement_group_prefix(self._run_name, uuid.uuid4().hex)
        arguments["failure_policy"] = CountingFailurePolicy(arguments["failure_policy"].failure_config)
        if isinstance(policy := arguments["scaling_policy"], ElasticScalingPolicy):
            arguments["scaling_policy"] = LimitedScalingPolicy(policy.scaling_config)
        this_node = {NODE_ID: ray.get_runtime_context().get_node_id()}
        # Not in a runtime environment: Ray starts a process that has one with two imports of Ray instead of one.
        environment = {**get_env_vars_to_propagate(), "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"}
        actor_class: Any = ray.remote(ElasticController)
        arguments |= {"placement_group_prefix": prefix, "environment": environment, **self._controller_arguments}
        controller = actor_class.options(num_cpus=0, label_selector=this_node).remote(**arguments)
        self._on_controller(controller)
        try:
            ray.get(controller.run.remote())
            return ray.get(controller.get_result.remote())
        finally:
            release_placement_groups(prefix)
