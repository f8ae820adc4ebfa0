"""What bounds a run, from the phases of its steps."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ddp.telemetry.bottleneck import Bottleneck, find_bottleneck
from elastic_ddp.telemetry.events import PhasesMeasured
from elastic_ddp.telemetry.phases import MIN_STEPS, STEP_PHASES, combine, mean_phases, newest

BALANCED = {"data": 0.02, "forward": 0.3, "backward": 0.5, "communication": 0.1, "optimizer": 0.06, "other": 0.02}


def measure(
    *ranks: dict[str, float],
    micro_batches: list[int] | None = None,
    num_steps: int = MIN_STEPS,
    in_turn: bool = False,
    **changes: Any,
) -> PhasesMeasured:
    """The event for ranks that differ from `BALANCED` in these phases. Peers wait for the slowest one.

    Each step waits for data; with `in_turn`, for that of a single rank, each of the ranks in turn.
    """
    phases = [{**BALANCED, **rank} for rank in ranks]
    step_s = max(sum(own.values()) for own in phases)
    for own in phases:
        own["communication"] += step_s - sum(own.values())
    parts = [
        {
            "step": 100,
            "num_steps": num_steps,
            "phases": own,
            "data_s": {
                str(step): own["data"] * (len(phases) * (step % len(phases) == rank) if in_turn else 1)
                for step in range(num_steps)
            },
            "in_other": {"evaluation": 0.0, "commit": 0.0},
            "work_s": sum(own.values()) - own["communication"],
            "memory_bytes": None,
            "utilization": None,
            **changes,
        }
        for rank, own in enumerate(phases)
    ]
    event = combine(parts, generation=1, micro_batches=micro_batches or [2] * len(ranks))
    assert event is not None
    return event


def verdict(event: PhasesMeasured, nodes: list[str] | None = None) -> Bottleneck:
    found = find_bottleneck(event, nodes or [])
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("phases", "kind", "setting"),
    [
        ({}, "compute", "max_workers"),
        ({"data": 0.4}, "data", "data.concurrency"),
        ({"communication": 0.6}, "communication", "ddp.bucket_cap_mb"),
        ({"communication": 3.0, "data": 0.9}, "communication", "ddp.bucket_cap_mb"),
        ({"other": 1.0}, "other", "stacks"),
    ],
)
def test_the_phase_that_bounds_all_ranks_is_named_with_a_setting(
    phases: dict[str, float], kind: str, setting: str
) -> None:
    for world_size in (1, 2, 3):
        found = verdict(measure(*[phases] * world_size))
        assert found.kind == kind and setting in found.advice and "%" in found.reason, found


@pytest.mark.parametrize(
    ("in_other", "reason", "advice"),
    [
        ({"evaluation": 0.1, "commit": 0.3}, "your code between steps takes 30 %", "Do it less often"),
        ({"evaluation": 0.7, "commit": 0.1}, "evaluations take 35 %", "fewer rows"),
        ({"evaluation": 0.1, "commit": 0.8}, "waiting for commits takes 40 %", "checkpoint.every_steps"),
    ],
)
def test_the_largest_part_of_other_is_named(in_other: dict[str, float], reason: str, advice: str) -> None:
    ranks = [{"other": 1.0, "forward": 0.3, "backward": 0.54, "communication": 0.08, "optimizer": 0.06}] * 2
    event = newest([measure(*ranks, num_steps=10, in_other=in_other) for _ in range(2)])
    assert event is not None
    found = verdict(event)
    assert found.kind == "other" and reason in found.reason and advice in found.advice


def test_a_rank_with_much_more_work_than_the_others_is_slow() -> None:
    found = verdict(measure({}, {"backward": 0.9}, {}), ["a", "b", "c"])
    assert (found.kind, found.ranks, found.node) == ("slow rank", [1], "b")
    assert "the work of rank 1 (node b) takes 1.4 times" in found.reason and "backward" in found.reason
    assert "elastic-ddp drain" in found.advice


def test_one_of_two_ranks_can_be_slow_and_a_drain_is_no_advice_if_there_is_one_node() -> None:
    found = verdict(measure({}, {"forward": 0.6}), ["a", "a"])
    assert found.ranks == [1] and "drain" not in found.advice


def test_a_node_is_slow_if_all_its_ranks_are() -> None:
    slow = {"forward": 0.7}
    found = verdict(measure({}, {}, {}, slow, slow), ["a", "a", "b", "c", "c"])
    assert (found.kind, found.ranks, found.node) == ("slow node", [3, 4], "c")
    assert verdict(measure({}, {}, {}, {}, slow), ["a", "a", "b", "c", "c"]).kind == "slow rank"


def test_a_slow_rank_that_costs_next_to_nothing_is_not_named() -> None:
    small = {"forward": 0.01, "backward": 0.01, "optimizer": 0.0, "other": 0.0, "data": 0.0}
    event = measure({**small, "communication": 0.98}, {**small, "forward": 0.02, "communication": 0.97})
    assert verdict(event).kind == "communication"


def test_a_rank_with_more_micro_batches_is_not_slow() -> None:
    more = {"forward": 0.6, "backward": 1.0}
    found = verdict(measure(more, {}, {}, micro_batches=[4, 2, 2]))
    assert found.kind == "communication" and "divides the 8 micro-batches" in found.advice


def test_a_rank_that_is_slow_because_its_data_is_late_is_bound_by_data() -> None:
    """Also if no other rank waits for data: the others read ahead while they wait for this one."""
    for others in (0.0, 0.5):
        found = verdict(measure({"data": others}, {"data": 1.5}, {"data": others}))
        assert (found.kind, found.ranks) == ("data", [1]) and "data.concurrency" in found.advice
        assert "waiting for data takes 60 % of the time on rank 1; other ranks wait meanwhile" in found.reason


def test_data_that_is_late_on_each_of_many_ranks_in_turn_bounds_the_run() -> None:
    waiting = {"data": 0.2, "communication": 1.5}  # each rank waits 1.4 s for the data of the other seven
    found = verdict(measure(*[waiting] * 8, num_steps=40, in_turn=True))
    assert found.kind == "data" and "ranks wait for data 62 % of" in found.reason
    assert verdict(measure(*[waiting] * 8)).kind == "communication"


def test_data_that_is_late_in_one_of_a_hundred_steps_bounds_the_run() -> None:
    fast = {phase: seconds / 20 for phase, seconds in BALANCED.items()}
    window = [measure(fast, num_steps=20) for _ in range(5)]
    late = measure({**fast, "data": 0.1}, num_steps=20)  # one of its steps waits for 2 s, the others for none
    events = [*window, late] * 4
    for end in range(12, len(events)):
        average = newest(events[:end])
        assert average is not None and verdict(average).kind == "data"


@pytest.mark.parametrize(("extra", "kind"), [(0.15, "communication"), (0.6, "slow rank")])
def test_the_larger_of_communication_and_of_what_a_slow_rank_costs_bounds_the_run(extra: float, kind: str) -> None:
    tiny = {"forward": 0.2, "backward": 0.2, "communication": 0.5}
    assert verdict(measure(tiny, {**tiny, "forward": 0.2 + extra})).kind == kind


def test_a_verdict_needs_twenty_steps() -> None:
    assert find_bottleneck(measure({}, num_steps=MIN_STEPS - 1)) is None


def test_a_verdict_is_about_the_newest_steps_of_the_generation() -> None:
    late = {"data": 0.9}
    ledger = [measure(late, num_steps=10) for _ in range(5)] + [measure({}, num_steps=10) for _ in range(3)]
    average = newest(ledger)
    assert average is not None and average.num_steps == 30, "30 seconds"
    assert average.phases == pytest.approx(BALANCED)
    former = PhasesMeasured(**{**vars(ledger[0]), "generation": 0})
    average = newest([former, ledger[0]])
    assert average is not None and average.num_steps == 10
    assert newest([]) is None


def test_averages_count_each_step_once() -> None:
    ledger = [measure({"data": 0.1}, num_steps=1), measure({"data": 0.4}, num_steps=9)]
    assert mean_phases(ledger)["data"] == pytest.approx(0.37)
    average = newest(ledger)
    assert average is not None and average.work_s == [pytest.approx(0.88 + 0.37)]


def test_a_window_without_a_step_on_every_rank_gives_no_event() -> None:
    part = {"step": 3, "phases": dict.fromkeys(STEP_PHASES, 0.0), "in_other": {}, "work_s": 0.0}
    part |= {"memory_bytes": 0, "utilization": None}
    assert combine([{**part, "num_steps": 1}, {**part, "num_steps": 0}], generation=1, micro_batches=[1, 1]) is None
