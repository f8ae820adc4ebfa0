"""The rendezvous, without Ray: events, progress, outcomes and status."""

from __future__ import annotations

import asyncio
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.rendezvous.actor import Rendezvous
from elastic_ddp.rendezvous.event_log import EventLog
from elastic_ddp.rendezvous.heartbeat import Heartbeat
from elastic_ddp.rendezvous.membership import LEFT
from elastic_ddp.rendezvous.messages import NO_SIGNALS, Ended, RendezvousOptions, Signals
from elastic_ddp.rendezvous.snapshot import Snapshot
from elastic_ddp.telemetry.events import StepsCompleted
from tests.unit.ledger_events import ledger_event
from tests.unit.rendezvous_harness import (
    BROKEN,
    Play,
    events_of,
    join,
    joined,
    member,
    report,
    signaled,
    started,
    until_blocked,
)


def test_events_reach_the_driver_in_order_with_the_newest_progress(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous, size=1)
        await report(rendezvous, [ledger_event("first_step"), ledger_event("commit_started")], {"step": 1})
        await report(rendezvous, [ledger_event("commit_succeeded")], {"step": 2})
        assert await rendezvous.poll_signals(member("a", 0, 1), 1, {"step": 3}) == NO_SIGNALS
        news = await rendezvous.wait_for_update(0)
        assert [event.event for event in news.events] == [
            "generation_formed",
            "first_step",
            "commit_started",
            "commit_succeeded",
        ]
        assert (news.progress, news.outcome) == ({"step": 3}, None)
        assert [event.event for event in (await rendezvous.wait_for_update(3)).events] == ["commit_succeeded"]

    play(scenario)


def test_delivered_events_are_deleted() -> None:
    log = EventLog(Snapshot(None))
    for number in range(1, 6):
        log.add(ledger_event("steps_completed", step=number))
    assert [event.step for event in log.after(2)] == [3, 4, 5] == [event.step for event in log.after(2)]
    assert [event.step for event in log.after(0)] == [3, 4, 5]
    assert log.num_events == 5 and log.last(StepsCompleted).step == 5
    log.add(ledger_event("steps_completed", step=6))
    assert [event.step for event in log.after(5)] == [6] and log.num_events == 6


def test_a_repeated_evaluation_is_another_event_and_a_repeated_report_is_none() -> None:
    log = EventLog(Snapshot(None))
    first, second = (ledger_event("evaluation_finished", generation=1, step=3, name="a", value=v) for v in (0.5, 0.25))
    assert log.add(first, "a0", 1) and log.add(second, "a0", 2)
    assert not log.add(first, "a1", 1), "the next rank 0 repeats it"
    assert log.after(0) == [first, second]


def test_a_stop_reaches_waiting_workers_and_no_worker_joins(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        waiting = asyncio.create_task(rendezvous.poll_signals(member("a", 0), 1, None))
        await until_blocked(waiting)
        await rendezvous.stop()
        assert await waiting == Signals(stop=True)
        assert await rendezvous.poll_signals(member("a", 1), 1, None) == Signals(stop=True)
        assert await join(rendezvous, member("a", 2)) == Ended("stopped")
        status = await rendezvous.status()
        assert status["state"] == "stopping"

    play(scenario)


def test_survivors_of_a_stopping_run_form_a_generation_to_commit(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        survivor = asyncio.create_task(join(rendezvous, member("a", 0), after=1, step=5, failure=BROKEN))
        await rendezvous.retire(member("a", 1))
        await until_blocked(survivor)  # one is too few to train
        await rendezvous.stop()
        answer = await survivor
        assert (answer.generation, answer.world_size, answer.source) == (2, 1, 0)

    play(scenario, RendezvousOptions(min_workers=2, max_workers=4, heartbeat_timeout_s=30.0))


def test_the_first_outcome_counts_and_ends_the_run_for_all(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        waiting = asyncio.create_task(rendezvous.poll_signals(member("a", 1), 1, None))
        joining = asyncio.create_task(join(rendezvous, member("a", 0), after=1, step=9))
        driver = asyncio.create_task(rendezvous.wait_for_update(1))
        await until_blocked(waiting, joining, driver)
        await report(rendezvous, [ledger_event("commit_succeeded", step=9)], None)
        await rendezvous.end(member("a", 0), {"step": 9}, {"status": "failed", "error": "the first"})
        await rendezvous.end(member("a", 0), None, {"status": "finished"})
        assert await waiting == Signals(ended="failed")
        news = await rendezvous.wait_for_update(1)
        assert [event.step for event in news.events] == [9]  # no event before the end is lost
        assert (news.progress, news.outcome) == ({"step": 9}, {"status": "failed", "error": "the first"})
        assert (await driver).events == news.events
        assert await join(rendezvous, member("a", 2)) == Ended("failed")
        assert (await rendezvous.wait_for_update(2)).outcome == news.outcome  # at once
        joining.cancel()

    play(scenario)


def test_the_status_follows_the_run(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        fresh = await rendezvous.status()
        assert (fresh["name"], fresh["state"], fresh["total_steps"]) == ("lm", "starting", 100)
        assert fresh["step"] is fresh["last_commit"] is fresh["generation"] is None
        await started(rendezvous)
        generation = ledger_event("generation_started", generation=1, world_size=2)
        await report(rendezvous, [generation, ledger_event("commit_succeeded", step=5)], {"step": 6, "loss": 0.5})
        assert (await rendezvous.status())["state"] == "training"
        await rendezvous.stop()
        status = await rendezvous.status()
        assert (status["state"], status["generation"], status["world_size"]) == ("stopping", 1, 2)
        assert (status["step"], status["loss"], status["last_commit"]) == (6, 0.5, 5)
        await rendezvous.end(member("a", 0), None, {"status": "stopped"})
        assert (await rendezvous.status())["state"] == "stopped"

    play(scenario)


def test_a_waiting_run_has_no_workers(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await report(rendezvous, [ledger_event("generation_started", generation=1, world_size=2)], None)
        assert (await rendezvous.status())["world_size"] == 2
        for rank in (0, 1):
            await rendezvous.retire(member("a", rank))
        status = await rendezvous.status()
        assert (status["state"], status["world_size"], status["members"]) == ("waiting", 0, [])

    play(scenario)


def test_progress_and_accounts_of_a_failed_member_do_not_count(play: Play, long_polls: None) -> None:
    ended = ledger_event("generation_ended", at=0.0, generation=1, account={"useful": 60.0})

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await report(rendezvous, [ledger_event("first_step")], {"step": 7}, "a1", 1)
        await rendezvous.mark_failed("a0", "no heartbeat for 5 s")
        await report(rendezvous, [ended], {"step": 3}, "a0", 1)
        assert (await rendezvous.status())["step"] == 7
        assert [event.account for event in await events_of(rendezvous, "generation_ended")] == [None]
        late = await join(rendezvous, member("a", 0), 1, 3, True, BROKEN, account={"useful": 60.0})
        other = await join(rendezvous, member("a", 1), 1, 7, True, BROKEN, account={"useful": 5.0})
        assert isinstance(late, Ended) and isinstance(other, Assignment)
        assert [event.account for event in await events_of(rendezvous, "generation_account")] == [{"useful": 5.0}]

    play(scenario)


def test_stale_training_events_of_a_failed_member_are_ignored(play: Play, long_polls: None) -> None:
    reports = [
        ledger_event("steps_completed", at=1.0, generation=1, step=4, loss=9.0, metrics={"error": 9.0}),
        ledger_event("generation_ended", at=2.0, generation=1, last_step=4, account={"useful": 60.0}),
        ledger_event("commit_failed", at=3.0, counts=False),
    ]

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous.mark_failed("a0", "no heartbeat for 5 s")
        await join(rendezvous, member("a", 1), 1, 7, True, BROKEN)
        await report(rendezvous, reports, {"step": 4}, "a0", 1)
        await report(rendezvous, reports, None, "a0", 1)
        late = [(event.at, event.what) for event in await events_of(rendezvous, "report_ignored")]
        assert late == [(1.0, "steps_completed"), (2.0, "generation_ended")]
        assert len(await events_of(rendezvous, "commit_failed")) == 1
        assert not await events_of(rendezvous, "steps_completed")
        assert not await events_of(rendezvous, "generation_ended")

    play(scenario)


# Restarts.


def test_a_full_disk_leaves_no_partial_event(tmp_path: Path) -> None:
    snapshot = Snapshot(str(tmp_path))
    snapshot.append({"sender": "", "number": 0, "event": {"event": "first"}})
    size = (tmp_path / "events.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))  # ten bytes of the next event fit
    try:
        with pytest.raises(OSError, match="too large"):
            snapshot.append({"sender": "", "number": 0, "event": {"event": "second"}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert (tmp_path / "events.jsonl").stat().st_size == size
    snapshot.append({"sender": "", "number": 0, "event": {"event": "third"}})
    assert [line["event"]["event"] for line in Snapshot(str(tmp_path)).lines()] == ["first", "third"]


def test_a_rendezvous_goes_on_quietly_after_the_driver_has_removed_its_folder(play: Play, tmp_path: Path) -> None:
    (folder := tmp_path / "snapshot").mkdir()
    options = RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=30.0, snapshot_folder=str(folder))

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        assert [*folder.iterdir()]
        shutil.rmtree(folder)
        await rendezvous.end(member("a", 0), None, {"status": "finished"})
        await rendezvous.stop()
        rendezvous._supervisor.tick()
        assert (await rendezvous.wait_for_update(0)).outcome == {"status": "finished"}
        assert not folder.exists()

    play(scenario, options)


def test_a_restarted_rendezvous_resumes_from_its_snapshot(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ddp.rendezvous.actor.RECONNECT_S", 0.3)
    options = RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=0.3, snapshot_folder=str(tmp_path))
    reports = [ledger_event("commit_succeeded", step=5, request=None, at=0.0)]

    async def first_life(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous, size=3)
        await report(rendezvous, reports, None, "a0", 1)
        await rendezvous.resize(2)
        await rendezvous.drain("id2", 100.0)

    async def second_life(rendezvous: Rendezvous) -> None:
        host, port = await rendezvous.heartbeat_address()
        heartbeats = [Heartbeat(lambda: (host, port), f"a{rank}", 30.0) for rank in (0, 2)]
        await report(rendezvous, reports, None, "a0", 1)  # a repeated call
        assert len(await events_of(rendezvous, "commit_succeeded")) == 1
        status = await rendezvous.status()
        assert (status["wanted"], status["draining"], len(status["members"])) == (2, ["id2"], 3)
        assert status["last_commit"] == 5
        await signaled(rendezvous, member("a", 0, 3), 1, lambda signals: signals.failed_generation)
        (failure,) = await events_of(rendezvous, "worker_failed")
        assert (failure.member, failure.error) == (
            "a1",
            "it did not reconnect after a restart of the rendezvous",
        )
        first, leaving = await asyncio.gather(
            joined(rendezvous, member("a", 0, 3), 1, 6), join(rendezvous, member("a", 2, 3), 1, 6)
        )
        assert (first.generation, first.rank, first.world_size) == (2, 0, 1)
        assert leaving == Ended(LEFT)
        for heartbeat in heartbeats:
            heartbeat.stop()

    play(first_life, options)
    play(second_life, options)


def test_delivered_events_leave_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ddp.rendezvous.event_log.COMPACT_EVERY", 100)
    log = EventLog(Snapshot(str(tmp_path)))
    for number in range(1, 1001):
        log.add(ledger_event("steps_completed", step=number), "a0", number)
        if number % 10 == 0:
            log.after(number)
    log.add(ledger_event("commit_succeeded", step=1000), "a0", 1001)
    log.end({"status": "finished"})
    log.after(1000)
    assert len(Snapshot(str(tmp_path)).lines()) < 150
    second = EventLog(Snapshot(str(tmp_path)))
    assert second.num_events == 1001 and second.ended == "finished"
    assert second.after(1000) == [ledger_event("commit_succeeded", step=1000)]
    assert second.last(StepsCompleted) == ledger_event("steps_completed", step=1000)
    assert not second.add(ledger_event("first_step"), "a0", 1001), "a repeated call adds nothing"


def test_an_event_has_its_time_by_the_clock_of_the_driver_whatever_a_workers_clock_shows(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        before = time.time()
        for number, clock in enumerate((1000.0, before + 3600.0)):
            sender = f"a{number}"
            await rendezvous.report(ledger_event("commit_started", at=clock - 2.0), None, sender, 1, clock)
            # Sent a minute ago.
            await rendezvous.report(ledger_event("commit_started", at=clock), None, sender, 2, clock - 60.0)
        times = [event.at for event in await events_of(rendezvous, "commit_started")]
        assert times == pytest.approx([before - 2.0, before, before - 2.0, before], abs=10.0)

    play(scenario)
