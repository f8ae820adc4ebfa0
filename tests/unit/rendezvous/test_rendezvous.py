"""The rendezvous, without Ray: joins, failures, newcomers and heartbeats."""

from __future__ import annotations

import asyncio

import pytest
import torch.distributed as dist

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.rendezvous import membership as membership_module
from elastic_ddp.rendezvous.actor import Rendezvous
from elastic_ddp.rendezvous.members import RESIZE
from elastic_ddp.rendezvous.membership import LEFT
from elastic_ddp.rendezvous.messages import Ended, PlannedAssignment, RendezvousOptions, Signals
from tests.unit.rendezvous_harness import (
    BROKEN,
    Play,
    events_of,
    join,
    joined,
    member,
    signaled,
    started,
    until_blocked,
)

# Joining.


def test_members_get_their_ranks_and_a_working_store(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        first, second = await started(rendezvous)
        assert isinstance(first, Assignment)
        assert (first.generation, first.rank, first.world_size, first.reason) == (1, 0, 2, "start")
        assert (first.source, first.receivers) == (None, (0, 1))
        assert (second.generation, second.rank) == (1, 1)
        store = dist.TCPStore(first.store_host, first.store_port, is_master=False, wait_for_workers=False)
        store.set("key", "value")
        assert store.get("key") == b"value"
        events = (await rendezvous.wait_for_update(0)).events
        assert [event.event for event in events] == ["generation_formed"]
        assert (events[0].world_size, events[0].reason, events[0].first_step) == (2, "start", None)
        assert events[0].members == [
            {"rank": 0, "node": "10.0.0.0", "pid": 100, "id": "a0"},
            {"rank": 1, "node": "10.0.0.1", "pid": 101, "id": "a1"},
        ]

    play(scenario)


def test_waiting_members_form_without_late_ones(play: Play, long_polls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ddp.rendezvous.planner.GROUP_WAIT_S", 0.05)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()  # starts the clock
        alone = await join(rendezvous, member("a", 1))
        assert isinstance(alone, Assignment)
        assert (alone.rank, alone.world_size) == (0, 1)

    play(scenario)


# Failures.


def test_a_broken_connection_leads_to_a_new_generation(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        before = await started(rendezvous)
        after = await asyncio.gather(
            join(rendezvous, member("a", 0), after=1, step=5, failure=BROKEN),
            join(rendezvous, member("a", 1), after=1, step=6, failure=BROKEN),
        )
        assert [answer.generation for answer in before] == [1, 1]
        assert [
            (answer.generation, answer.rank, answer.source, answer.receivers, answer.reason) for answer in after
        ] == [
            (2, 0, 1, (0,), "worker failed"),
            (2, 1, 1, (0,), "worker failed"),
        ]
        # A repeated request, as after a lost reply.
        assert await join(rendezvous, member("a", 1), after=1, step=6, failure=BROKEN) == after[1]

    play(scenario)


def test_a_survivor_continues_as_soon_as_a_heartbeat_connection_closes(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        address = await rendezvous.heartbeat_address()
        await started(rendezvous)
        _, connection = await asyncio.open_connection(*address)
        connection.write(b"a1\n")
        await connection.drain()
        survivor = asyncio.create_task(join(rendezvous, member("a", 0), after=1, step=5, failure=BROKEN))
        await until_blocked(survivor)
        connection.close()
        answer = await survivor
        assert (answer.generation, answer.rank, answer.world_size, answer.source) == (2, 0, 1, 0)
        assert (await rendezvous.supervise(["a0", "a1"], 0, {})).failed == {"a1": "its process exited"}
        late = await join(rendezvous, member("a", 1), after=1, step=5)
        assert late == Ended("its process exited")

    play(scenario)


def test_a_failure_is_recorded_once_with_its_generation(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous, size=3)
        for rank in (1, 1, 2):
            who = member("a", rank, 3)
            assert await join(rendezvous, who, after=1, step=5, failure=f"rank {rank} saw it") is None
        failure = await events_of(rendezvous, "worker_failed")
        assert [(event.generation, event.reported_by, event.error) for event in failure] == [(1, "a1", "rank 1 saw it")]

    play(scenario)


# Joining and leaving a healthy run.


def test_a_newcomer_joins_at_a_step_boundary(play: Play, long_polls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "BATCH_S", 0.05)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)
        asked = asyncio.create_task(signaled(rendezvous, member("a", 0), 1, lambda signals: signals.reconfigure))
        newcomer = asyncio.create_task(joined(rendezvous, member("a", 2)))
        assert await asked == Signals(reconfigure=True, planned=PlannedAssignment(rank=0, world_size=3, step=0))
        assert not newcomer.done()
        answers = [
            *await asyncio.gather(*(joined(rendezvous, member("a", rank), after=1, step=7) for rank in range(2))),
            await newcomer,
        ]
        assert [(answer.generation, answer.rank, answer.world_size) for answer in answers] == [
            (2, 0, 3),
            (2, 1, 3),
            (2, 2, 3),
        ]
        assert [(answer.source, answer.receivers, answer.reason) for answer in answers] == [
            (0, (2,), "workers joined")
        ] * 3
        formed = await events_of(rendezvous, "generation_formed")
        assert [(event.generation, event.first_step) for event in formed] == [(1, None), (2, 7)]

    play(scenario)


def test_a_resize_dismisses_a_waiting_newcomer_at_once(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        newcomer = asyncio.create_task(joined(rendezvous, member("a", 2)))
        late = member("a", 3)
        await until_blocked(newcomer)
        await rendezvous.resize(2)
        assert await join(rendezvous, member("a", 2)) == await join(rendezvous, late) == Ended(LEFT)
        with pytest.raises(AssertionError):
            await newcomer
        directives = await rendezvous.supervise(["a0", "a1", "a2", "a3"], 0, {})
        assert directives is not None and (directives.limit, directives.dismissed) == (2, ["a2", "a3"])
        left = await events_of(rendezvous, "worker_left")
        assert [(event.member, event.kind) for event in left] == [("a2", RESIZE), ("a3", RESIZE)]

    play(scenario)


def test_a_member_that_retires_after_the_end_is_no_failure(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous.end(member("a", 1), None, {"status": "finished"})
        await rendezvous.retire(member("a", 1))
        assert (await rendezvous.supervise(["a0", "a1"], 0, {})).failed == {}
        assert await events_of(rendezvous, "worker_failed") == []

    play(scenario)


# Heartbeats.


def test_a_member_without_heartbeats_fails(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        address = await rendezvous.heartbeat_address()
        await started(rendezvous)
        _, silent = await asyncio.open_connection(*address)
        silent.write(b"a1\n")
        signals = await signaled(rendezvous, member("a", 0), 1, lambda signals: signals.failed_generation)
        assert signals == Signals(failed_generation=1)
        assert (await rendezvous.supervise(["a0", "a1"], 0, {})).failed == {"a1": "no heartbeat for 0.2 s"}
        (failure,) = await events_of(rendezvous, "worker_failed")
        assert (failure.generation, failure.member) == (1, "a1")
        silent.close()

    play(scenario, RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=0.2))


# Newcomers.


def test_a_newcomers_failure_does_not_end_a_run_that_trains(play: Play, long_polls: None) -> None:
    failed = {"status": "failed", "kind": "TrainFunctionError", "error": "no such mount"}

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        assert not await rendezvous.end(member("a", 2), None, failed)
        (failure,) = await events_of(rendezvous, "newcomer_failed")
        assert (failure.member, failure.error) == ("a2", "no such mount")
        directives = await rendezvous.supervise(["a0", "a1", "a2"], 0, {})
        assert (
            directives is not None and directives.failed == {"a2": "no such mount"} and directives.newcomers == ["a2"]
        )
        assert await rendezvous.end(member("a", 0), None, failed)
        assert (await rendezvous.wait_for_update(0)).outcome == failed

    play(scenario)


def test_a_failure_before_any_worker_trains_ends_the_run(play: Play, long_polls: None) -> None:
    failed = {"status": "failed", "kind": "TrainFunctionError", "error": "no such mount"}

    async def scenario(rendezvous: Rendezvous) -> None:
        assert await rendezvous.end(member("a", 0), None, failed)
        assert (await rendezvous.wait_for_update(0)).outcome == failed

    play(scenario)


def test_a_killed_newcomer_is_listed_as_one(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous.mark_failed("a2", "its process exited")
        directives = await rendezvous.supervise(["a0", "a1", "a2", "a3"], 0, {})
        assert directives is not None and directives.failed == {"a2": "its process exited"}
        assert directives.newcomers == ["a2", "a3"], "the controller lists a worker before it joins"
        await rendezvous.mark_failed("a1", "its process exited")
        directives = await rendezvous.supervise(["a0", "a1", "a2", "a3"], 0, {})
        assert directives is not None and "a1" not in directives.newcomers

    play(scenario)


def test_a_member_that_leaves_a_generation_unasked_has_failed(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous.retire(member("a", 1))
        (failure,) = await events_of(rendezvous, "worker_failed")
        assert (failure.member, failure.error) == ("a1", "it left its generation without being asked to")
        assert (await rendezvous.poll_signals(member("a", 0), 1, None)).failed_generation == 1
        alone = await join(rendezvous, member("a", 0), 1, 5)
        assert isinstance(alone, Assignment) and alone.world_size == 1

    play(scenario)


def test_a_newcomer_with_an_assignment_gets_it_while_the_run_stops(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        newcomer = asyncio.create_task(join(rendezvous, member("a", 2)))
        await until_blocked(newcomer)
        newcomer.cancel()  # the call ended without an answer, so the client will repeat it
        await asyncio.gather(*(join(rendezvous, member("a", rank), 1, 5) for rank in (0, 1)))
        await rendezvous.stop()
        place = await join(rendezvous, member("a", 2))
        assert isinstance(place, Assignment) and place.world_size == 3

    play(scenario)


def test_a_newcomer_of_a_stopping_run_is_not_waited_for(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        newcomer = asyncio.create_task(join(rendezvous, member("a", 2)))
        await until_blocked(newcomer)
        await rendezvous.stop()
        newcomer.cancel()
        assert await join(rendezvous, member("a", 2)) == Ended("stopped")
        places = await asyncio.gather(*(join(rendezvous, member("a", rank), 1, 5) for rank in (0, 1)))
        assert [place.world_size for place in places if isinstance(place, Assignment)] == [2, 2]

    play(scenario)
