"""Saving behind training: every rank copies its share of the state at once and writes it in a thread, and what all have
written is committed by rank 0.

A save outlives its generation: ranks that are still writing say so again and again, and only one that has fallen silent
is given up, and the save with it. So is one that a storage keeps waiting for ever: then the rank says that instead.
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
from elastic_ddp.checkpoint.store import CheckpointStore
from elastic_ddp.checkpoint.writer import HostMemoryError, Part, StateWriter
from elastic_ddp.errors import CheckpointError, ElasticDDPError, StorageError, format_exception
from elastic_ddp.storage.storage import Storage
from elastic_ddp.storage.watchdog import WatchedStorage

_log = logging.getLogger(__name__)

LET_BE, MOST_LET_BE_S = 0.25, 0.25
"""Ranks copy at about the same time, and training waits for the last: a rank that is through lets the others have the
memory's bandwidth for a quarter of the time that it took itself, and for no longer than this. Without that two ranks on
two cores are held up for 1.13 of a copy rather than 1.05, and with all of that time for no less."""
POLL_S = 0.01
"""How often it is looked for what others have written."""
BEAT_S = 0.5
"""How often a rank says that it is still writing."""
SILENCE_S, SILENCE_OF_THE_LOST_S = 15.0, 2.0
"""Silence after which a rank is given up, and the same once it is known that some rank is lost."""
LETTER_CHARACTERS = 1 << 20
"""Of what a rank says at once. Torch's stores refuse values of more than 8 MiB, which is what is said of 47,000 blocks,
and a character takes up to four bytes."""
ERROR_CHARACTERS = 2000
"""Of an error that is told in place of what could not be."""


class Mailbox(Protocol):
    """Where ranks leave word for each other, outside of collectives; at most `LETTER_CHARACTERS` and a few at a key."""

    def put(self, key: str, text: str) -> None: ...
    def get(self, key: str) -> str | None: ...
    def remove(self, key: str) -> None: ...


class RankFailedError(ElasticDDPError):
    """A rank was lost, or fell silent, before it had written its share: there is no commit, and nothing is wrong with
    the storage."""


class _Word(BaseModel):
    """What a rank says when it is through."""

    part: Part | None = None
    error: str = ""
    is_of_storage: bool = False
    """Whether the storage is to blame for the error."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save, as a rank takes part in it. All but `rank` and what follows it is the same on every rank."""

    step: int
    """Steps that the state has behind it."""
    attempt: str
    """32 hexadecimal digits that no other save has."""
    world_size: int
    rank: int
    mailbox: Mailbox | None
    """None where one rank is alone."""
    record: dict[str, Any]
    """Facts to keep in the manifest; JSON values."""
    fence: Callable[[], None]
    """For rank 0: raises if this save may not be committed any more."""
    on_end: Callable[[Commit | Exception], None]
    """For rank 0: told in the thread that saves what came of it."""
    on_reject: Callable[[str, str], object] = lambda key, reason: None
    """For rank 0: told in that thread of the key of a bad commit that was in the way, and what is wrong with it."""
    is_current: Callable[[], bool] = lambda: True
    """For rank 0: whether the generation in which it began goes on."""


class Saver:
    """One worker's part in the saves of a run, one after the other.

    Args:
        storage: a folder for commits alone.
        store: the commits in it.
        of_rank_0: components of the state that rank 0 writes alone.

    Attributes:
        awaits_others: whether this rank is rank 0 in the save at hand, and waits for what others write.
    """

    def __init__(
        self,
        storage: Storage,
        store: CheckpointStore,
        *,
        of_rank_0: frozenset[str] = frozenset(),
    ) -> None:
        self._storage, self._store = storage, store
        self._writer = StateWriter(of_rank_0=of_rank_0)
        self._behind = BackgroundThread("save")
        self._broke = threading.Event()
        self._no_room: HostMemoryError | None = None
        """For what was to be copied last."""
        self._unheard: list[Save] = []
        """Failed saves, of which ranks may have said something since that nobody asks for."""
        self.awaits_others = False

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way, as far as this rank has to do with it."""
        return self._behind.is_busy

    def warm_up(self, state: dict[str, Any]) -> None:
        """Refuses now what `begin` would refuse, and has what it needs in memory, and planned as far as that depends
        neither on the rank nor on the number of ranks."""
        self._writer.prepare(state)

    def begin(self, state: dict[str, Any], save: Save) -> None:
        """Copies this rank's share; the rest happens in a thread. Every rank calls it, at the same step. It waits for
        the save before. Where there is no memory for the copy the save fails, and training can go on.

        Raises:
            CheckpointError: the state holds something that cannot be kept.
        """
        self.wait()
        # It was perhaps given up, and a thread of it still hangs in a write of what is replaced here. That does no
        # harm, as nothing of that attempt is ever committed; memory of its own for every such save might run out.
        begin, self._no_room = time.monotonic(), None
        try:
            with _uncollected():
                self._writer.stage(state, rank=save.rank, world_size=save.world_size, seed=save.attempt)
        except HostMemoryError as error:
            self._no_room = error.with_traceback(None)  # which would keep the state
        copying_s = time.monotonic() - begin
        self._broke.clear()
        self._behind.do(lambda: self._run(save, copying_s))

    def wait(self, within_s: float | None = None) -> bool:
        """Until this rank is through with the save at hand. Returns whether it is."""
        return self._behind.wait(within_s)

    def generation_broke(self) -> None:
        """A rank of the generation in which the save at hand began is lost, or presumed so."""
        self._broke.set()

    def _run(self, save: Save, copying_s: float) -> None:
        if save.world_size > 1:
            time.sleep(min(MOST_LET_BE_S, LET_BE * copying_s))
        threading.current_thread().name = f"save-{save.step}"
        storage = WatchedStorage(self._storage)
        if save.rank == 0:
            self._commit(save, storage)
            return
        try:
            word = _Word(part=self._write(save, storage))
        except Exception as error:
            word = _Word(error=format_exception(error), is_of_storage=is_of_storage(error))
        try:
            _tell(save, word)
        except Exception as error:
            _log.warning("what this rank wrote of step %d cannot be told: %s", save.step, format_exception(error))
            # Or rank 0 would take this one for lost. If that cannot be told either, it is.
            with suppress(Exception):
                _tell(save, _Word(error=f"what it wrote cannot be told: {format_exception(error)}"[:ERROR_CHARACTERS]))

    def _write(self, save: Save, storage: WatchedStorage) -> Part:
        """Writes this rank's share, and says meanwhile that it is at it."""
        if self._no_room is not None:
            raise self._no_room
        prefix = attempt_prefix(save.step, save.attempt)
        if save.rank == 0:
            return storage.run_watched(lambda: self._writer.write(storage, prefix))
        done = threading.Event()
        beating = threading.Thread(target=_beat, args=[save, done], name="save-beat", daemon=True)
        beating.start()
        try:
            return storage.run_watched(lambda: self._writer.write(storage, prefix))
        finally:
            done.set()
            beating.join()

    def _commit(self, save: Save, storage: WatchedStorage) -> None:
        """Rank 0's part."""
        store, tell = self._store.through(storage, save.on_reject), _First(save.on_end)
        parts, failed = self._parts_of_all(save, storage)
        if failed is not None:
            with suppress(StorageError):
                storage.run_watched(lambda: store.discard(attempt_prefix(save.step, save.attempt)))
            tell(failed)
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
                    on_commit=tell,
                    is_current=save.is_current,
                )
            )
        except Exception as error:  # nothing is discarded here: the manifest may be there, and only its answer lost
            if not tell(error):
                _log.warning("what is not kept is left until the next commit: %s", format_exception(error))

    def _parts_of_all(self, save: Save, storage: WatchedStorage) -> tuple[list[Part], Exception | None]:
        """What the ranks have written, and the first error of one that could not. The others are waited for then, too,
        up to the first that is lost: what they wrote once the attempt is discarded would stay, on a disk that may be
        full. It takes as long as if none had failed."""
        parts: list[Part] = []
        failed: Exception | None = None
        try:
            parts.append(self._write(save, storage))
        except Exception as error:
            failed = error.with_traceback(None)
        self.awaits_others = True
        try:
            for rank in range(1, save.world_size):
                try:
                    parts.append(self._part_of(rank, save))
                except (CheckpointError, StorageError) as error:
                    failed = failed or error.with_traceback(None)
        except Exception as error:
            self._unheard.append(save)
            failed = failed or error.with_traceback(None)
        else:
            self._clear_up(save)
        finally:
            self.awaits_others = False
        return parts, failed

    def _clear_up(self, save: Save) -> None:
        """What ranks said of saves that were given up before: they are through with all of them."""
        unheard, self._unheard = self._unheard, []
        with suppress(Exception):  # what is left takes little room, and goes with the generation
            for each in unheard:
                if each.mailbox is save.mailbox:
                    for rank in range(1, each.world_size):
                        _take(each, rank)

    def _part_of(self, rank: int, save: Save) -> Part:
        """What another rank has written, once it has. Raises what keeps it from that."""
        mailbox, key = save.mailbox, _place(save, rank)
        assert mailbox is not None
        last, heard_at = None, time.monotonic()
        while mailbox.get(key) is None:
            if (beat := mailbox.get(f"{key}/beat")) != last:
                last, heard_at = beat, time.monotonic()
            is_lost = self._broke.is_set()
            silence_s = SILENCE_OF_THE_LOST_S if is_lost else SILENCE_S
            if time.monotonic() - heard_at > silence_s:
                what = "was lost" if is_lost else f"fell silent for {silence_s:g} s"
                raise RankFailedError(f"rank {rank} {what} before it had written its share of step {save.step}")
            time.sleep(POLL_S)
        letters = _take(save, rank)
        if None in letters:  # the store was replaced by an empty one meanwhile
            raise RankFailedError(f"what rank {rank} said of its share of step {save.step} was lost")
        word = _Word.model_validate_json("".join(filter(None, letters)))
        if word.part is None:
            kind = StorageError if word.is_of_storage else CheckpointError
            raise kind(f"rank {rank} could not write its share of step {save.step}: {word.error}")
        return word.part


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is looked for meanwhile: in a process with many objects that takes longer than to stage a state of ten
    thousand tensors, which makes so many that it would be due."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _First:
    """Tells the first outcome of a save alone: what was given up may come to an end after all."""

    def __init__(self, tell: Callable[[Commit | Exception], None]) -> None:
        self._tell, self._told = tell, threading.Lock()

    def __call__(self, outcome: Commit | Exception) -> bool:
        """Whether it was the first."""
        if not self._told.acquire(blocking=False):
            return False
        self._tell(outcome)
        return True


def is_of_storage(error: Exception) -> bool:
    """Whether a save failed for want of the storage, rather than for what was to be saved."""
    return isinstance(error, StorageError) and not isinstance(error, CheckpointError)


def _tell(save: Save, word: _Word) -> None:
    """In as many letters as it takes. The last one, at the rank's place, says how many came before it."""
    assert save.mailbox is not None
    place, text = _place(save, save.rank), word.model_dump_json()
    *before, last = [text[at : at + LETTER_CHARACTERS] for at in range(0, len(text), LETTER_CHARACTERS)]
    for number, letter in enumerate(before):
        save.mailbox.put(f"{place}/{number}", letter)
        save.mailbox.put(f"{place}/beat", f"letter {number}")
    save.mailbox.put(place, f"{len(before)} {last}")


def _take(save: Save, rank: int) -> list[str | None]:
    """What a rank has said of a save, out of the mailbox. None is what is not there."""
    mailbox, place = save.mailbox, _place(save, rank)
    assert mailbox is not None
    said = mailbox.get(place)
    count, _, last = ("0", "", None) if said is None else said.partition(" ")
    before = [f"{place}/{number}" for number in range(int(count))]
    letters = [*map(mailbox.get, before), last]
    for each in (place, f"{place}/beat", *before):
        mailbox.remove(each)
    return letters


def _beat(save: Save, done: threading.Event) -> None:
    assert save.mailbox is not None
    count = 0
    try:
        while not done.is_set():
            count += 1
            save.mailbox.put(f"{_place(save, save.rank)}/beat", str(count))
            done.wait(BEAT_S)
    except Exception as error:
        _log.warning("that this rank writes step %d cannot be told: %s", save.step, format_exception(error))


def _place(save: Save, rank: int) -> str:
    return f"{save.attempt}/{rank}"
