"""Writes TensorBoard's event files into the run's folder. Needs `tensorboardX`, which Ray Train installs."""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from elastic_ddp.loggers.logger import LoggedRun
from elastic_ddp.storage.storage import Storage

FOLDER = "tensorboard"
"""The folder of the event files in the run's folder."""
FLUSH_EVERY_S = 10.0
"""Least time between two writes to an object storage."""
OBJECT_BYTES = 256 * 1024
"""Size above which an event file in an object storage is followed by another."""


class TensorBoardLogger:
    """Writes each step as one record, so that an event file has all values of a step or none.

    A local file grows record by record. An object storage has no append: there, a flush rewrites the newest file.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_starts = 0
        self._next = 0
        """Values of this and later steps in older files are hidden."""
        self.destination = ""
        self._file: _LocalFile | _Objects

    def start(self, run: LoggedRun) -> int | None:
        from tensorboardX.proto.event_pb2 import Event

        storage = Storage(run.uri)
        self.destination = storage.at(FOLDER).uri
        self._num_starts += 1
        # TensorBoard reads files in the order of their names, and the clock may be set back between sessions.
        name = f"events.out.tfevents.{run.session_number:010d}.{run.id}.{run.session}.{self._num_starts:04d}"
        key = f"{FOLDER}/{name}"
        is_local = "://" not in storage.uri
        self._file = _LocalFile(Path(storage.uri, key)) if is_local else _Objects(storage, key, self._clock)
        self._next = 0
        for key in reversed([key for key in storage.list(FOLDER) if f".{run.id}." in key]):
            events = [Event.FromString(record) for record in read_records(storage.read(key))]
            steps = [event.step for event in events if event.HasField("summary")]
            if steps:
                self._next = max(steps) + 1
                return max(steps)
        return None

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = Event(wall_time=time, step=step, summary=Summary(value=scalars))
        header = Event(wall_time=time, file_version="brain.Event:2")
        # As `purge_step` of torch's SummaryWriter does.
        purge = Event(wall_time=time, step=self._next, session_log=SessionLog(status=SessionLog.START))
        start = _frame(header.SerializeToString()) + _frame(purge.SerializeToString())
        self._file.append(_frame(event.SerializeToString()), header=start)
        self._next = step + 1

    def finish(self, status: str) -> None:
        self._file.flush()


class _LocalFile:
    """A file that grows. A process that is killed leaves at most its last record incomplete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_new = True

    def append(self, record: bytes, header: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        data = header + record if self._is_new else record
        with self._path.open("ab", buffering=0) as file:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._is_new = False

    def flush(self) -> None:
        """Every record is in the file already."""


class _Objects:
    """Numbered objects, of which the newest is rewritten."""

    def __init__(self, storage: Storage, key: str, clock: Callable[[], float]) -> None:
        self._storage = storage
        self._key = key
        self._clock = clock
        self._number = 0
        self._data = b""
        self._is_written = True
        self._flushed_at = clock()

    def append(self, record: bytes, header: bytes) -> None:
        if len(self._data) > OBJECT_BYTES:
            self.flush()
            self._number += 1
            self._data = b""
        self._data = (self._data or header) + record
        self._is_written = False
        if self._clock() >= self._flushed_at + FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        if not self._is_written:
            self._storage.write(f"{self._key}.{self._number:06d}", self._data)
            self._is_written = True
            self._flushed_at = self._clock()


def _frame(data: bytes) -> bytes:
    """Returns a record of a TFRecord file, which event files are."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    return b"".join([length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))])


def read_records(data: bytes) -> Iterator[bytes]:
    """Yields the records of an event file, up to one that is incomplete."""
    position = 0
    while position + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        end = position + 12 + length
        if end + 4 > len(data):
            return
        yield data[position + 12 : end]
        position = end + 4
