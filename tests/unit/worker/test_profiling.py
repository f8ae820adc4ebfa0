"""Profiles of a live run: which steps a rank records, what it answers, and that training is not disturbed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.rendezvous.messages import MemberRequest, ProfileRequest
from elastic_ddp.telemetry.description import describe_event
from elastic_ddp.telemetry.event import parse
from elastic_ddp.worker import profiling, trace_recording
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from tests.inside_run import close_profiler, job_of, leave
from tests.ranks import run_ranks
from tests.unit.single_worker import NewRun, PeerFailures, client_of, train
from tests.unit.worker.test_torn_steps import run_of_two

FOLDER = "profiles/20261127T101500Z"


def ask(run: Run, number: int = 1, **changes: Any) -> None:
    fields: dict[str, Any] = {"generation": 1, "ranks": (0,), "num_steps": 2, "memory": False, "folder": FOLDER}
    client_of(run).profile_requests.put(MemberRequest(number=number, profile=ProfileRequest(**fields | changes)))


def answer_of(run: Run, number: int = 1) -> dict[str, Any]:
    """What the worker has answered once it has left the run."""
    close_profiler(run)
    (answer,) = [answer for request, answer in client_of(run).answers if request == number]
    return answer


def ask_in(run: Run, index: int, **changes: Any) -> Any:
    """Returns a function that asks in the middle of a step."""
    return lambda step: ask(run, **changes) if step.index == index else None


def test_a_rank_records_the_asked_steps_and_stores_trace_and_figures(new_run: NewRun, tmp_path: Path) -> None:
    undisturbed = train(new_run(folder="undisturbed"))
    run = new_run()
    facts = train(run, ask_in(run, 1, memory=True))
    assert facts["weights_sha256"] == undisturbed["weights_sha256"]
    answer = answer_of(run)
    assert (answer["first_step"], answer["num_steps"], answer["ended_early"]) == (3, 2, None)
    assert answer["trace"] == f"{FOLDER}/rank-0.json.gz" and answer["snapshot"] is None
    assert 0 < answer["compute_s"] < answer["window_s"] and answer["peak_memory_bytes"] > 0
    assert "aten::addmm" in {each["name"] for each in answer["memory"]["operators"]}
    events = json.loads(gzip.decompress((tmp_path / "run" / answer["trace"]).read_bytes()))["traceEvents"]
    calls = [event for event in events if event["name"] == "aten::addmm"]
    assert {"step 3", "step 4", "forward", "backward"} <= {event["name"] for event in events}
    assert len(calls) == 2 * 2 * job_of(run).config.num_micro_batches, "two layers, in two steps"
    stored = json.loads((tmp_path / "run" / FOLDER / "rank-0-figures.json").read_text())
    assert stored == answer
    (recorded,) = map(parse, client_of(run).events_of("profiled"))
    assert describe_event(recorded) == f"[step 5] profiled steps 3-4 on 1 rank: {FOLDER}"
    assert not client_of(run).events_of("warned")


def test_a_second_request_is_refused_while_the_first_is_served(new_run: NewRun) -> None:
    run = new_run()

    def in_step(step: Step) -> None:
        ask_in(run, 0, num_steps=1)(step)
        ask_in(run, 2, number=2)(step)
        ask_in(run, 3, number=3, num_steps=1)(step)

    train(run, in_step)
    assert answer_of(run, 1)["first_step"] == 2
    assert "being profiled for another request" in answer_of(run, 2)["error"]
    assert answer_of(run, 3)["first_step"] == 5


def test_ranks_start_only_once_all_of_them_can(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "START_WITHIN_S", 0.0)
    run = new_run()
    train(run, ask_in(run, 1, ranks=(0, 1)))
    assert answer_of(run) == {"error": "not all 2 ranks could start within 0 s"}


def train_on_two(group: ProcessGroup, folder: Path, received_in: tuple[int, int] | None) -> dict[str, Any]:
    """Trains on two ranks, which receive a request in different steps. Returns the outcome and the answer."""
    torch.manual_seed(0)
    with run_of_two(group, folder, 8) as run:

        def in_step(step: Step) -> None:
            if received_in is not None and step.index == received_in[group.rank]:
                ask(run, generation=group.assignment.generation + 1, ranks=(0, 1))

        outcome = train(run, in_step)
    close_profiler(run)
    leave(run)
    return {"weights": outcome["weights_sha256"], "answers": client_of(run).answers}


def test_all_ranks_record_the_same_steps_whenever_they_receive_the_request(tmp_path: Path) -> None:
    undisturbed, _ = run_ranks(2, train_on_two, tmp_path / "undisturbed", None)
    profiled = run_ranks(2, train_on_two, tmp_path / "profiled", (0, 2))
    for rank in profiled:
        assert rank["weights"] == undisturbed["weights"]
        ((number, answer),) = rank["answers"]
        assert (number, answer["first_step"], answer["num_steps"]) == (1, 4, 2)
        assert answer["compute_s"] > 0 and answer["communication_s"] > 0
    assert len([*(tmp_path / "profiled" / FOLDER).glob("rank-*.json.gz")]) == 2


def test_a_profile_ends_with_its_generation_and_keeps_the_steps_that_are_done(new_run: NewRun) -> None:
    run, fail = new_run(), PeerFailures(4)

    def in_step(step: Step) -> None:
        ask_in(run, 0, num_steps=100)(step)
        fail(step.index)

    train(run, in_step)
    answer = answer_of(run)
    assert (answer["first_step"], answer["num_steps"]) == (2, 2)
    assert answer["ended_early"] == "workers joined, left or failed"


@pytest.mark.parametrize(("changes", "reason"), [({"generation": 1}, "joined, left or failed"), ({}, "the run ended")])
def test_a_profile_without_a_step_is_dropped_with_its_reason(new_run: NewRun, changes: Any, reason: str) -> None:
    run, fail = new_run(), PeerFailures(1)

    def in_step(step: Step) -> None:
        if changes:
            fail(step.index)
        ask_in(run, 0 if changes else 5)(step)

    train(run, in_step)
    assert reason in answer_of(run)["error"]


def test_a_profiler_of_the_training_function_is_left_alone(new_run: NewRun) -> None:
    run, own = new_run(), torch.profiler.profile()

    def in_step(step: Step) -> None:
        ask_in(run, 0)(step)
        if step.index == 2:
            own.start()
        elif step.index == 4:
            own.stop()

    train(run, in_step)
    assert "has used torch.profiler itself" in answer_of(run)["error"]
    assert any(each.key == "aten::addmm" for each in own.key_averages())
    assert "rank 0 was not profiled, and training continues" in client_of(run).events_of("warned")[0]["text"]


@pytest.mark.parametrize("place", ["start", "stop", "store"])
def test_a_profile_that_fails_does_not_disturb_training(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError("no space left on device")

    undisturbed = train(new_run(folder="undisturbed"))
    monkeypatch.setattr(trace_recording.TraceRecording, place, fail)
    run = new_run()
    facts = train(run, ask_in(run, 1))
    assert facts["weights_sha256"] == undisturbed["weights_sha256"]
    assert answer_of(run) == {"error": "OSError: no space left on device"}
    assert len(client_of(run).events_of("warned")) == 1
