"""A worker's Ray Data pipelines: read, transform and collate the rows of a plan, in order, on the worker's node."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle
from typing import Any, Generic, TypeVar

import pyarrow as pa
import ray
from ray.data import ExecutionResources, TaskPoolStrategy

from elastic_ddp.data.chunk_source import ChunkSource
from elastic_ddp.data.collate import CollateFn, Collator, batches_in_memory, collate_rows, read_rows
from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.map_style import MapStyleIndex
from elastic_ddp.data.order import FeedPlan
from elastic_ddp.data.packing import PackedBatch, pack_blocks, unpack_block
from elastic_ddp.data.source import BLOCK_BYTES, read_chunks
from elastic_ddp.data.split import ChunkContent
from elastic_ddp.data.transform import PrepareChunks, Transform, unpack
from elastic_ddp.data.user_calls import CallRecords, FatalCall, record_calls
from elastic_ddp.data.user_code import Shipped, refuse_breakpoints, ship
from elastic_ddp.errors import ConfigError, DataError, format_exception

_STORE_BYTES = 32 << 20
"""Limit on finished blocks that wait in the object store. A higher limit makes no feed faster."""
_ROW_BYTES = 1
"""A limit on the size of blocks that makes each row one block: `pack_blocks` puts several batches into a row."""
_TASK_BYTES = 64 << 10
"""Rows that a task collates, at least, if other tasks collate than read."""
_NAME = "elastic_ddp"  # the prefix of names and ids of these executions

Content = TypeVar("Content")
Tables = Iterator[pa.Table]


class ProcessDiedError(Exception):
    """A data process died in a call of the user's function."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place
        """The place in the run of the call."""


class Pipeline(Generic[Content]):
    """Yields what its executions produce, one from each in turn. One thread iterates, once; any thread may close it."""

    def __init__(
        self,
        datasets: Sequence[ray.data.Dataset],
        unpack: Callable[[pa.Table], Iterator[Content]],
        stages: _Stages,
        locate: Callable[[list[int]], str],
    ) -> None:
        _filter_logs()
        # Imported here: with another Ray version the import fails, and the driver explains that better.
        from elastic_ddp.ray_internals.dataset import DatasetExecution

        self._executions = [DatasetExecution(dataset) for dataset in datasets]
        self._unpack = unpack
        self._records, self._locate = stages.records, locate

    def __iter__(self) -> Iterator[Content]:
        """Yields in order, and stops early when the pipeline is closed.

        Raises:
            DataError: raised by a read, the transform, the data set, or the collate function.
            ConfigError: one of them cannot be loaded on this node.
            ProcessDiedError: a task's process died in a call of the user's function.
            ray.exceptions.RayError: a task failed in another way.
        """
        try:
            contents = [chain.from_iterable(map(self._unpack, execution)) for execution in self._executions]
            for source in cycle(contents):
                if (content := next(source, None)) is None:
                    return
                yield content
        except Exception as error:
            cause = _own_error(error)
            if cause is None and (fatal := self._fatal_call(error)) is not None:
                raise ProcessDiedError(fatal.message, fatal.place) from error
            if cause is None:
                raise
            message, _, _ = str(cause).partition("\nFailed to apply ")  # Ray appends advice on Ray Data
            kind = DataError if isinstance(cause, DataError) else ConfigError
            raise kind(message.rstrip()) from error

    def _fatal_call(self, error: Exception) -> FatalCall | None:
        """Returns the call of the user's function in which a task's process died."""
        if isinstance(error, ray.exceptions.OutOfMemoryError):
            return self._records.find_fatal(self._locate, " because Ray's memory monitor killed it: memory is short")
        return self._records.find_fatal(self._locate) if isinstance(error, ray.exceptions.WorkerCrashedError) else None

    def hanging_call(self, after_s: float, waited_s: float) -> str | None:
        """Returns the description of a call of the user's function that does not end; see `CallRecords.find_hanging`.

        For any thread, but one at a time.
        """
        call = self._records.find_hanging(self._locate, after_s, waited_s)
        return call.message if call is not None else None

    def stop_tasks(self) -> None:
        """Stops the tasks; the iteration ends after the blocks that are ready. Call it in the thread that iterates."""
        for execution in self._executions:
            execution.gather()

    def close(self) -> None:
        """Stops the tasks and frees the waiting blocks in the object store."""
        for execution in self._executions:
            execution.close()
        self._records.close()


def open_chunks(
    index: DatasetIndex, plan: FeedPlan, transform: Transform | None, *, any_node: bool = False
) -> Pipeline[ChunkContent]:
    """Returns the pipeline of the transformed chunks of Parquet files.

    With `any_node`, tasks may run on other nodes, for when Ray no longer starts tasks on this one.
    """
    job = ray.put((index, plan))
    stages = _Stages(plan, any_node, BLOCK_BYTES)
    # With one task each, Ray Data fuses reading and transforming into one process.
    tasks = plan.options.concurrency if transform else 1
    dataset = stages.read(lambda: read_chunks(*ray.get(job)))
    prepare = PrepareChunks(plan.seed, _shipped(transform, "transform"), lambda rows: ray.get(job)[0].locate(rows))
    return Pipeline([stages.map(dataset, prepare, tasks)], unpack, stages, index.locate)


def open_batches(
    index: DatasetIndex | MapStyleIndex,
    plan: FeedPlan,
    transform: Transform | None,
    collate_fn: CollateFn | None,
    *,
    any_node: bool = False,
) -> Pipeline[PackedBatch]:
    """Returns the pipeline of collated micro-batches; `any_node` as in `open_chunks`.

    For a data set in memory, each of `concurrency` processes makes every n-th micro-batch, like those of a DataLoader.
    Parquet files are read by one process, which also collates if `concurrency` is 1.
    """
    job: Any = ray.put((index, Collator(plan, _shipped(transform, "transform"), _shipped(collate_fn, "collate_fn"))))
    tasks = plan.options.concurrency
    if isinstance(index, MapStyleIndex):
        stages = _Stages(plan, any_node, _ROW_BYTES)
        datasets = [stages.read(_share_in_memory(job, share, tasks)) for share in range(tasks)]
        return Pipeline(datasets, unpack_block, stages, index.locate)

    def read() -> Tables:
        index, collator = ray.get(job)
        return read_rows(index, collator.plan)

    def collate(tables: Tables) -> Tables:
        index, collator = ray.get(job)
        return pack_blocks(chain.from_iterable(collate_rows(collator, table, index.locate) for table in tables))

    stages = _Stages(plan, any_node, _ROW_BYTES if tasks == 1 else _TASK_BYTES)
    if tasks == 1:
        dataset = stages.read(lambda: collate(read()))
    else:
        dataset = stages.map(stages.read(read), lambda table: collate(iter([table])), tasks)
    return Pipeline([dataset], unpack_block, stages, index.locate)


def _share_in_memory(job: ray.ObjectRef, share: int, num_shares: int) -> Callable[[], Tables]:
    def read() -> Tables:
        index, collator = ray.get(job)
        return pack_blocks(batches_in_memory(index, collator, share, num_shares))

    return read


class _Stages:
    """Builds lazy Ray Data data sets whose tasks run on the worker's node, so that no other node can fail them.

    Tasks are not retried: Ray would read from the start, but the feed opens a new pipeline at the current step.
    """

    def __init__(self, plan: FeedPlan, any_node: bool, block_bytes: int) -> None:
        self._remote: dict[str, Any] = {"num_cpus": plan.options.num_cpus_per_task}
        if not any_node:
            self._remote["label_selector"] = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        self._block_bytes = block_bytes
        self.records = CallRecords()

    def read(self, tables: Callable[[], Tables]) -> ray.data.Dataset:
        """Returns a data set that one task reads."""
        folder = self.records.folder

        def read() -> Tables:
            _begin_task(folder)
            return tables()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # max_retries has no successor in Ray 2.60
            dataset = ray.data.read_datasource(
                ChunkSource(read),
                override_num_blocks=1,
                compute=TaskPoolStrategy(size=1),
                ray_remote_args={"max_retries": 0},
                **self._remote,
            )
        return self._configured(dataset)

    def map(
        self, dataset: ray.data.Dataset, function: Callable[[pa.Table], Tables], num_tasks: int
    ) -> ray.data.Dataset:
        """Returns the data set with the function applied to each of its blocks by up to `num_tasks` tasks at a time."""
        folder = self.records.folder

        def apply(table: pa.Table) -> Tables:
            _begin_task(folder)
            return function(table)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            dataset = dataset.map_batches(
                apply,
                batch_size=None,
                batch_format="pyarrow",
                compute=TaskPoolStrategy(size=num_tasks),
                max_retries=0,
                **self._remote,
            )
        return self._configured(dataset)

    def _configured(self, dataset: ray.data.Dataset) -> ray.data.Dataset:
        dataset.set_name(_NAME)
        context = dataset.context
        context.execution_options.preserve_order = True
        context.execution_options.resource_limits = ExecutionResources(object_store_memory=_STORE_BYTES)
        context.target_max_block_size = self._block_bytes
        context.execution_no_progress_timeout_s = -1  # training may pause for any time
        context.issue_detectors_config.detectors = []  # a read task may run for hours
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        return dataset


def _begin_task(records: str) -> None:
    from elastic_ddp.ray_internals.messages import mark_messages

    mark_messages()
    refuse_breakpoints()
    record_calls(records)


def explain_failure(error: Exception) -> Exception:
    """Returns the error to raise for tasks that failed repeatedly."""
    if isinstance(error, ProcessDiedError):
        return DataError(str(error))
    if isinstance(error, ray.exceptions.WorkerCrashedError | ray.exceptions.OutOfMemoryError):
        return DataError(f"the process that reads the data died again and again: {format_exception(error)}")
    if isinstance(error, ray.exceptions.RayTaskError):
        return DataError(f"the data cannot be read: {format_exception(error.cause or error)}")
    return error


def _shipped(function: Any, name: str) -> Any:
    """Returns a function, or None, as the tasks receive it: `run.evaluate` gets one that the driver has not sent."""
    return function if function is None or isinstance(function, Shipped) else ship(function, name)


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
