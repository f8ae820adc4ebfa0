"""Saves in the background: every rank copies its share of the state, and a thread writes it while training goes on.

Rank 0 commits what all ranks have written. Ranks exchange messages through a mailbox, outside of collectives, so a save
may outlive its generation. A rank that is still writing sends heartbeats. Rank 0 gives up on a rank whose heartbeats
stop, and with it on the save. A rank whose storage hangs reports an error instead.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from elastic_ddp.checkpoint.background_thread import BackgroundThread
from elastic_ddp.checkpoint.manifest import Commit, attempt_prefix
from elastic_ddp.checkpoint.parts import Part
from elastic_ddp.checkpoint.staging import HostMemoryError
from elastic_ddp.checkpoint.store import CheckpointStore
from elastic_ddp.checkpoint.writer import StateWriter
from elastic_ddp.errors import CheckpointError, ElasticDDPError, StorageError, format_exception
from elastic_ddp.storage.storage import Storage
from elastic_ddp.storage.watchdog import WatchedStorage

_log = logging.getLogger(__name__)

COPY_PAUSE, MAX_COPY_PAUSE_S = 0.25, 0.25
"""After its copy, a rank waits for this share of the copy's time: other ranks still copy and need the bandwidth."""
MAILBOX_POLL_S = 0.01
SAVE_HEARTBEAT_S = 0.5
"""Interval between the heartbeats of a rank that is writing."""
SILENT_RANK_S, FAILED_RANK_S = 15.0, 2.0
"""Rank 0 gives up on a rank after this long without a heartbeat: normally, and once some rank has failed."""
CHUNK_CHARACTERS = 1 << 20
"""Largest chunk of a report. Torch's store takes values of up to 8 MiB; a character takes up to four bytes."""
ERROR_CHARACTERS = 2000


class Mailbox(Protocol):
    """Messages between ranks, outside of collectives. A message has at most `CHUNK_CHARACTERS` and a few."""

    def put(self, key: str, text: str) -> None: ...
    def get(self, key: str) -> str | None: ...
    def remove(self, key: str) -> None: ...


class RankFailedError(ElasticDDPError):
    """A rank failed, or its heartbeats stopped, before it had written its share. The storage is not at fault."""


class _Report(BaseModel):
    """The outcome of a rank's write."""

    part: Part | None = None
    error: str = ""
    is_of_storage: bool = False
    """Whether the storage caused the error."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save, as a rank takes part in it. `step`, `attempt` and `world_size` are equal on all ranks."""

    step: int
    """Number of steps done."""
    attempt: str
    """32 hexadecimal digits, unique to this save."""
    world_size: int
    rank: int
    mailbox: Mailbox | None
    """None at world size 1."""
    record: dict[str, Any]
    """JSON facts to store in the manifest."""
    fence: Callable[[], None]
    """On rank 0: raises if this save may no longer be committed."""
    on_end: Callable[[Commit | Exception], None]
    """On rank 0: called with the outcome, in the saving thread."""
    on_reject: Callable[[str, str], object] = lambda key, reason: None
    """On rank 0: called in that thread with the key of a bad commit at this step, and the reason."""
    is_current: Callable[[], bool] = lambda: True
    """On rank 0: returns whether the generation in which the save began is still running."""


class Saver:
    """One worker's part in the saves of a run, one after the other.

    Args:
        storage: a folder for commits only.
        store: the commits in it.
        of_rank_0: components of the state that only rank 0 writes.

    Attributes:
        awaits_others: whether this is rank 0, waiting for the writes of other ranks.
    """

    def __init__(self, storage: Storage, store: CheckpointStore, *, of_rank_0: frozenset[str] = frozenset()) -> None:
        self._storage, self._store = storage, store
        self._writer = StateWriter(of_rank_0=of_rank_0)
        self._thread = BackgroundThread("save")
        self._generation_broke = threading.Event()
        self._memory_error: HostMemoryError | None = None
        """Why the state of the newest save was not copied."""
        self.awaits_others = False

    @property
    def is_busy(self) -> bool:
        """Whether this rank still takes part in a save."""
        return self._thread.is_busy

    def warm_up(self, state: dict[str, Any]) -> None:
        """Plans a save ahead of the first `begin`, as far as that depends on neither rank nor world size.

        Raises:
            CheckpointError: the state has values that cannot be saved.
        """
        self._writer.prepare(state)

    def begin(self, state: dict[str, Any], save: Save) -> None:
        """Waits for the save before, copies this rank's share of the state, and starts writing it in the background.

        Every rank calls it, at the same step. If the host memory for the copy cannot be allocated, the save fails and
        training can go on.

        Raises:
            CheckpointError: the state has values that cannot be saved.
        """
        self.wait()
        # A thread of an abandoned save may still write from the buffers that are overwritten here. That does no harm:
        # its attempt is never committed.
        self._memory_error = None
        began_at = time.monotonic()
        try:
            with _gc_paused():
                self._writer.stage(state, rank=save.rank, world_size=save.world_size, seed=save.attempt)
        except HostMemoryError as error:
            self._memory_error = error.with_traceback(None)  # the traceback would keep the state
        self._generation_broke.clear()
        pause_s = min(COPY_PAUSE * (time.monotonic() - began_at), MAX_COPY_PAUSE_S) if save.world_size > 1 else 0.0
        self._thread.submit(lambda: self._run(save, pause_s))

    def wait(self, within_s: float | None = None) -> bool:
        """Waits until this rank's part in the save has ended. Returns whether it has."""
        return self._thread.wait(within_s)

    def generation_broke(self) -> None:
        """Notes that a rank failed, or is presumed dead, in the generation in which the save began."""
        self._generation_broke.set()

    def _run(self, save: Save, pause_s: float) -> None:
        time.sleep(pause_s)
        threading.current_thread().name = f"save-{save.step}"
        storage = WatchedStorage(self._storage)
        if save.rank == 0:
            self._commit(save, storage)
            return
        try:
            report = _Report(part=self._write(save, storage))
        except Exception as error:
            report = _Report(error=format_exception(error), is_of_storage=is_of_storage(error))
        try:
            _send(save, report)
        except Exception as error:
            reason = format_exception(error)
            _log.warning("cannot report the write of step %d to rank 0: %s", save.step, reason)
            with suppress(Exception):  # a short report may pass; without any, rank 0 takes this rank for failed
                _send(save, _Report(error=f"cannot report its write: {reason}"[:ERROR_CHARACTERS]))

    def _write(self, save: Save, storage: WatchedStorage) -> Part:
        """Writes this rank's share, with heartbeats to rank 0 meanwhile."""
        if self._memory_error is not None:
            raise self._memory_error
        prefix = attempt_prefix(save.step, save.attempt)
        if save.rank == 0:
            return storage.run_watched(lambda: self._writer.write(storage, prefix))
        done = threading.Event()
        heartbeat = threading.Thread(target=_send_heartbeats, args=[save, done], name="save-heartbeat", daemon=True)
        heartbeat.start()
        try:
            return storage.run_watched(lambda: self._writer.write(storage, prefix))
        finally:
            done.set()
            heartbeat.join()

    def _commit(self, save: Save, storage: WatchedStorage) -> None:
        """Writes the share of rank 0, waits for the other ranks, and commits."""
        store, report = self._store.through(storage, save.on_reject), _FirstOutcome(save.on_end)
        parts, failure = self._collect_parts(save, storage)
        if failure is not None:
            with suppress(StorageError):
                storage.run_watched(lambda: store.discard(attempt_prefix(save.step, save.attempt)))
            report(failure)
            return
        try:
            storage.run_watched(
                lambda: store.complete(
                    step=save.step,
                    attempt=save.attempt,
                    parts=parts,
                    kinds=self._writer.kinds,
                    record=save.record,
                    fence=save.fence,
                    on_commit=report,
                    is_current=save.is_current,
                )
            )
        except Exception as error:  # discards nothing: the manifest may be stored, and only the response lost
            if not report(error):
                _log.warning("superseded commits stay until the next commit: %s", format_exception(error))

    def _collect_parts(self, save: Save, storage: WatchedStorage) -> tuple[list[Part], Exception | None]:
        """Returns the parts of all ranks, and the first error of one that could not write.

        After an error it still waits for the other ranks, up to the first that failed. Otherwise what they write after
        the attempt is discarded would stay, perhaps on a full disk.
        """
        parts: list[Part] = []
        failure: Exception | None = None
        try:
            parts.append(self._write(save, storage))
        except Exception as error:
            failure = error.with_traceback(None)
        self.awaits_others = True
        try:
            for rank in range(1, save.world_size):
                try:
                    parts.append(self._receive_part(rank, save))
                except (CheckpointError, StorageError) as error:
                    failure = failure or error.with_traceback(None)
        except Exception as error:
            failure = failure or error.with_traceback(None)
        finally:
            self.awaits_others = False
        return parts, failure

    def _receive_part(self, rank: int, save: Save) -> Part:
        """Waits for the report of a rank, and returns the part that it wrote.

        Raises:
            CheckpointError, StorageError: the rank could not write.
            RankFailedError: the rank's heartbeats stopped.
        """
        mailbox, key = save.mailbox, _mailbox_key(save, rank)
        assert mailbox is not None
        heartbeat, alive_at = None, time.monotonic()
        while mailbox.get(key) is None:
            if (newest := mailbox.get(f"{key}/heartbeat")) != heartbeat:
                heartbeat, alive_at = newest, time.monotonic()
            has_failure = self._generation_broke.is_set()
            timeout_s = FAILED_RANK_S if has_failure else SILENT_RANK_S
            if time.monotonic() - alive_at > timeout_s:
                reason = "failed" if has_failure else f"sent no heartbeat for {timeout_s:g} s"
                raise RankFailedError(f"rank {rank} {reason} before it had written its share of step {save.step}")
            time.sleep(MAILBOX_POLL_S)
        report = _receive(save, rank)
        if report.part is None:
            kind = StorageError if report.is_of_storage else CheckpointError
            raise kind(f"rank {rank} could not write its share of step {save.step}: {report.error}")
        return report.part


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Pauses garbage collection. With 10,000 tensors it would take longer than to stage them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _FirstOutcome:
    """Passes on the first outcome of a save only: work that was abandoned may still end."""

    def __init__(self, on_end: Callable[[Commit | Exception], None]) -> None:
        self._on_end, self._ended = on_end, threading.Lock()

    def __call__(self, outcome: Commit | Exception) -> bool:
        """Returns whether this was the first."""
        if not self._ended.acquire(blocking=False):
            return False
        self._on_end(outcome)
        return True


def is_of_storage(error: Exception) -> bool:
    """Returns whether the storage made a save fail, rather than the state that was to be saved."""
    return isinstance(error, StorageError) and not isinstance(error, CheckpointError)


def _mailbox_key(save: Save, rank: int) -> str:
    return f"{save.attempt}/{rank}"


def _send(save: Save, report: _Report) -> None:
    """Sends a report in chunks. The last message, at the rank's own key, is their number."""
    assert save.mailbox is not None
    key, text = _mailbox_key(save, save.rank), report.model_dump_json()
    chunks = [text[start : start + CHUNK_CHARACTERS] for start in range(0, len(text), CHUNK_CHARACTERS)]
    for number, chunk in enumerate(chunks):
        save.mailbox.put(f"{key}/{number}", chunk)
        save.mailbox.put(f"{key}/heartbeat", f"chunk {number}")
    save.mailbox.put(key, str(len(chunks)))


def _receive(save: Save, rank: int) -> _Report:
    """Removes the report of a rank from the mailbox, and returns it."""
    mailbox, key = save.mailbox, _mailbox_key(save, rank)
    assert mailbox is not None
    count = mailbox.get(key)
    keys = [f"{key}/{number}" for number in range(int(count or 0))]
    chunks = [mailbox.get(chunk_key) for chunk_key in keys]
    for read in (key, f"{key}/heartbeat", *keys):
        mailbox.remove(read)
    if count is None or None in chunks:  # the rendezvous restarted, and its store is empty
        raise RankFailedError(f"the report of rank {rank} on its share of step {save.step} was lost in the store")
    return _Report.model_validate_json("".join(filter(None, chunks)))


def _send_heartbeats(save: Save, done: threading.Event) -> None:
    assert save.mailbox is not None
    count = 0
    try:
        while not done.is_set():
            count += 1
            save.mailbox.put(f"{_mailbox_key(save, save.rank)}/heartbeat", str(count))
            done.wait(SAVE_HEARTBEAT_S)
    except Exception as error:
        _log.warning("cannot send heartbeats while writing step %d: %s", save.step, format_exception(error))
