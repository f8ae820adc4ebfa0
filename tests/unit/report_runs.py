"""The ledger of a made-up run for the tests of the report: two kills, a drain, joins, a resume."""

from __future__ import annotations

import math
from typing import Any

from elastic_ddp.telemetry.event import Event
from tests.unit.ledger_events import ledger_event

STEP_S = {1: 0.5, 2: 0.3, 3: 0.2}
"""Seconds of a step, by world size."""
PHASES = {"data": 0.05, "forward": 0.25, "backward": 0.45, "communication": 0.1, "optimizer": 0.1, "other": 0.05}
"""Share of each phase in a step."""
MEMBERS = {"a": 11, "b": 12, "c": 13, "d": 14, "e": 15, "f": 16}
"""Process ids."""


class Recorder:
    """Records what happens to a run, as its driver would."""

    def __init__(
        self, name: str, *, at: float = 1_000_000.0, loss: float = 6.0, gpus: bool = True, **config: Any
    ) -> None:
        self.events: list[Event] = []
        self._name, self._at, self._loss, self._gpus, self._config = name, at, loss, gpus, config
        self._step = self._generation = self._session = 0
        self._account: dict[str, float] = {}
        self._members = ""

    def record(self, event: str, **fields: Any) -> None:
        session = f"s{self._session}"
        common = {"at": self._at, "time": self._at, "seq": len(self.events), "session": session}
        self.events.append(ledger_event(event, **{**common, **fields}))

    def start(self, step: int | None = None, pause_s: float = 0.0) -> None:
        self._at += pause_s
        self._session, self._generation, self._step = self._session + 1, 0, step or 0
        config = {"name": self._name, "storage": "s3://b/runs", "checkpoint": {"every_steps": 40}, **self._config}
        versions = {"python": "3.11.7", "torch": "2.13.0"}
        self.record("session_started", resumed_from_step=step, total_steps=480, config=config, versions=versions)
        self._at += 6.0

    def form(self, members: str, reason: str) -> None:
        """A generation forms with these workers, and its first step takes 1 s."""
        self._generation, self._members = self._generation + 1, members
        generation = {"generation": self._generation, "world_size": len(members), "reason": reason}
        told = [{"rank": rank, "node": "n1", "pid": MEMBERS[name], "id": name} for rank, name in enumerate(members)]
        self.record("generation_formed", first_step=self._step, members=told, **generation)
        self._account = {"rendezvous": 0.1, "hand_over": 0.2, "useful": 0.0}
        self._at += 0.3
        self.record("generation_started", first_step=self._step, **generation)

    def train(self, until: int) -> None:
        generation, size = {"generation": self._generation}, len(self._members)
        first = self._step
        while self._step < until:
            seconds = 1.0 if self._step == first else STEP_S[size]
            self._at, self._step = self._at + seconds, self._step + 1
            self._account["useful"] += seconds
            if self._step == first + 1:
                self.record("first_step", seconds=1.0, **generation)
            if self._step % 4 == 0:
                loss = 2.0 + (self._loss - 2.0) * math.exp(-self._step / 120) + 0.1 * math.sin(self._step)
                metrics = {"grad_norm": 1.0 + 0.5 * math.cos(self._step / 7)}
                fields = {"loss": loss, "samples": 32 * self._step, "world_size": size, "metrics": metrics}
                self.record("steps_completed", step=self._step, account=dict(self._account), **fields, **generation)
            if self._step % 20 == 0:
                self._measure(size)
            if self._step % 40 == 0:
                self.record("commit_succeeded", step=self._step, seconds=0.13, num_bytes=3 << 20, **generation)
                self.record("evaluation_finished", step=self._step, name="validation_loss", value=2.2 + 40 / self._step)

    def _measure(self, size: int) -> None:
        step_s = STEP_S[size]
        work_s = [0.8 * step_s * (1.3 if rank == 2 and self._step < 100 else 1.0) for rank in range(size)]
        gpus = {"memory_bytes": [(6 << 30) + rank for rank in range(size)], "utilization": [0.8] * size}
        phases = {name: share * step_s for name, share in PHASES.items()}
        common = {"generation": self._generation, "step": self._step, "num_steps": 20, "micro_batches": [2] * size}
        common |= {"work_s": work_s, "slowest_rank": work_s.index(max(work_s))}
        self.record("phases_measured", phases=phases, **common, **(gpus if self._gpus else {}))

    def lose(self, name: str, error: str = "its process ended: exit signal SIGKILL") -> None:
        self._at += 0.2
        self.record("worker_failed", generation=self._generation, member=name, error=error)
        self._account["detection"] = 0.2
        self.record("generation_account", generation=self._generation, account=dict(self._account))

    def end(self, reason: str) -> None:
        ended = {"generation": self._generation, "last_step": self._step, "account": dict(self._account)}
        self.record("generation_ended", reason=reason, **ended)

    def leave(self, name: str, kind: str) -> None:
        self.end("workers join or leave")
        self.record("worker_left", generation=self._generation, member=name, kind=kind)

    def finish(self, status: str, total: int) -> None:
        self.end("the run ended")
        self._at += 1.0
        samples = 32 * self._step
        self.record("run_finished", status=status, steps=self._step, total_steps=total, samples=samples, at=None)
        self.record("session_ended", at=None)


def eventful(name: str = "lm", **options: Any) -> list[Event]:
    """A run of 480 steps in two sessions: two workers are lost, one is drained, and three join."""
    run = Recorder(name, **options)
    run.start()
    run.form("abc", "start")
    run.train(120)
    run.lose("b")
    run.form("ac", "worker failed")
    run.train(160)
    run.end("workers join or leave")
    run.form("acd", "workers joined")
    run.train(240)
    run.lose("a")
    run.form("cd", "worker failed")
    run.train(290)
    run.end("workers join or leave")
    run.form("cde", "workers joined")
    run.train(330)
    run.leave("d", "drain")
    run.form("ce", "workers left")
    run.train(345)
    run.finish("stopped", 480)
    run.start(345, pause_s=3600.0)
    run.form("abc", "resume")
    run.train(480)
    run.finish("finished", 480)
    return run.events


def calm(name: str = "calm", **options: Any) -> list[Event]:
    """A run of one session on two workers."""
    run = Recorder(name, **options)
    run.start()
    run.form("ab", "start")
    run.train(480)
    run.finish("finished", 480)
    return run.events
