"""Reports the call of a user's function (a transform, for example) in which a data process died or hangs.

Ray reports only that a task's process died. So a data process writes the running call into a file of its node, to which
Python's faulthandler appends the signal and the stack. The worker on that node reads the file. The worker can also
request the stack of a running process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic_ddp.data.columns import Int64Array
from elastic_ddp.errors import shorten
from elastic_ddp.rendezvous.standby_process import has_ended, process_state
from elastic_ddp.signals import FATAL_SIGNALS
from elastic_ddp.storage.temporary_folder import TemporaryFolder

_MAX_ROWS = 20
_MAX_DESCRIBED_ROWS = 64
"""As many rows as most micro-batches have, so that a row with NaN is among them."""
_EXIT_TIMEOUT_S = 1.0
"""How long a process may take to end after Ray saw its connection close."""
_STACK_TIMEOUT_S = 1.0
_STDERR = 2
_SHOW_STACK = signal.SIGUSR1
_NO_SIGNAL = (
    " without a signal that Python can handle: it called os._exit, or was killed (SIGKILL), as by the kernel when "
    "memory is short"
)
_PACKAGE = Path(__file__).parents[1]

_record: tuple[str, int] | None = None
"""The folder and the file descriptor of this data process's record."""


def record_calls(folder: str) -> None:
    """Makes this process record its calls in a folder of `CallRecords`, if the folder is on this node."""
    global _record
    if _record is not None and _record[0] == folder:
        return
    if _record is not None:
        faulthandler.unregister(_SHOW_STACK)
        os.close(_record[1])
        _record = None
    with suppress(OSError):
        _record = folder, os.open(f"{folder}/{os.getpid()}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        faulthandler.register(_SHOW_STACK, _record[1], all_threads=False)


@contextmanager
def recorded(function: str, place: str, row_ids: Int64Array) -> Iterator[None]:
    """Records a call of the user's function until the context ends.

    Args:
        function: the function's name in messages, "the transform" for example; if empty, the call is not recorded.
        place: the place in the run, which differs for every call.
        row_ids: the rows of the call.
    """
    if _record is None or not function:
        yield
        return
    file = _record[1]
    call = [function, place, row_ids[:_MAX_ROWS].tolist(), len(row_ids)]
    with suppress(OSError):  # a full disk
        os.ftruncate(file, 0)
        os.write(file, json.dumps(call).encode() + b"\n")
    faulthandler.enable(file, all_threads=False)
    try:
        yield
    finally:
        faulthandler.enable(_STDERR, all_threads=False)  # as Ray does
        with suppress(OSError):
            os.ftruncate(file, 0)


class UserCallError(Exception):
    """The call of the user's function in which a data process died or hangs."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place
        """The place in the run of the call."""


class CallRecords:
    """The folder with the records of a pipeline's data processes. The worker creates it."""

    def __init__(self) -> None:
        self._temporary = TemporaryFolder("calls")
        self.folder = self._temporary.path
        self._waited: dict[tuple[str, int], float] = {}
        """Seconds for which the worker has waited during each running call, by process and the time that it began."""

    def find_fatal(self, locate: Callable[[list[int]], str], reason: str = "") -> UserCallError | None:
        """Returns the call in which a process died, or None. Call it after Ray reported that a process died.

        Args:
            locate: describes rows by their row ids.
            reason: why the process was killed, if Ray knows.
        """
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        while True:
            calls = {}
            for path in self._paths():
                with suppress(OSError):
                    record = path.read_text(errors="replace")
                    if record:
                        calls[int(path.name)] = record.partition("\n")
            for pid, (call, _, report) in calls.items():
                if has_ended(pid):
                    return _describe(call, report, locate, f"died{_signal(report) or reason or _NO_SIGNAL}")
            if not calls or time.monotonic() > deadline:
                return None
            time.sleep(0.01)

    def find_hanging(self, locate: Callable[[list[int]], str], after_s: float, waited_s: float) -> UserCallError | None:
        """Returns a call for which the worker has waited this many seconds, with the stack of its process, or None.

        Args:
            locate: describes rows by their row ids.
            after_s: the limit.
            waited_s: seconds since the previous call of this method for which the worker itself has run, and waited.
                Time in which the machine or the worker was suspended does not count.
        """
        before = self._waited
        self._waited = {}
        for path in self._paths():
            with suppress(OSError):
                status = path.stat()
                if not status.st_size:
                    continue
                call = path.name, status.st_mtime_ns
                age_s = max(0.0, time.time() - status.st_mtime)
                is_stopped = process_state(int(path.name)) in "Tt"
                added_s = 0.0 if is_stopped else waited_s if call in before else min(waited_s, age_s)
                self._waited[call] = before.get(call, 0.0) + added_s
                if self._waited[call] >= after_s:
                    return self._describe_hanging(path, locate, after_s)
        return None

    def _describe_hanging(self, path: Path, locate: Callable[[list[int]], str], after_s: float) -> UserCallError | None:
        os.kill(int(path.name), _SHOW_STACK)
        deadline = time.monotonic() + _STACK_TIMEOUT_S
        while time.monotonic() < deadline and not path.read_text(errors="replace").partition("\n")[2]:
            time.sleep(0.01)
        call, _, report = path.read_text(errors="replace").partition("\n")
        return _describe(call, report, locate, f"has made no progress for {after_s:g} s") if call else None

    def _paths(self) -> list[Path]:
        """Returns the records of all processes; none if the pipeline is closed."""
        try:
            return list(Path(self.folder).iterdir())
        except OSError:
            return []

    def close(self) -> None:
        self._temporary.close()


def _signal(report: str) -> str:
    problem = report.partition("\n")[0]
    return next((f" of {signal} ({name})" for name, signal in FATAL_SIGNALS.items() if name in problem), "")


def _describe(call: str, report: str, locate: Callable[[list[int]], str], what: str) -> UserCallError:
    function, place, row_ids, num_rows = json.loads(call)
    more = f" and {num_rows - len(row_ids):,} more" if num_rows > len(row_ids) else ""
    frames = [line for line in report.splitlines() if line.startswith("  File ")]
    own = next((number for number, line in enumerate(frames) if f'"{_PACKAGE}/' in line), len(frames))
    message = f"the process that runs {function} {what}, in {place}: {locate(row_ids)}{more}"
    return UserCallError("\n".join([message, *frames[:own]]), place)


def describe_rows(row_ids: Sequence[int], where: str = "the data set") -> str:
    """Returns text for rows, for example "rows 3, 17 of a.parquet"."""
    numbers = shorten([f"{row:,}" for row in row_ids], _MAX_DESCRIBED_ROWS)
    return f"{'row' if len(row_ids) == 1 else 'rows'} {numbers} of {where}"
