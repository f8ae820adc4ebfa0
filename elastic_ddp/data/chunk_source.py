"""`ChunkSource`: the Ray Data source of pipelines. Processes without pipelines save the import of Ray Data."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask


class ChunkSource(Datasource):
    """A Ray Data source with one task."""

    def __init__(self, read: Callable[[], Iterator[pa.Table]]) -> None:
        super().__init__()
        self._read = read

    def get_name(self) -> str:
        return "Chunks"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *args: object, **kwargs: object) -> list[ReadTask]:
        return [ReadTask(self._read, BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None))]
