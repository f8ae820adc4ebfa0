"""How long a rank spends in each phase of its steps, with a manual clock."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ddp.rendezvous.hang import Activity, Place
from elastic_ddp.telemetry.phases import STEP_PHASES
from elastic_ddp.worker.phase_clock import PhaseClock, Utilization

CPU = torch.device("cpu")


class ManualTimer:
    """A clock that a test moves, and a device that has come to `reached`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.reached = float("inf")

    def mark(self) -> float:
        return self.now

    def is_past(self, mark: float) -> bool:
        return mark <= self.reached

    def seconds(self, begin: float, end: float) -> float:
        assert end <= self.reached, "read before the device was there"
        return end - begin

    def release(self, mark: float) -> None: ...


class Rank:
    """The activity and the clock of a rank, as a worker connects them."""

    def __init__(self) -> None:
        self.timer = ManualTimer()
        self.clock = PhaseClock(CPU, self.timer)
        self.activity = Activity()
        self.activity.on_enter = self.clock.follow
        self.steps_done = 0
        self.begin()

    def begin(self) -> None:
        self.activity.enter("between steps")
        self.clock.begin(self.steps_done)

    def spend(self, place: Place, seconds: float) -> None:
        self.activity.enter(place)
        self.timer.now += seconds

    def step(self, *, data: float = 0.0, slow_by: float = 0.0) -> None:
        """A step of two micro-batches that takes 7 seconds, besides those given."""
        for place, seconds in (("data", data), ("forward", 1.0), ("backward", 1.0)):
            self.spend(place, seconds)  # type: ignore[arg-type]
        self.spend("forward", 1.0 + slow_by)
        self.spend("reduction", 1.0)
        self.clock.enter("communication")
        self.timer.now += 0.5
        self.clock.enter("backward")
        self.timer.now += 0.5
        self.spend("collective", 0.5)
        self.spend("optimizer", 0.5)
        self.spend("between steps", 0.75)
        self.steps_done += 1
        self.clock.step_done(self.steps_done)
        self.timer.now += 0.25  # the beginning of the next step


def settled_rank() -> Rank:
    """A rank past the first two steps of its generation, which are not measured."""
    rank = Rank()
    rank.step(data=100.0)
    rank.step(data=100.0)
    return rank


def test_a_step_is_split_into_its_phases() -> None:
    rank = Rank()
    for _ in range(4):
        rank.step(data=2.0)
    taken = rank.clock.take()
    assert (taken["step"], taken["num_steps"]) == (4, 2), "the first two steps of a generation are not measured"
    expected = {"data": 2.0, "forward": 2.0, "backward": 2.5, "communication": 1.0, "optimizer": 0.5, "other": 1.0}
    assert taken["phases"] == expected and list(taken["phases"]) == list(STEP_PHASES)
    assert taken["work_s"] == 8.0 and taken["data_s"] == {"3": 2.0, "4": 2.0}
    assert taken["memory_bytes"] is taken["utilization"] is None


def test_a_window_has_the_steps_since_the_last_one() -> None:
    rank = settled_rank()
    rank.step(data=1.0)
    assert rank.clock.take()["phases"]["data"] == 1.0
    assert rank.clock.take()["num_steps"] == 0
    rank.step(data=3.0)
    rank.step(data=5.0)
    assert rank.clock.take()["phases"]["data"] == 4.0


def test_a_new_generation_begins_a_new_window() -> None:
    rank = settled_rank()
    rank.step(data=100.0)
    rank.clock.end()
    rank.spend("rendezvous", 100.0)
    rank.begin()
    for _ in range(2):
        rank.step(data=100.0)
        assert rank.clock.take()["num_steps"] == 0, "its first two steps are not measured"
    rank.step(data=2.0)
    taken = rank.clock.take()
    assert (taken["step"], taken["num_steps"], taken["phases"]["data"]) == (6, 1, 2.0)


def test_waiting_for_a_commit_is_no_work_and_an_evaluation_is() -> None:
    rank = settled_rank()
    with rank.activity.within("commit"):
        rank.timer.now += 10.0
    with rank.activity.within("evaluation"):
        rank.timer.now += 2.0
    rank.step()
    taken = rank.clock.take()
    assert taken["phases"]["other"] == 13.0
    assert taken["in_other"] == {"evaluation": 2.0, "commit": 10.0}
    assert taken["work_s"] == 8.0


@given(st.lists(st.tuples(st.sampled_from(["data", "forward", "commit", "optimizer", "shares", "evaluation"]),
                          st.integers(0, 50), st.booleans()), min_size=1, max_size=40))  # fmt: skip
def test_phases_add_up_to_the_time_from_step_to_step(parts: list[tuple[Place, int, bool]]) -> None:
    rank = settled_rank()
    num_steps = 0
    begun_at = ended_at = rank.timer.now - 0.25  # the end of the step before
    for place, seconds, ends_step in parts:
        rank.spend(place, seconds)
        if ends_step:
            num_steps, ended_at = num_steps + 1, rank.timer.now
            rank.clock.step_done(2 + num_steps)
    taken = rank.clock.take()
    assert taken["num_steps"] == num_steps
    assert sum(taken["phases"].values()) * num_steps == pytest.approx(ended_at - begun_at, abs=1e-3)


def test_steps_that_the_device_has_not_finished_are_not_waited_for() -> None:
    rank = settled_rank()
    for _ in range(3):
        rank.timer.reached = rank.timer.now  # behind by a step
        rank.step(data=1.0)
    taken = rank.clock.take()
    assert (taken["step"], taken["num_steps"]) == (4, 2)
    rank.timer.reached = rank.timer.now + 100
    rank.step(data=1.0)
    assert rank.clock.take()["num_steps"] == 2, "none is left out"


def test_a_profiler_sees_ranges_named_after_step_and_phase() -> None:
    rank = Rank()
    rank.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        rank.step()
        rank.step()
    rank.step()
    ranges = [event for event in profiler.events() if event.name in STEP_PHASES or event.name.startswith("step ")]
    by_name = {event.name: event for event in ranges}
    assert {"step 2", "data", "forward", "backward", "communication", "optimizer", "other"} <= by_name.keys()
    step = by_name["step 2"].time_range
    inside = [event.name for event in ranges if step.start <= event.time_range.start < event.time_range.end <= step.end]
    assert {"data", "forward", "backward", "optimizer"} <= set(inside)


PROGRAM = """
import torch
from elastic_ddp.worker.phase_clock import TraceRange

model, step, phase = torch.nn.Linear(64, 64), TraceRange(on_gpu=False), TraceRange(on_gpu=False)
names = []
options = {"schedule": torch.profiler.schedule(wait=0, warmup=0, active=1, repeat=3)}
with torch.profiler.profile(**options, on_trace_ready=lambda profile: names.append(profile.key_averages())) as profile:
    for index in range(3):
        step.switch(f"step {index}")
        phase.switch("forward")
        model(torch.randn(8, 64)).sum().backward()
        phase.switch("other")
        profile.step()  # ends a session, and begins the next one
step.switch(None), phase.switch(None)
assert all(f"step {index}" in {each.key for each in of_step} for index, of_step in enumerate(names)), names
print("done")
"""


def test_ranges_survive_a_profiler_that_begins_a_session_as_it_ends_one() -> None:
    """Filled with garbage, freed memory that torch still uses ends the process."""
    environment = {**os.environ, "MALLOC_PERTURB_": "165", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout[-5:]) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("is_available", [True, False])
def test_the_utilization_of_a_gpu_is_read_in_another_thread(
    monkeypatch: pytest.MonkeyPatch, is_available: bool
) -> None:
    """Without NVML, it is asked for once."""
    calls, may_return = [], threading.Event()

    def read(device: Any) -> int:
        calls.append(device)
        assert may_return.wait(10)
        if not is_available:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
        return 75

    monkeypatch.setattr(torch.cuda, "utilization", read)
    utilization = Utilization(torch.device("cuda", 0))
    assert utilization.newest() is utilization.newest() is None, "it does not wait"
    may_return.set()
    assert utilization._reading is not None
    utilization._reading.exception(10)
    assert utilization.newest() == (0.75 if is_available else None)
    utilization.newest()
    utilization._reader.shutdown()
    assert len(calls) == (2 if is_available else 1)
