"""Moves Ray's own messages from the console to a file; output of the user's code in workers stays on the console.

Ray sends the driver the output of all processes of its job, and reports of its daemons (the last lines of a dead node's
log). A worker marks Ray's log lines, so that the driver can separate them from the user's output.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO

import ray._private.log
import ray._private.worker
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

from elastic_ddp.console import Tolerant

Batch = Mapping[str, Any]
"""Lines that one process printed, and Ray's record of that process."""

_ray_worker: Any = ray._private.worker
_RayHandler: Any = ray._private.log.PlainRayHandler
"""Ray's class of logging handlers that write to the console."""
_emit = _RayHandler.emit

_MARK = ":ray_message:"
"""Start of a line that Ray's Python code logged in a worker."""
_NATIVE = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z] \d+ \d+\] ")
"""Start of a line of Ray's C++ code, which every process may print."""
_OF_PROFILER = "ERROR: External init callback must run in same thread as registerClient"
"""Start of a line that torch's profiler prints if it starts in another thread than the main one; harmless."""
_MORE_OF_NATIVE = re.compile(r"\s|\*\*\* |\S+\(\S*\+0x[0-9a-f]+\) ")
"""Start of further lines of such a message: text that is indented, or frames of a C++ stack."""
_LOG = "ray_print_logs"
"""Ray's name for its handler of workers' output."""


def mark_messages() -> None:
    """From now on, marks Ray's log lines in this process, a worker or a task."""
    _RayHandler.emit = _emit_marked
    # Ray raises KeyboardInterrupt in a task that it cancels, and SystemExit in a process that it ends. Either may hit a
    # destructor or a generator.
    sys.unraisablehook = _report_unraisable


def _is_of_ray(record: logging.LogRecord) -> bool:
    return record.name == "ray" or record.name.startswith("ray.")


def _emit_marked(handler: Any, record: logging.LogRecord) -> None:
    if _is_of_ray(record):
        lines = handler.format(record).splitlines()
        Tolerant(sys.stderr).write("".join(f"{_MARK}{line}\n" for line in lines))
    else:
        _emit(handler, record)


def _report_unraisable(unraisable: Any) -> None:
    if not issubclass(unraisable.exc_type, KeyboardInterrupt | SystemExit):
        sys.__unraisablehook__(unraisable)


class RayMessages:
    """Writes Ray's messages to a file while its `with` block runs in a driver that is connected to Ray.

    The first message creates `file` and calls `note` with a line that says where it is. If `verbose`, the console shows
    messages, too. Threads of Ray call the methods.
    """

    def __init__(self, file: Path, note: Callable[[str], None], *, verbose: bool) -> None:
        self._path = file
        self._note = note
        self._verbose = verbose
        self._file: TextIO | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._print = _ray_worker.print_to_stdstream
        _ray_worker.print_to_stdstream = self._route  # reports of daemons
        self._handlers = dispatcher.handlers
        dispatcher.handlers = [  # what workers print; it has no handler if the user asked for none
            (name, partial(self._route, **handle.keywords) if name == _LOG else handle)
            for name, handle in dispatcher.handlers
        ]
        _RayHandler.emit = lambda handler, record: self._route_record(handler, record)
        return self

    def __exit__(self, *error: object) -> None:
        _ray_worker.print_to_stdstream = self._print
        dispatcher.handlers = self._handlers
        _RayHandler.emit = _emit
        with self._lock:
            if self._file is not None:
                self._file.close()

    def _route(self, batch: Batch, ignore_prefix: bool = False) -> None:
        """Takes the place of Ray's function that prints lines of a process."""
        own, others = split(batch)
        if own:
            self._take(source_of(batch), own)
        if others and batch["is_err"]:
            self._print({**batch, "lines": others}, ignore_prefix)
        elif others:  # Ray would drop lines of workers that differ in numbers (ranks) only
            _ray_worker.print_worker_logs({**batch, "lines": others}, Tolerant(sys.stdout), ignore_prefix)

    def _route_record(self, handler: Any, record: logging.LogRecord) -> None:
        """Takes the place of the method with which Ray logs in this process."""
        if _is_of_ray(record):
            self._take("driver", handler.format(record).splitlines())
        else:
            _emit(handler, record)

    def _take(self, source: str, lines: list[str]) -> None:
        """Writes lines of Ray to the file, and to the console if the file cannot be written."""
        text = "".join(f"({source}) {line}\n" for line in lines)
        is_first = False
        is_shown = self._verbose
        try:
            with self._lock:
                if self._file is None:
                    self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace")
                    is_first = True
                self._file.write(text)
                self._file.flush()
        except OSError:  # a full disk, for example
            is_shown = True
        if is_first:
            self._note(f"Ray's own messages are in {self._path} (ELASTIC_DDP_VERBOSE=1 shows them here, too)")
        if is_shown:
            Tolerant(sys.stderr).write(text)


def split(batch: Batch) -> tuple[list[str], list[str]]:
    """Returns Ray's own lines of a batch, without their mark, and all others."""
    lines = batch["lines"]
    if batch["pid"] == "autoscaler":  # its whole log, of which Ray prints the events only
        return list(_ray_worker.filter_autoscaler_events(lines)), []
    if not str(batch["pid"]).isdigit():  # the name of a daemon
        return list(lines), []
    own: list[str] = []
    others: list[str] = []
    is_native = False
    for line in lines:
        is_native = bool(_NATIVE.match(line) or (is_native and _MORE_OF_NATIVE.match(line)))
        if is_native or line.startswith((_MARK, _OF_PROFILER)):
            own.append(line.removeprefix(_MARK))
        else:
            others.append(line)
    return own, others


def source_of(batch: Batch) -> str:
    """Returns which process printed a batch."""
    name = batch.get("actor_name") or batch.get("task_name")
    process = f"{name} pid={batch['pid']}" if name else str(batch["pid"])
    here = batch.get("ip") in (None, batch.get("localhost"))
    return process if here else f"{process}, ip={batch['ip']}"


def default_file(run: str) -> Path:
    """Returns where the messages go if the run's folder is not on this machine: the logs of the Ray session."""
    return Path(_ray_worker._global_node.get_session_dir_path(), "logs", f"elastic_ddp-{run}.log")
