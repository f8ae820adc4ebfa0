"""A `ray.data.Dataset` becomes files in the run's storage, before the run starts."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from elastic_ddp.errors import DataError

if TYPE_CHECKING:
    import ray.data

    from elastic_ddp.storage.storage import Storage

_MARKER = "data/dataset.json"
_ROWS_PER_GROUP = 8192  # small enough that a window of several fits in memory, large enough to read well


def materialize(
    dataset: ray.data.Dataset, storage: Storage, *, may_replace: bool, note: Callable[[str], None] = lambda text: None
) -> str:
    """Write a Ray Data data set into the run's storage, and return where it is.

    The marker is written last and names what it vouches for. Where there is one, the run goes on with the data it began
    with, unless `may_replace`: whether `dataset` is still the same cannot be told, so it is written again then.

    Args:
        note: told which of the two it is, where there is a choice.
    """
    before = _copy(storage)
    if before is not None and not may_replace:
        note("the run goes on with the copy of its ray.data.Dataset that it began with; other data needs another name")
        return f"{storage.uri}/{before}"
    if before is not None:
        note("nothing is committed yet, so the ray.data.Dataset is written once more: it may be another one")
    name = f"data/dataset-{uuid.uuid4().hex}"
    filesystem, path = storage.at(name).filesystem_and_path()
    marker = json.dumps({"folder": name}).encode()
    try:
        with _in_order(dataset):
            # Not by pyarrow's own S3 writer: it commits a partial object when it fails, and not every server takes it.
            dataset.write_parquet(path, filesystem=filesystem, row_group_size=_ROWS_PER_GROUP)
        if not any(key.endswith(".parquet") for key in storage.list(name)):
            raise DataError("the ray.data.Dataset has no rows; give one that has")
        if before is None:
            storage.create(_MARKER, marker)
        else:
            storage.write(_MARKER, marker)
    except FileExistsError:  # another driver of this run came first: its copy counts
        storage.delete_tree(name)
        return f"{storage.uri}/{_copy(storage)}"
    except BaseException:
        storage.delete_tree(name)
        raise
    if before is not None:
        storage.delete_tree(before)
    return f"{storage.uri}/{name}"


def _copy(storage: Storage) -> str | None:
    """The folder of the copy that the run has, if it has one."""
    try:
        folder: str = json.loads(storage.read(_MARKER))["folder"]
    except FileNotFoundError:
        return None
    return folder


@contextmanager
def _in_order(dataset: ray.data.Dataset) -> Iterator[None]:
    """Files are named in the order in which their tasks begin: another order would be another data set."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = before
