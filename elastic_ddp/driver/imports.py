"""Imports modules while the driver waits for Ray."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def imports_meanwhile(*modules: str) -> Iterator[None]:
    """Imports modules in a thread during the `with` block. Errors are raised where the modules are imported again."""

    def import_all() -> None:
        for module in modules:
            with suppress(Exception):
                importlib.import_module(module)

    thread = threading.Thread(target=import_all, name="imports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
