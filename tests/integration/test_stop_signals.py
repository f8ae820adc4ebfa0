"""Signals that stop a run whose driver has started Ray, as supervisors, shells and closed terminals send them."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger
from tests.integration.clusters import parent_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PROGRAM = """
import sys
from pathlib import Path
import torch
import elastic_ddp as ed
from tests.integration import jobs

folder = Path(sys.argv[1])

def train(run):
    model = run.prepare(jobs.Model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.01))
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(jobs.loss_fn(model, batch))
            step.optimize()
        if step.index == 0:
            print(f"größe: worker {run.rank} →")
        if step.index == 5:
            (folder / f"training-{run.rank}").touch()

config = jobs.settings(str(folder / "runs"), "stopped", 2, steps=10**6, checkpoint={"every_seconds": 3600.0})
(folder / "result").write_text(ed.ElasticTrainer(train, str(folder / "data"), config).fit().status)
"""
STOPS_WITHIN_S = 60.0
"""A few seconds on an idle machine. A run whose Ray ends first waits for more than a minute."""


def descendants(pid: int) -> set[int]:
    """Returns the ids of a process's children, their children, and so on."""
    found = {pid}
    parents = {int(stat.parent.name): parent_of(stat) for stat in Path("/proc").glob("[0-9]*/stat")}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def stop_run(folder: Path, stop: Callable[[int], object], terminal: int | None = None) -> str:
    """Starts a run in a session of its own, calls `stop` with its process group, and checks how it ends.

    Returns what it printed, unless `terminal`, a file descriptor, shows it.
    """

    def before_exec() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)  # background jobs and `nohup` ignore them
        if terminal is not None:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    (folder / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "RAY_ADDRESS": "local", "PYTHONIOENCODING": "ascii"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    with (folder / "log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "program.py", str(folder)],
            cwd=folder,
            env=environment,
            stdout=log if terminal is None else terminal,
            stderr=log if terminal is None else terminal,
            start_new_session=True,
            preexec_fn=before_exec,
        )
    try:
        while len(list(folder.glob("training-*"))) < 2:
            assert driver.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        processes = descendants(driver.pid)
        stop(driver.pid)
        assert driver.wait(STOPS_WITHIN_S) == 0, (folder / "log").read_text()
    finally:
        driver.kill()
        driver.wait()
    assert (folder / "result").read_text() == "stopped"
    events = read_ledger(Storage(folder / "runs" / "stopped"))
    commits = [event.step for event in events if event.event == "commit_succeeded"]
    assert len(commits) == 1 and commits[0] > 5, "it committed when it was asked to stop, and only then"
    assert commits[0] == max(event.step for event in events if event.event == "steps_completed"), "no step is lost"
    end = time.monotonic() + 10
    while left := {pid for pid in processes if Path(f"/proc/{pid}").exists()}:
        assert time.monotonic() < end, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
        time.sleep(0.1)
    return (folder / "log").read_text()


def test_signals_to_the_whole_process_group_commit_and_stop_the_run(folder: Path) -> None:
    def stop(group: int) -> None:
        """Sends what `timeout` and a closed ssh session send, each twice."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGHUP):
            os.killpg(group, number)
            time.sleep(0.02)  # two signals that are pending at once are one

    console = stop_run(folder, stop)
    assert "Traceback" not in console
    for rank in range(2):
        assert console.count(f"gr\\xf6\\xdfe: worker {rank} \\u2192\n") == 1, "each print appears once, in ASCII"


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_each_stop_signal_commits_and_stops_the_run(
    folder: Path, send: Callable[[int, int], None], number: int
) -> None:
    assert "Traceback" not in stop_run(folder, lambda group: send(group, number))


@pytest.mark.chaos
def test_the_end_of_its_terminal_commits_and_stops_the_run(folder: Path) -> None:
    screen, terminal = pty.openpty()
    reader = subprocess.Popen(["cat"], stdin=screen, stdout=subprocess.DEVNULL)
    os.close(screen)

    def hang_up(_: int) -> None:
        os.close(terminal)
        reader.kill()
        reader.wait()

    stop_run(folder, hang_up, terminal)
