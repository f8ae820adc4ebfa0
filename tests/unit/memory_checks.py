"""Whether memory is let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

from elastic_ddp.errors import ElasticDDPError


class _Large:
    pass


def is_let_go_after(call: Callable[[], object]) -> bool:
    """Whether what whoever makes a call has is let go with it, also if it met an error of ours."""
    held = _meet(call)
    gc.collect()
    return held() is None


def _meet(call: Callable[[], object]) -> weakref.ref[_Large]:
    large = _Large()
    try:
        call()
    except ElasticDDPError as error:
        met = error  # in a frame to which the error leads, as those have it that go on after one
        assert str(met)
    return weakref.ref(large)
