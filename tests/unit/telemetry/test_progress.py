from __future__ import annotations

import re
import threading
from io import StringIO

import pytest
from rich.console import Console

from elastic_ddp.telemetry.progress import MovingRate, Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Screen:
    def __init__(self, terminal: bool) -> None:
        self.file = StringIO()
        self.console = Console(
            file=self.file, force_terminal=terminal, width=160, color_system=None, _environ={"TERM": "xterm"}
        )

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.file.getvalue())

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_without_a_terminal_plain_lines_are_printed(clock: Clock) -> None:
    screen = Screen(terminal=False)
    with Progress(400, screen.console, clock=clock) as progress:
        for step in range(121):
            clock.now = step * 0.125
            progress.update(step, 2.314159, samples=step * 150, world_size=2, state="training")
    assert screen.lines == [
        "step 0/400  loss 2.314  2 workers",
        "step 40/400  loss 2.314  1,200 samples/s  2 workers  0:45 left",
        "step 80/400  loss 2.314  1,200 samples/s  2 workers  0:40 left",
        "step 120/400  loss 2.314  1,200 samples/s  2 workers  0:35 left",
    ]


def test_the_last_numbers_are_shown_at_the_end(clock: Clock) -> None:
    screen = Screen(terminal=False)
    with Progress(None, screen.console, clock=clock) as progress:
        progress.update(1, samples=8, world_size=1)
        clock.now = 1.0
        progress.update(2, samples=16, world_size=1)
    assert screen.lines == ["step 1  1 worker", "step 2  8 samples/s  1 worker"]
    silent = Screen(terminal=False)
    with Progress(10, silent.console, clock=clock):
        pass
    assert silent.text == ""


def test_the_last_step_and_changes_of_state_are_shown_at_once(clock: Clock) -> None:
    screen = Screen(terminal=False)
    with Progress(3, screen.console, clock=clock) as progress:
        for step, state in enumerate(["training", "training", "waiting for workers", "training"]):
            progress.update(step, samples=step, world_size=2, state=state)
    assert screen.lines == ["step 0/3  2 workers", "step 2/3  waiting for workers", "step 3/3  2 workers"]


def test_a_note_is_a_separate_line_without_markup(clock: Clock) -> None:
    for terminal in (False, True):
        screen = Screen(terminal)
        with Progress(3, screen.console, clock=clock) as progress:
            progress.update(1, samples=1, world_size=2)
            progress.note("generation 3: 2 workers [red]" + " on a long line" * 20)
        assert any(line.endswith("2 workers [red]" + " on a long line" * 20) for line in screen.lines)


def test_a_terminal_shows_a_bar_redrawn_at_most_ten_times_a_second(clock: Clock) -> None:
    screen = Screen(terminal=True)
    threads = threading.active_count()
    with Progress(1000, screen.console, clock=clock) as progress:
        for step in range(1, 1000):
            clock.now = step * 0.001
            progress.update(step, 1.0, samples=step * 8, world_size=4)
        assert threading.active_count() == threads
    assert 8 <= screen.text.count("samples/s") <= 14
    last = screen.lines[-1]
    assert "━" in last and "step 999/1,000  loss 1  8,000 samples/s  4 workers  0:01 left" in last
    assert screen.file.getvalue().endswith("\x1b[?25h"), "the cursor is visible again"


def test_the_rate_is_that_of_the_window() -> None:
    rate = MovingRate()
    assert rate.samples_per_s is None
    for second in range(40):
        rate.add(second, second, second * 100)
    assert rate.samples_per_s == 100 and rate.steps_per_s == 1
    for second in range(40, 80):
        rate.add(second, second, 3900 + (second - 39) * 10)
    assert rate.samples_per_s == 10
    rate.add(81, 12, 100)  # resumed from an earlier step
    assert rate.samples_per_s is None
    rate.add(81, 12, 100)
    assert rate.samples_per_s is None, "no time, no rate"


def test_a_pause_does_not_lower_the_rate(clock: Clock) -> None:
    screen = Screen(terminal=False)
    with Progress(None, screen.console, clock=clock) as progress:
        for now, step, state in ((0, 0, "training"), (1, 1, "training"), (2, 1, "waiting"), (90, 1, "training"),
                                 (91, 2, "training"), (96, 7, "training")):  # fmt: skip
            clock.now = now
            progress.update(step, samples=step * 50, world_size=1, state=state)
    assert screen.lines[-1] == "step 7  50 samples/s  1 worker"
