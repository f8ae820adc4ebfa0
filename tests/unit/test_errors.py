"""Errors of the user's code whose own text cannot be shown."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ddp.data.map_style import index_in_memory
from elastic_ddp.distributed.process_group import is_missing_group, is_peer_failure
from elastic_ddp.errors import DataError, format_exception


class MuteError(ValueError):
    def __str__(self) -> str:
        raise TypeError("no text")

    def __repr__(self) -> str:
        raise KeyError("no text")


class MuteRows:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> Any:
        raise MuteError


def test_an_exception_whose_repr_raises_is_named_by_type_and_place() -> None:
    with pytest.raises(DataError, match="raised <MuteError, whose __repr__ raises KeyError>") as caught:
        index_in_memory(MuteRows())
    assert "in __getitem__" in str(caught.value) and __file__ in str(caught.value)


def test_an_exception_whose_text_cannot_be_shown_is_no_failure_of_a_peer() -> None:
    assert format_exception(MuteError()) == "MuteError: <MuteError, whose __str__ raises TypeError>"
    assert format_exception(ValueError("3")) == "ValueError: 3"
    assert not is_peer_failure(MuteError()) and not is_missing_group(MuteError())
