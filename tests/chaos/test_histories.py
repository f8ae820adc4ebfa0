"""Sequences of faults and resizes in one run."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.faults import Fault, hold
from tests.chaos.runs import STEPS, Trial, until

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.usefixtures("one_node")]


def from_full_size(summary: Mapping[str, Any], count: int = 3) -> list[dict[str, Any]]:
    """Returns the generations from the first one with `count` workers on: on a busy machine a run may start with
    fewer."""
    return list(itertools.dropwhile(lambda generation: generation["world_size"] < count, summary["generations"]))


def sizes(generations: Sequence[Mapping[str, Any]]) -> list[int]:
    return [generation["world_size"] for generation in generations]


@pytest.mark.parametrize(("workers", "along"), [(3, (1,)), (3, (0,)), (4, (1, 2)), (4, (0, 1))])
def test_all_workers_but_one_fail_at_once(
    folder: Path, calm: Mapping[str, Any], workers: int, along: tuple[int, ...]
) -> None:
    faults = [Fault(workers - 1, 27, "reduction", "SIGKILL", along=along)]
    run = Trial(folder, f"all-but-one-of-{workers}-{along[0]}", faults, {"max_workers": workers})
    summary = run.fit().summary
    run.check(summary, calm)
    assert from_full_size(summary, workers)[-1]["first_step"] >= 27


def test_a_run_whose_workers_all_fail_resumes_from_its_newest_commit(folder: Path, calm: Mapping[str, Any]) -> None:
    run = Trial(folder, "all", [Fault(1, 27, "reduction", "SIGKILL", along=(0, 2))])
    summary = run.fit().summary
    run.check_results(summary, calm)
    assert from_full_size(summary)[1]["first_step"] == 20
    assert summary["sessions"] == 1, "the driver survived"


@pytest.mark.parametrize(("least", "along"), [(3, ()), (2, (0,)), (3, (0,))])
def test_a_run_below_min_workers_waits_and_continues_from_memory(
    folder: Path, calm: Mapping[str, Any], least: int, along: tuple[int, ...]
) -> None:
    faults = [Fault(2, 27, "reduction", "SIGKILL", along=along)]
    run = Trial(folder, f"below-{least}-{len(along)}", faults, {"min_workers": least})
    summary = run.fit().summary
    run.check(summary, calm)
    assert min(sizes(summary["generations"])) >= least
    assert from_full_size(summary)[1]["first_step"] == 27, "the survivors kept the state"


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
def test_a_worker_fails_while_another_joins(
    folder: Path, calm: Mapping[str, Any], place: str, rank: int, step: int
) -> None:
    """Before the second failure the run waits for the replacement of the first victim, which joins after step 26."""
    faults = [Fault(2, 10, "reduction", "SIGKILL"), Fault(rank, step, place, "SIGKILL", later=step > 0)]
    run = Trial(folder, f"join-and-failure-{place}-{rank}", faults)
    summary = run.fit().summary
    run.check(summary, calm)
    assert sizes(from_full_size(summary))[:2] == [3, 2]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_fails_during_a_state_transfer(folder: Path, calm: Mapping[str, Any], how: str, rank: int) -> None:
    run = Trial(folder, f"transfer-{how}-{rank}", [Fault(rank, 0, "transfer", how)], {"heartbeat_timeout_s": 3.0})
    run.check(run.fit().summary, calm)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_fails_while_all_leave_for_a_newcomer(
    folder: Path, calm: Mapping[str, Any], how: str, rank: int
) -> None:
    faults = [Fault(2, 10, "reduction", "SIGKILL"), Fault(rank, 0, "leaving", how, later=True)]
    run = Trial(folder, f"leaving-{how}-{rank}", faults, {"heartbeat_timeout_s": 3.0})
    summary = run.fit().summary
    run.check(summary, calm)
    assert sizes(from_full_size(summary))[:2] == [3, 2]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(("rank", "place"), [(0, "commit"), (1, "collective")])
def test_the_other_workers_make_the_last_commit_if_one_fails_at_the_end(
    folder: Path, calm: Mapping[str, Any], how: str, rank: int, place: str
) -> None:
    run = Trial(folder, f"at-the-end-{how}-{rank}", [Fault(rank, STEPS, place, how)], {"heartbeat_timeout_s": 3.0})
    summary = run.fit().summary
    run.check(summary, calm)
    assert max(event.step for event in run.events("commit_succeeded")) == STEPS
    assert summary["sessions"] == 1 and summary["generations"][-1]["first_step"] == STEPS


def test_a_worker_fails_repeatedly_right_after_it_joined(folder: Path, calm: Mapping[str, Any]) -> None:
    faults = [Fault(1, 5, "data", "SIGKILL")] * 5
    run = Trial(folder, "flapping", faults, {"max_workers": 2})
    summary = run.fit().summary
    run.check(summary, calm)
    assert sizes(from_full_size(summary, 2))[:2] == [2, 1]


@pytest.mark.parametrize(
    ("how", "message"), [("raise", "a bug in the training function"), ("SIGSEGV", "its process exited")]
)
def test_newcomers_that_fail_are_replaced_and_do_not_count_as_restarts(
    folder: Path, calm: Mapping[str, Any], how: str, message: str
) -> None:
    faults = [Fault(2, 10, "reduction", "SIGKILL"), *[Fault(2, 0, "build", how)] * 3]
    run = Trial(folder, f"newcomers-fail-{how}", faults, {"max_restarts": 1})
    summary = run.fit().summary
    run.check(summary, calm)
    assert sizes(from_full_size(summary))[:2] == [3, 2]
    assert summary["workers_failed"] == summary["recoveries"] == 1
    assert all(message in event.error for event in run.events("newcomer_failed"))


@pytest.fixture(scope="module")
def calm_and_sharded(one_node: None, folder: Path) -> Mapping[str, Any]:
    """Norms of FSDP may differ from those of DDP in their last bits, and the run clips by them."""
    return Trial(folder, "calm-and-sharded", settings={"max_workers": 1, "strategy": "fsdp"}).fit().summary


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_world_sizes_three_one_three_two(
    folder: Path, calm: Mapping[str, Any], calm_and_sharded: Mapping[str, Any], strategy: str
) -> None:
    run = Trial(folder, f"3132-{strategy}", settings={"strategy": strategy})
    go_on = folder / f"3132-{strategy}"
    run.hold = hold(lambda worker, at: at < 20 or go_on.exists())
    with run.live() as (handle, result):

        def is_held(num_workers: int) -> bool:
            status = handle.status()
            size = status["world_size"]
            return (status["step"] or 0) >= 20 and size == num_workers == len(status["members"])

        until(partial(is_held, 3), result)
        for num_workers in (1, 3):
            handle.resize(num_workers)
            until(partial(is_held, num_workers), result)
        victim = next(member for member in handle.status()["members"] if member["rank"] == 0)
        os.kill(victim["pid"], signal.SIGKILL)
        until(lambda: victim["id"] not in {member["id"] for member in handle.status()["members"]}, result)
        go_on.touch()
        summary = result.result(timeout=120).summary
    run.check_results(summary, calm_and_sharded if strategy == "fsdp" else calm)
    run.check_steps(summary["generations"])
    assert [size for size, _ in itertools.groupby(sizes(from_full_size(summary)))][:4] == [3, 1, 3, 2]


LONG = 150


@pytest.fixture(scope="module")
def calm_and_long(one_node: None, folder: Path) -> Mapping[str, Any]:
    return Trial(folder, "calm-and-long", settings={"max_workers": 1, "steps": LONG}).fit().summary


def draw_faults(seed: int) -> list[Fault]:
    """Returns four to six faults at increasing steps. Some are followed by another one in the next generation."""
    random_ = random.Random(seed)
    faults: list[Fault] = []
    for step in range(15, LONG - 20, 35):
        rank = random_.randrange(3)
        how = random_.choice(["SIGKILL", "SIGSEGV", "SIGSTOP", "gil", "SIGTERM", "rendezvous"])
        place = random_.choice(["data", "forward", "backward", "reduction", "optimizer"])
        faults.append(Fault(rank, step + random_.randrange(8), place, how))
        if how not in ("SIGTERM", "rendezvous") and random_.random() < 0.7 and len(faults) < 6:
            other = random_.choice([candidate for candidate in range(3) if candidate != rank])
            place = random_.choice(["rendezvous", "hand-over"])
            faults.append(replace(faults[-1], rank=other, place=place, how=random_.choice(["SIGKILL", "rendezvous"])))
    return faults


@pytest.mark.parametrize("seed", range(4))
def test_random_faults_make_no_difference(folder: Path, calm_and_long: Mapping[str, Any], seed: int) -> None:
    """Nor does verifying every step, which takes none of them for corruption."""
    faults = draw_faults(seed)
    settings = {"steps": LONG, "heartbeat_timeout_s": 3.0, "verify": {"every_steps": 1, "action": "stop"}}
    run = Trial(folder, f"random-{seed}", faults, settings)
    summary = run.fit().summary
    run.check(summary, calm_and_long)
    assert not run.events("corruption_found")
    assert len(run.events("step_verified")) >= LONG // 2, "steps of a single worker are not verified"
