"""A worker's pipeline: the chunks of a plan, read and transformed by Ray Data, in order."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import ray
from ray.data import ExecutionResources, TaskPoolStrategy

from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.order import FeedPlan
from elastic_ddp.data.source import (
    BLOCK_BYTES,
    ChunkSource,
    PrepareChunks,
    PreparedChunk,
    Transform,
    read_chunks,
    unpack,
)
from elastic_ddp.errors import DataError

_STORE_BYTES = 32 << 20
"""Finished blocks that wait in the object store; one more is always let through. More made no feed faster, as windows
are read ahead besides. But they are read while membership changes, and where a node's store is fuller than 70 %, Ray
has every process of the cluster collect its garbage."""
_NAME = "elastic_ddp"  # begins every name and id of our executions


class ChunkPipeline:
    """The chunks of a plan, read and transformed by tasks on this node, in order.

    One thread iterates, once; any thread may close. `anywhere` is for a node on which Ray starts nothing any more.
    """

    def __init__(
        self, index: DatasetIndex, plan: FeedPlan, transform: Transform | None, *, anywhere: bool = False
    ) -> None:
        dataset = _dataset(index, plan, transform, anywhere=anywhere)
        _quiet_logs()
        # Imported here: with another Ray version the import fails, and the driver explains that better.
        from elastic_ddp.ray_internals.dataset import DatasetExecution

        self._execution = DatasetExecution(dataset)

    def __iter__(self) -> Iterator[PreparedChunk]:
        """Ends early when the pipeline is closed.

        Raises:
            DataError: what a read or the transform raised; its message holds the traceback of the transform.
            ray.exceptions.RayError: a task's process was lost.
        """
        try:
            for block in self._execution:
                yield from unpack(block)
        except Exception as error:
            cause = _data_error(error)
            if cause is None:
                raise
            message, _, _ = str(cause).partition("\nFailed to apply ")  # Ray adds advice on Ray Data
            raise DataError(message.rstrip()) from error

    def gather(self) -> None:
        """Stops the tasks and frees their processes. The iteration yields the blocks that are ready, and ends.

        Call it in the thread that iterates.
        """
        self._execution.gather()

    def close(self) -> None:
        """Stop the tasks and free what waits in the object store."""
        self._execution.close()


def _dataset(index: DatasetIndex, plan: FeedPlan, transform: Transform | None, *, anywhere: bool) -> ray.data.Dataset:
    """The pipeline as a lazy Ray Data data set.

    Its tasks run on this node and no other: a pipeline shares the fate of its worker and is not touched by the death
    of another node. A lost process is not replaced by Ray, which would read everything from the start again: the feed
    opens a new pipeline where it stands.
    """
    job = ray.put((index, plan))
    options = plan.options
    remote: dict[str, Any] = {"num_cpus": options.num_cpus_per_task}
    if not anywhere:
        remote["label_selector"] = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    # Read and transform share a process unless several transforms are to run at a time.
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
            PrepareChunks(plan.seed, transform),
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
    context.execution_no_progress_timeout_s = -1  # training may pause for as long as it likes
    context.issue_detectors_config.detectors = []  # a read task that runs for hours is no issue
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return dataset


def _data_error(error: BaseException | None) -> DataError | None:
    """The DataError that a task raised, as the task raised it: Ray's own error is one as well, and wordier."""
    seen: set[int] = set()
    found = None
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, DataError):
            found = error
        error = getattr(error, "cause", None) or error.__cause__ or error.__context__
    return found


_CHATTERS = tuple(f"ray.data._internal.{module}" for module in ("execution.streaming_executor", "logging", "progress"))


def _quiet_logs() -> None:
    """Ray Data tells of every execution's start and end, and there is one at every change of membership."""
    for name in _CHATTERS:
        logger = logging.getLogger(name)
        if _is_news not in logger.filters:
            logger.addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "Progress bars disabled" not in text and (record.levelno >= logging.WARNING or _NAME not in text)
