"""Running a data set.

Ray Data's public iterators end a pipeline by killing its processes, and the next one then waits 0.6 to 0.9 s for new
ones; ended without force, the processes stay and the next pipeline yields after 0.06 to 0.08 s (measured with Ray 2.60
on two cores). A public iterator also cannot be stopped while a thread waits in it. So `DatasetExecution` drives the
executor itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import ray
from ray.data import DataContext, ExecutionResources
from ray.data._internal.execution.metadata_fetcher import InlineMetadataFetcher
from ray.data._internal.execution.streaming_executor import StreamingExecutor

_GATHERED = 4
"""Blocks that are kept at most when the tasks are stopped, which is all that the limit on waiting blocks lets wait: of
some steps where the pipeline has just begun and its blocks are small, and else of many."""
_REST_S = 1.0
"""How long an executor rests at most while its consumer has blocks to take, or waits for none and has no room."""


class DatasetExecution:
    """One execution of a data set: its blocks, in order. One thread iterates, once; any may close."""

    def __init__(self, dataset: ray.data.Dataset) -> None:
        self._executor = _Executor(dataset.context, dataset.get_dataset_id())
        self._bundles = dataset._build_bundle_iterator(self._executor)
        self._executor.set_external_consumer_bytes(0)  # without it the limit on waiting blocks does not hold
        self._gathered: deque[pa.Table] | None = None

    def __iter__(self) -> Iterator[pa.Table]:
        while self._gathered is None:
            with self._executor.waited_for():
                bundle = next(self._bundles, None)
            if bundle is None:
                return
            yield from _blocks_of(bundle)
        while self._gathered:
            yield self._gathered.popleft()

    def gather(self) -> None:
        """Takes the blocks that are ready, for the iteration to end with, and stops the tasks. For the thread that
        iterates."""
        if self._gathered is None:
            ready = [next(self._bundles) for _ in range(min(self._executor.num_ready, _GATHERED))]
            self._gathered = deque(block for bundle in ready for block in _blocks_of(bundle))
            self._executor.shutdown(force=False)

    def close(self) -> None:
        """Stops the tasks but not their processes, and frees what waits in the object store."""
        self._executor.shutdown(force=False)
        if self._gathered is not None:
            self._gathered.clear()


def _blocks_of(bundle: Any) -> list[pa.Table]:
    blocks: list[pa.Table] = ray.get(bundle.block_refs)
    return blocks


class _NoAutoscaler:
    """In the place of Ray Data's `ClusterAutoscaler`: asks for nothing, and leaves limits to the options.

    Ray's own would ask the cluster for nodes whenever many blocks wait, as they should here, and it sends a request to
    an actor in every round of the executor's loop, which took a third of a core.
    """

    def try_trigger_scaling(self) -> None:
        pass

    def on_executor_shutdown(self) -> None:
        pass

    def get_total_resources(self) -> ExecutionResources:
        return ExecutionResources.for_limits()


class _Executor(StreamingExecutor):
    """Ray Data's executor without an autoscaler, without waiting to hand out a block, and at rest while it has to wait.

    By default a thread fetches the metadata of a block, and the loop sees them when the next block comes or 0.1 s have
    passed. Here, where blocks are few and large, that held back every one of them (70 ms instead of 30 ms to deliver).

    Its loop waits for tasks that run. While blocks lie ready and there is no room for another one, which is how a feed
    that is ahead of its training spends its time, there is nothing to wait for, and the loop goes round without end, a
    core's worth in every worker. Blocks of large rows leave no room for another one from the first on, as those in the
    consumer's hands count. Here it rests until a block is asked for.
    """

    def __init__(self, context: DataContext, dataset_id: str) -> None:
        super().__init__(context, dataset_id)
        self._metadata_fetcher = InlineMetadataFetcher()
        self._awake = threading.Event()
        self._closing = self._is_waited_for = False

    @property
    def num_ready(self) -> int:
        """Bundles that need not be waited for."""
        assert self._output_node is not None
        return len(self._output_node[1].output_queue)

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Around the consumer's wait for a block, after which there may be room for more."""
        self._is_waited_for = True
        self._awake.set()
        try:
            yield
        finally:
            self._is_waited_for = False
            self._awake.set()

    def shutdown(self, force: bool, exception: Exception | None = None) -> None:
        self._closing = True
        self._awake.set()
        super().shutdown(force, exception)

    def _scheduling_loop_step(self, topology: Any) -> bool:
        self._awake.clear()
        going_on: bool = super()._scheduling_loop_step(topology)
        if going_on and not self._closing and self._may_rest(topology):
            self._awake.wait(_REST_S)
        return going_on

    def _may_rest(self, topology: Any) -> bool:
        """Whether a block is ready, or nobody waits for one and no stage has room for what it makes."""
        if self.num_ready > 0:
            return True
        running = [operator for operator in topology if operator.num_active_tasks()]
        has_room = not running or not all(operator._in_task_output_backpressure for operator in running)
        return not self._is_waited_for and not has_room

    @property  # type: ignore[override]
    def _cluster_autoscaler(self) -> _NoAutoscaler:
        return _NoAutoscaler()

    @_cluster_autoscaler.setter
    def _cluster_autoscaler(self, registered: Any) -> None:
        registered.on_executor_shutdown()  # takes its registration back
