"""The stacks of a run's workers: of live ones, which threads beside training send, and of the last hang."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.cli import stacks as cli_stacks
from elastic_ddp.driver import run_handle
from elastic_ddp.driver.run_handle import RunHandle
from elastic_ddp.errors import ConfigError, ElasticDDPError
from elastic_ddp.rendezvous.actor import Rendezvous
from elastic_ddp.rendezvous.client import RendezvousClient
from elastic_ddp.telemetry.stacks import parse_stacks, stacks_of_last_hang
from tests.unit.cli.test_cli import invoke, write_ledger
from tests.unit.inprocess_rendezvous import FAKE_RAY, InProcessRendezvous
from tests.unit.ledger_events import ledger_event
from tests.unit.rendezvous_harness import Play, member, signaled, started

WAITS = (
    'Thread TrainingThread(x):\n  File "a.py", line 1, in train\n    wait()\n\nThread sender:\n  File "b.py", line 2\n'
)
HANGS = WAITS.replace("wait()", "stuck()")


def test_a_request_reaches_each_worker_once_and_every_answer_counts(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)
        await rendezvous.heartbeat_address(member("b", 0))  # a worker that builds its model
        number = await rendezvous.request_stacks()
        for who in (member("a", 0), member("b", 0)):
            signals = await signaled(rendezvous, who, 1, lambda signals: signals.requests)
            assert [request.number for request in signals.requests] == [number]
            await rendezvous.answer(who, number, {"place": "data", "stacks": WAITS})
        again = await rendezvous.request_stacks()
        signals = await rendezvous.poll_signals(member("a", 0), 1, None, received=number)
        assert [request.number for request in signals.requests] == [again]
        answers = await rendezvous.answers(number)
        assert answers is not None
        assert [(each["rank"], each["id"], each["answer"] is None) for each in answers] == [
            (0, "a0", False),
            (1, "a1", True),
            (None, "b0", False),
        ]
        await rendezvous.retire(member("a", 1))
        answers = await rendezvous.answers(number)
        assert answers is not None and "left its generation" in answers[1]["answer"]["error"]
        assert await rendezvous.answers(number + 10) is None

    play(scenario)


def test_a_worker_sends_its_stacks_while_its_training_thread_hangs(
    inprocess_rendezvous: Callable[..., InProcessRendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_handle, "ray", FAKE_RAY)
    monkeypatch.setattr(run_handle, "_STACKS_WITHIN_S", 1.0)
    rendezvous, released = inprocess_rendezvous(), threading.Event()

    def wait_for_a_peer() -> None:
        released.wait()

    training = threading.Thread(target=wait_for_a_peer, name="TrainingThread(train)")
    training.start()
    try:
        with closing(RendezvousClient(rendezvous, member("a", 0), 30.0)):
            for rank in (0, 1):
                rendezvous.ask("heartbeat_address", member("a", rank))
            facts = RunHandle("lm", rendezvous).stacks()
    finally:
        released.set()
        training.join()
    (worker,), (missing,) = facts["workers"], facts["missing"]
    assert (worker["id"], worker["pid"], worker["place"]) == ("a0", 100, "start")
    assert worker["threads"][0]["name"].startswith("TrainingThread")
    assert "wait_for_a_peer" in worker["threads"][0]["stack"]
    assert missing["id"] == "a1" and "no answer within 1 s" in missing["reason"]


def test_a_request_that_a_restarted_rendezvous_forgot_is_an_error() -> None:
    class Handle(RunHandle):
        def _call(self, method: str, *arguments: Any) -> Any:
            return 7 if method == "request_stacks" else None

    with pytest.raises(ElasticDDPError, match=r"run 'lm': its rendezvous has restarted meanwhile\. Ask again\."):
        Handle("lm", None).stacks()


def worker(rank: int | None, stacks: str, place: str = "reduction", node: str = "10.0.0.1") -> dict[str, Any]:
    facts = {"rank": rank, "node": node, "pid": 100 + (rank or 0), "id": f"w{rank}"}
    return {**facts, "place": place, "threads": parse_stacks(stacks)}


def test_equal_stacks_are_printed_once_and_missing_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [worker(rank, WAITS) for rank in range(7)] + [worker(7, HANGS, "forward", "10.0.0.2"), worker(9, WAITS)]
    missing = [{"rank": 8, "node": "10.0.0.2", "pid": 108, "id": "w8", "reason": "no answer within 10 s"}]

    class Handle:
        def stacks(self) -> dict[str, Any]:
            return {"workers": workers, "missing": missing}

    monkeypatch.setattr(cli_stacks, "get_run", lambda run: Handle())
    shown = invoke("stacks", "lm").output
    assert shown.count("wait()") == 1 and shown.count("stuck()") == 1
    assert "ranks 0-6, 9 (10.0.0.1), in 'reduction'" in shown
    assert "rank 7 (10.0.0.2), in 'forward'" in shown
    assert "rank 8 (10.0.0.2): no answer within 10 s" in shown
    assert "Thread sender" not in shown, "that is for --all-threads"
    with_others = invoke("stacks", "lm", "--all-threads").output
    assert with_others.index("wait()") < with_others.index("Thread sender")
    assert json.loads(invoke("stacks", "lm", "--json").output)["missing"] == missing


def hang_in_ledger(folder: Path) -> None:
    members = [{"rank": rank, "node": f"10.0.0.{rank}", "pid": 7, "id": f"w{rank}"} for rank in range(3)]
    formed = ("generation_formed", {"generation": 2, "world_size": 3, "reason": "start", "members": members})
    old = ("stacks_recorded", {"member": "w2", "place": "data", "stacks": "Thread TrainingThread(x):\n  old\n"})
    hang = {"generation": 2, "seconds": 600.0, "culprits": ["w1"]}
    places = {"w0": "reduction", "w1": "forward", "w2": "reduction"}
    write_ledger(
        folder,
        "s1",
        ("session_started", {"config": {"name": "lm"}}),
        formed,
        old,
        ("hang_detected", {**hang, "places": {"w2": "data"}}),
        ("stacks_recorded", {"member": "w0", "place": "reduction", "stacks": WAITS}),
        ("stacks_recorded", {"member": "w1", "place": "forward", "stacks": HANGS}),
        ("hang_detected", {**hang, "places": places}),
    )


def test_the_stacks_of_the_last_hang_come_from_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "lm"
    hang_in_ledger(run)

    def not_live(run: str) -> Any:
        raise ConfigError(f"{run} is not live")

    monkeypatch.setattr(cli_stacks, "get_run", not_live)
    shown = invoke("stacks", str(run)).output
    assert "No worker made progress for 600 s" in shown
    assert "rank 0 (10.0.0.0), in 'reduction'" in shown and "wait()" in shown
    assert "rank 1 (10.0.0.1), in 'forward', others waited for it" in shown and "stuck()" in shown
    assert "rank 2 (10.0.0.2): it recorded no stacks" in shown and "old" not in shown
    assert invoke("stacks", "--last-hang", str(run)).output == shown
    monkeypatch.chdir(tmp_path)
    assert invoke("stacks", "lm").output == shown
    with pytest.raises(ConfigError, match="other is not live"):
        invoke("stacks", "other")


def test_a_run_without_a_hang_has_no_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stacks_of_last_hang([ledger_event("session_started")]) is None
    write_ledger(tmp_path, "s1", ("session_started", {"config": {"name": "lm"}}))
    with pytest.raises(ConfigError, match=r"its ledger has no hang"):
        invoke("stacks", "--last-hang", str(tmp_path))

    def not_live(run: str) -> Any:
        raise ConfigError("this run has finished.")

    monkeypatch.setattr(cli_stacks, "get_run", not_live)
    with pytest.raises(ConfigError, match=r"this run has finished\. Its ledger has no hang"):
        invoke("stacks", str(tmp_path))
