"""Every fault, everywhere in a worker's loop, in the first rank and in another: the run ends with the same bits."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.errors import TrainFunctionError
from tests.chaos.faults import Fault, drive
from tests.chaos.runs import Trial
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
NO_CODE_OF_THE_USER = ("rendezvous",)
"""Where nothing of the user's runs that could hang or raise. The last backward of a step is in the reduction."""
COMMIT_EVERY = 10
TOUR_STEPS = COMMIT_EVERY * (len(PLACES) + 1)


def faults_at(place: str, rank: int, how: str, *, step: int = 27) -> list[Fault]:
    """Faults by which one happens to a rank in a place."""
    loss = Fault(2, step, "reduction", "SIGKILL")  # what leads to another generation
    if place in ("rendezvous", "hand-over"):
        return [loss, Fault(rank, step, place, how)]
    if place == "first step":
        return [loss, Fault(rank, step, "forward", how, later=True)]
    return [Fault(rank, step, place, how)]


def settings_for(how: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"hang_timeout_s": 60.0, "drain_deadline_s": 6.0}
    if how in ("SIGSTOP", "gil", "rendezvous"):
        settings["heartbeat_timeout_s"] = 3.0
    if how == "hang":
        settings |= {"hang_timeout_s": 8.0, "heartbeat_timeout_s": 8.0}
    return settings


def trial(folder: Path, how: str, place: str, rank: int) -> Trial:
    """One fault."""
    return Trial(folder, f"{how}-{place}-{rank}".replace(" ", "-"), faults_at(place, rank, how), settings_for(how))


def tour(folder: Path, how: str, rank: int, *, but: tuple[str, ...] = ()) -> Trial:
    """The fault in one place after the other, each when those before it are mended."""
    places = [place for place in PLACES if place not in but]
    steps = range(7, TOUR_STEPS, COMMIT_EVERY)
    faults = [
        each for place, step in zip(places, steps, strict=False) for each in faults_at(place, rank, how, step=step)
    ]
    return Trial(folder, f"{how}-{rank}", faults, {**settings_for(how), "steps": TOUR_STEPS})


@pytest.fixture(scope="module")
def calm_tour(one_node: None, folder: Path) -> Mapping[str, Any]:
    return Trial(folder, "calm-tour", settings={"max_workers": 1, "steps": TOUR_STEPS}).fit().summary


def test_some_of_the_table_in_one_run(folder: Path, calm: Mapping[str, Any]) -> None:
    """What is not left to `make chaos`."""
    faults = [
        Fault(0, 10, "reduction", "rendezvous"),
        Fault(0, 17, "forward", "SIGSTOP"),
        *faults_at("hand-over", 1, "SIGKILL"),
        Fault(0, 34, "optimizer", "SIGSEGV", along=(2,)),
        Fault(1, 40, "data", "SIGTERM"),
    ]
    run = Trial(folder, "some-of-the-table", faults, {"heartbeat_timeout_s": 3.0, "drain_deadline_s": 6.0})
    run.check(run.fit().summary, calm)


@pytest.mark.chaos
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "SIGSTOP", "gil", "SIGTERM"])
def test_a_fault_makes_no_difference_wherever_it_comes(
    folder: Path, calm_tour: Mapping[str, Any], how: str, rank: int
) -> None:
    run = tour(folder, how, rank)
    run.check(run.fit().summary, calm_tour)


@pytest.mark.chaos
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rendezvous_that_dies_makes_no_difference_wherever_a_worker_is(
    folder: Path, calm_tour: Mapping[str, Any], rank: int
) -> None:
    run = tour(folder, "rendezvous", rank)
    run.check(run.fit().summary, calm_tour)


@pytest.mark.chaos
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", [each for each in PLACES if each not in NO_CODE_OF_THE_USER])
def test_a_worker_that_hangs_makes_no_difference(folder: Path, calm: Mapping[str, Any], place: str, rank: int) -> None:
    """A run each: while one waits for the replacement of the last victim, it does not hang."""
    run = trial(folder, "hang", place, rank)
    run.check(run.fit().summary, calm)


@pytest.mark.chaos
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_the_users_ends_the_run_once_and_the_same_command_resumes_it(
    folder: Path, calm_tour: Mapping[str, Any], rank: int
) -> None:
    run = tour(folder, "raise", rank, but=NO_CODE_OF_THE_USER)
    errors = [fault for fault in run.faults if fault.how == "raise"]
    for number in range(len(errors)):
        with pytest.raises(TrainFunctionError, match="a mistake of the user's"):
            run.fit()
        assert len(run.events("failed")) == number + 1
    run.check(run.fit().summary, calm_tour)


@pytest.mark.chaos
@pytest.mark.timeout(900)  # ten drivers, one after the other, and each starts Ray and workers
@pytest.mark.parametrize("rank", [0, 1])
def test_a_driver_that_is_killed_is_replaced_by_the_same_command(
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
