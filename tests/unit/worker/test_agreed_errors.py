"""Errors that one rank meets and every rank raises."""

from __future__ import annotations

import pytest

from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import CheckpointError, ConfigError, PeerFailedError, StorageError
from elastic_ddp.worker.agreed_errors import agree_on_error
from tests.ranks import run_ranks


def agree(group: ProcessGroup, errors: list[Exception | None]) -> str | list[bytes]:
    """What `agree_on_error` returns or raises where each rank has one of these errors."""
    try:
        return agree_on_error(errors[group.rank], group, f"data of {group.rank}".encode())
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([None, None, None], [b"data of 0", b"data of 1", b"data of 2"]),
        ([None, CheckpointError("bad\nin two lines"), None], r"CheckpointError('bad\nin two lines')"),
        ([CheckpointError("bad"), StorageError("down"), ConfigError("full")], "ConfigError('full')"),
        ([PeerFailedError("changed"), CheckpointError("bad"), CheckpointError("worse")], "CheckpointError('bad')"),
    ],
)
def test_all_ranks_raise_the_same_error_or_get_all_data(
    errors: list[Exception | None], expected: str | list[bytes]
) -> None:
    assert run_ranks(3, agree, errors) == [expected] * 3
