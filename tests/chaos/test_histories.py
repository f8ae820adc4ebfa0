"""What happens to a run over its life: several faults, and workers that come and go, in every order."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.faults import Fault, hold
from tests.chaos.runs import STEPS, Trial, until

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.usefixtures("one_node")]


def since_all_were_there(summary: Mapping[str, Any], count: int = 3) -> list[dict[str, Any]]:
    """Generations from the first one on that had so many workers: on a busy machine a run may begin with fewer, as it
    does not wait for long for the last of them."""
    return list(itertools.dropwhile(lambda each: each["world_size"] < count, summary["generations"]))


def sizes(generations: Sequence[Mapping[str, Any]]) -> list[int]:
    return [each["world_size"] for each in generations]


@pytest.mark.parametrize(
    ("rank", "along"),
    [pytest.param(1, (2,), id="the-others"), pytest.param(1, (0,), id="the-first")],
)
def test_two_losses_at_once(folder: Path, calm: Mapping[str, Any], rank: int, along: tuple[int, ...]) -> None:
    run = Trial(folder, f"two-at-once-{along[0]}", [Fault(rank, 27, "reduction", "SIGKILL", along=along)])
    summary = run.fit().summary
    run.check(summary, calm)
    assert since_all_were_there(summary)[-1]["first_step"] >= 27


@pytest.mark.parametrize("along", [(1, 2), (0, 1)])
def test_a_loss_of_all_but_one(folder: Path, calm: Mapping[str, Any], along: tuple[int, ...]) -> None:
    faults = [Fault(3, 27, "reduction", "SIGKILL", along=along)]
    run = Trial(folder, f"all-but-one-{along[0]}", faults, {"max_workers": 4})
    summary = run.fit().summary
    run.check(summary, calm)
    assert since_all_were_there(summary, 4)[-1]["first_step"] >= 27


def test_a_run_that_loses_everybody_goes_on_from_its_newest_commit(folder: Path, calm: Mapping[str, Any]) -> None:
    run = Trial(folder, "everybody", [Fault(1, 27, "reduction", "SIGKILL", along=(0, 2))])
    summary = run.fit().summary
    for key in ("status", "weights_sha256", "samples_sha256", "samples", "steps"):
        assert summary[key] == calm[key]
    assert since_all_were_there(summary)[1]["first_step"] == 20
    assert summary["sessions"] == 1, "the driver lived"


@pytest.mark.parametrize(("least", "along"), [(3, ()), (2, (0,)), (3, (0,))])
def test_a_run_below_min_workers_waits_and_goes_on_from_memory(
    folder: Path, calm: Mapping[str, Any], least: int, along: tuple[int, ...]
) -> None:
    faults = [Fault(2, 27, "reduction", "SIGKILL", along=along)]
    run = Trial(folder, f"below-{least}-{len(along)}", faults, {"min_workers": least})
    summary = run.fit().summary
    run.check(summary, calm)
    assert min(sizes(summary["generations"])) >= least
    assert since_all_were_there(summary)[1]["first_step"] == 27, "its survivors kept the state"


@pytest.mark.parametrize(
    ("place", "rank", "step"),
    [
        pytest.param("rendezvous", 0, 27, id="the-first-in-rendezvous"),
        pytest.param("rendezvous", 1, 27, id="another-in-rendezvous"),
        pytest.param("hand-over", 0, 27, id="the-source-in-hand-over"),
        pytest.param("hand-over", 1, 27, id="another-in-hand-over"),
        pytest.param("hand-over", 2, 0, id="the-newcomer-in-hand-over"),
        pytest.param("reduction", 1, 27, id="another-in-the-first-step"),
        pytest.param("forward", 2, 27, id="the-newcomer-in-the-first-step"),
    ],
)
def test_a_join_and_a_loss_in_the_same_moment(
    folder: Path, calm: Mapping[str, Any], place: str, rank: int, step: int
) -> None:
    """Before the second loss the run waits for the replacement of the first, which comes in after step 26."""
    faults = [Fault(2, 10, "reduction", "SIGKILL"), Fault(rank, step, place, "SIGKILL", later=step > 0)]
    run = Trial(folder, f"join-and-loss-{place}-{rank}", faults)
    summary = run.fit().summary
    run.check(summary, calm)
    assert sizes(since_all_were_there(summary))[:2] == [3, 2]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_loss_in_the_midst_of_a_hand_over(folder: Path, calm: Mapping[str, Any], how: str, rank: int) -> None:
    run = Trial(folder, f"transfer-{how}-{rank}", [Fault(rank, 0, "transfer", how)], {"heartbeat_timeout_s": 3.0})
    run.check(run.fit().summary, calm)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_while_all_leave_to_let_a_newcomer_in(
    folder: Path, calm: Mapping[str, Any], how: str, rank: int
) -> None:
    faults = [Fault(2, 10, "reduction", "SIGKILL"), Fault(rank, 0, "leaving", how, later=True)]
    run = Trial(folder, f"leaving-{how}-{rank}", faults, {"heartbeat_timeout_s": 3.0})
    summary = run.fit().summary
    run.check(summary, calm)
    assert sizes(since_all_were_there(summary))[:2] == [3, 2]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(("rank", "place"), [(0, "commit"), (1, "collective")])
def test_a_loss_at_the_end_leaves_the_last_commit_to_the_others(
    folder: Path, calm: Mapping[str, Any], how: str, rank: int, place: str
) -> None:
    run = Trial(folder, f"at-the-end-{how}-{rank}", [Fault(rank, STEPS, place, how)], {"heartbeat_timeout_s": 3.0})
    summary = run.fit().summary
    run.check(summary, calm)
    assert max(each.step for each in run.events("commit")) == STEPS
    assert summary["sessions"] == 1 and summary["generations"][-1]["first_step"] == STEPS


def test_a_worker_that_dies_again_and_again_right_after_it_joined(folder: Path, calm: Mapping[str, Any]) -> None:
    faults = [Fault(1, 5, "data", "SIGKILL")] * 5
    run = Trial(folder, "flapping", faults, {"max_workers": 2})
    summary = run.fit().summary
    run.check(summary, calm)
    assert sizes(since_all_were_there(summary, 2))[:2] == [2, 1]


@pytest.mark.parametrize(("how", "said"), [("raise", "a mistake of the user's"), ("SIGSEGV", "its process exited")])
def test_newcomers_that_fail_are_replaced_and_do_not_end_the_run(
    folder: Path, calm: Mapping[str, Any], how: str, said: str
) -> None:
    """Nor do they count as restarts, of which there may be as many as there are losses."""
    faults = [Fault(2, 10, "reduction", "SIGKILL"), *[Fault(2, 0, "build", how)] * 3]
    run = Trial(folder, f"newcomers-fail-{how}", faults, {"max_restarts": 1})
    summary = run.fit().summary
    run.check(summary, calm)
    assert sizes(since_all_were_there(summary))[:2] == [3, 2]
    assert summary["workers_lost"] == summary["restarts"] == 1
    assert all(said in event.error for event in run.events("newcomer_lost"))


class Director:
    """Asks a live run that is held for changes of its size, one after the other."""

    def __init__(self, run: Trial, handle: Any, result: Any) -> None:
        self._run, self._handle, self._result = run, handle, result

    def waits_with(self, num_workers: int, *, step: int = 20) -> None:
        """Until the run is held with so many workers."""

        def is_so() -> bool:
            status = self._handle.status()
            size = status["world_size"]
            return (status["step"] or 0) >= step and size == num_workers == len(self._members())

        until(is_so, self._result)

    def resize(self, num_workers: int) -> None:
        self._handle.resize(num_workers)
        self.waits_with(num_workers)

    def kill(self, *ranks: int) -> None:
        doomed = {each["id"]: each["pid"] for each in self._members() if each["rank"] in ranks}
        for pid in doomed.values():
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(each["id"] in doomed for each in self._members()), self._result)

    def _members(self) -> list[dict[str, Any]]:
        members: list[dict[str, Any]] = self._handle.status()["members"]
        return members


@pytest.mark.parametrize("how", ["by-resize-and-a-kill", "by-kills-and-a-resize"])
def test_three_one_three_two(folder: Path, calm: Mapping[str, Any], how: str) -> None:
    run = Trial(folder, f"3132-{how}")
    go_on = folder / f"3132-{how}"
    run.hold = hold(lambda worker, at: at < 20 or go_on.exists())
    with run.live() as (handle, result):
        director = Director(run, handle, result)
        director.waits_with(3)
        if how == "by-resize-and-a-kill":
            director.resize(1)
            director.resize(3)
            director.kill(0)
        else:
            director.kill(0, 2)
            director.waits_with(1)
            director.waits_with(3)
            director.resize(2)
        go_on.touch()
        summary = result.result(timeout=120).summary
    for key in ("status", "weights_sha256", "samples_sha256", "samples", "steps"):
        assert summary[key] == calm[key]
    run.check_steps(summary["generations"])
    changes = [size for size, _ in itertools.groupby(sizes(since_all_were_there(summary)))]
    if how == "by-resize-and-a-kill":
        assert changes[:4] == [3, 1, 3, 2]
    else:  # who is replaced may come one by one
        assert changes[0] == 3 and changes[-1] == 2 and 1 in changes and changes.count(3) == 2


LONG = 150


@pytest.fixture(scope="module")
def calm_and_long(one_node: None, folder: Path) -> Mapping[str, Any]:
    return Trial(folder, "calm-and-long", settings={"max_workers": 1, "steps": LONG}).fit().summary


def draw(seed: int) -> list[Fault]:
    """Four to six faults, at increasing steps. Some are followed at once by another, in the generation that forms."""
    random_ = random.Random(seed)
    faults: list[Fault] = []
    for step in range(15, LONG - 20, 35):
        rank = random_.randrange(3)
        how = random_.choice(["SIGKILL", "SIGSEGV", "SIGSTOP", "gil", "SIGTERM", "rendezvous"])
        place = random_.choice(["data", "forward", "backward", "reduction", "optimizer"])
        faults.append(Fault(rank, step + random_.randrange(8), place, how))
        if how not in ("SIGTERM", "rendezvous") and random_.random() < 0.7 and len(faults) < 6:
            other = random_.choice([each for each in range(3) if each != rank])
            place = random_.choice(["rendezvous", "hand-over"])
            faults.append(replace(faults[-1], rank=other, place=place, how=random_.choice(["SIGKILL", "rendezvous"])))
    return faults


@pytest.mark.parametrize("seed", range(4))
def test_faults_at_random(folder: Path, calm_and_long: Mapping[str, Any], seed: int) -> None:
    faults = draw(seed)
    settings = {"steps": LONG, "heartbeat_timeout_s": 3.0}
    run = Trial(folder, f"random-{seed}", faults, settings)
    run.check(run.fit().summary, calm_and_long)
