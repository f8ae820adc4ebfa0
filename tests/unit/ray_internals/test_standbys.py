"""The standbys of a worker group, without a cluster: which are started, ended, and used."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train.v2._internal.execution.worker_group import ActorMetadata

from elastic_ddp.ray_internals import standbys as module
from elastic_ddp.ray_internals.standbys import Standbys, StartingWorker

RUNNING = SimpleNamespace(running=True, error=None)
DIED = RayActorError(
    error_msg="The actor died unexpectedly before finishing this task.\n\tclass_name: ElasticWorker\nThe actor is dead "
    "because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits "
    "with a connection error code 2. End of file. Some common causes include: (1) the process was killed by the OOM "
    "killer"
)
"""Ray's error if a process was killed."""


def metadata(node_id: str, *gpus: str) -> ActorMetadata:
    return ActorMetadata("host", node_id, "10.0.0.1", 1, {"GPU": list(gpus)})


class FakeRay:
    """Actors whose calls return at once what a test has set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.killed: list[str] = []
        self.answers: dict[str, Any] = {}
        """Answers or errors of `take_place` by node; True by default."""
        self.statuses: dict[str, Any] = {}
        """Answers or errors of `poll_status` by node."""
        self.places: list[tuple[list[str], int]] = []
        """The GPUs and the process that each taken place had."""
        self.is_launched = True
        monkeypatch.setattr(module.ray, "kill", lambda actor: self.killed.append(actor.node_id))
        monkeypatch.setattr(module.ray, "wait", lambda refs, timeout: (refs, []))
        monkeypatch.setattr(module.ray, "get", self._get)
        self.standbys = Standbys(self._start, lambda starting: self.is_launched)

    def _get(self, answer: Any, timeout: float | None = None) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _start(self, neighbor: ActorMetadata) -> StartingWorker:
        node_id = neighbor.node_id

        def take_place(gpus: list[str], predecessor: int) -> Any:
            self.places.append((gpus, predecessor))
            return self.answers.get(node_id, True)

        actor = SimpleNamespace(
            node_id=node_id,
            take_place=SimpleNamespace(remote=take_place),
            poll_status=SimpleNamespace(remote=lambda: self.statuses.get(node_id, RUNNING)),
        )
        worker: Any = SimpleNamespace(actor=actor, metadata=metadata(node_id))
        now = time.monotonic()
        return StartingWorker(None, now, placed_at=now, actor=actor, worker=worker)

    def keep(self, nodes: str, number: int = 1, *, may_start: bool = True) -> list[str]:
        """Keeps `number` standbys on each node. Returns the nodes of all standbys afterwards."""
        self.standbys.keep(number, {node: metadata(node) for node in nodes}, may_start=may_start)
        self.standbys.advance()
        return sorted(standby.node_id for standby in self.standbys._standbys)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


def test_each_node_gets_its_standbys_when_they_may_start(fake: FakeRay) -> None:
    assert fake.keep("ab", 2, may_start=False) == []
    assert fake.keep("ab", 2) == ["a", "a", "b", "b"]
    assert fake.keep("ab", 2) == ["a", "a", "b", "b"]


def test_standbys_on_nodes_that_the_run_leaves_end(fake: FakeRay) -> None:
    fake.keep("ab")
    assert fake.keep("b", may_start=False) == ["b"] and fake.killed == ["a"]
    fake.standbys.clear()
    assert fake.killed == ["a", "b"]


def test_a_standby_gets_the_gpus_of_the_worker_that_failed_on_its_node(fake: FakeRay) -> None:
    fake.keep("ab")
    worker = fake.standbys.take(metadata("b", "3"))
    assert worker is not None and worker.metadata == metadata("b", "3") and fake.places == [(["3"], 1)]
    assert fake.keep("ab", may_start=False) == ["a"] and fake.killed == []
    assert fake.standbys.take(metadata("b")) is None and fake.standbys.take(metadata("c")) is None


def test_a_standby_without_a_training_function_takes_no_place(fake: FakeRay) -> None:
    fake.is_launched = False
    assert fake.keep("a") == ["a"]
    assert fake.standbys.take(metadata("a")) is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (False, "it has used CUDA on another GPU"),
        (DIED, "it did not answer"),
        (GetTimeoutError(), "it did not answer"),
    ],
)
def test_a_standby_that_cannot_take_a_place_ends_and_the_next_one_takes_it(
    fake: FakeRay, caplog: pytest.LogCaptureFixture, answer: Any, reason: str
) -> None:
    fake.keep("a", 2)
    fake.answers["a"] = answer
    assert fake.standbys.take(metadata("a")) is None
    assert fake.killed == ["a", "a"], "both were tried"
    assert caplog.messages == [f"a standby on 10.0.0.1 could not take the place of a worker: {reason}"] * 2


@pytest.mark.parametrize("status", [DIED, SimpleNamespace(running=False, error=ValueError("raised"))])
def test_a_standby_that_fails_is_counted_once_and_replaced(
    fake: FakeRay, caplog: pytest.LogCaptureFixture, status: Any
) -> None:
    fake.statuses["a"] = status
    fake.keep("a")
    assert fake.standbys.advance() == 1 and fake.standbys.advance() == 0
    assert not caplog.messages, "the rendezvous reports it"
    fake.statuses.clear()
    assert fake.keep("a") == ["a"]


@pytest.mark.parametrize(
    ("error", "reason"), [(None, "its process did not start within 0 s"), (DIED, "its process exited")]
)
def test_a_standby_whose_process_does_not_start_fails_with_one_short_line(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Any, reason: str
) -> None:
    fake.is_launched = False
    fake.keep("a")
    if error is None:
        monkeypatch.setattr(module, "START_TIMEOUT_S", 0.0)
    else:
        monkeypatch.setattr(fake.standbys, "_advance", mock.Mock(side_effect=error))
    assert fake.standbys.advance() == 1
    assert caplog.messages == [f"a standby on 10.0.0.1 failed to start: {reason}"]
