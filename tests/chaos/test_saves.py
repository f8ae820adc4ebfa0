"""Workers fail and leave, and runs stop, while a save is written: no commit is torn, and no step is lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.checkpoint import CheckpointStore, Commit
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import COMMITS
from tests.chaos.faults import Fault
from tests.chaos.runs import STEPS, Trial, until

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.usefixtures("one_node")]

WRITE_S = 0.3
EVERY = 4


def check_commits(run: Trial) -> None:
    """Checks that all commits verify, and that the ledger has no others. It may miss one whose rank 0 failed."""
    store = CheckpointStore(Storage(run.config["storage"]).at(run.name).at(COMMITS), keep=1)
    commits = store.all_commits()
    for _, commit in commits:
        assert isinstance(commit, Commit)
        store.verify(commit)
    recorded = {event.step for event in run.events("commit_succeeded")}
    assert recorded <= {step for step, _ in commits} and commits[0][0] == STEPS


def trial(folder: Path, name: str, faults: list[Fault]) -> Trial:
    settings = {"checkpoint": {"every_steps": EVERY, "keep": 100}, "drain_deadline_s": 6.0}
    return Trial(folder, name, faults, settings, write_s=WRITE_S)


PLACES = [(0, 5), (1, 13), (2, 21), (0, 29)]
FAULTS = {how: [Fault(rank, step, "saving", how) for rank, step in PLACES] for how in ("SIGKILL", "SIGTERM", "SIGSEGV")}
FAULTS["two"] = [Fault(1, 9, "saving", "SIGKILL", along=(2,))]


@pytest.mark.parametrize("how", FAULTS)
def test_workers_that_go_during_a_save_damage_no_commit(folder: Path, calm: Mapping[str, Any], how: str) -> None:
    run = trial(folder, f"saving-{how}", FAULTS[how])
    run.check(run.fit().summary, calm)
    check_commits(run)


def test_a_save_that_takes_longer_than_the_hang_timeout_is_no_hang(folder: Path, calm: Mapping[str, Any]) -> None:
    settings = {"checkpoint": {"every_steps": 2 * STEPS}, "hang_timeout_s": 5.0, "heartbeat_timeout_s": 5.0}
    run = Trial(folder, "saving-slowly", settings=settings, write_s=8.0)
    run.check(run.fit().summary, calm)
    assert not run.events("hang_detected")
    assert [event.seconds > 8.0 for event in run.events("commit_succeeded")] == [True]


def test_a_run_that_is_stopped_during_a_save_resumes_where_it_stopped(folder: Path, calm: Mapping[str, Any]) -> None:
    run = trial(folder, "saving-stopped", [])
    with run.live() as (handle, result):
        until(lambda: bool(run.events("commit_succeeded")), result)
        handle.stop()
        stopped = result.result()
    assert stopped.status == "stopped" and 0 < stopped.steps < STEPS
    assert run.events("commit_succeeded")[-1].step == stopped.steps
    run.check(run.fit().summary, calm)
    check_commits(run)
