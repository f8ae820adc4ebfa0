"""Versions of Python and the packages that a run depends on."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version

PACKAGES = ("elastic-ddp", "torch", "ray", "pyarrow")


@cache
def versions() -> dict[str, str]:
    """Returns the versions in this process, by name."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
