"""A run that fails three times in a row at the same step, on nodes that live, ends; node failures do not count."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.errors import TrainFunctionError, WorkersFailedError
from elastic_ddp.rendezvous.actor import Rendezvous
from elastic_ddp.rendezvous.attempts import MAX_ATTEMPTS, SETTLE_S, Attempts
from elastic_ddp.rendezvous.members import DrainNotice
from elastic_ddp.rendezvous.messages import Ended, RendezvousOptions
from tests.unit.ledger_events import ledger_event
from tests.unit.membership_harness import FAILED, MembershipHarness, harness_of
from tests.unit.membership_harness import member as a_member
from tests.unit.rendezvous.test_heartbeat import LIMIT_S, LONG_S, Receiver, run_server
from tests.unit.rendezvous_harness import BROKEN, Play, join, member, report, started, until_blocked

CRASH = f"{FAILED}: SIGABRT at /home/me/train.py:9 in train\n  File ..."


class Failing:
    """A run of one worker that fails again and again, each time replaced by another."""

    def __init__(self, node: str = "n") -> None:
        self.harness = harness_of("0", nodes={"0": node})
        self.attempts = Attempts()
        self.node, self.step = node, 7
        self.count = 0

    def fail(self, *, how: str = FAILED, node: str | None = None, drained: bool = False, is_hang: bool = False) -> None:
        """The worker fails, and its replacement starts on `node`."""
        membership, name = self.harness.membership, str(self.count)
        if drained:
            membership.avoid(f"id of {self.node}", DrainNotice())
        self.attempts.record(membership, name, how, self.harness.now, is_hang=is_hang)
        membership.mark_failed(name, how)
        self.count += 1
        self.node = node or self.node
        assert self.harness.join(str(self.count), node=self.node) is None
        self.attempts.generation_formed(self.harness.formed(), self.step, 0.0)
        self.harness.now += SETTLE_S
        self.verdict = self.attempts.verdict(self.step, membership, self.harness.now)


def test_three_failures_at_the_same_step_end_the_run() -> None:
    run = Failing()
    for _ in range(MAX_ATTEMPTS - 1):
        run.fail()
        assert run.verdict is None
    run.fail()
    assert isinstance(run.verdict, WorkersFailedError)
    assert "failed 3 times in a row without progress, after 7 steps" in str(run.verdict) and "SIGKILL ended it" in str(
        run.verdict
    )
    assert "rank 0 on n (pid" in str(run.verdict)


def test_a_run_that_makes_progress_between_failures_continues() -> None:
    run = Failing()
    for _ in range(3 * MAX_ATTEMPTS):
        run.step += 1
        run.fail()
        assert run.verdict is None
    for _ in range(MAX_ATTEMPTS - 1):
        assert run.verdict is None
        run.step -= 1  # it goes back to a commit
        run.fail()
    assert run.verdict is not None


def test_failures_of_nodes_do_not_count() -> None:
    lost, drained = Failing(), Failing()
    for number in range(3 * MAX_ATTEMPTS):
        lost.fail(node=f"node {number}")
        drained.fail(node=f"node {number}", drained=True)
        assert lost.verdict is drained.verdict is None


def test_a_node_without_power_has_not_survived_because_a_starting_worker_on_it_falls_silent_later() -> None:
    harness, attempts = harness_of("ab", nodes={"a": "stable", "b": "node 0"}), Attempts()
    for number in range(MAX_ATTEMPTS):
        current, newcomer = ("b", f"n{number}") if number == 0 else (f"b{number}", f"n{number}")
        attempts.starting[newcomer] = a_member(newcomer, node=f"node {number}")
        attempts.record(harness.membership, current, "no heartbeat for 5 s", harness.now)
        harness.membership.mark_failed(current, "no heartbeat for 5 s")
        harness.now += 10
        assert attempts.verdict(7, harness.membership, harness.now, 5.0) is None
        harness.now += 45
        attempts.record(harness.membership, newcomer, "no heartbeat for 60 s", harness.now)
        harness.membership.mark_failed(newcomer, "no heartbeat for 60 s")
        assert harness.join("a", 7, failure=FAILED) is None
        assert harness.join(f"b{number + 1}", node=f"node {number + 1}") is None
        attempts.generation_formed(harness.formed(), 7, 0.0)
    assert attempts.verdict(7, harness.membership, harness.now + 1000, 5.0) is None


def test_workers_that_fail_together_are_one_attempt() -> None:
    harness, attempts = harness_of("abcd"), Attempts()
    for name in "abc":
        attempts.record(harness.membership, name, FAILED, 0.0)
        harness.membership.mark_failed(name, FAILED)
    assert attempts.verdict(0, harness.membership, 100.0) is None


def test_a_stack_or_the_report_of_ray_explains_the_end() -> None:
    crashing, killed, hanging = Failing(), Failing(), Failing()
    for number in range(MAX_ATTEMPTS):
        crashing.fail(how=CRASH, node=f"node {number}")
        hanging.fail(how="hung in 'between steps'", is_hang=True)
        killed.attempts.explain({str(number - 1): "out of memory"})
        killed.fail()
    killed.attempts.explain({str(MAX_ATTEMPTS - 1): "out of memory"})
    verdict = killed.attempts.verdict(7, killed.harness.membership, killed.harness.now)
    assert str(verdict).count("Ray reports: out of memory") == 1
    assert "SIGABRT at /home/me/train.py:9 in train\n  File" in str(crashing.verdict), "its node lived until then"
    assert isinstance(hanging.verdict, TrainFunctionError) and "Raise hang_timeout_s" in str(hanging.verdict)


def test_a_rendezvous_ends_a_run_without_progress(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ddp.rendezvous.attempts.SETTLE_S", 0.1)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous, size=1)
        for name in "bcd":
            await rendezvous.mark_failed("a0" if name == "b" else f"{chr(ord(name) - 1)}0", FAILED)
            await join(rendezvous, member(name, 0, 1))
        while (news := await rendezvous.wait_for_update(0)).outcome is None:
            await asyncio.sleep(0.01)
        assert news.outcome["kind"] == "WorkersFailedError" and "3 times in a row" in news.outcome["error"]

    play(scenario, RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=30.0))


def test_three_failed_starts_end_a_run_in_which_no_worker_trains() -> None:
    harness, attempts = MembershipHarness(), Attempts()

    def start(names: str) -> None:
        attempts.starting |= {name: a_member(name) for name in names}

    def fail(names: str) -> None:
        for name in names:
            attempts.record(harness.membership, name, FAILED, harness.now)
            harness.membership.mark_failed(name, FAILED)
        harness.now += SETTLE_S

    for names in ("ab", "cd"):  # the workers of one start fail at different times
        start(names)
        fail(names[0])
        fail(names[1])
    start("ef")
    assert attempts.verdict(0, harness.membership, harness.now) is None
    fail("e")
    verdict = attempts.verdict(0, harness.membership, harness.now)
    assert "after 0 steps. The last failure: a worker that starts on n (pid" in str(verdict)


def test_failed_starts_do_not_count_while_others_train() -> None:
    harness, attempts = harness_of("a"), Attempts()
    for name in "bcdefg":
        attempts.starting[name] = a_member(name)
        attempts.record(harness.membership, name, CRASH, harness.now)
        harness.now += SETTLE_S
        assert attempts.verdict(0, harness.membership, harness.now) is None


async def failed_starts(rendezvous: Rendezvous, names: str) -> None:
    """Workers start one after the other, and die."""
    for name in names:
        await rendezvous.heartbeat_address(member(name, 1))
        await rendezvous.mark_failed(f"{name}1", CRASH)


def test_failed_starts_end_a_run_whose_survivors_wait_once_they_have_committed(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ddp.rendezvous.attempts.SETTLE_S", 0.0)

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await failed_starts(rendezvous, "bcdef")  # while both train
        await report(rendezvous, [ledger_event("first_step", generation=1, seconds=0.1, at=0.0)], {"step": 8})
        await rendezvous.mark_failed("a1", CRASH)
        waits = asyncio.create_task(join(rendezvous, member("a", 0), 1, 7, failure=BROKEN))
        await until_blocked(waits)
        await failed_starts(rendezvous, "gh")
        while not isinstance(place := await waits, Assignment):
            waits = asyncio.create_task(join(rendezvous, member("a", 0), 1, 7, failure=BROKEN))
        assert place.handover_only and place.receivers == (), "it commits"
        rendezvous._supervisor.tick()
        assert (await rendezvous.wait_for_update(0)).outcome is None, "it has not committed yet"
        await report(rendezvous, [ledger_event("commit_succeeded", step=7, request=1, at=0.0)], None, "a0", 1)
        answer = None
        while not isinstance(answer, Ended):
            answer = await join(rendezvous, member("a", 0), place.generation, 7, committed=7)
        outcome = (await rendezvous.wait_for_update(0)).outcome
        assert outcome is not None and outcome["kind"] == "WorkersFailedError"
        assert "3 times in a row without progress, after 7 steps. The last failure: a worker that" in outcome["error"]
        assert "SIGABRT at /home/me/train.py:9 in train\n  File" in outcome["error"]

    play(scenario, RendezvousOptions(min_workers=2, max_workers=2, heartbeat_timeout_s=30.0))


def test_workers_that_die_while_they_wait_for_others_are_failed_starts() -> None:
    harness, attempts = harness_of("abz", min_workers=3), Attempts()
    harness.membership.mark_failed("z", FAILED)
    harness.all_join("ab", 7)
    assert harness.form() is None
    for name in "cde":
        assert attempts.verdict(7, harness.membership, harness.now) is None
        harness.all_join(name)
        attempts.record(harness.membership, name, "not ready to train 120 s after its start", harness.now)
        harness.membership.mark_failed(name, FAILED)
        harness.now += SETTLE_S
    verdict = str(attempts.verdict(7, harness.membership, harness.now))
    assert "after 7 steps" in verdict and "not ready to train 120 s after its start\nCorrect" in verdict


def test_steps_between_failed_starts_are_progress() -> None:
    harness, attempts = harness_of("ab", min_workers=2), Attempts()
    for step, peer, starts, replacement in ((3, "b", "c", "d"), (7, "d", "e", "f"), (12, "f", "g", "h")):
        attempts.record(harness.membership, peer, FAILED, harness.now)
        harness.membership.mark_failed(peer, FAILED)
        harness.all_join("a", step)
        attempts.starting[starts] = a_member(starts)
        attempts.record(harness.membership, starts, CRASH, harness.now)
        harness.now += SETTLE_S
        assert attempts.verdict(step + 1, harness.membership, harness.now) is None
        harness.all_join(replacement)
        attempts.generation_formed(harness.formed(), step, 0.0)


CRASHES = """
import os, sys
from elastic_ddp.rendezvous.heartbeat import Heartbeat

def train():
    sys.stdin.read()
    os.kill(os.getpid(), int(sys.argv[4])) if sys.argv[4] != "0" else os._exit(3)

heartbeat = Heartbeat(lambda: (sys.argv[1], int(sys.argv[2])), "worker", float(sys.argv[3]))
heartbeat.report_crashes()
heartbeat.report_exits(lambda: "called by rank 1 at step 5")
if os.fork() == 0:
    os._exit(0)
os.wait()
train()
"""


@pytest.mark.parametrize(
    ("number", "what"),
    [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGABRT, "SIGABRT"), (0, "os._exit(3) called by rank 1 at step 5")],
)
def test_a_crash_or_an_exit_is_reported_with_its_cause_and_its_place(tmp_path: Path, number: int, what: str) -> None:
    script = tmp_path / "crashes.py"
    script.write_text(textwrap.dedent(CRASHES))

    async def scenario(receiver: Receiver, address: tuple[str, int]) -> None:
        arguments = [str(script), address[0], str(address[1]), str(LONG_S), str(int(number))]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        await asyncio.wait_for(process.communicate(b""), LIMIT_S)
        ((_, how),) = await receiver.until_failed()
        first, *stack = how.split("\n")
        assert first == f"{FAILED}: {what} at {script}:7 in train"
        assert any('crashes.py", line 15, in <module>' in line for line in stack)

    run_server(LONG_S, scenario)
