from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ddp.telemetry.stopwatch import PHASES, Phase, Stopwatch, split_wasted


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.on_read: Callable[[], None] | None = None

    def __call__(self) -> float:
        now = self.now
        if (on_read := self.on_read) is not None:
            self.on_read = None
            on_read()
        return now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> Stopwatch:
    return Stopwatch(clock)


def test_each_phase_has_the_time_spent_in_it(clock: Clock, watch: Stopwatch) -> None:
    watch.start("rendezvous")
    clock.now += 0.25
    watch.enter("hand_over")
    clock.now += 0.5
    watch.enter("useful")
    clock.now += 8
    watch.enter("checkpoint")
    clock.now += 1
    watch.enter("useful")
    clock.now += 2.0000004
    assert watch.seconds() == {"rendezvous": 0.25, "hand_over": 0.5, "useful": 10.0, "checkpoint": 1.0}


def test_a_start_resets_the_stopwatch(clock: Clock, watch: Stopwatch) -> None:
    assert (watch.seconds(), watch.since_mark()) == ({}, 0.0)
    watch.start("useful")
    clock.now += 5
    watch.mark()
    clock.now += 5
    watch.start("rendezvous")
    clock.now += 1
    assert watch.seconds() == {"rendezvous": 1.0}
    assert watch.since_mark() == 1.0, "no step has been done"


def test_a_stopwatch_starts_with_its_first_phase(clock: Clock, watch: Stopwatch) -> None:
    watch.move("useful", "redone", 1.0)
    assert watch.seconds() == {}
    with watch.within("checkpoint"):
        clock.now += 1
    watch.enter("useful")
    clock.now += 2
    assert watch.seconds() == {"checkpoint": 1.0, "useful": 2.0}


def test_a_block_ends_in_the_previous_phase_also_after_an_error(clock: Clock, watch: Stopwatch) -> None:
    watch.start("useful")
    with watch.within("checkpoint"):
        clock.now += 1
        with pytest.raises(RuntimeError), watch.within("detection"):
            clock.now += 2
            raise RuntimeError("a peer failed")
        clock.now += 4
    clock.now += 8
    assert watch.seconds() == {"checkpoint": 5.0, "detection": 2.0, "useful": 8.0}


@pytest.mark.parametrize(("requested", "moved"), [(2.0, 2.0), (3.0, 3.0), (7.0, 3.0), (-1.0, 0.0)])
@pytest.mark.parametrize("still_in_it", [True, False])
def test_at_most_the_booked_seconds_are_moved(
    clock: Clock, watch: Stopwatch, requested: float, moved: float, still_in_it: bool
) -> None:
    watch.start("useful")
    clock.now += 3
    if not still_in_it:
        watch.enter("detection")
    watch.move("useful", "redone", requested)
    assert watch.seconds().get("redone") == moved
    assert watch.seconds()["useful"] == 3.0 - moved
    clock.now += 1
    assert watch.seconds()["useful" if still_in_it else "detection"] == (4.0 - moved if still_in_it else 1.0)


def test_the_time_since_the_last_step_is_known(clock: Clock, watch: Stopwatch) -> None:
    watch.start("useful")
    clock.now += 3
    watch.mark()
    clock.now += 0.5
    watch.enter("detection")
    assert watch.since_mark() == 0.5


phases = st.sampled_from(PHASES)
durations = st.floats(0, 1e4)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("enter"), phases),
            st.tuples(st.just("wait"), durations),
            st.tuples(st.just("move"), phases, phases, st.floats(-10, 1e5)),
        ),
        max_size=30,
    )
)
def test_phases_add_up_to_the_time_since_the_start(actions: list[tuple[Any, ...]]) -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.start("rendezvous")
    began = clock.now
    for name, *arguments in actions:
        if name == "wait":
            clock.now += arguments[0]
        else:
            getattr(watch, name)(*arguments)
        seconds = watch.seconds()
        assert min(seconds.values()) >= 0 and seconds.keys() <= set(PHASES)
        assert sum(seconds.values()) == pytest.approx(clock.now - began, abs=1e-5)


def test_a_read_during_a_switch_is_consistent(clock: Clock, watch: Stopwatch) -> None:
    watch.start("useful")
    clock.now += 3

    def switch() -> None:
        clock.now += 1
        watch.enter("checkpoint")

    clock.on_read = switch
    assert watch.seconds() == {"useful": 3.0}
    assert watch.seconds() == {"useful": 4.0, "checkpoint": 0.0}


def test_another_thread_may_read_at_any_time() -> None:
    watch = Stopwatch()
    watch.start("useful")
    totals: list[float] = []
    stopped = threading.Event()

    def read() -> None:
        while not stopped.is_set():
            totals.append(sum(watch.seconds().values()))

    reader = threading.Thread(target=read)
    reader.start()
    order: list[Phase] = ["checkpoint", "useful"]
    while len(totals) < 1000 and reader.is_alive():
        for phase in order:
            watch.enter(phase)
        watch.move("useful", "redone", 1e-6)
    stopped.set()
    reader.join()
    assert len(totals) >= 1000, "reading failed"
    assert all(later >= earlier - 1e-5 for earlier, later in pairwise(totals))


@pytest.mark.parametrize(
    ("seconds", "worked", "redone", "detection"),
    [
        (0.3, 1.0, 0.3, 0.0),
        (1.0, 1.0, 1.0, 0.0),
        (6.0, 1.0, 1.0, 5.0),
        (6.0, 0.0, 0.0, 6.0),
        (6.0, -1.0, 0.0, 6.0),
        (-0.1, 1.0, 0.0, 0.0),
    ],
)
def test_wasted_time_beyond_the_work_is_detection(
    seconds: float, worked: float, redone: float, detection: float
) -> None:
    assert split_wasted(seconds, worked) == (redone, detection)
