"""How many workers fit on a cluster, and whether their data pipelines get CPUs. Plain numbers, no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.errors import ConfigError

_RAY_UNITS = 10_000
"""Ray counts resources in units of 1/10000. Plain floats would put five workers of 0.4 CPUs above 2 CPUs."""


def workers_that_fit(node: Mapping[str, float], resources_per_worker: Mapping[str, float]) -> int:
    """Returns how many workers fit on an empty node with these resources, such as `{"CPU": 8, "GPU": 1}`."""
    return min(
        round(node.get(name, 0.0) * _RAY_UNITS) // units
        for name, amount in resources_per_worker.items()
        if (units := round(amount * _RAY_UNITS))
    )


def explain_shortage(
    nodes: Sequence[Mapping[str, float]], resources_per_worker: Mapping[str, float], min_workers: int
) -> str | None:
    """Returns why nodes with these resources cannot hold `min_workers`, and the fix; None if they can."""
    needs = {name: amount for name, amount in resources_per_worker.items() if amount}
    fitting = sum(workers_that_fit(node, needs) for node in nodes)
    if fitting >= min_workers:
        return None
    lacking = [
        f"{name}={amount:g} (the largest node has {largest:g})"
        for name, amount in needs.items()
        if (largest := max((node.get(name, 0.0) for node in nodes), default=0.0)) < amount
    ]
    if lacking:
        return f"no node has resources_per_worker {', '.join(lacking)}; lower it or add larger nodes"
    return (
        f"{fitting} workers of {needs} fit, below min_workers={min_workers}; lower min_workers or "
        "resources_per_worker, or add nodes"
    )


@dataclass(frozen=True)
class ClusterUse:
    """The resources of a cluster, and the runs and jobs that use them."""

    total: Sequence[Mapping[str, float]]
    """All resources of each node, by Ray's names."""
    free: Sequence[Mapping[str, float]]
    """The free resources of each node."""
    held: Mapping[str, Mapping[str, float]]
    """The resources that workers of each other run reserve, by the run's name."""
    num_own: int
    """Workers of this run that have their resources, and train or start."""
    num_draining: int = 0
    """Nodes that are left out because the run must avoid them."""


def explain_wait(
    use: ClusterUse, resources_per_worker: Mapping[str, float], min_workers: int, *, is_late: bool
) -> str | None:
    """Returns what a run with fewer than `min_workers` waits for; None if its workers are starting.

    With `is_late`, resources that are free should have been used by now, and workers with resources should train.
    """
    needs = {name: amount for name, amount in resources_per_worker.items() if amount}
    drained = f" ({use.num_draining} nodes are being drained)" if use.num_draining else ""
    shortage = explain_shortage(use.total, needs, min_workers)
    if shortage is not None:
        return f"waiting for nodes: {shortage}{drained}"
    fitting = sum(workers_that_fit(node, needs) for node in use.free)
    if use.num_own + fitting >= min_workers and not is_late:
        return None
    if use.num_own >= min_workers:
        return (
            f"waiting for workers to start: {use.num_own} have their resources. Nodes may be installing the "
            "runtime_env or loading modules; /tmp/ray/session_latest/logs on them has errors."
        )
    wanted = f"min_workers={min_workers} workers of {_amounts(needs, needs)}"
    if use.num_own + fitting >= min_workers:
        return f"waiting for Ray: {wanted} fit, but Ray has not started them. It may reserve resources for another job."
    runs = {f"run {run!r}": resources for run, resources in use.held.items()}
    used = {
        name: sum(node.get(name, 0.0) for node in use.total)
        - sum(node.get(name, 0.0) for node in use.free)
        - sum(resources.get(name, 0.0) for resources in use.held.values())
        - use.num_own * amount
        for name, amount in needs.items()
    }
    users = {**runs, "other Ray jobs": used}
    in_use = [f"{who} ({text})" for who, resources in users.items() if (text := _amounts(resources, needs))]
    return (
        f"waiting for resources: {use.num_own + fitting} of {wanted} fit{drained}. In use: "
        f"{', '.join(in_use) or 'none'}. The run starts when they are free, or when nodes join."
    )


def _amounts(resources: Mapping[str, float], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={amount:g}" for name in names if round(amount := resources.get(name, 0.0), 4) > 0)


def check_cpus(nodes: Sequence[Mapping[str, float]], config: RunConfig, num_tasks: int) -> None:
    """Raises ConfigError if the data pipelines on some node could never start, because workers reserve its CPUs.

    A pipeline runs `num_tasks` tasks at a time on its worker's node. The check assumes that workers fill one node after
    the other, as Ray Train packs them.
    """
    cpus = config.data.num_cpus_per_task
    per_worker = config.resources_per_worker.get("CPU", 0.0)
    remaining = config.max_workers
    for node in nodes:
        workers = min(remaining, workers_that_fit(node, config.resources_per_worker))
        remaining -= workers
        free = node.get("CPU", 0.0) - workers * per_worker
        needed = workers * num_tasks * cpus
        if needed > free + 1e-6:  # rounding of the sums
            raise ConfigError(
                f"data.num_cpus_per_task={cpus:g}: {workers} workers reserve {workers * per_worker:g} of the "
                f"{node.get('CPU', 0.0):g} CPUs of a node, and their data pipelines need {needed:g} more. Use "
                "data.num_cpus_per_task=0 to share the workers' CPUs, or reserve fewer in resources_per_worker"
            )
