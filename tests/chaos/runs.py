"""The runs of the chaos tests, and the checks that each of them must pass."""

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
from elastic_ddp.telemetry.event import Event
from tests.chaos.faults import LINGERING, Fault, Happened, happened, make_train
from tests.integration import jobs

STEPS = jobs.STEPS
FREE_CPUS_WITHIN_S = 60.0
"""How long Ray may take to free the CPUs of the previous run."""
DEADLY = ("SIGKILL", "SIGSTOP", "SIGSEGV", "gil", "hang", "node")
"""Faults after which a worker counts as failed."""


def until(condition: Callable[[], bool], run: Future[ed.RunResult], timeout_s: float = 120) -> None:
    """Waits for a condition; fails if the run ends first."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert not run.done(), run.result()
        assert time.monotonic() < end, f"not true within {timeout_s} s"
        time.sleep(0.05)


@dataclass
class Trial:
    """One run and its faults."""

    folder: Path
    """Folder of the data set and all runs."""
    name: str
    faults: Sequence[Fault] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from those of all chaos tests."""
    hold: Callable[[ed.Run, int], None] | None = None
    """Called in the middle of each step, to block it until something has happened (see `jobs.make_train`). A step
    before a fault waits for all workers anyway."""
    write_s: float = 0.0
    """Seconds that each write of a save takes. If not 0, steps do not wait for saves."""
    wait_for_cpus: bool = True
    """Whether to wait for free CPUs before the run starts; not with an autoscaler."""

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
        """The arguments of a driver in another process, see `faults.main`."""
        faults = [asdict(fault) for fault in self.faults]
        return {"data": self.data, "config": self.config, "faults": faults, "markers": str(self.markers)}

    def fit(self) -> ed.RunResult:
        """Runs it with a driver in this process."""
        max_workers = self.config["max_workers"]
        train = make_train(self.faults, self.markers, num_workers=max_workers, also=self.hold, write_s=self.write_s)
        end = time.monotonic() + FREE_CPUS_WITHIN_S
        # Workers of the previous run may still exist.
        while self.wait_for_cpus and ray.available_resources().get("CPU", 0) < max_workers:
            assert time.monotonic() < end, f"no free CPUs: {placement_group_table()}"
            time.sleep(0.05)
        try:
            return ed.ElasticTrainer(train, self.data, self.config, transform=jobs.jitter).fit()
        finally:
            self.kill_leftovers()

    @contextmanager
    def live(self) -> Iterator[tuple[RunHandle, Future[ed.RunResult]]]:
        """Runs it in a thread. Gives a handle of the live run and its future result."""
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

    def kill_leftovers(self) -> None:
        """Kills victims of faults that still run, such as stopped processes."""
        for victim in self.happened():
            with suppress(OSError):
                if Path(f"/proc/{victim.pid}/cmdline").read_text().startswith("ray::"):
                    os.kill(victim.pid, signal.SIGKILL)

    def happened(self) -> list[Happened]:
        """Returns the faults that have happened."""
        return happened(self.markers)

    def events(self, *kinds: str) -> list[Event]:
        """Returns the ledger's events of some names, or all."""
        ledger = read_ledger(Storage(self.config["storage"]).at(self.name))
        return [event for event in ledger if not kinds or event.event in kinds]

    def failed_members(self) -> set[str]:
        """Returns the ids of members that counted as failed."""
        return {event.member for event in self.events("worker_failed", "newcomer_failed") if event.member}

    def members_that_left(self) -> set[str]:
        """Returns the ids of members that left because they were asked to."""
        return {event.member for event in self.events("worker_left")}

    def check(self, summary: Mapping[str, Any], calm: Mapping[str, Any]) -> None:
        """Checks that each fault happened, that it hit only its victim, and that it made no difference."""
        self.check_results(summary, calm)
        facts = self.happened()
        assert len(facts) == len(self.faults), f"of {list(self.faults)} only these happened: {facts}"
        pairs = list(zip(self.faults, facts, strict=True))
        victims = {victim.member for fault, victim in pairs if fault.how in DEADLY}
        newcomers = {victim.member for fault, victim in pairs if fault.place == "build"}
        assert {event.member for event in self.events("newcomer_failed")} >= newcomers
        victims |= newcomers
        num_victims = len(victims) + sum(len(fault.along) for fault in self.faults)
        # A driver that is killed in the same step may not have recorded the failure before it.
        driver_steps = {fault.step for fault in self.faults if fault.how == "driver"}
        unrecorded = {victim.member for fault, victim in pairs if fault.how in DEADLY and fault.step in driver_steps}
        failed = self.failed_members() | unrecorded
        assert failed >= victims and len(failed) == num_victims, "only the victims failed"
        assert self.members_that_left() >= {victim.member for fault, victim in pairs if fault.how in LINGERING}
        hung = {victim.member for fault, victim in pairs if fault.how == "hang"}
        assert {culprit for event in self.events("hang_detected") for culprit in event.culprits} == hung
        assert len(self.events("rendezvous_restarted")) == sum(fault.how == "rendezvous" for fault in self.faults)
        self.check_steps(summary["generations"])

    @staticmethod
    def check_results(summary: Mapping[str, Any], calm: Mapping[str, Any]) -> None:
        """Checks that the run finished with the weights and samples of the undisturbed run."""
        assert summary["status"] == "finished"
        for key in ("steps", "samples", "samples_sha256", "weights_sha256"):
            assert summary[key] == calm[key], key

    def check_steps(self, generations: Collection[Mapping[str, Any]]) -> None:
        """Checks that no step was lost, that at most the one in flight was repeated, and that sessions resumed from
        the newest commit."""
        commits = {generation["session"]: 0 for generation in generations}
        for started in self.events("session_started"):
            if started.session in commits:
                commits[started.session] = started.resumed_from_step or 0
        sessions = list(commits)
        for before, after in pairwise(generations):
            if before["session"] == after["session"]:
                assert after["first_step"] == before["last_step"], generations
        for before, after in pairwise(sessions):
            written = [event.step for event in self.events("commit_succeeded") if event.session == before]
            assert commits[after] >= max(written, default=0), "a session resumes from the newest commit"
            first = next(generation for generation in generations if generation["session"] == after)
            assert first["first_step"] == commits[after]
