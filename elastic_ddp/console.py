"""Standard output and standard error as a run needs them: writing to them never fails.

The terminal may have been closed, a program such as `tee` may have ended, or the encoding may not have a character.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TextIO


class Tolerant:
    """A text stream that escapes what its encoding cannot hold, and drops text once it is closed or broken."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with suppress(OSError, ValueError):  # closed
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()
