"""Runs of the chaos tests, and what has to be true of every one of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
from ray.util import placement_group_table

import elastic_ddp as ed
from elastic_ddp.driver.run_handle import RunHandle, live_runs
from elastic_ddp.errors import ElasticDDPError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger
from elastic_ddp.telemetry.events import Event
from tests.chaos.faults import Fault, Happened, happened, make_train, marker_of
from tests.integration import jobs

STEPS = jobs.STEPS
ROOM_S = 60.0
"""How long Ray may take to have room for a run after the one before it."""
DEADLY = ("SIGKILL", "SIGSTOP", "SIGSEGV", "gil", "hang", "node")
"""Faults that end with a lost worker."""


def until(condition: Callable[[], bool], run: Future[ed.RunResult], timeout_s: float = 120) -> None:
    """Waits for a condition for as long as the run lives."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert not run.done(), run.result()
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@dataclass
class Trial:
    """One run and its faults."""

    folder: Path
    """With the data set in it, and all runs."""
    name: str
    faults: Sequence[Fault] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """Other than those of all chaos tests."""
    hold: Callable[[ed.Run, int], None] | None = None
    """As `jobs.make_train` takes it: what holds a step until something has happened. A step in which a fault is next
    waits for all workers anyway."""

    write_s: float = 0.0
    """How long every write of a save takes, if the run is not to wait for saves."""
    has_room: bool = True
    """Whether there is room for it before it begins, and not made for it."""

    @property
    def markers(self) -> Path:
        markers = self.folder / "markers" / self.name
        markers.mkdir(parents=True, exist_ok=True)
        return markers

    @property
    def data(self) -> str:
        return str(self.folder / "data")

    @property
    def config(self) -> dict[str, Any]:
        changes = {"min_workers": 1, "resize_interval_s": 1.0, **self.settings}
        return jobs.settings(str(self.folder / "runs"), self.name, 3, **changes)

    @property
    def command(self) -> dict[str, Any]:
        """What a driver of its own needs to know, see `faults.main`."""
        faults = [asdict(each) for each in self.faults]
        return {"data": self.data, "config": self.config, "faults": faults, "markers": str(self.markers)}

    def fit(self) -> ed.RunResult:
        """Runs it in this process."""
        max_workers = self.config["max_workers"]
        train = make_train(self.faults, self.markers, num_workers=max_workers, also=self.hold, write_s=self.write_s)
        end = time.monotonic() + ROOM_S
        while (
            self.has_room and ray.available_resources().get("CPU", 0) < max_workers
        ):  # the workers of the run before are still there
            assert time.monotonic() < end, f"no room: {placement_group_table()}"
            time.sleep(0.05)
        try:
            return ed.ElasticTrainer(train, self.data, self.config, transform=jobs.jitter).fit()
        finally:
            self.bury()

    @contextmanager
    def live(self) -> Iterator[tuple[RunHandle, Future[ed.RunResult]]]:
        """Runs it in a thread. What is in the block asks the live run for something."""
        with ThreadPoolExecutor(1) as thread:
            result = thread.submit(self.fit)
            until(lambda: self.name in live_runs(), result)
            handle = ed.get_run(self.name)
            try:
                yield handle, result
            except BaseException:
                with suppress(ElasticDDPError):
                    handle.stop()
                raise

    def bury(self) -> None:
        """Ends what a fault has left behind."""
        for each in self.happened():
            with suppress(OSError):
                if Path(f"/proc/{each.pid}/cmdline").read_text().startswith("ray::"):
                    os.kill(each.pid, signal.SIGKILL)

    def happened(self) -> list[Happened]:
        """The faults that did."""
        return happened(self.markers)

    def marker(self, number: int) -> Path:
        """What exists once a fault has happened."""
        return marker_of(self.markers, number)

    def events(self, *kinds: str) -> list[Event]:
        """Those of the ledger."""
        ledger = read_ledger(Storage(self.config["storage"]).at(self.name))
        return [event for event in ledger if not kinds or event.event in kinds]

    def failure(self) -> set[str]:
        """Members that were taken for dead."""
        return {event.member for event in self.events("worker_lost", "newcomer_lost") if event.member}

    def left(self) -> set[str]:
        """Members that left in peace."""
        return {event.member for event in self.events("worker_left")}

    def check(self, summary: Mapping[str, Any], calm: Mapping[str, Any]) -> None:
        """Every fault happened, in the one it was meant for and in nobody else, and made no difference."""
        self.check_results(summary, calm)
        facts = self.happened()
        assert len(facts) == len(self.faults), f"of {list(self.faults)} only these happened: {facts}"
        by_how = [(fault.how, each) for fault, each in zip(self.faults, facts, strict=True)]
        victims = {each.member for how, each in by_how if how in DEADLY}
        failed = {each.member for fault, each in zip(self.faults, facts, strict=True) if fault.place == "build"}
        assert {event.member for event in self.events("newcomer_lost")} >= failed
        victims |= failed
        num_victims = len(victims) + sum(len(fault.along) for fault in self.faults)
        # A driver that is killed in the same step may not have written yet who was lost before.
        steps_of_drivers = {fault.step for fault in self.faults if fault.how == "driver"}
        pairs = zip(self.faults, facts, strict=True)
        unwritten = {each.member for fault, each in pairs if fault.how in DEADLY and fault.step in steps_of_drivers}
        failure = self.failure() | unwritten
        assert failure >= victims and len(failure) == num_victims, "nobody else was lost"
        leavers = {each.member for how, each in by_how if how in ("SIGTERM", "drain")}
        assert self.left() >= leavers, "they left in peace"
        hung = {each.member for how, each in by_how if how == "hang"}
        assert {each for event in self.events("hang") for each in event.culprits} == hung
        hows = [how for how, _ in by_how]
        assert len(self.events("rendezvous_restarted")) == hows.count("rendezvous")
        self.check_steps(summary["generations"])

    @staticmethod
    def check_results(summary: Mapping[str, Any], calm: Mapping[str, Any]) -> None:
        """The run is finished, with the bits and the samples of the undisturbed one."""
        assert summary["status"] == "finished"
        for key in ("steps", "samples", "samples_sha256", "weights_sha256"):
            assert summary[key] == calm[key], key

    def check_steps(self, generations: Collection[Mapping[str, Any]]) -> None:
        """No step was lost, and none was done twice but the one in flight. A session goes on from the newest commit."""
        commits = dict.fromkeys(dict.fromkeys(each["session"] for each in generations), 0)
        for session in commits:
            started = next(each for each in self.events("session_started") if each.session == session)
            commits[session] = started.resumed_from_step or 0
        sessions = list(commits)
        for before, after in pairwise(generations):
            if before["session"] == after["session"]:
                assert after["first_step"] == before["last_step"], generations
        for before, after in pairwise(sessions):
            written = [each.step for each in self.events("commit") if each.session == before]
            assert commits[after] >= max(written, default=0), "the newest commit counts"
            first = next(each for each in generations if each["session"] == after)
            assert first["first_step"] == commits[after]
