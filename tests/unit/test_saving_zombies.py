"""Two generations that save at the same time: the older one is over, and does not know it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from elastic_ddp.checkpoint import Commit
from elastic_ddp.errors import PeerFailedError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.restore import restore
from tests.ranks import single_rank_group
from tests.single_rank_store import SingleRankStore
from tests.unit.faulty import FaultyStorage, new_folder, ranks_of_many_blocks
from tests.unit.test_checkpoint import keys_of, make_state, save, step_of

pytestmark = pytest.mark.usefixtures("quick_ranks")

STEP = 4
"""That the newer generation saves, over commits 1 and 2."""
ZOMBIES = [
    pytest.param(STEP, id="same"),
    pytest.param(STEP - 1, id="older", marks=pytest.mark.chaos),
    pytest.param(STEP + 2, id="later", marks=pytest.mark.chaos),
]
"""Steps that a zombie saves, named by how they are to the newer generation's. What nobody can tell apart by its name is
in every test run."""
OTHER = 100
"""A zombie's state is that of so many steps later: it can be told from another one of the same step."""


class Zombie:
    """Two ranks of a generation that is over, which save a step while those of a newer one are at theirs.

    - `writes`: they begin now.
    - `lists`: they have written everything, and now look whether it is there.
    - `asks`: they have written everything, and now ask whether they may commit.
    - `may commit`: the same, and they were told so when it was still true.
    - `removes`: they have committed while theirs was the newest generation, and begin to remove what is not kept.
    """

    def __init__(self, uri: str, step: int, kind: str) -> None:
        self.step, self.kind = step, kind
        self.came: Any = None
        self._ranks = ranks_of_many_blocks(lambda rank: SlowToList(uri, self), 2)
        self._asks, self._go = threading.Event(), threading.Event()
        if kind != "writes":
            self._begin()
            assert self._asks.wait(60)

    def go_on(self) -> None:
        """To its end."""
        self._go.set()
        if self.kind == "writes":
            self._begin()
        self.came = self._ranks.wait()

    def _begin(self) -> None:
        state = make_state(self.step + OTHER)
        self.attempt = self._ranks.begin(self.step, fence=self._fence, state=state)

    def hold(self) -> None:
        """Until it is to go on."""
        self._asks.set()
        assert self._go.wait(60)

    def _fence(self) -> None:
        if self.kind in ("asks", "may commit"):
            self.hold()
        if self.kind != "may commit" and self._go.is_set():
            raise PeerFailedError("generation 1 is over")


class SlowToList(Storage):
    """What a zombie asked is there is told when it is to go on."""

    def __init__(self, uri: str, zombie: Zombie) -> None:
        super().__init__(uri)
        self._zombie = zombie

    def sizes(self, prefix: str = "") -> dict[str, int]:
        found = super().sizes(prefix)
        if self._zombie.kind == "lists":
            self._zombie.hold()
        return found

    def delete(self, key: str) -> None:
        if self._zombie.kind == "removes":
            self._zombie.hold()
        super().delete(key)


def save_beside(zombie_step: int, kind: str, rank: int, when: str, at: int) -> tuple[Storage, Zombie, Any, bool]:
    """A save of two ranks, in which a zombie goes on before or after an operation of one of them: where, who, what came
    of it, and whether there is such an operation."""
    uri = new_folder()
    save(Storage(uri), 1, 2, keep=2)
    zombie = Zombie(uri, zombie_step, kind)
    faulty = FaultyStorage(uri, f"calls {when}", at, zombie.go_on)
    ranks = ranks_of_many_blocks(lambda each: faulty if each == rank else FaultyStorage(uri, "", None), 2)
    ranks.begin(STEP)
    came = ranks.wait()
    met = faulty.operations > at
    if zombie.came is None:
        zombie.go_on()  # after all of it; an operation that fails has no end to go on at
    return Storage(uri), zombie, came, met


def restored(storage: Storage) -> tuple[Commit, int]:
    """The newest commit that verifies, and the step of its state, which is no mixture."""
    found = SingleRankStore(storage, keep=1).load_latest()
    assert found is not None
    return found[0], step_of(found[1])


def check_next(storage: Storage, step: int) -> None:
    """The newer generation goes on from this step, and nothing is left of what happened once that is old."""
    ranks = ranks_of_many_blocks(lambda rank: storage, 2)
    newest: list[Any] = []
    for number in range(step + 1, step + 4):
        ranks.begin(number)
        newest.append(ranks.wait())
    assert restored(storage) == (newest[-1], step + 3)
    assert storage.list() == sorted(key for commit in newest[-2:] for key in keys_of(commit))


@pytest.mark.parametrize("zombie_step", ZOMBIES)
@pytest.mark.parametrize("kind", ["writes", "lists", "asks"])
def test_a_generation_that_is_over_commits_nothing_whenever_it_tries(kind: str, zombie_step: int) -> None:
    for rank in (0, 1):
        for when in ("before", "after"):
            at, met = 0, True
            while met:
                storage, zombie, came, met = save_beside(zombie_step, kind, rank, when, at)
                what = f"{when} operation {at} of rank {rank}: {came!r:.200}"
                assert isinstance(zombie.came, PeerFailedError), what
                assert isinstance(came, Commit) and restored(storage) == (came, STEP), what
                assert storage.list() == [
                    *storage.list("commits"), *storage.list("step=2"), *storage.list(came.prefix)
                ] and storage.list("commits") == ["commits/2.json", came.key], what  # fmt: skip
                at += 1
            assert at > (8 if rank == 0 else 2)
    check_next(storage, STEP)


@pytest.mark.parametrize("zombie_step", ZOMBIES)
def test_one_that_was_suspended_in_the_moment_of_its_commit_does_no_harm(zombie_step: int) -> None:
    """That moment is the one thing no fence guards. Its state is one of the same run, and it is there whole or not at
    all; what the newer generation committed stays."""
    for rank in (0, 1):
        for when in ("before", "after"):
            at, met = 0, True
            while met:
                storage, zombie, came, met = save_beside(zombie_step, "may commit", rank, when, at)
                what = f"{when} operation {at} of rank {rank}: {came!r:.200}; {zombie.came!r:.200}"
                commit, state = restored(storage)
                assert (commit.step, state) in ((STEP, STEP), (zombie_step, zombie_step + OTHER)), what
                if isinstance(came, Commit):
                    assert commit.step >= STEP and (commit.step > STEP or commit == came), what
                if (rank, when) == (0, "before"):
                    check_next(storage, commit.step)
                at += 1
            assert at > (8 if rank == 0 else 2)


@pytest.mark.parametrize("zombie_step", ZOMBIES)
def test_one_that_was_suspended_in_the_moment_of_its_removals_does_no_harm(zombie_step: int) -> None:
    """It was asked whether its generation goes on when that was still true. What it removes is older than its own."""
    for rank in (0, 1):
        for when in ("before", "after"):
            at, met = 0, True
            while met:
                storage, zombie, came, met = save_beside(zombie_step, "removes", rank, when, at)
                what = f"{when} operation {at} of rank {rank}: {came!r:.200}; {zombie.came!r:.200}"
                assert isinstance(zombie.came, Commit) and isinstance(came, Commit), what
                commit, state = restored(storage)
                newest = max(STEP, zombie_step)
                assert commit.step == newest, what
                assert state == (zombie_step + OTHER if zombie_step >= STEP else STEP), what
                if (rank, when) == (0, "before"):
                    check_next(storage, commit.step)
                at += 1
            assert at > (4 if rank == 0 else 0)


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("zombie_step", ZOMBIES)
@pytest.mark.parametrize("kind", ["writes", "lists", "asks", "may commit", "removes"])
def test_a_zombie_goes_on_when_a_rank_of_the_newer_generation_has_died(kind: str, zombie_step: int, dies: int) -> None:
    """At every operation. What is restored was committed, by one of the two."""
    at, met = 0, True
    while met:
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
                    saver.generation_broke()  # as the other finds out at once
            ranks.savers[0].wait(within_s=0.005)
        met = faulty.dead
        zombie.go_on()
        what = f"operation {at}: {ranks.ended!r:.200}; {zombie.came!r:.200}"
        commit, state = restored(Storage(uri))
        own, others = zombie_step, kind in ("may commit", "removes")
        allowed = {(2, 2), (STEP, STEP), *([(own, own + OTHER)] if others else [])}
        assert (commit.step, state) in allowed, what
        if ranks.ended and isinstance(ranks.ended[0], Commit):
            assert commit.step >= STEP, what
        if not others:
            assert isinstance(zombie.came, PeerFailedError), what
        if at % 3 == 0:
            check_next(Storage(uri), commit.step)
        at += 1
    assert at > (6 if dies == 0 else 2)


# A commit that is bad: both find that, and set it aside to make it again.


def make_again(uri: str) -> Commit:
    """What the newer generation does with a bad commit."""
    return SingleRankStore(Storage(uri), keep=9).save(make_state(STEP), step=STEP, record={"by": "newer"})


class StoodStill(SingleRankStore):
    """Of a generation that is over, which stood still when it had found a commit bad, or when it had been let."""

    def __init__(self, uri: str, when: str) -> None:
        super().__init__(Storage(uri), keep=9)
        self.uri, self.when, self.made = uri, when, list[Commit]()

    def reject(self, *found: Any) -> None:
        super().reject(*found)
        if self.when == "judged" and not self.made:
            self.made.append(make_again(self.uri))

    def fence(self) -> None:
        if self.made:
            raise PeerFailedError("generation 1 is over")
        if self.when == "let" and Storage(self.uri).list("set-aside"):
            self.made.append(make_again(self.uri))


@pytest.mark.parametrize("what", ["an object", "the manifest"])
@pytest.mark.parametrize("when", ["judged", "let"])
@pytest.mark.parametrize("does", ["saves", "restores"])
def test_one_that_stood_still_leaves_what_was_made_in_place_of_a_bad_commit(does: str, when: str, what: str) -> None:
    uri = new_folder()
    save(Storage(uri), 1, keep=9)
    [bad] = save(Storage(uri), STEP, keep=9)
    if what == "an object":
        Storage(uri).delete(bad.objects[0].key)
    else:
        Storage(uri).write(bad.key, b"torn")
    zombie = StoodStill(uri, when)
    if does == "saves":
        with pytest.raises(PeerFailedError):
            zombie.save(make_state(STEP + OTHER), step=STEP, record={}, fence=zombie.fence)
    else:
        found = restore(zombie, Storage(uri), single_rank_group(), fence=zombie.fence)
        assert found is not None and found[0].step == 1
    [made] = zombie.made
    assert restored(Storage(uri)) == (made, STEP)
    [aside] = Storage(uri).list("set-aside")
    assert made.attempt not in aside


@pytest.mark.parametrize("does", ["saves", "restores"])
def test_one_that_is_over_sets_nothing_aside(does: str) -> None:
    uri = new_folder()
    save(Storage(uri), 1, keep=9)
    [bad] = save(Storage(uri), STEP, keep=9)
    Storage(uri).delete(bad.objects[0].key)

    def fence() -> None:
        raise PeerFailedError("generation 1 is over")

    store = SingleRankStore(Storage(uri), keep=9)
    with pytest.raises(PeerFailedError):
        if does == "saves":
            store.save(make_state(STEP), step=STEP, record={}, fence=fence)
        else:
            restore(store, Storage(uri), single_rank_group(), fence=fence)
    assert Storage(uri).list("commits") == ["commits/1.json", bad.key]
