"""Second tries: a commit is rejected only after the same read has failed twice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from elastic_ddp.errors import CheckpointError, StorageError
from elastic_ddp.storage.storage import Storage

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def read_twice(storage: Storage, key: str, read: Callable[[], Result]) -> Result:
    """Returns what `read` returns, and calls it again if it fails: bits flip in transit, and mounts can be stale.

    Args:
        storage: the folder of the commits.
        key: the object or folder that is read.
        read: reads and verifies it.

    Raises:
        CheckpointError: it does not verify, or cannot be read although the storage answers.
        StorageError: the storage does not answer; that says nothing about the commit.
    """
    try:
        return read()
    except StorageError as error:
        first = error.with_traceback(None)  # its frames hold what was read
    _log.warning("%s; reading it again", first)
    if not isinstance(first, CheckpointError):
        check_answers(storage, key)
    try:
        return read()
    except CheckpointError:
        raise
    except StorageError as error:
        raise CheckpointError(f"{key} cannot be read although the storage answers: {error}") from error


def check_answers(storage: Storage, key: str) -> None:
    """Raises StorageError unless the storage lists the commits and reads a byte of a manifest other than `key`."""
    others = [manifest for manifest in storage.list("commits") if manifest != key]
    if others:
        with suppress(FileNotFoundError):  # removed since it was listed
            storage.read_into(others[-1], 0, memoryview(bytearray(1)))
