"""The rendezvous, without Ray: what it hears, keeps and tells of the run, and what it is asked for."""

from __future__ import annotations

import asyncio
import resource
import signal
from pathlib import Path

import pytest

from elastic_ddp.distributed.process_group import Assignment
from elastic_ddp.rendezvous import actor as rendezvous_module
from elastic_ddp.rendezvous.actor import Rendezvous
from elastic_ddp.rendezvous.event_log import EventLog
from elastic_ddp.rendezvous.heartbeat import Heartbeat
from elastic_ddp.rendezvous.membership import LEFT
from elastic_ddp.rendezvous.messages import NO_SIGNALS, DriverUpdate, Ended, RendezvousOptions, Signals
from elastic_ddp.rendezvous.snapshot import Snapshot
from elastic_ddp.telemetry.events import Event, StepsCompleted
from tests.unit.ledger_events import ledger_event
from tests.unit.rendezvous_harness import BROKEN, Play, events_of, heard, join, joined, member, started, until_held

# The ear and the mouth of the run.


def test_messages_reach_the_driver_in_order_and_only_the_newest_progress_does(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous, size=1)
        await rendezvous.report([ledger_event("one"), ledger_event("two")], {"step": 1})
        await rendezvous.report([ledger_event("three")], {"step": 2})
        assert await rendezvous.poll_signals(member("a", 0, 1), 1, {"step": 3}) == NO_SIGNALS
        news = await rendezvous.wait_for_update(0)
        assert [event.event for event in news.events] == ["rendezvous", "one", "two", "three"]
        assert (news.progress, news.outcome) == ({"step": 3}, None)
        assert [event.event for event in (await rendezvous.wait_for_update(3)).events] == ["three"]

    play(scenario)


def test_what_the_driver_has_written_down_is_forgotten() -> None:
    journal = EventLog(Snapshot(None))
    for number in range(1, 6):
        journal.add([ledger_event("steps", step=number)], None)
    assert [event.step for event in journal.after(2)] == [3, 4, 5] == [event.step for event in journal.after(2)]
    assert [event.step for event in journal.after(0)] == [3, 4, 5]
    assert journal.num_events == 5 and journal.last(StepsCompleted).step == 5
    journal.add([ledger_event("steps", step=6)], None)
    assert [event.step for event in journal.after(5)] == [6] and journal.num_events == 6


def test_the_driver_is_held_until_there_is_news(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        driver = asyncio.create_task(rendezvous.wait_for_update(0))
        await until_held(driver)
        await rendezvous.report([ledger_event("commit", step=7)], None)
        assert [event.step for event in (await driver).events] == [7]

    play(scenario)


def test_a_driver_without_news_is_answered_within_a_poll(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        assert await rendezvous.wait_for_update(0) == DriverUpdate([], {}, None, 0, False)

    play(scenario)


def test_a_stop_reaches_a_worker_that_waits_and_nobody_new_gets_in(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        waiting = asyncio.create_task(rendezvous.poll_signals(member("a", 0), 1, None))
        await until_held(waiting)
        await rendezvous.stop()
        assert await waiting == Signals(stop=True)
        assert await rendezvous.poll_signals(member("a", 1), 1, None) == Signals(stop=True)
        assert await join(rendezvous, member("a", 2)) == Ended("stopped")
        status = await rendezvous.status()
        assert status["state"] == "stopping"

    play(scenario)


def test_survivors_of_a_run_that_stops_form_once_more_to_commit_what_they_hold(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        survivor = asyncio.create_task(join(rendezvous, member("a", 0), after=1, step=5, failure=BROKEN))
        await rendezvous.retire(member("a", 1))
        await until_held(survivor)  # one is too few to train
        await rendezvous.stop()
        answer = await survivor
        assert (answer.generation, answer.world_size, answer.source) == (2, 1, 0)

    play(scenario, RendezvousOptions(min_workers=2, max_workers=4, heartbeat_timeout_s=30.0))


def test_the_first_outcome_counts_and_ends_everyone(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        waiting = asyncio.create_task(rendezvous.poll_signals(member("a", 1), 1, None))
        joining = asyncio.create_task(join(rendezvous, member("a", 0), after=1, step=9))
        driver = asyncio.create_task(rendezvous.wait_for_update(1))
        await until_held(waiting, joining, driver)
        await rendezvous.report([ledger_event("commit", step=9)], None)
        await rendezvous.end(member("a", 0), {"step": 9}, {"status": "failed", "error": "the first"})
        await rendezvous.end(member("a", 0), None, {"status": "finished"})
        assert await waiting == Signals(ended="failed")
        news = await rendezvous.wait_for_update(1)
        assert [event.step for event in news.events] == [9]  # nothing that was said before the end is lost
        assert (news.progress, news.outcome) == ({"step": 9}, {"status": "failed", "error": "the first"})
        assert (await driver).events == news.events
        assert await join(rendezvous, member("a", 2)) == Ended("failed")
        assert (await rendezvous.wait_for_update(2)).outcome == news.outcome  # at once
        joining.cancel()

    play(scenario)


def test_a_member_that_waits_when_the_run_ends_is_told_when_it_asks_again(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        joining = asyncio.create_task(join(rendezvous, member("a", 0), after=1, step=9))
        await rendezvous.end(member("a", 0), None, {"status": "finished"})
        answers = [await joining, await join(rendezvous, member("a", 0), after=1, step=9)]
        assert answers[-1] == Ended("finished")

    play(scenario)


def test_the_status_follows_the_run(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        fresh = await rendezvous.status()
        assert (fresh["name"], fresh["state"], fresh["total_steps"]) == ("lm", "starting", 100)
        assert fresh["step"] is fresh["last_commit"] is fresh["generation"] is None
        await started(rendezvous)
        said = [ledger_event("generation", generation=1, world_size=2), ledger_event("commit", step=5)]
        await rendezvous.report(said, {"step": 6, "loss": 0.5})
        assert (await rendezvous.status())["state"] == "training"
        await rendezvous.stop()
        status = await rendezvous.status()
        assert (status["state"], status["generation"], status["world_size"]) == ("stopping", 1, 2)
        assert (status["step"], status["loss"], status["last_commit"]) == (6, 0.5, 5)
        await rendezvous.end(member("a", 0), None, {"status": "stopped"})
        assert (await rendezvous.status())["state"] == "stopped"

    play(scenario)


def test_a_run_that_waits_has_no_workers(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous.report([ledger_event("generation", generation=1, world_size=2)], None)
        assert (await rendezvous.status())["world_size"] == 2
        for each in (member("a", 0), member("a", 1)):
            await rendezvous.retire(each)
        status = await rendezvous.status()
        assert (status["state"], status["world_size"], status["members"]) == ("waiting", 0, [])

    play(scenario)


def test_of_one_presumed_dead_neither_progress_nor_time_counts(play: Play, long_polls: None) -> None:
    ended = ledger_event("generation_ended", at=0.0, generation=1, account={"useful": 60.0})

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous.report([], {"step": 7}, "a1")
        await rendezvous._on_failure("a0", "no heartbeat for 5 s")
        await rendezvous.report([ended], {"step": 3}, "a0", 1)
        assert (await rendezvous.status())["step"] == 7
        assert [each.account for each in await events_of(rendezvous, "generation_ended")] == [None]
        late = await join(rendezvous, member("a", 0), 1, 3, True, BROKEN, account={"useful": 60.0})
        other = await join(rendezvous, member("a", 1), 1, 7, True, BROKEN, account={"useful": 5.0})
        assert isinstance(late, Ended) and isinstance(other, Assignment)
        assert [each.account for each in await events_of(rendezvous, "generation_account")] == [{"useful": 5.0}]

    play(scenario)


def test_what_one_presumed_dead_says_of_training_when_that_has_gone_on_is_no_news(play: Play, long_polls: None) -> None:
    said = [
        ledger_event("steps", at=1.0, generation=1, step=4, loss=9.0, metrics={"error": 9.0}),
        ledger_event("generation_ended", at=2.0, generation=1, last_step=4, account={"useful": 60.0}),
        ledger_event("commit_failed", at=3.0, counts=False),
    ]

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous._on_failure("a0", "no heartbeat for 5 s")
        await join(rendezvous, member("a", 1), 1, 7, True, BROKEN)
        await rendezvous.report(said, {"step": 4}, "a0", 1)
        await rendezvous.report(said, None, "a0", 1)
        late = [(each.at, each.what) for each in await events_of(rendezvous, "told_too_late")]
        assert late == [(1.0, "steps"), (2.0, "generation_ended")]
        assert len(await events_of(rendezvous, "commit_failed")) == 1
        assert not await events_of(rendezvous, "steps") and not await events_of(rendezvous, "generation_ended")

    play(scenario)


# What it is asked for.


def test_a_member_that_asks_to_go_is_let_go_at_the_next_boundary_and_recorded(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)
        listening = asyncio.create_task(heard(rendezvous, member("a", 0), 1, lambda signals: signals.reconfigure))
        await until_held(listening)
        await rendezvous.leave(member("a", 1), 0.0, "SIGTERM")
        await listening
        first, second = await asyncio.gather(
            joined(rendezvous, member("a", 0), 1, 5), join(rendezvous, member("a", 1), 1, 5)
        )
        assert (first.generation, first.world_size, first.reason) == (2, 1, "workers left")
        assert second == Ended(LEFT)
        assert [each.by for each in await events_of(rendezvous, "notice")] == ["SIGTERM"]
        assert [(each.member, each.kind) for each in await events_of(rendezvous, "worker_left")] == [("a1", "drain")]
        orders = await rendezvous.supervise(["a0", "a1"], 0, {})
        assert orders is not None and (orders.dismissed, orders.failed, orders.leaving) == (["a1"], {}, [])

    play(scenario)


def test_of_members_that_all_leave_one_is_to_commit_first(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)
        orders = await rendezvous.supervise(["a0", "a1"], 0, {"id0": 0.0, "id1": 0.0})
        assert orders is not None and sorted(orders.leaving) == ["a0", "a1"] and orders.avoid == ["id0", "id1"]
        await heard(rendezvous, member("a", 0), 1, lambda signals: signals.reconfigure)
        first, second = await asyncio.gather(
            joined(rendezvous, member("a", 0), 1, 5), join(rendezvous, member("a", 1), 1, 5)
        )
        assert first.handover_only and first.world_size == 1
        assert second == Ended(LEFT)
        assert await join(rendezvous, member("a", 0), 2, 5, committed=5) == Ended(LEFT)
        assert [each.by for each in await events_of(rendezvous, "notice")] == ["Ray", "Ray"]

    play(scenario)


def test_who_asks_for_a_commit_is_told_when_there_is_one(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        first, second = await rendezvous.checkpoint(), await rendezvous.checkpoint()
        assert await rendezvous.committed(first) is None
        signals = await heard(rendezvous, member("a", 0), 1, lambda signals: signals.commit == second)
        await rendezvous.report([ledger_event("commit", step=4, request=None, at=0.0)], None)
        assert await rendezvous.committed(first) is None
        await rendezvous.report([ledger_event("commit", step=7, request=signals.commit, at=0.0)], None)
        assert await rendezvous.committed(first) == await rendezvous.committed(second) == 7, "one commit answers both"
        assert await rendezvous.checkpoint() > second

    play(scenario)


@pytest.mark.parametrize(("status", "answer"), [("failed", None), ("finished", 7)])
def test_a_run_that_has_failed_has_not_committed_what_it_was_asked_for(
    play: Play, status: str, answer: int | None
) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous.report([ledger_event("commit", step=7, request=None, at=0.0)], None)
        request = await rendezvous.checkpoint()
        async with rendezvous._locked() as assembly:
            assembly.end({"status": status, "error": "4 saves in a row failed"})
        for each in ("a0", "a1", "a2"):
            await rendezvous._on_failure(each, "its process exited")
        assert await rendezvous.committed(request) == answer

    play(scenario)


def test_a_commit_that_had_begun_before_somebody_asked_is_no_answer(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        first = await rendezvous.checkpoint()
        await heard(rendezvous, member("a", 0), 1, lambda signals: signals.commit == first)
        later = await rendezvous.checkpoint()
        await rendezvous.report([ledger_event("commit", step=7, request=first, at=0.0)], None)
        assert await rendezvous.committed(first) == 7
        assert await rendezvous.committed(later) is None
        await heard(rendezvous, member("a", 0), 1, lambda signals: signals.commit == later)
        await rendezvous.report([ledger_event("commit", step=9, request=later, at=0.0)], None)
        assert await rendezvous.committed(later) == 9

    play(scenario)


def test_what_was_written_before_others_began_from_a_commit_is_not_committed_any_more(
    play: Play, tmp_path: Path, long_polls: None
) -> None:
    """Also by one that has left in peace, and by a rendezvous that was restarted since."""
    options = RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=30.0, snapshot_folder=str(tmp_path))

    async def first_life(rendezvous: Rendezvous) -> None:
        await started(rendezvous, size=3)
        assert await rendezvous.why_not_commit(member("a", 0, 3), 1) is None
        await asyncio.gather(*(join(rendezvous, member("a", rank, 3), after=1, step=5) for rank in range(3)))
        await rendezvous.leave(member("a", 0, 3), 0.0, "SIGTERM")
        await asyncio.gather(*(join(rendezvous, member("a", rank, 3), after=2, step=7) for rank in range(3)))
        assert [await rendezvous.why_not_commit(member("a", 0, 3), number) for number in (1, 2)] == [None] * 2
        await asyncio.gather(*(join(rendezvous, member("a", rank, 3), after=3, failure=BROKEN) for rank in (1, 2)))

    async def check(rendezvous: Rendezvous) -> None:
        for rank, number in [(0, 1), (0, 2), (1, 3)]:
            reason = await rendezvous.why_not_commit(member("a", rank, 3), number)
            assert reason == f"generation 4 has started from a commit since generation {number}"
        assert await rendezvous.why_not_commit(member("a", 1, 3), 4) is None

    async def both(rendezvous: Rendezvous) -> None:
        await first_life(rendezvous)
        await check(rendezvous)

    play(both, options)
    play(check, options)


def failed_save(step: int, counts: bool = True, of_storage: bool = True) -> Event:
    error = f"step {step} is full"
    return ledger_event("commit_failed", step=step, at=0.0, error=error, counts=counts, of_storage=of_storage)


@pytest.mark.parametrize("to_mend", ["the storage", "the cause"])
def test_saves_that_fail_are_counted_whoever_makes_them(
    play: Play, tmp_path: Path, long_polls: None, to_mend: str
) -> None:
    """Also by one that was restarted meanwhile. A commit ends the count, and not all failures are a storage's."""
    options = RendezvousOptions(
        min_workers=1, max_workers=4, heartbeat_timeout_s=30.0, max_failed_saves=2, snapshot_folder=str(tmp_path)
    )

    async def first_life(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous.report([failed_save(1), failed_save(2), ledger_event("commit", step=3, at=0.0)], None, "a0", 1)
        await rendezvous.report([failed_save(4)], None, "a0", 4)
        await rendezvous.report([failed_save(4)], None, "a0", 4)  # it had not heard that it arrived
        await rendezvous._on_failure("a0", "killed")
        await rendezvous.report([failed_save(5)], None, "a0", 5)  # others went on without it
        await rendezvous.report([failed_save(5), failed_save(6, counts=False)], None, "a1", 1)
        assert (await rendezvous.wait_for_update(0)).outcome is None

    async def second_life(rendezvous: Rendezvous) -> None:
        await rendezvous.report([failed_save(7, of_storage=to_mend == "the storage")], None, "b0", 1)
        outcome = (await rendezvous.wait_for_update(0)).outcome
        assert outcome is not None and (outcome["status"], outcome["kind"]) == ("failed", "StorageError")
        for fact in ("3 saves", "checkpoint.max_failed_saves=2", "step 7 is full", "step 3", f"Repair {to_mend}"):
            assert fact in outcome["error"]

    play(first_life, options)
    play(second_life, options)


def test_a_node_is_drained_by_its_address_or_by_its_id(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous, size=3)
        assert await rendezvous.drain("10.0.0.1", 0.0) == ["id1"]
        assert await rendezvous.drain("id2", 0.0) == ["id2"]
        assert await rendezvous.drain("elsewhere", 0.0) == []
        status = await rendezvous.status()
        assert status["draining"] == ["id1", "id2"]
        assert len(status["members"]) == 3, "they are still here"

    play(scenario)


def test_a_run_that_is_made_smaller_says_so_to_the_controller(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous, size=3)
        await rendezvous.resize(1)
        await heard(rendezvous, member("a", 0, 3), 1, lambda signals: signals.reconfigure)
        answers = await asyncio.gather(*(join(rendezvous, member("a", rank, 3), 1, 5) for rank in range(3)))
        assert answers[1:] == [Ended(LEFT), Ended(LEFT)]
        orders = await rendezvous.supervise(["a0", "a1", "a2"], 0, {})
        assert orders is not None and (orders.limit, orders.dismissed) == (1, ["a1", "a2"])

    play(scenario)


def test_a_commit_is_made_also_where_there_are_too_few_to_train(play: Play, long_polls: None) -> None:
    options = RendezvousOptions(min_workers=2, max_workers=4, heartbeat_timeout_s=30.0, last_commit=3)

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        assert (await rendezvous.status())["last_commit"] == 3, "that it went on from"
        await rendezvous._on_failure("a1", "its process exited")
        waits = asyncio.create_task(join(rendezvous, member("a", 0), 1, 5))
        await until_held(waits)
        request = await rendezvous.checkpoint()
        place = await waits
        assert isinstance(place, Assignment) and place.handover_only and place.world_size == 1
        commit = ledger_event("commit", step=5, request=request, at=0.0)
        await rendezvous.report([commit], None, "a0", 1)
        assert await rendezvous.committed(request) == 5
        waits = asyncio.create_task(join(rendezvous, member("a", 0), 2, 5, committed=5))
        await until_held(waits)
        assert await rendezvous.committed(await rendezvous.checkpoint()) == 5, "there is nothing newer"
        waits.cancel()

    play(scenario, options)


def test_the_store_forgets_what_generations_before_the_last_said(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "TICK_S", 0.01)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)
        for number in (1, 2):
            rendezvous._store.set(f"generation{number}/here", "2")
        rendezvous._store.set("generation10/here", "2")
        await asyncio.gather(*(joined(rendezvous, member("a", rank), 1, 5) for rank in (0, 1)))
        while "generation1/here" in rendezvous._store.list_keys():
            await asyncio.sleep(0.01)
        assert {"generation2/here", "generation10/here"} <= set(rendezvous._store.list_keys())

    play(scenario)


# A second life.


def test_a_message_is_kept_whole_or_not_at_all_where_the_disk_is_full(tmp_path: Path) -> None:
    memory = Snapshot(str(tmp_path))
    memory.append([{"sender": "", "number": 0, "event": {"event": "first"}}])
    size = (tmp_path / "events.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))  # the next one fits by ten bytes
    try:
        with pytest.raises(OSError, match="too large"):
            memory.append([{"sender": "", "number": 0, "event": {"event": "second"}}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert (tmp_path / "events.jsonl").stat().st_size == size
    memory.append([{"sender": "", "number": 0, "event": {"event": "third"}}])
    assert [line["event"]["event"] for line in Snapshot(str(tmp_path)).lines()] == ["first", "third"]


def test_a_restarted_rendezvous_knows_what_the_one_before_knew(play: Play, tmp_path: Path) -> None:
    options = RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=0.3, snapshot_folder=str(tmp_path))
    said = [ledger_event("commit", step=5, request=None, at=0.0)]

    async def first_life(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous, size=3)
        await rendezvous.report(said, None, "a0", 1)
        await rendezvous.resize(2)
        await rendezvous.drain("id2", 100.0)

    async def second_life(rendezvous: Rendezvous) -> None:
        host, port = await rendezvous.heartbeat_address()
        pulses = [Heartbeat(lambda: (host, port), f"a{rank}", 30.0) for rank in (0, 2)]
        await rendezvous.report(said, None, "a0", 1)  # it had not heard that it arrived
        assert len(await events_of(rendezvous, "commit")) == 1
        status = await rendezvous.status()
        assert (status["wanted"], status["draining"], len(status["members"])) == (2, ["id2"], 3)
        assert status["last_commit"] == 5
        await heard(rendezvous, member("a", 0, 3), 1, lambda signals: signals.failed_generation)
        (failure,) = await events_of(rendezvous, "worker_lost")
        assert (failure.member, failure.error) == (
            "a1",
            "it did not reconnect after a restart of the rendezvous",
        )
        first, leaving = await asyncio.gather(
            joined(rendezvous, member("a", 0, 3), 1, 6), join(rendezvous, member("a", 2, 3), 1, 6)
        )
        assert (first.generation, first.rank, first.world_size) == (2, 0, 1)
        assert leaving == Ended(LEFT)
        for pulse in pulses:
            pulse.stop()

    play(first_life, options)
    play(second_life, options)


def test_events_that_were_written_down_leave_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ddp.rendezvous.event_log.COMPACT_EVERY", 100)
    journal = EventLog(Snapshot(str(tmp_path)))
    for number in range(1, 1001):
        journal.add([ledger_event("steps", step=number)], None, "a0", number)
        if number % 10 == 0:
            journal.after(number)
    journal.add([ledger_event("commit", step=1000)], None, "a0", 1001)
    journal.end({"status": "finished"})
    journal.after(1000)
    assert len(Snapshot(str(tmp_path)).lines()) < 150
    second = EventLog(Snapshot(str(tmp_path)))
    assert second.num_events == 1001 and second.ended == "finished"
    assert second.after(1000) == [ledger_event("commit", step=1000)]
    assert second.last(StepsCompleted) == ledger_event("steps", step=1000)
    assert second.add([ledger_event("again")], None, "a0", 1001) == [], "the sender had not heard that it arrived"


def test_an_outcome_is_not_forgotten(play: Play, tmp_path: Path) -> None:
    options = RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=30.0, snapshot_folder=str(tmp_path))

    async def first_life(rendezvous: Rendezvous) -> None:
        await rendezvous.end(member("a", 0), None, {"status": "finished", "steps": 9})

    async def second_life(rendezvous: Rendezvous) -> None:
        assert (await rendezvous.wait_for_update(0)).outcome == {"status": "finished", "steps": 9}

    play(first_life, options)
    play(second_life, options)
