"""What is wrong with a commit, told from what went wrong as it was read: nothing is condemned by one reading."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from elastic_ddp.checkpoint.manifest import committed_steps, manifest_key
from elastic_ddp.checkpoint.reader import Piece, Reading, Targets, read_piece
from elastic_ddp.errors import CheckpointError, StorageError, UnreadableError
from elastic_ddp.storage.retry import RetryingStorage
from elastic_ddp.storage.storage import Storage

AGAIN_S = 10.0
"""For how long a storage that is not patient itself is asked a second time."""
WITNESSES = 3
"""Manifests that are tried before the storage is taken to be away."""

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def confirmed(storage: Storage, key: str, read: Callable[[Storage], Result]) -> Result:
    """What `read` gives of an object or a folder in a storage. What it fails at is believed the second time: bits flip
    on the way, network mounts show what was there some time ago, and storages are away for a while.

    Raises:
        CheckpointError: neither time it was what was committed.
        UnreadableError: it could not be read, and the storage answered before it was tried again, and afterwards.
        StorageError: the storage is away.
    """
    try:
        return read(storage)
    except StorageError as error:
        first = error.with_traceback(None)  # which would keep what was read in memory
    return _second(storage, key, first, read)


def confirmed_piece(storage: Storage, piece: Piece, targets: Targets | None = None) -> memoryview:
    """As `read_piece`, and as `confirmed`."""
    return confirmed(storage, piece.key, lambda storage: read_piece(storage, piece, targets))


def confirmed_pieces(storage: Storage, pieces: Iterable[Piece], targets: Targets | None = None) -> Reading[Piece]:
    """As `read_pieces`, each as `confirmed`."""
    return Reading(pieces, lambda piece: confirmed_piece(storage, piece, targets))


def _second(storage: Storage, key: str, first: StorageError, read: Callable[[Storage], Result]) -> Result:
    """What another reading gives, and what it means if it fails like the first."""
    if not isinstance(first, CheckpointError) and not _answers(storage, key):
        raise first
    _log.warning("%s; it is read once more", first)
    try:
        return read(RetryingStorage(storage, retry_for_s=AGAIN_S))
    except StorageError as error:
        away = next((each for each in (error, first) if not isinstance(each, CheckpointError)), None)
        if away is None:
            raise
        if not _answers(storage, key):
            raise away from away.__cause__
        raise UnreadableError(f"{away}; others in the same folder can be read") from away


def _answers(storage: Storage, key: str) -> bool:
    """Whether a manifest can be read now, other than the object that cannot."""
    with suppress(StorageError):
        others = [each for each in map(manifest_key, committed_steps(storage.list("commits"))) if each != key]
        for each in others[:WITNESSES]:
            with suppress(StorageError, FileNotFoundError):
                storage.read_into(each, 0, memoryview(bytearray(1)))
                return True
    return False
