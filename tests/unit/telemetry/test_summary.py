from __future__ import annotations

import json
from io import StringIO
from typing import Any

from rich.console import Console

from elastic_ddp.cli.run_summary import render
from elastic_ddp.telemetry.event import EVENTS, Event, GenerationEvent
from elastic_ddp.telemetry.goodput import STALLS
from elastic_ddp.telemetry.summary import summarize
from tests.unit.ledger_events import ledger_event
from tests.unit.telemetry.test_goodput import GROWN


def session(name: str, start: float, *events: tuple[str, dict[str, Any]]) -> list[Event]:
    """Events of one session, one each second, in the newest generation unless they name one."""
    session, generation = [], 0
    for number, (event, fields) in enumerate(events):
        generation = fields.get("generation", generation)
        of_generation = {"generation": generation} if issubclass(EVENTS[event], GenerationEvent) else {}
        session.append(
            ledger_event(event, time=start + number, seq=number, session=name, **{**of_generation, **fields})
        )
    return session


def generation(number: int, world_size: int, first_step: int, reason: str) -> tuple[str, dict[str, Any]]:
    fields = {"generation": number, "world_size": world_size, "first_step": first_step, "reason": reason}
    return "generation_started", fields


def steps(step: int, loss: Any = None, **metrics: float) -> tuple[str, dict[str, Any]]:
    fields: dict[str, Any] = {"step": step, "samples": step * 10, "world_size": 2, "metrics": metrics}
    return "steps_completed", fields if loss is None else {**fields, "loss": loss}


STARTED = ("session_started", {"resumed_from_step": None, "config": {"name": "mnist", "storage": "s3://b/runs"}})
RUN = [
    *session(
        "s1", 100.0,
        STARTED,
        generation(0, 2, 0, "start"),
        steps(10, 2.5, accuracy=0.1),
        ("commit_succeeded", {"step": 10}),
        ("worker_failed", {"member": "one"}),
        ("generation_ended", {"generation": 0, "last_step": 14, "reason": "worker failed"}),
        generation(1, 1, 14, "worker failed"),
        steps(20, 2.0),
        ("commit_succeeded", {"step": 20}),
        steps(26, 1.5),
    ),
    *session(
        "s2", 1000.0,
        ("session_started", {"resumed_from_step": 20, "config": {"name": "mnist", "storage": "s3://b/runs"},
                             "versions": {"torch": "2.13.0"}}),
        generation(2, 3, 20, "resume"),
        steps(30, 1.0, accuracy=0.9),
        ("commit_succeeded", {"step": 20}),
        ("commit_succeeded", {"step": 40}),
        ("generation_ended", {"generation": 2, "last_step": 40, "reason": "finished"}),
        ("run_finished", {"status": "finished", "steps": 40, "epochs": 1, "samples": 400, "weights_sha256": "aa",
                      "samples_sha256": "bb", "metrics": {"final": 3.0}}),
    ),
]  # fmt: skip


def test_a_run_over_two_sessions_is_one_summary() -> None:
    summary = summarize(RUN)
    generations, goodput = summary.pop("generations"), summary.pop("goodput")
    assert (goodput["total"], goodput["goodput"]) == (15.0, None), "there is no account"
    assert summary == {
        "name": "mnist", "status": "finished", "error": None, "steps": 40, "epochs": 1, "samples": 400,
        "total_steps": None, "workers_drained": 0,
        "wall_seconds": 15.0, "samples_per_second": 26.667, "sessions": 2, "recoveries": 1, "commits": 3,
        "workers_failed": 1, "commit_interval_s": None, "skipped_steps": 0, "verified_step": None,
        "corruptions": 0,
        "weights_sha256": "aa", "samples_sha256": "bb", "loss": {"first": 2.5, "last": 1.0, "step": 30},
        "metrics": {"accuracy": 0.9, "final": 3.0}, "evaluated_at": {}, "scaling": [],
        "phases": None, "bottleneck": None, "memory_bytes": None,
        "storage": "s3://b/runs", "versions": {"torch": "2.13.0"},
    }  # fmt: skip
    assert [[row["generation"], row["world_size"], row["first_step"], row["last_step"]] for row in generations] == [
        [0, 2, 0, 14],
        [1, 1, 14, 26],  # killed: the last reported step
        [2, 3, 20, 40],
    ]
    assert [row["reason"] for row in generations] == ["start", "worker failed", "resume"]
    assert [row["ended_by"] for row in generations] == ["worker failed", "its driver died", "finished"]
    assert [row["session"] for row in generations] == ["s1", "s1", "s2"]
    assert [row["session_number"] for row in generations] == [1, 1, 2]
    assert {row[name] for row in generations for name in STALLS} == {None}
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_loss_and_metrics_are_those_since_the_run_started_from_step_0() -> None:
    evaluated = ("evaluation_finished", {"generation": 1, "step": 30, "name": "accuracy", "value": 0.9})
    first = session("s1", 100.0, STARTED, generation(1, 2, 0, "start"), steps(30, 2.5, norm=3.0), evaluated)
    again = session("s2", 200.0, STARTED, generation(1, 2, 0, "start"), steps(10, 7.5))
    summary = summarize(first + again)
    assert summary["loss"] == {"first": 7.5, "last": 7.5, "step": 10}
    assert summary["metrics"] == summary["evaluated_at"] == {} and summary["steps"] == 10


def test_the_newest_commit_interval_is_shown() -> None:
    intervals = ((10, 60.0), (20, 33.75))
    commits = [("commit_succeeded", {"step": step, "interval_s": every_s}) for step, every_s in intervals]
    summary = summarize(session("s1", 100.0, STARTED, *commits))
    assert summary["commit_interval_s"] == 33.75 and "2, one every 33.8 s" in shown(summary)
    assert "one every" not in shown(summarize(RUN))


def accounted(number: int, step: int, **account: float) -> tuple[str, dict[str, Any]]:
    return "generation_ended", {"generation": number, "last_step": step, "account": account, "reason": "it ended"}


def rendezvous(number: int, first_step: int | None, reason: str) -> tuple[str, dict[str, Any]]:
    fields = {"generation": number, "world_size": 2, "first_step": first_step, "reason": reason}
    return "generation_formed", fields


DRAINED = session(
    "s1", 100.0,
    STARTED,
    rendezvous(1, None, "start"),
    generation(1, 2, 0, "start"),
    ("first_step", {"generation": 1, "seconds": 0.2}),
    ("worker_left", {"generation": 1, "member": "b", "node": "n", "kind": "drain"}),
    ("worker_left", {"generation": 1, "member": "c", "node": "n", "kind": "drain"}),
    ("worker_left", {"generation": 1, "member": "d", "node": "n", "kind": "resize"}),
    accounted(1, 7, rendezvous=0.25, hand_over=0.5, useful=5.25),
    rendezvous(2, 7, "workers left"),
    generation(2, 2, 7, "workers left"),
    accounted(2, 9, rendezvous=0.125, hand_over=0.25, useful=1.5),
    ("run_finished", {"status": "finished", "steps": 9, "samples": 90}),
)  # fmt: skip


def test_the_summary_has_goodput_and_the_stall_of_each_generation() -> None:
    summary = summarize(DRAINED)
    assert summary["goodput"] == {
        "useful": 6.75, "redone": 0.0, "detection": 0.0, "rendezvous": 1.375, "hand_over": 0.75, "checkpoint": 0.0,
        "waiting": 0.0, "start_up": 1.0, "shut_down": 1.125, "total": 11.0, "goodput": 0.6136,
    }  # fmt: skip
    assert summary["goodput"]["total"] == summary["wall_seconds"]
    assert (summary["workers_drained"], summary["recoveries"]) == (2, 0)
    assert [[row[name] for name in STALLS] for row in summary["generations"]] == [
        [None, 0.25, 0.5, 0.2],
        [0.0, 1.125, 0.25, None],
    ]
    text = shown(summary)
    assert "61.4 %  useful 6.8 s · rendezvous 1.4 s · hand-over 0.75 s · start-up 1 s · shut-down 1.1 s" in text
    assert "redone" not in text and "waiting" not in text
    assert "(13.3 samples/s in training; 8.18 samples/s over the whole time)" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["workers", "2", "drained"] in lines
    assert ["2", "2", "7", "9", "1.38", "s", "workers", "left", "it", "ended"] in lines


def test_a_slow_first_step_is_part_of_the_stall() -> None:
    """The first step of generation 1 takes 0.2 s, and one of 0.15 s is usual."""
    measured = ("phases_measured", {"generation": 1, "step": 7, "num_steps": 5, "phases": {"forward": 0.15}})
    assert "0.75 s" in shown(summarize(DRAINED))
    text = shown(summarize([*DRAINED, *session("s1", 105.0, measured)]))
    assert "0.80 s" in text and "whole run" in text and "step 150 ms: forward 100 %" in text


def test_long_parts_of_the_time_have_hours_and_minutes() -> None:
    summary = summarize(DRAINED)
    summary["goodput"] |= {"useful": 105.6, "start_up": 59.94, "waiting": 7322.0}
    assert "useful 1 min 46 s · " in shown(summary) and "waiting 2 h 2 min · start-up 1 min" in shown(summary)


def test_an_unfinished_run_tells_if_its_driver_died() -> None:
    summary = summarize(RUN[:9])
    assert "running or unfinished" in shown(summary)
    assert "unfinished, its driver died" in shown({**summary, "status": "dead"})


def test_every_prefix_of_a_run_can_be_summarized_and_shown() -> None:
    for length in range(len(RUN) + 1):
        summary = summarize(RUN[:length])
        assert summary["status"] == ("finished" if length == len(RUN) else "unfinished")
        assert shown(summary)
    assert summarize([])["name"] is None
    assert summarize(RUN[:10])["steps"] == 26
    assert summarize(RUN[:11])["steps"] == 20, "resumed from the commit"


def test_a_failed_run_has_an_error_until_it_is_resumed() -> None:
    failed = session("s1", 0.0, STARTED, generation(0, 1, 0, "start"), steps(3), ("run_failed", {"error": "boom"}))
    assert (summarize(failed)["status"], summarize(failed)["error"]) == ("failed", "boom")
    finished = {"status": "failed", "steps": 3, "samples": None, "metrics": {}}
    both = failed + session("s1", 4.0, ("run_finished", finished))
    assert (summarize(both)["status"], summarize(both)["error"], summarize(both)["samples"]) == ("failed", "boom", 30)
    assert summarize(both)["generations"][0]["ended_by"] == "failed"
    resumed = both + session("s2", 9.0, ("session_started", {"resumed_from_step": 3, "config": {}}))
    assert (summarize(resumed)["status"], summarize(resumed)["error"]) == ("unfinished", None)


def test_a_failed_session_without_steps_keeps_the_samples_of_the_session_before() -> None:
    stopped = ("run_finished", {"status": "stopped", "steps": 5, "samples": 50})
    events = session("s1", 0.0, STARTED, steps(3), stopped)
    events += session("s2", 9.0, ("session_started", {"resumed_from_step": 5}), ("run_failed", {"error": "boom"}))
    assert (summarize(events)["steps"], summarize(events)["samples"]) == (5, 50)


def test_an_error_of_the_training_function_ends_its_generation() -> None:
    """Its peers report a broken connection."""
    ended = ("generation_ended", {"generation": 0, "last_step": 3, "reason": "a worker failed"})
    events = session("s1", 0.0, STARTED, generation(0, 2, 0, "start"), steps(3), ended)
    for kind, by in {"TrainFunctionError": "an error", "WorkersFailedError": "a worker failed"}.items():
        failed = events + session("s1", 4.0, ("run_failed", {"error": "boom", "kind": kind}))
        assert summarize(failed)["generations"][0]["ended_by"] == by


def test_a_stopped_run_is_stopped_and_arguments_override_events() -> None:
    stopped = session("s1", 0.0, STARTED, ("run_finished", {"status": "stopped", "steps": 5, "samples": 50}))
    summary = summarize(stopped, name="other", storage="/runs")
    assert (summary["status"], summary["steps"], summary["name"]) == ("stopped", 5, "other")
    assert summary["storage"] == "/runs"


def shown(summary: dict[str, Any]) -> str:
    console = Console(file=StringIO(), width=160, color_system=None)
    console.print(render(summary))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_table_shows_the_facts_and_one_line_for_each_generation() -> None:
    text = shown(summarize(RUN))
    for part in ("26.7 samples/s over the whole time", "2.5 → 1 (step 30)", "accuracy 0.9", "15 s", "s3://b/runs"):
        assert part in text
    assert "goodput" not in text and "drained" not in text, "they are not known"
    rows = [line.split() for line in text.splitlines()]
    formed = [generation["reason"].split() for generation in summarize(RUN)["generations"]]
    assert ["1.0", "2", "0", "14", *formed[0], "worker", "failed"] in rows
    assert ["1.1", "1", "14", "26", *formed[1], "its", "driver", "died"] in rows
    assert ["2.2", "3", "20", "40", *formed[2], "finished"] in rows


def test_sessions_that_formed_no_generation_are_counted() -> None:
    later = session("s2", 500.0, STARTED) + session("s3", 900.0, STARTED, generation(1, 2, 20, "resume"))
    rows = summarize(RUN[:9] + later)["generations"]
    assert [(row["generation"], row["session_number"]) for row in rows] == [(0, 1), (1, 1), (1, 3)]


def test_user_text_is_not_markup_and_losses_may_be_nan() -> None:
    events = session("s1", 0.0, STARTED, steps(1, "NaN"), ("run_failed", {"error": "KeyError: [red] in [/b]"}))
    text = shown(summarize(events))
    assert "KeyError: [red] in [/b]" in text and "NaN → NaN" in text


def test_no_step_is_missing_if_two_ranks_0_fail_before_one_of_them_reports_it() -> None:
    formed = [{"generation": number, "world_size": 3, "reason": "start", "first_step": number * 7} for number in (0, 1)]
    events = session("a", 0.0, STARTED, *(("generation_formed", fields) for fields in formed))
    events += session("b", 9.0, STARTED, ("generation_formed", {**formed[1], "first_step": 5}))
    rows = summarize(events)["generations"]
    assert [(row["first_step"], row["last_step"], row["ended_by"]) for row in rows] == [
        (0, 7, "a worker failed"),
        (7, 7, "its driver died"),
        (5, 5, None),
    ]


def test_a_late_report_belongs_to_its_own_generation() -> None:
    formed = [{"generation": number, "world_size": 3 - number, "reason": "start"} for number in (1, 2, 3)]
    events = session(
        "a",
        0.0,
        STARTED,
        ("generation_formed", formed[0]),
        ("generation_started", {**formed[0], "first_step": 0}),
        ("generation_formed", formed[1]),
        ("generation_ended", {"generation": 1, "last_step": 7, "reason": "workers join or leave"}),
        ("generation_started", {**formed[1], "first_step": 7}),
        ("generation_formed", formed[2]),
        ("generation_started", {**formed[2], "first_step": 8}),
    )
    rows = summarize(events)["generations"]
    assert [(row["first_step"], row["last_step"], row["ended_by"]) for row in rows] == [
        (0, 7, "workers join or leave"),
        (7, 8, "a worker failed"),
        (8, 8, None),
    ]


def test_older_values_are_shown_with_their_step() -> None:
    evaluation = {"name": "validation_loss", "value": 5.5}
    events = session(
        "s1",
        0.0,
        generation(1, 2, 0, "start"),
        steps(3, 1.0),
        ("evaluation_finished", {**evaluation, "step": 2}),
        ("evaluation_finished", {"name": "test_loss", "value": 4.0, "step": 3}),
    )
    summary = summarize(events)
    assert summary["metrics"] == {"validation_loss": 5.5, "test_loss": 4.0}
    assert summary["evaluated_at"] == {"validation_loss": 2, "test_loss": 3}
    assert "validation_loss 5.5 (step 2)  test_loss 4\n" in shown(summary)
    assert "1 → 1 (step" not in shown(summary)
    more = session("s1", 9.0, ("generation_ended", {"generation": 1, "last_step": 7}))
    assert "1 → 1 (step 3)" in shown(summarize([*events, *more])), "steps that were not logged came after it"


def test_a_run_with_several_world_sizes_has_a_table_of_them() -> None:
    text = shown(summarize(GROWN))
    assert "scaling, without start-up; efficiency is relative to 1 worker" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["1", "10", "10", "100%", "19"] in lines and ["2", "16.7", "8.33", "83%", "10"] in lines
    assert "efficiency" not in shown(summarize(GROWN[:6]))
