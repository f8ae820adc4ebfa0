"""Checks that a call frees its memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

from elastic_ddp.errors import ElasticDDPError


class _Large:
    pass


def frees_memory(call: Callable[[], object]) -> bool:
    """Whether the caller's locals are freed after a call, also if it raised an error of this package."""
    local = _call(call)
    gc.collect()
    return local() is None


def _call(call: Callable[[], object]) -> weakref.ref[_Large]:
    large = _Large()
    try:
        call()
    except ElasticDDPError as error:
        caught = error  # a cycle: the error's traceback holds this frame, which holds the error
        assert str(caught)
    return weakref.ref(large)
