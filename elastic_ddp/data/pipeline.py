"""A worker's Ray Data pipeline: reads and transforms the chunks of a plan, in order, on the worker's node."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import ray
from ray.data import ExecutionResources, TaskPoolStrategy

from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.order import FeedPlan
from elastic_ddp.data.source import BLOCK_BYTES, ChunkSource, read_chunks
from elastic_ddp.data.transform import PrepareChunks, PreparedChunk, Transform, unpack
from elastic_ddp.errors import ConfigError, DataError
from elastic_ddp.user_code import Shipped, ship

_STORE_BYTES = 32 << 20
"""Limit on finished blocks that wait in the object store. A higher limit makes no feed faster."""
_NAME = "elastic_ddp"  # the prefix of names and ids of these executions


class ChunkPipeline:
    """Yields the transformed chunks of a plan, in order. One thread iterates, once; any thread may close it.

    With `any_node`, tasks may run on other nodes, for when Ray no longer starts tasks on this one.
    """

    def __init__(
        self, index: DatasetIndex, plan: FeedPlan, transform: Transform | None, *, any_node: bool = False
    ) -> None:
        dataset = _dataset(index, plan, transform, any_node=any_node)
        _filter_logs()
        # Imported here: with another Ray version the import fails, and the driver explains that better.
        from elastic_ddp.ray_internals.dataset import DatasetExecution

        self._execution = DatasetExecution(dataset)

    def __iter__(self) -> Iterator[PreparedChunk]:
        """Yields chunks, and stops early when the pipeline is closed.

        Raises:
            DataError: raised by a read or the transform.
            ConfigError: the transform cannot be loaded on this node.
            ray.exceptions.RayError: a task's process failed.
        """
        try:
            for block in self._execution:
                yield from unpack(block)
        except Exception as error:
            cause = _own_error(error)
            if cause is None:
                raise
            message, _, _ = str(cause).partition("\nFailed to apply ")  # Ray appends advice on Ray Data
            kind = DataError if isinstance(cause, DataError) else ConfigError
            raise kind(message.rstrip()) from error

    def stop_tasks(self) -> None:
        """Stops the tasks; the iteration ends after the blocks that are ready. Call it in the thread that iterates."""
        self._execution.gather()

    def close(self) -> None:
        """Stops the tasks and frees the waiting blocks in the object store."""
        self._execution.close()


def _dataset(index: DatasetIndex, plan: FeedPlan, transform: Transform | None, *, any_node: bool) -> ray.data.Dataset:
    """Returns the pipeline as a lazy Ray Data data set.

    Its tasks run on the worker's node, so failures of other nodes do not affect it. Tasks are not retried: Ray would
    read from the start, but the feed opens a new pipeline at the current step.
    """
    job = ray.put((index, plan))
    options = plan.options
    remote: dict[str, Any] = {"num_cpus": options.num_cpus_per_task}
    if not any_node:
        remote["label_selector"] = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    # With one task each, Ray Data fuses reading and transforming into one process.
    transforms = TaskPoolStrategy(size=options.concurrency if transform else 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # max_retries has no successor in Ray 2.60
        dataset = ray.data.read_datasource(
            ChunkSource(lambda: read_chunks(*ray.get(job))),
            override_num_blocks=1,
            compute=TaskPoolStrategy(size=1),
            ray_remote_args={"max_retries": 0},
            **remote,
        ).map_batches(
            PrepareChunks(plan.seed, _shipped(transform)),
            batch_size=None,
            batch_format="pyarrow",
            compute=transforms,
            max_retries=0,
            **remote,
        )
    dataset.set_name(_NAME)
    context = dataset.context
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ExecutionResources(object_store_memory=_STORE_BYTES)
    context.target_max_block_size = BLOCK_BYTES
    context.execution_no_progress_timeout_s = -1  # training may pause for any time
    context.issue_detectors_config.detectors = []  # a read task may run for hours
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return dataset


def _shipped(transform: Transform | None) -> Transform | None:
    """Returns the transform as the tasks receive it: `run.evaluate` gets one that the driver has not sent."""
    return transform if transform is None or isinstance(transform, Shipped) else ship(transform, "transform")


def _own_error(error: BaseException | None) -> DataError | ConfigError | None:
    """Returns the error of ours that a task raised, without the ones with which Ray wraps it, or None."""
    seen: set[int] = set()
    innermost: DataError | ConfigError | None = None
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        innermost = error if isinstance(error, DataError | ConfigError) else innermost
        error = getattr(error, "cause", None) or error.__cause__ or error.__context__
    return innermost


def _filter_logs() -> None:
    """Hides Ray Data's messages about the start and end of each execution, which come at every membership change."""
    for module in ("execution.streaming_executor", "logging", "progress"):
        logging.getLogger(f"ray.data._internal.{module}").addFilter(_is_relevant)  # adds it once


def _is_relevant(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "Progress bars disabled" not in text and (record.levelno >= logging.WARNING or _NAME not in text)
