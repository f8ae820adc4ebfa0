"""Each kind of fault at each place of a worker's loop, on rank 0 and another rank: the weights are the same bits."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.errors import TrainFunctionError
from elastic_ddp.report.history import History, read_history
from elastic_ddp.report.page import charts
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger
from tests.chaos.faults import Fault, drive
from tests.chaos.runs import STEPS, Trial
from tests.integration import jobs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_node")]

PLACES = (
    "data",
    "forward",
    "backward",
    "reduction",
    "optimizer",
    "commit",
    "rendezvous",
    "hand-over",
    "first step",
)
WITHOUT_USER_CODE = ("rendezvous",)
"""Places where no user code runs that could hang or raise. A step's last backward is in the reduction."""
COMMIT_EVERY = 10
TOUR_STEPS = COMMIT_EVERY * (len(PLACES) + 1)


def faults_at(place: str, rank: int, how: str, *, step: int = 27) -> list[Fault]:
    """Returns the faults by which one of a kind happens to a rank in a place."""
    first = Fault(2, step, "reduction", "SIGKILL")  # leads to another generation
    if place in ("rendezvous", "hand-over"):
        return [first, Fault(rank, step, place, how)]
    if place == "first step":
        return [first, Fault(rank, step, "forward", how, later=True)]
    return [Fault(rank, step, place, how)]


def settings_for(how: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"hang_timeout_s": 60.0, "drain_deadline_s": 6.0}
    if how in ("SIGSTOP", "gil", "rendezvous"):
        settings["heartbeat_timeout_s"] = 3.0
    if how == "hang":
        settings |= {"hang_timeout_s": 8.0, "heartbeat_timeout_s": 8.0}
    return settings


def trial(folder: Path, how: str, place: str, rank: int) -> Trial:
    """Returns a run with one fault."""
    return Trial(folder, f"{how}-{place}-{rank}".replace(" ", "-"), faults_at(place, rank, how), settings_for(how))


def tour(folder: Path, how: str, rank: int, *, skip: tuple[str, ...] = ()) -> Trial:
    """Returns a run with the fault in one place after another, each after the replacement of the previous victim."""
    places = [place for place in PLACES if place not in skip]
    steps = range(7, TOUR_STEPS, COMMIT_EVERY)
    at_places = (faults_at(place, rank, how, step=step) for place, step in zip(places, steps, strict=False))
    faults = list(itertools.chain.from_iterable(at_places))
    return Trial(folder, f"{how}-{rank}", faults, {**settings_for(how), "steps": TOUR_STEPS})


@pytest.fixture(scope="module")
def calm_tour(one_node: None, folder: Path) -> Mapping[str, Any]:
    return Trial(folder, "calm-tour", settings={"max_workers": 1, "steps": TOUR_STEPS}).fit().summary


def test_a_sample_of_faults_in_one_run_makes_no_difference(folder: Path, calm: Mapping[str, Any]) -> None:
    """The part that `make test` runs."""
    faults = [
        Fault(0, 10, "reduction", "rendezvous"),
        Fault(0, 22, "forward", "SIGSTOP"),
        Fault(1, 22, "hand-over", "SIGKILL"),
        Fault(0, 34, "optimizer", "SIGSEGV", along=(2,)),
        Fault(1, 40, "data", "SIGTERM"),
    ]
    run = Trial(folder, "sample", faults, {"heartbeat_timeout_s": 3.0, "drain_deadline_s": 6.0})
    summary = run.fit().summary
    run.check(summary, calm)
    check_report(read_history(read_ledger(Storage(folder / "runs" / run.name))), summary)


def check_report(history: History, summary: Mapping[str, Any]) -> None:
    """Checks that the report of the run says what happened."""
    marked = {kind: [mark for mark in history.marks if mark.kind == kind] for kind in ("failed", "drained", "joined")}
    assert summary["workers_failed"] >= max(4, len(marked["failed"])) and len(marked["failed"]) >= 3
    assert len(marked["drained"]) == 1 and len(marked["joined"]) >= 2
    times = [mark.at for mark in history.marks]
    assert times == sorted(times) and times[-1] <= history.seconds
    assert max(size for _, size in history.sizes) == 3 and history.points[-1].event.step == STEPS
    assert {"What happened", "Stalls", "Commits"} <= {chart.title for chart in charts([history])}


@pytest.mark.chaos
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "SIGSTOP", "gil", "SIGTERM", "rendezvous"])
def test_a_fault_makes_no_difference_at_any_place(
    folder: Path, calm_tour: Mapping[str, Any], how: str, rank: int
) -> None:
    run = tour(folder, how, rank)
    run.check(run.fit().summary, calm_tour)


@pytest.mark.chaos
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", [place for place in PLACES if place not in WITHOUT_USER_CODE])
def test_a_hanging_worker_makes_no_difference(folder: Path, calm: Mapping[str, Any], place: str, rank: int) -> None:
    """One run for each place: a run that waits for a replacement does not count as hanging."""
    run = trial(folder, "hang", place, rank)
    run.check(run.fit().summary, calm)


@pytest.mark.chaos
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_user_code_ends_the_run_and_the_same_command_resumes_it(
    folder: Path, calm_tour: Mapping[str, Any], rank: int
) -> None:
    run = tour(folder, "raise", rank, skip=WITHOUT_USER_CODE)
    errors = [fault for fault in run.faults if fault.how == "raise"]
    for number in range(len(errors)):
        with pytest.raises(TrainFunctionError, match="a bug in the training function"):
            run.fit()
        assert len(run.events("run_failed")) == number + 1
    run.check(run.fit().summary, calm_tour)


@pytest.mark.chaos
@pytest.mark.timeout(900)  # ten drivers, one after another, and each starts workers
@pytest.mark.parametrize("rank", [0, 1])
def test_the_same_command_resumes_a_run_whose_driver_was_killed(
    folder: Path, calm_tour: Mapping[str, Any], rank: int
) -> None:
    run = tour(folder, "driver", rank)
    for _ in PLACES:
        killed = drive(run.command)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    last = drive(run.command)
    assert last.returncode == 0, last.stderr
    summary = jobs.summary(folder, run.name)
    assert summary["sessions"] == len(PLACES) + 1
    run.check(summary, calm_tour)
