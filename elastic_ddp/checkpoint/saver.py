"""Saves in the background: every rank copies its share of the state, and a thread writes it while training goes on.

Rank 0 commits the blocks of all ranks. Ranks exchange messages through a mailbox, outside of collectives, so a save
may outlive its generation. Rank 0 gives up on the save when the heartbeats of a rank that is writing stop.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from elastic_ddp.checkpoint.background_thread import BackgroundThread
from elastic_ddp.checkpoint.manifest import Commit, attempt_prefix
from elastic_ddp.checkpoint.parts import Part
from elastic_ddp.checkpoint.store import CheckpointStore
from elastic_ddp.checkpoint.writer import HostMemoryError, StateWriter
from elastic_ddp.errors import CheckpointError, ElasticDDPError, StorageError, format_exception
from elastic_ddp.storage.storage import Storage
from elastic_ddp.storage.watchdog import WatchedStorage

if TYPE_CHECKING:
    from elastic_ddp.distributed.torch_store import StoreMailbox

_log = logging.getLogger(__name__)

COPY_PAUSE = 0.25
"""After its copy, a rank waits for this share of the copy's time: other ranks still copy and need the bandwidth."""
MAX_COPY_PAUSE_S = 0.25
MAILBOX_POLL_S = 0.01
SAVE_HEARTBEAT_S = 0.5
"""Interval between the heartbeats of a rank that is writing."""
SILENT_RANK_S = 15.0
"""Rank 0 gives up on a rank after this long without a heartbeat."""
FAILED_RANK_S = 2.0
"""Rank 0 gives up after this long without a heartbeat, once some rank has failed."""
CHUNK_CHARACTERS = 1 << 20
"""Largest chunk of a report. Torch's store takes values of up to 8 MiB; a character takes up to four bytes."""


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
    mailbox: StoreMailbox | None
    """For messages between ranks, outside of collectives; None at world size 1."""
    record: dict[str, Any]
    """JSON facts to store in the manifest."""
    fence: Callable[[], None]
    """On rank 0: raises if this save may no longer be committed."""
    on_end: Callable[[Commit | Exception], None]
    """On rank 0: called with the outcome, in the saving thread."""
    on_reject: Callable[[str, str], object] = lambda key, reason: None
    """On rank 0: called in the saving thread with the key of a bad commit at this step, and the reason."""
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
        self._storage = storage
        self._store = store
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
        """Raises CheckpointError for a state that cannot be saved, before training."""
        self._writer.prepare(state)

    def begin(self, state: dict[str, Any], save: Save) -> None:
        """Waits for the previous save, copies this rank's share of the state, and starts writing it in the background.

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
        collects = gc.isenabled()
        gc.disable()  # with 10,000 tensors, a collection would take longer than to stage them
        try:
            self._writer.stage(state, rank=save.rank, world_size=save.world_size, seed=save.attempt)
        except HostMemoryError as error:
            self._memory_error = error.with_traceback(None)  # the traceback would keep the state
        finally:
            if collects:
                gc.enable()
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
        else:
            self._write_and_report(save, storage)

    def _write(self, save: Save, storage: WatchedStorage) -> Part:
        if self._memory_error is not None:
            raise self._memory_error
        prefix = attempt_prefix(save.step, save.attempt)
        return storage.run_watched(lambda: self._writer.write(storage, prefix))

    def _write_and_report(self, save: Save, storage: WatchedStorage) -> None:
        """Writes this rank's share, with heartbeats to rank 0 meanwhile, and reports the outcome."""
        messages = _Messages(save, save.rank)
        done = threading.Event()
        heartbeat = threading.Thread(target=_send_heartbeats, args=[messages, done], name="save-heartbeat", daemon=True)
        heartbeat.start()
        try:
            report = _Report(part=self._write(save, storage))
        except Exception as error:
            report = _Report(error=format_exception(error), is_of_storage=is_of_storage(error))
        finally:
            done.set()
            heartbeat.join()
        try:
            messages.send(report)
        except Exception as error:  # rank 0 counts this rank as failed
            _log.warning("cannot report the write of step %d to rank 0: %s", save.step, format_exception(error))

    def _commit(self, save: Save, storage: WatchedStorage) -> None:
        """Writes the share of rank 0, waits for the other ranks, and commits."""
        store = self._store.through(storage, save.on_reject)
        ended = threading.Lock()

        def report(outcome: Commit | Exception) -> bool:
            """Reports the first outcome only: work that was abandoned may still end. Returns whether it was first."""
            is_first = ended.acquire(blocking=False)
            if is_first:
                save.on_end(outcome)
            return is_first

        parts: list[Part] = []
        failure: Exception | None = None
        for rank in range(save.world_size):
            self.awaits_others = rank > 0
            try:
                parts.append(self._receive_part(rank, save) if rank else self._write(save, storage))
            except Exception as error:
                failure = failure or error.with_traceback(None)
                # After an error, rank 0 still waits for the other ranks, up to the first that failed: files that they
                # write after the discard would stay, perhaps on a full disk.
                if rank and not isinstance(error, StorageError):
                    break
        self.awaits_others = False
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

    def _receive_part(self, rank: int, save: Save) -> Part:
        """Waits for the report of a rank, and returns the part that it wrote, or raises why there is none."""
        messages = _Messages(save, rank)
        heartbeat = None
        alive_at = time.monotonic()
        while (report := messages.receive()) is None:
            newest = messages.heartbeat()
            if newest != heartbeat:
                heartbeat = newest
                alive_at = time.monotonic()
            has_failure = self._generation_broke.is_set()
            timeout_s = FAILED_RANK_S if has_failure else SILENT_RANK_S
            if time.monotonic() - alive_at > timeout_s:
                reason = "failed" if has_failure else f"sent no heartbeat for {timeout_s:g} s"
                raise RankFailedError(f"rank {rank} {reason} before it had written its share of step {save.step}")
            time.sleep(MAILBOX_POLL_S)
        if report.part is None:
            kind = StorageError if report.is_of_storage else CheckpointError
            raise kind(f"rank {rank} could not write its share of step {save.step}: {report.error}")
        return report.part


class _Messages:
    """The messages of a rank to rank 0 during a save: heartbeats, and a report in chunks."""

    def __init__(self, save: Save, rank: int) -> None:
        assert save.mailbox is not None
        self._mailbox = save.mailbox
        self._key = f"{save.attempt}/{rank}"

    def send_heartbeat(self, text: str) -> None:
        self._mailbox.put(f"{self._key}/heartbeat", text)

    def heartbeat(self) -> str | None:
        return self._mailbox.get(f"{self._key}/heartbeat")

    def send(self, report: _Report) -> None:
        """Sends a report. The last message, at the rank's own key, is the number of chunks."""
        text = report.model_dump_json()
        starts = range(0, len(text), CHUNK_CHARACTERS)
        for number, start in enumerate(starts):
            self._mailbox.put(f"{self._key}/{number}", text[start : start + CHUNK_CHARACTERS])
            self.send_heartbeat(f"chunk {number}")
        self._mailbox.put(self._key, str(len(starts)))

    def receive(self) -> _Report | None:
        """Removes the report from the mailbox, and returns it; None if it has not arrived."""
        count = self._mailbox.get(self._key)
        if count is None:
            return None
        keys = [f"{self._key}/{number}" for number in range(int(count))]
        chunks = [self._mailbox.get(key) for key in keys]
        for key in (self._key, f"{self._key}/heartbeat", *keys):
            self._mailbox.remove(key)
        if None in chunks:  # the rendezvous restarted, and its store is empty
            raise RankFailedError(f"the report {self._key} of a rank on its write was lost in the store")
        return _Report.model_validate_json("".join(filter(None, chunks)))


def is_of_storage(error: Exception) -> bool:
    """Returns whether a save failed because of the storage, and not because of the state to save."""
    return isinstance(error, StorageError) and not isinstance(error, CheckpointError)


def _send_heartbeats(messages: _Messages, done: threading.Event) -> None:
    try:
        for count in itertools.count():
            messages.send_heartbeat(str(count))
            if done.wait(SAVE_HEARTBEAT_S):
                return
    except Exception as error:
        _log.warning("cannot send heartbeats during a save: %s", format_exception(error))
