"""Two generations save at the same time. The older one, a zombie, has ended and has not detected it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from elastic_ddp.checkpoint import Commit
from elastic_ddp.errors import PeerFailedError
from elastic_ddp.storage.folder import Entry
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.restore import restore
from tests.ranks import single_rank_group
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import keys_of, make_state, save, step_of
from tests.unit.checkpoint.test_saving_faults import CHECK_EVERY
from tests.unit.faulty import EVERY, WHEN, FaultyStorage, new_folder, ranks_of_many_blocks

pytestmark = pytest.mark.usefixtures("quick_ranks")

STEP = 4
"""The step that the newer generation saves, after commits 1 and 2."""
ZOMBIES = [
    pytest.param(STEP, id="same"),
    pytest.param(STEP - 1, id="older", marks=pytest.mark.chaos),
    pytest.param(STEP + 2, id="later", marks=pytest.mark.chaos),
]
"""Steps that a zombie saves, relative to the newer generation's. The same step is in every test run."""
OTHER = 100
"""A zombie's state is that of so many steps later, so that it differs from the other state of the same step."""


class Zombie:
    """Two ranks of an ended generation, which save a step during a save of the newer generation.

    - `writes`: they begin to write.
    - `lists`: they have written everything, and list their objects.
    - `asks`: they have written everything, and call the fence.
    - `may commit`: the same, and have passed the fence before their generation ended.
    - `removes`: they committed in the newest generation, and begin to remove superseded commits.
    """

    def __init__(self, uri: str, step: int, kind: str) -> None:
        self.step, self.kind = step, kind
        self.outcome: Any = None
        self._ranks = ranks_of_many_blocks(lambda rank: HoldingStorage(uri, self), 2)
        self._held, self._resumed = threading.Event(), threading.Event()
        if kind != "writes":
            self._begin()
            assert self._held.wait(60)

    def resume(self) -> None:
        """Continues, and waits for the outcome."""
        self._resumed.set()
        if self.kind == "writes":
            self._begin()
        self.outcome = self._ranks.wait()

    def _begin(self) -> None:
        state = make_state(self.step + OTHER)
        self.attempt = self._ranks.begin(self.step, fence=self._fence, state=state)

    def hold(self) -> None:
        """Waits until `resume` is called."""
        self._held.set()
        assert self._resumed.wait(60)

    def _fence(self) -> None:
        if self.kind in ("asks", "may commit"):
            self.hold()
        if self.kind != "may commit" and self._resumed.is_set():
            raise PeerFailedError("generation 1 has ended")


class HoldingStorage(Storage):
    """Holds the listings or removals of a zombie until it is resumed."""

    def __init__(self, uri: str, zombie: Zombie) -> None:
        super().__init__(uri)
        self._zombie = zombie

    def listing(self, prefix: str = "") -> dict[str, Entry]:
        sizes = super().listing(prefix)
        if self._zombie.kind == "lists":
            self._zombie.hold()
        return sizes

    def delete(self, key: str) -> None:
        if self._zombie.kind == "removes":
            self._zombie.hold()
        super().delete(key)


def save_beside(zombie_step: int, kind: str, rank: int, when: str, at: int) -> tuple[Storage, Zombie, Any, bool]:
    """Runs a save of two ranks, and resumes a zombie before or after an operation of one of them.

    Returns the storage, the zombie, the outcome, and whether there is such an operation.
    """
    uri = new_folder()
    save(Storage(uri), 1, 2, keep=2)
    zombie = Zombie(uri, zombie_step, kind)
    faulty = FaultyStorage(uri, f"calls {when}", at, zombie.resume)
    ranks = ranks_of_many_blocks(lambda other: faulty if other == rank else FaultyStorage(uri, "", None), 2)
    ranks.begin(STEP)
    outcome = ranks.wait()
    reached = faulty.operations > at
    if zombie.outcome is None:
        zombie.resume()  # after the save; there is no moment after an operation that fails
    return Storage(uri), zombie, outcome, reached


def restored(storage: Storage) -> tuple[Commit, int]:
    """Returns the newest commit that verifies, and the step of its state."""
    newest = SingleRankStore(storage, keep=1).load_latest()
    assert newest is not None
    return newest[0], step_of(newest[1])


def check_next(storage: Storage, step: int) -> None:
    """Checks that the newer generation continues from this step, and that no leftovers remain."""
    ranks = ranks_of_many_blocks(lambda rank: storage, 2)
    newest: list[Any] = []
    for number in range(step + 1, step + 4):
        ranks.begin(number)
        newest.append(ranks.wait())
    assert restored(storage) == (newest[-1], step + 3)
    assert storage.list() == sorted(key for commit in newest[-2:] for key in keys_of(commit))


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("zombie_step", ZOMBIES)
@pytest.mark.parametrize("kind", ["writes", "lists", "asks"])
def test_an_ended_generation_never_commits(kind: str, zombie_step: int, when: str, every: int) -> None:
    for rank in (0, 1):
        at, reached = 0, True
        while reached:
            storage, zombie, outcome, reached = save_beside(zombie_step, kind, rank, when, at)
            what = f"{when} operation {at} of rank {rank}: {outcome!r:.200}"
            assert isinstance(zombie.outcome, PeerFailedError), what
            assert isinstance(outcome, Commit) and restored(storage) == (outcome, STEP), what
            assert storage.list() == [
                *storage.list("commits"), *storage.list("step=2"), *storage.list(outcome.prefix)
            ] and storage.list("commits") == ["commits/2.json", outcome.key], what  # fmt: skip
            at += every
        assert at > (8 if rank == 0 else 2)
    check_next(storage, STEP)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("zombie_step", ZOMBIES)
@pytest.mark.parametrize("kind", ["may commit", "removes"])
def test_a_saver_suspended_after_the_fence_does_no_harm(kind: str, zombie_step: int, when: str, every: int) -> None:
    """Its commit is complete or absent, newer commits stay, and it removes only commits older than its own."""
    for rank in (0, 1):
        at, reached = 0, True
        while reached:
            storage, zombie, outcome, reached = save_beside(zombie_step, kind, rank, when, at)
            what = f"{when} operation {at} of rank {rank}: {outcome!r:.200}; {zombie.outcome!r:.200}"
            commit, state = restored(storage)
            assert (commit.step, state) in ((STEP, STEP), (zombie_step, zombie_step + OTHER)), what
            if kind == "removes":
                assert isinstance(zombie.outcome, Commit) and isinstance(outcome, Commit), what
                assert state == (zombie_step + OTHER if zombie_step >= STEP else STEP), what
            elif isinstance(outcome, Commit):
                assert commit.step >= STEP and (commit.step > STEP or commit == outcome), what
            if rank == 0 and at % CHECK_EVERY == 0:
                check_next(storage, commit.step)
            at += every
        assert at > (4 if rank == 0 else 0)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("zombie_step", ZOMBIES)
@pytest.mark.parametrize("kind", ["writes", "lists", "asks", "may commit", "removes"])
def test_a_zombie_does_no_harm_after_a_failure_in_the_newer_generation(
    kind: str, zombie_step: int, dies: int, every: int
) -> None:
    """One of the two has committed the restored state."""
    at, reached = 0, True
    while reached:
        uri = new_folder()
        save(Storage(uri), 1, 2, keep=2)
        zombie = Zombie(uri, zombie_step, kind)
        faulty = FaultyStorage(uri, "dies before", at)
        ranks = ranks_of_many_blocks(
            lambda rank, uri=uri, faulty=faulty: faulty if rank == dies else FaultyStorage(uri, "", None),  # type: ignore[misc]
            2,
        )
        ranks.begin(STEP)
        while any(saver.is_busy for saver in ranks.savers):
            if faulty.dead:
                for saver in ranks.savers:
                    saver.generation_broke()  # as the other would detect
            ranks.savers[0].wait(within_s=0.005)
        reached = faulty.dead
        zombie.resume()
        what = f"operation {at}: {ranks.ended!r:.200}; {zombie.outcome!r:.200}"
        commit, state = restored(Storage(uri))
        own, others = zombie_step, kind in ("may commit", "removes")
        allowed = {(2, 2), (STEP, STEP), *([(own, own + OTHER)] if others else [])}
        assert (commit.step, state) in allowed, what
        if ranks.ended and isinstance(ranks.ended[0], Commit):
            assert commit.step >= STEP, what
        if not others:
            assert isinstance(zombie.outcome, PeerFailedError), what
        if at % CHECK_EVERY == 0:
            check_next(Storage(uri), commit.step)
        at += every
    assert at > (6 if dies == 0 else 2)


# Both generations find a commit bad, set it aside and make it again.


def make_again(uri: str) -> Commit:
    """Makes a bad commit again, as the newer generation does."""
    return SingleRankStore(Storage(uri), keep=9).save(make_state(STEP), step=STEP, record={"by": "newer"})


class SuspendedStore(SingleRankStore):
    """A store of an ended generation, suspended after it has found a commit bad, or after the fence."""

    def __init__(self, uri: str, when: str) -> None:
        super().__init__(Storage(uri), keep=9)
        self.uri, self.when, self.made = uri, when, list[Commit]()

    def reject(self, *arguments: Any) -> None:
        super().reject(*arguments)
        if self.when == "rejected" and not self.made:
            self.made.append(make_again(self.uri))

    def fence(self) -> None:
        if self.made:
            raise PeerFailedError("generation 1 has ended")
        if self.when == "fenced" and Storage(self.uri).list("set-aside"):
            self.made.append(make_again(self.uri))


@pytest.mark.parametrize("what", ["an object", "the manifest"])
@pytest.mark.parametrize("when", ["rejected", "fenced"])
@pytest.mark.parametrize("does", ["saves", "restores"])
def test_a_suspended_process_keeps_the_replacement_of_a_bad_commit(does: str, when: str, what: str) -> None:
    uri = new_folder()
    save(Storage(uri), 1, keep=9)
    [bad] = save(Storage(uri), STEP, keep=9)
    if what == "an object":
        Storage(uri).delete(bad.objects[0].key)
    else:
        Storage(uri).write(bad.key, b"torn")
    zombie = SuspendedStore(uri, when)
    if does == "saves":
        with pytest.raises(PeerFailedError):
            zombie.save(make_state(STEP + OTHER), step=STEP, record={}, fence=zombie.fence)
    else:
        newest = restore(zombie, Storage(uri), single_rank_group(), fence=zombie.fence)
        assert newest is not None and newest[0].step == 1
    [made] = zombie.made
    assert restored(Storage(uri)) == (made, STEP)
    [aside] = Storage(uri).list("set-aside")
    assert made.attempt not in aside


@pytest.mark.parametrize("does", ["saves", "restores"])
def test_an_ended_generation_sets_nothing_aside(does: str) -> None:
    uri = new_folder()
    save(Storage(uri), 1, keep=9)
    [bad] = save(Storage(uri), STEP, keep=9)
    Storage(uri).delete(bad.objects[0].key)

    def fence() -> None:
        raise PeerFailedError("generation 1 has ended")

    store = SingleRankStore(Storage(uri), keep=9)
    with pytest.raises(PeerFailedError):
        if does == "saves":
            store.save(make_state(STEP), step=STEP, record={}, fence=fence)
        else:
            restore(store, Storage(uri), single_rank_group(), fence=fence)
    assert Storage(uri).list("commits") == ["commits/1.json", bad.key]
