"""What is wrong with a commit, told from what went wrong as it was read: nothing is condemned by one reading."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TypeVar

from elastic_ddp.checkpoint.reading import Piece, Targets, read_pieces
from elastic_ddp.errors import CheckpointError
from elastic_ddp.storage import Storage

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def confirmed(read: Callable[[], Result]) -> Result:
    """What `read` returns, which is called once more if that is not what was committed: bits flip on the way, and
    network mounts show what was there some time ago.

    Raises:
        CheckpointError: it was not the second time, either.
    """
    try:
        return read()
    except CheckpointError as error:
        _log.warning("it is read once more: %s", error)
    return read()


def confirmed_pieces(
    storage: Storage, pieces: Sequence[Piece], targets: Targets | None = None
) -> Generator[tuple[Piece, memoryview]]:
    """As `read_pieces`, where a piece that is not what was committed is read once more before that is believed."""
    done = 0
    while done < len(pieces):
        try:
            with closing(read_pieces(storage, pieces[done:], targets)) as reading:
                for each in reading:
                    done += 1
                    yield each
        except CheckpointError as error:
            _log.warning("it is read once more: %s", error)
        else:
            return
        [again] = read_pieces(storage, [pieces[done]], targets)
        done += 1
        yield again
