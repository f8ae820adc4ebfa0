"""Ranks that wait for each other at different places of the program end the run, with the places in the error."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.rendezvous import hang
from elastic_ddp.rendezvous.actor import Rendezvous
from elastic_ddp.rendezvous.hang import Activity, ActivityReport, Section, differ, find_mismatch
from elastic_ddp.rendezvous.messages import RendezvousOptions
from elastic_ddp.rendezvous.user_place import Frame, collective_of, user_place
from elastic_ddp.torch_internals import backend_of
from elastic_ddp.worker import clock
from elastic_ddp.worker.step import Step
from tests.ranks import run_ranks
from tests.unit import rank_steps
from tests.unit.rendezvous_harness import BROKEN, Play, join, member, started

EVALUATION, REDUCTION = "run.evaluate(name='val') after 6 steps", "the reduction of step 6"
LIMIT_S = 20.0


def idle(section: Section, where: str = "") -> ActivityReport:
    return ActivityReport(7, "collective", section=section, is_idle=True, where=where)


def in_section(name: str, first: int, last: int, generation: int = 1, where: str = "") -> ActivityReport:
    return idle(Section(generation, name, first, last), where)


def test_ranks_differ_if_they_begin_the_same_collective_in_different_sections() -> None:
    evaluation, reduction = Section(1, EVALUATION, 12, 13), Section(1, REDUCTION, 12, 15)
    assert differ(evaluation, reduction) and differ(reduction, evaluation)
    assert not differ(evaluation, reduction._replace(name=EVALUATION)), "both are in it"
    assert not differ(evaluation, reduction._replace(generation=2)), "an old report"
    assert not differ(evaluation, Section(1, "the end of step 5", 9, 12)), "it has not come to the evaluation yet"
    assert not differ(evaluation, Section(1, "the code after step 5", 12, 12)), "it computes"


def test_the_error_names_each_place_once_with_its_ranks() -> None:
    reports = {rank: idle(Section(1, REDUCTION, 12, 14), "train.py:9 in train") for rank in (1, 2, 3)}
    error = find_mismatch({0: idle(Section(1, EVALUATION, 12, 13), "train.py:12 in train"), **reports}, 4, 4)
    assert str(error).startswith(
        f"ranks wait for each other at different places: rank 0 in {EVALUATION}, at train.py:12 in train; ranks 1, 2, "
        f"3 in {REDUCTION}, at train.py:9 in train. Make the same calls"
    )
    assert find_mismatch(reports, 3, 3) is None


def test_unequal_numbers_of_micro_batches_are_named_as_the_cause() -> None:
    own = idle(Section(1, "step 0", 0, 3, is_users=True), "train.py:8 in train")
    others = {rank: idle(Section(1, "the reduction of step 0", 1, 5), "train.py:9 in train") for rank in (1, 2)}
    assert "3 workers have different numbers of the 4 micro-batches" in str(find_mismatch({0: own, **others}, 3, 4))
    assert "even_micro_batches" not in str(find_mismatch({0: own, 1: others[1]}, 2, 4))


def test_ranks_in_one_section_that_ran_other_numbers_of_collectives_are_named() -> None:
    reports = {0: idle(Section(1, REDUCTION, 12, 14), ""), 1: idle(Section(1, REDUCTION, 11, 13), "")}
    numbers = "different numbers of collectives before it, by rank: {0: 12, 1: 11"
    assert numbers in str(find_mismatch(reports, 2, 4))
    assert find_mismatch({0: reports[0], 1: reports[0]}, 2, 4) is None
    reports[2] = reports[1]
    assert numbers in str(find_mismatch(reports, 3, 4))


def sections_of_steps(group: ProcessGroup, config: RunConfig) -> list[Section]:
    sections: list[Section] = []

    class Recorded(Activity):
        def __init__(self) -> None:
            super().__init__()
            self.begin_generation(1, group.num_collectives)

        def begin(self, name: str, *, is_users: bool = False) -> None:
            sections.append(self.report().section)
            super().begin(name, is_users=is_users)

    def body(step: Step, model: Any) -> None:
        for batch in step.micro_batches():
            step.backward(model(batch["x"]).float().square().mean(), weight=3000.0)
        step.optimize()

    clock.Activity = Recorded  # type: ignore[misc]
    torch.manual_seed(0)
    rank_steps.run_steps(group, config, torch.nn.Linear(3, 1), body)
    return sections


@pytest.mark.parametrize(
    "settings", [{"precision": "fp16"}, {"reduction": "native", "ddp": {"comm_hook": "fp16"}}], ids=["fp16", "hook"]
)
def test_ranks_with_unequal_numbers_of_micro_batches_wait_in_the_same_sections(settings: dict[str, Any]) -> None:
    of_ranks = run_ranks(4, sections_of_steps, rank_steps.config_of(steps=2, **settings))
    assert all(any(section.last > section.first for section in sections) for sections in of_ranks)
    for one, other in itertools.combinations(of_ranks, 2):
        assert not [pair for pair in itertools.product(one, other) if differ(*pair)]


def options() -> RendezvousOptions:
    return RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=30.0, num_micro_batches=4)


def test_a_run_whose_ranks_wait_at_different_places_ends_at_once(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)
        reports = [
            in_section(EVALUATION, 12, 14, where="a.py:1 in f"),
            in_section(REDUCTION, 12, 13, where="a.py:2 in f"),
        ]
        await asyncio.gather(
            *(rendezvous.poll_signals(member("a", rank), 1, None, report) for rank, report in enumerate(reports))
        )
        while (news := await rendezvous.wait_for_update(0)).outcome is None:
            await asyncio.sleep(0.01)
        assert news.outcome["kind"] == "TrainFunctionError"
        assert (
            "rank 0 in run.evaluate(name='val') after 6 steps, at a.py:1 in f; rank 1 in the" in news.outcome["error"]
        )

    play(scenario, options())


@pytest.mark.parametrize("is_same", [True, False])
def test_a_broken_connection_between_different_places_ends_the_run(play: Play, is_same: bool) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        sections = [in_section(REDUCTION, 12, 13), in_section(REDUCTION if is_same else EVALUATION, 12, 15)]
        await asyncio.gather(
            *(
                join(rendezvous, member("a", rank), 1, 6, failure=BROKEN, activity=report._replace(where="a.py:1 in f"))
                for rank, report in enumerate(sections)
            )
        )
        outcome = (await rendezvous.wait_for_update(0)).outcome
        assert (outcome is None) == is_same

    play(scenario, options())


# What a worker reports.


def count_collectives(group: ProcessGroup) -> list[Section]:
    """A rank's sections: a collective of the user's, one of ours, and a message that only two ranks exchange."""
    activity, tensor = Activity(), torch.zeros(1)
    if group.rank < 2:  # as in a state transfer, before the generation begins
        dist.send(tensor, 1) if group.rank == 0 else dist.recv(tensor, 0)
    activity.begin_generation(1, group.num_collectives)
    activity.begin("step 0")
    dist.all_reduce(tensor)
    before = activity.report().section
    with activity.section("evaluation"):
        group.all_gather_bytes(b"x")
        inside = activity.report().section
    activity.end_generation()
    dist.all_reduce(tensor)
    return [before, inside, activity.report().section]


def test_all_ranks_number_the_collectives_of_a_section_alike() -> None:
    expected = [Section(1, "step 0", 0, 1), Section(1, "evaluation", 1, 3), Section(1, "step 0", 3, 3)]
    assert run_ranks(3, count_collectives) == [expected] * 3


def exchange_messages(group: ProcessGroup) -> list[Section]:
    """A rank's sections in three steps. In each, rank 0 exchanges more messages than the other ranks."""
    activity, tensor, sections = Activity(), torch.zeros(1), []
    activity.begin_generation(1, group.num_collectives)
    for step in range(3):
        activity.begin(f"step {step}", is_users=True)
        for other in range(1, group.world_size) if group.rank == 0 else [0]:
            if step == 0:
                dist.send(tensor, other) if group.rank == 0 else dist.recv(tensor)
            elif step == 1:
                operation = dist.P2POp(dist.isend if group.rank == 0 else dist.irecv, tensor, other)
                for work in dist.batch_isend_irecv([operation]):
                    work.wait()
        if step == 2:
            dist.monitored_barrier()
        activity.begin(f"the reduction of step {step}")
        dist.all_reduce(tensor)
        sections.append(activity.report().section)
        activity.begin(f"the code after step {step}", is_users=True)
        dist.all_reduce(tensor)
        sections.append(activity.report().section)
    return sections


def test_a_run_whose_ranks_exchange_other_numbers_of_messages_has_no_mismatch() -> None:
    ranks = run_ranks(3, exchange_messages)
    for late, early in itertools.permutations(range(3), 2):  # one rank still receives what another has received
        for before, after in itertools.pairwise(range(len(ranks[0]))):
            reports = {late: idle(ranks[late][before], ""), early: idle(ranks[early][after], "")}
            assert find_mismatch(reports, 3, 4) is None
    assert ranks[0][-1] == Section(1, "the code after step 2", 5, 6, is_users=True)


def wait_in_monitored_barrier(group: ProcessGroup) -> list[int | None]:
    """Returns the number of collectives before, in, and after a barrier for which rank 0 is late."""
    tensor, own = torch.zeros(1), dist.new_group()
    numbers = [group.num_collectives()]
    if group.rank == 0:
        dist.recv(tensor, 1, group=own)
        numbers.append(group.num_collectives())
        dist.monitored_barrier()
    else:
        begun = (count := backend_of(torch.device("cpu"))._get_sequence_number_for_group)()
        waiting = threading.Thread(target=dist.monitored_barrier)
        waiting.start()
        while count() == begun:
            time.sleep(0.001)
        numbers.append(group.num_collectives())
        dist.send(tensor, 0, group=own)
        waiting.join()
    return [*numbers, group.num_collectives()]


def test_messages_of_a_monitored_barrier_have_no_numbers() -> None:
    for numbers in run_ranks(2, wait_in_monitored_barrier):
        assert len({*numbers}) == 1


def report_of_a_thread(function: Callable[[Activity], None], until: Callable[[ActivityReport], Any]) -> ActivityReport:
    """Returns the report of a training thread in `function` that satisfies a condition."""
    activities: list[Activity] = []

    def run() -> None:
        activities.append(Activity())
        function(activities[0])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    end = time.monotonic() + LIMIT_S
    while not (activities and until(report := activities[0].report())):
        assert time.monotonic() < end
        time.sleep(0.01)
    return report


def test_a_rank_that_computes_does_not_wait_in_its_last_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "IDLE_S", 0.1)
    counts = [0]
    finished = threading.Event()

    def compute(activity: Activity) -> None:
        activity.begin_generation(1, lambda: counts[0])
        activity.begin("step 0", is_users=True)
        counts[0] = 2
        finished.wait()

    report = report_of_a_thread(compute, lambda report: report.is_idle)
    finished.set()
    assert report.section == Section(1, "step 0", 0, 0, is_users=True)
    assert report.where.startswith(f"{__file__}:") and report.where.endswith(" in compute")


def test_the_place_of_a_failed_collective_is_kept_until_the_next_generation() -> None:
    activity = Activity()
    activity.begin_generation(1, lambda: 0)
    activity.failed_at([Frame("/home/me/train.py", 12, "train")])
    activity.failed_at([Frame("/home/me/train.py", 9, "train")])
    assert activity.report().where == "/home/me/train.py:12 in train"
    activity.begin_generation(2, lambda: 0)
    assert activity.report().where == ""


def test_a_place_is_in_the_innermost_code_of_the_user() -> None:
    torch_file, numpy_file = torch.__file__, pytest.__file__
    own = Frame("/home/me/train.py", 3, "loss")
    assert user_place([Frame(torch_file, 1, "f"), Frame(numpy_file, 2, "g"), own]) == "/home/me/train.py:3 in loss"
    assert user_place([Frame(torch_file, 1, "f"), Frame(numpy_file, 2, "g")]) == f"{numpy_file}:2 in g"
    assert user_place([Frame(torch_file, 1, "f")]) == ""


def test_messages_between_two_ranks_are_no_collectives() -> None:
    file, user = dist.distributed_c10d.__file__, Frame("/home/me/train.py", 3, "train")
    assert collective_of([Frame(file, 1, "all_gather"), Frame(file, 2, "wrapper"), user]) == "all_gather"
    assert collective_of([Frame(file, 1, "recv"), Frame(file, 2, "wrapper"), user]) is None
    assert collective_of([user, Frame(file, 1, "all_gather")]) is None
