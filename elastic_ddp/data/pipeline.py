"""A worker's Ray Data pipelines: do the work of a plan in order, in processes on the worker's node."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, cycle
from typing import Any

import pyarrow as pa
import ray
from ray.data import ExecutionResources, TaskPoolStrategy
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from elastic_ddp.data.map_style import MapStyleIndex
from elastic_ddp.data.packing import Content, pack_blocks, pack_rows, unpack_block, unpack_rows
from elastic_ddp.data.user_calls import CallRecords, UserCallError, record_calls
from elastic_ddp.data.user_code import Shipped, refuse_breakpoints, ship
from elastic_ddp.data.work import Work
from elastic_ddp.errors import ConfigError, DataError, format_exception

_STORE_BYTES = 32 << 20
"""Limit on finished blocks that wait in the object store. A higher limit makes no feed faster."""
_NO_JOIN = 1
"""A limit on the size of blocks that makes each row one block: a row holds several chunks or micro-batches."""
_NAME = "elastic_ddp"  # the prefix of names and ids of these executions

Tables = Iterator[pa.Table]


class Pipeline:
    """Yields packed chunks or micro-batches in order. One thread iterates, once; any thread may close it.

    For a data set in memory, each of `data.concurrency` processes makes every n-th micro-batch, as in a
    DataLoader. Parquet files are read by one process. If `data.concurrency` is 1, or there is no function of the user
    to call, this process also makes chunks or micro-batches.

    With `any_node`, tasks may run on other nodes, for when Ray no longer starts tasks on this one.
    """

    def __init__(self, work: Work, *, any_node: bool = False) -> None:
        _filter_logs()
        # Imported here: with another Ray version the import fails, and the driver explains that better.
        from elastic_ddp.ray_internals.dataset import DatasetExecution

        self._records = CallRecords()
        self._locate = work.index.locate
        self._executions = [DatasetExecution(each) for each in _datasets(work, any_node, self._records.folder)]

    def __iter__(self) -> Iterator[Content]:
        """Yields in order, and stops early when the pipeline is closed.

        Raises:
            DataError: raised by a read, the transform, the data set, or the collate function.
            ConfigError: the transform, the data set or the collate function cannot be loaded on this node.
            UserCallError: a task's process died in a call of the user's function.
            ray.exceptions.RayError: a task failed in another way.
        """
        try:
            contents = [chain.from_iterable(map(unpack_block, execution)) for execution in self._executions]
            for source in cycle(contents):
                content = next(source, None)
                if content is None:
                    return
                yield content
        except Exception as error:
            cause = _own_error(error)
            if cause is None:
                fatal = self._fatal_call(error)
                if fatal is None:
                    raise
                raise fatal from error
            message = str(cause).partition("\nFailed to apply ")[0]  # Ray appends advice on Ray Data
            kind = DataError if isinstance(cause, DataError) else ConfigError
            raise kind(message.rstrip()) from error

    def _fatal_call(self, error: Exception) -> UserCallError | None:
        """Returns the call of the user's function in which a task's process died."""
        if isinstance(error, ray.exceptions.OutOfMemoryError):
            return self._records.find_fatal(self._locate, " because Ray's memory monitor killed it: memory is short")
        return self._records.find_fatal(self._locate) if isinstance(error, ray.exceptions.WorkerCrashedError) else None

    def hanging_call(self, after_s: float, waited_s: float) -> UserCallError | None:
        """Returns a call of the user's function that does not end; see `CallRecords.find_hanging`.

        For any thread, but one at a time.
        """
        return self._records.find_hanging(self._locate, after_s, waited_s)

    def stop_tasks(self) -> None:
        """Stops the tasks; the iteration ends after the blocks that are ready. Call it in the thread that iterates."""
        for execution in self._executions:
            execution.gather()

    def close(self) -> None:
        """Stops the tasks and frees the waiting blocks in the object store."""
        for execution in self._executions:
            execution.close()
        self._records.close()


def _datasets(work: Work, any_node: bool, records: str) -> list[ray.data.Dataset]:
    """Returns lazy Ray Data data sets that yield the blocks of a pipeline in turn.

    Their tasks run on the worker's node, so that no other node can fail them. Tasks are not retried: Ray would read
    from the start, but the feed opens a new pipeline at the current step.
    """
    transform = _shipped(work.transform, "transform")
    collate_fn = _shipped(work.collate_fn, "collate_fn")
    job: Any = ray.put(replace(work, transform=transform, collate_fn=collate_fn))
    in_memory = isinstance(work.index, MapStyleIndex)
    tasks = work.plan.options.concurrency if in_memory or transform or collate_fn else 1
    remote: dict[str, Any] = {"num_cpus": work.plan.options.num_cpus_per_task}
    if not any_node:
        remote["label_selector"] = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}

    def read(contents: Callable[[Work], Tables]) -> ray.data.Dataset:
        """Returns a data set that one task reads."""

        def tables() -> Tables:
            _begin_task(records)
            return contents(ray.get(job))

        return ray.data.read_datasource(
            _Source(tables),
            override_num_blocks=1,
            compute=TaskPoolStrategy(size=1),
            ray_remote_args={"max_retries": 0},
            **remote,
        )

    def read_share(share: int) -> ray.data.Dataset:
        return read(lambda work: pack_blocks(work.make_in_memory(share, tasks)))

    def make(table: pa.Table) -> Tables:
        _begin_task(records)
        work: Work = ray.get(job)
        return pack_blocks(map(work.make, unpack_rows(table)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # max_retries has no successor in Ray 2.60
        if in_memory:
            return [_configured(read_share(share)) for share in range(tasks)]
        if tasks == 1:
            return [_configured(read(lambda work: pack_blocks(work.contents())))]
        rows = read(lambda work: pack_rows(work.read()))
        pool = TaskPoolStrategy(size=tasks)
        made = rows.map_batches(make, batch_size=None, batch_format="pyarrow", compute=pool, max_retries=0, **remote)
        return [_configured(made)]


def _configured(dataset: ray.data.Dataset) -> ray.data.Dataset:
    dataset.set_name(_NAME)
    context = dataset.context
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ExecutionResources(object_store_memory=_STORE_BYTES)
    context.target_max_block_size = _NO_JOIN
    context.execution_no_progress_timeout_s = -1  # training may pause for any time
    context.issue_detectors_config.detectors = []  # a read task may run for hours
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return dataset


class _Source(Datasource):
    """A Ray Data source with one task."""

    def __init__(self, read: Callable[[], Tables]) -> None:
        super().__init__()
        self._read = read

    def get_name(self) -> str:
        return "Chunks"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *args: object, **kwargs: object) -> list[ReadTask]:
        return [ReadTask(self._read, BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None))]


def _begin_task(records: str) -> None:
    from elastic_ddp.ray_internals.ray_messages import mark_messages

    mark_messages()
    refuse_breakpoints()
    record_calls(records)


def explain_failure(error: Exception) -> Exception:
    """Returns the error to raise for tasks that failed repeatedly."""
    if isinstance(error, UserCallError):
        return DataError(str(error))
    if isinstance(error, ray.exceptions.WorkerCrashedError | ray.exceptions.OutOfMemoryError):
        return DataError(f"the process that reads the data died again and again: {format_exception(error)}")
    if isinstance(error, ray.exceptions.RayTaskError):
        return DataError(f"the data cannot be read: {format_exception(error.cause or error)}")
    return error


def _shipped(function: Any, name: str) -> Any:
    """Returns a function, or None, as the tasks receive it: the driver has not sent functions for `run.evaluate`."""
    return function if function is None or isinstance(function, Shipped) else ship(function, name)


def _own_error(error: BaseException | None) -> DataError | ConfigError | None:
    """Returns this package's error that a task raised, without the errors with which Ray wraps it, or None."""
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
