"""Checks whether a node reads the data and uses the storage that the driver uses."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from elastic_ddp.data.files import DataFile, check_version, read_footer
from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.map_style import MapStyleIndex
from elastic_ddp.data.user_code import this_node
from elastic_ddp.errors import ConfigError, DataError
from elastic_ddp.storage.storage import Storage

_log = logging.getLogger(__name__)

_SESSIONS = "sessions"
"""A folder in the run's folder, with an object for the newest session. A node that sees it shares the storage."""
_MAX_FOLDERS = 4


def files_to_check(index: DatasetIndex | MapStyleIndex, storage: Storage) -> tuple[DataFile, ...]:
    """Returns the files that show whether a node reads the data: the first of each folder, of up to four folders.

    None for data in memory, which Ray sends, or for data in the folder that holds the run's storage.
    """
    first: dict[str, DataFile] = {}
    for file in index.files if isinstance(index, DatasetIndex) else ():
        first.setdefault(file.path.rpartition("/")[0], file)
    beside = storage.uri.rpartition("/")[0] + "/"
    return tuple(file for file in list(first.values())[:_MAX_FOLDERS] if not file.path.startswith(beside))


def announce(storage: Storage, session: str) -> None:
    """Writes an object named after the driver's session. A node that reads it has the same storage: `check_storage`.

    The name is new: a mounted bucket (gcsfuse, blobfuse) shows the old content of a replaced object for minutes.
    """
    earlier = storage.list(_SESSIONS)
    storage.write(f"{_SESSIONS}/{session}", b"")
    for key in earlier:
        storage.delete(key)


def check_storage(storage: Storage, session: str) -> None:
    """Raises ConfigError unless this node sees the object that the driver of a session wrote with `announce`."""
    try:
        storage.read(f"{_SESSIONS}/{session}")
    except FileNotFoundError:
        raise ConfigError(
            f"node {this_node()} does not see storage={storage.uri!r}: what the driver wrote there is missing. All "
            "nodes must see the storage: use a folder that they share, or a bucket, such as s3://bucket/runs."
        ) from None


def check_data(files: Sequence[DataFile]) -> None:
    """Raises DataError unless this node reads these files, or OSError for an error that may be temporary."""
    for file in files:
        check_version(file.path, file.size, file.version)
        read_footer(file.path, file.size)


def check_access(storage: Storage, session: str, files: Sequence[DataFile]) -> None:
    """Makes both checks in a worker that starts. Ignores errors that may be temporary: later operations retry them.

    Raises:
        ConfigError: this node does not share the run's storage.
        DataError: this node cannot read the data.
    """
    try:
        check_storage(storage, session)
        check_data(files)
    except (ConfigError, DataError):
        raise
    except Exception:  # file systems raise whatever their client library does
        _log.debug("the access to data and storage is unknown", exc_info=True)
