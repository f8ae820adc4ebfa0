"""How many workers a cluster has room for, and whether they leave any to what feeds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic_ddp.config.run_config import DataConfig
from elastic_ddp.errors import ConfigError


def workers_that_fit(node: Mapping[str, float], resources_per_worker: Mapping[str, float]) -> int:
    """On a node with these resources, such as `{"CPU": 8, "GPU": 1}`, and nothing else."""
    # Ray counts in ten-thousandths; in floating point, five times 0.4 CPUs are more than two.
    return min(
        round(node.get(name, 0.0) * 10_000) // round(amount * 10_000)
        for name, amount in resources_per_worker.items()
        if amount
    )


def explain_shortage(
    nodes: Sequence[Mapping[str, float]], resources_per_worker: Mapping[str, float], min_workers: int
) -> str | None:
    """Why nodes with these resources cannot hold so many workers, and what to change; None if they can."""
    needs = {name: amount for name, amount in resources_per_worker.items() if amount}
    room = sum(workers_that_fit(node, needs) for node in nodes)
    if room >= min_workers:
        return None
    most = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in needs}
    lacking = [
        f"{name}={amount:g} (the most that one has: {most[name]:g})"
        for name, amount in needs.items()
        if most[name] < amount
    ]
    if lacking:
        return f"no node has resources_per_worker {', '.join(lacking)}; ask for less of that, or add nodes that have it"
    return (
        f"there is room for {room} of the {min_workers} workers of min_workers={min_workers}, each of {needs}; lower "
        "min_workers or resources_per_worker, or add nodes"
    )


def check_cpus(
    nodes: Sequence[Mapping[str, float]],
    *,
    resources_per_worker: Mapping[str, float],
    max_workers: int,
    options: DataConfig,
    has_transform: bool,
) -> None:
    """Refuse a configuration in which workers leave no CPU to the pipelines that feed them.

    A pipeline runs on its worker's node, and needs a CPU for its read task and one for a transform; the two are one
    task where `concurrency` is 1. Workers are taken to fill one node after the other, as Ray Train packs them.

    Args:
        nodes: the resources of every node, such as `{"CPU": 8, "GPU": 1}`.

    Raises:
        ConfigError: on some node the pipelines could never start.
    """
    cpus = options.num_cpus_per_task
    tasks = 2 if has_transform and options.concurrency > 1 else 1
    per_worker = resources_per_worker.get("CPU", 0.0)
    left = max_workers
    for node in nodes:
        workers = min(left, workers_that_fit(node, resources_per_worker))
        left -= workers
        free = node.get("CPU", 0.0) - workers * per_worker
        needed = workers * tasks * cpus
        if needed > free + 1e-6:  # sums of floating-point numbers
            raise ConfigError(
                f"data.num_cpus_per_task={cpus:g}: {workers} worker(s) hold {workers * per_worker:g} of the "
                f"{node.get('CPU', 0.0):g} CPUs of a node, and their pipelines need {needed:g} more to run at all, so "
                "they would wait for ever; use data.num_cpus_per_task=0, which runs them beside the workers, or give "
                "workers fewer CPUs in resources_per_worker"
            )
