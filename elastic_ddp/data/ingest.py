"""Copies a `ray.data.Dataset` into the run's storage before the run starts."""

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

_MARKER, _COPIES = "data/dataset.json", "data/dataset-"
_ROWS_PER_GROUP = 8192  # a window of several row groups fits in memory, and reads are large enough


def materialize(
    dataset: ray.data.Dataset, storage: Storage, *, may_replace: bool, note: Callable[[str], None] = lambda text: None
) -> str:
    """Writes a Ray Data data set as Parquet into the run's storage and returns the URI of the copy.

    A marker file, written last, names the folder of the copy. An existing copy is used unless `may_replace`, because
    nothing shows whether `dataset` is the same. `note` receives a message about it.
    """
    old_folder = _copy(storage)
    if old_folder is not None and not may_replace:
        note("using the run's existing copy of its ray.data.Dataset; to train on other data, use another run name")
        return f"{storage.uri}/{old_folder}"
    if old_folder is not None:
        note("writing the ray.data.Dataset again, because the run has no commit yet and the data may have changed")
    name = f"{_COPIES}{uuid.uuid4().hex}"
    filesystem, path = storage.at(name).filesystem_and_path()
    marker = json.dumps({"folder": name}).encode()
    try:
        with _preserve_order(dataset):
            # Not pyarrow's S3 filesystem: it commits a partial object on failure, and some servers reject its requests.
            dataset.write_parquet(path, filesystem=filesystem, row_group_size=_ROWS_PER_GROUP)
        if not any(key.endswith(".parquet") for key in storage.list(name)):
            raise DataError("the ray.data.Dataset has no rows. Pass one that has.")
        if old_folder is None:
            storage.create(_MARKER, marker)
        else:
            storage.write(_MARKER, marker)
    except FileExistsError:  # another driver of this run wrote a copy first, or the answer to our own request was lost
        copy = _copy(storage)
        if copy != name:
            storage.delete_tree(name)
        return f"{storage.uri}/{copy}"
    except BaseException:
        storage.delete_tree(name)
        raise
    if old_folder is not None:
        storage.delete_tree(old_folder)
    return f"{storage.uri}/{name}"


def _copy(storage: Storage) -> str | None:
    """Returns the folder of the run's copy, or None."""
    try:
        folder: str = json.loads(storage.read(_MARKER))["folder"]
    except FileNotFoundError:
        return None
    except ValueError:  # cut by a power failure
        folders = sorted({"/".join(key.split("/")[:2]) for key in storage.list("data") if key.startswith(_COPIES)})
        if len(folders) != 1:
            raise DataError(
                f"{storage.uri}/{_MARKER} is damaged, and does not name the copy of the ray.data.Dataset. Write "
                f'{{"folder": "..."}} into it, with one of: {", ".join(folders) or "(no copy is left)"}. Or use '
                "another run name; run.load_weights can start that run from the weights of this one."
            ) from None
        (folder,) = folders
    return folder


@contextmanager
def _preserve_order(dataset: ray.data.Dataset) -> Iterator[None]:
    """Makes tasks start in the order of the data. This order names the files, and so defines the order of rows."""
    options = dataset.context.execution_options
    before = options.preserve_order
    options.preserve_order = True
    try:
        yield
    finally:
        options.preserve_order = before
