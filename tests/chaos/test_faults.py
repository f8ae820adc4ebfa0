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
LOSS = Fault(2, 27, "reduction", "SIGKILL")
"""What leads to another generation."""


def table(*hows: str, ranks: tuple[int, ...] = (0, 1), but: tuple[str, ...] = ()) -> list[Any]:
    rows = [(how, place, rank) for how in hows for place in PLACES if place not in but for rank in ranks]
    return [pytest.param(*row, id=name_of(*row)) for row in rows]


def name_of(how: str, place: str, rank: int) -> str:
    return f"{how}-{place}-{rank}".replace(" ", "-")


def faults_at(place: str, rank: int, how: str) -> list[Fault]:
    """Faults by which one happens to a rank in a place."""
    if place in ("rendezvous", "hand-over"):
        return [LOSS, Fault(rank, 27, place, how)]
    if place == "first step":
        return [LOSS, Fault(rank, 27, "forward", how, generation=2)]
    if place == "commit" and rank != 0:
        return [Fault(rank, 30, "data", how)]  # what it does while rank 0 writes
    return [Fault(rank, 27, place, how)]


def trial(folder: Path, how: str, place: str, rank: int) -> Trial:
    settings: dict[str, Any] = {"hang_timeout_s": 60.0, "drain_deadline_s": 6.0}
    if how in ("SIGSTOP", "gil", "rendezvous"):
        settings["heartbeat_timeout_s"] = 3.0
    if how == "hang":
        settings |= {"hang_timeout_s": 8.0, "heartbeat_timeout_s": 8.0}
    return Trial(folder, name_of(how, place, rank), faults_at(place, rank, how), settings)


def test_some_of_the_table_in_one_run(folder: Path, calm: Mapping[str, Any]) -> None:
    """What is not left to `make chaos`."""
    faults = [Fault(0, 10, "reduction", "rendezvous"), *faults_at("hand-over", 1, "SIGKILL")]
    run = Trial(folder, "some-of-the-table", faults, {"heartbeat_timeout_s": 3.0})
    run.check(run.fit().summary, calm)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("how", "place", "rank"),
    [
        *table("SIGKILL", "SIGSEGV", "SIGSTOP", "gil", "SIGTERM"),
        *table("hang", but=NO_CODE_OF_THE_USER),
        *table("rendezvous", ranks=(0,)),
    ],
)
def test_a_fault_makes_no_difference(folder: Path, calm: Mapping[str, Any], how: str, place: str, rank: int) -> None:
    run = trial(folder, how, place, rank)
    run.check(run.fit().summary, calm)


@pytest.mark.chaos
@pytest.mark.parametrize(("how", "place", "rank"), table("raise", but=NO_CODE_OF_THE_USER))
def test_an_error_of_the_users_ends_the_run_once_and_the_same_command_resumes_it(
    folder: Path, calm: Mapping[str, Any], how: str, place: str, rank: int
) -> None:
    run = trial(folder, how, place, rank)
    with pytest.raises(TrainFunctionError, match="a mistake of the user's"):
        run.fit()
    run.check(run.fit().summary, calm)
    assert len(run.events("failed")) == 1


@pytest.mark.chaos
@pytest.mark.parametrize(("how", "place", "rank"), table("driver", ranks=(0,)))
def test_a_driver_that_is_killed_is_replaced_by_the_same_command(
    folder: Path, calm: Mapping[str, Any], how: str, place: str, rank: int
) -> None:
    run = trial(folder, how, place, rank)
    first = drive(run.command)
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = drive(run.command)
    assert second.returncode == 0, second.stderr
    summary = jobs.summary(folder, run.name)
    assert summary["sessions"] == 2
    run.check(summary, calm)
