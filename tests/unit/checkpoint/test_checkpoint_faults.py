"""A fault is injected at each operation of a save, and a commit is restored afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from elastic_ddp.errors import StorageError
from elastic_ddp.storage.storage import Storage
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import keys_of, make_state, restored_step, save, step_of
from tests.unit.faulty import Died, FaultyStorage

FAULTS = ["error before", "error after", "dies before", "dies within", "lies"]


@pytest.mark.parametrize("fault", FAULTS)
def test_after_any_fault_in_a_save_a_complete_commit_is_restored(tmp_path: Path, fault: str) -> None:
    operations = 0
    while _survives(str(tmp_path / str(operations)), fault, operations):
        operations += 1
    assert operations > 10, "the number of operations of a save"


@pytest.mark.chaos
@pytest.mark.parametrize("fault", ["error after", "dies within"])
def test_after_any_fault_on_s3_a_complete_commit_is_restored(s3: str, fault: str) -> None:
    numbers = iter(range(0, 100, 3))
    while _survives(f"{s3}/{uuid.uuid4().hex}", fault, number := next(numbers)):
        pass
    assert number > 9


def _survives(uri: str, fault: str, at: int) -> bool:
    """Saves with a fault, and checks the restored commit. Returns False if the save has no such operation."""
    save(Storage(uri), 1, 2, keep=2)
    faulty = FaultyStorage(uri, fault, at)
    saved = False
    try:
        SingleRankStore(faulty, keep=2).save(make_state(3), step=3, record={"step": 3})
        saved = True
    except (StorageError, Died):
        pass
    restored = restored_step(Storage(uri))
    if saved and fault != "lies":
        assert restored == 3, f"{fault} at {at}: the save returned"
    assert restored in (2, 3), f"{fault} at {at}"

    # The run resumes, and after two more commits no leftovers exist.
    newest = save(Storage(uri), *range(restored + 1, 6), keep=2)[-2:]
    assert restored_step(Storage(uri)) == 5
    expected = sorted(key for commit in newest for key in keys_of(commit))
    aside = Storage(uri).list("set-aside")  # it stays, with its objects
    left = [key for key in Storage(uri).list() if not aside or not key.startswith(("set-aside/", "step=3/"))]
    assert left == expected, f"{fault} at {at}: something was left behind"
    assert not aside or fault in ("dies within", "lies")
    return faulty.operations > at


@pytest.mark.parametrize("fault", ["error after", "dies after"])
def test_replacing_a_bad_commit_may_be_interrupted_anywhere(tmp_path: Path, fault: str) -> None:
    at = 0
    while True:
        uri = str(tmp_path / f"{at}")
        save(Storage(uri), 1, keep=2)
        [bad] = save(Storage(uri), 2, keep=2)
        Storage(uri).delete(bad.objects[0].key)
        faulty = FaultyStorage(uri, fault, at)
        with suppress(StorageError, Died):
            SingleRankStore(faulty, keep=2).save(make_state(2), step=2, record={"step": 2})
        if faulty.operations <= at:
            break
        assert restored_step(Storage(uri)) in (1, 2)
        save(Storage(uri), 2, keep=2)
        assert restored_step(Storage(uri)) == 2
        at += 1
    assert at > 8


SAVER = """
import itertools, sys
sys.path[:0] = {path!r}
from elastic_ddp.storage.storage import Storage
from tests.unit.checkpoint.test_checkpoint import make_state
from tests.single_rank_store import SingleRankStore
store = SingleRankStore(Storage({uri!r}), keep=2)
for step in itertools.count({first}):
    store.save(make_state(step), step=step, record={{"step": step}})
    print(step, flush=True)
"""


def test_a_killed_saver_loses_no_reported_commit(tmp_path: Path) -> None:
    """A real SIGKILL at a random moment."""
    script = SAVER.format(path=sys.path, uri=str(tmp_path), first=1)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as saver:
        assert saver.stdout is not None
        announced = [int(saver.stdout.readline()) for _ in range(8)]
        os.kill(saver.pid, signal.SIGKILL)
        announced += [int(line) for line in saver.stdout.read().split()]
    restored = SingleRankStore(Storage(tmp_path), keep=2).load_latest()
    assert restored is not None and step_of(restored[1]) in (announced[-1], announced[-1] + 1)
