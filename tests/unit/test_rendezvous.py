"""The rendezvous, without Ray: who gets into which generation, and when they are told."""

from __future__ import annotations

import asyncio

import pytest
import torch.distributed as dist

from elastic_ddp.distributed.process_group import Assignment
from elastic_ddp.rendezvous import membership as membership_module
from elastic_ddp.rendezvous.actor import Rendezvous
from elastic_ddp.rendezvous.heartbeat import Heartbeat
from elastic_ddp.rendezvous.members import RESIZE
from elastic_ddp.rendezvous.membership import LEFT
from elastic_ddp.rendezvous.messages import NO_SIGNALS, Ended, PlannedAssignment, RendezvousOptions, Signals
from tests.unit.rendezvous_harness import BROKEN, Play, events_of, heard, join, joined, member, started, until_held

# Joining.


def test_members_that_join_get_their_ranks_and_a_store_that_answers(play: Play, long_polls: None) -> None:
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
        assert [event.event for event in events] == ["rendezvous"]
        assert (events[0].world_size, events[0].reason, events[0].first_step) == (2, "start", None)
        assert events[0].members == [
            {"rank": 0, "node": "10.0.0.0", "pid": 100},
            {"rank": 1, "node": "10.0.0.1", "pid": 101},
        ]

    play(scenario)


def test_a_member_that_waits_alone_is_told_to_ask_again_within_a_poll(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        assert await join(rendezvous, member("a", 0)) is None
        assert await join(rendezvous, member("a", 0)) is None

    play(scenario)


def test_a_member_whose_answer_was_lost_gets_it_again(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        answers = await started(rendezvous)
        assert await join(rendezvous, member("a", 1)) == answers[1]

    play(scenario)


def test_members_that_wait_go_without_those_who_do_not_come(
    play: Play, long_polls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ddp.rendezvous.members.GROUP_WAIT_S", 0.05)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()  # the clock runs from here on
        alone = await join(rendezvous, member("a", 1))
        assert isinstance(alone, Assignment)
        assert (alone.rank, alone.world_size) == (0, 1)

    play(scenario)


def test_members_that_wait_longer_than_a_poll_go_without_those_who_do_not_come(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ddp.rendezvous.members.GROUP_WAIT_S", 0.5)  # many polls, as in truth

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        async with asyncio.timeout(3):
            while await join(rendezvous, member("a", 1)) is None:
                pass

    play(scenario)


# Losses.


def test_members_that_all_survived_a_broken_connection_get_a_new_generation(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        before = await started(rendezvous)
        after = await asyncio.gather(
            join(rendezvous, member("a", 0), after=1, step=5, failure=BROKEN),
            join(rendezvous, member("a", 1), after=1, step=6, failure=BROKEN),
        )
        assert [answer.generation for answer in before] == [1, 1]
        assert [(each.generation, each.rank, each.source, each.receivers, each.reason) for each in after] == [
            (2, 0, 1, (0,), "worker failed"),
            (2, 1, 1, (0,), "worker failed"),
        ]
        # Its answer was lost, and it asks again.
        assert await join(rendezvous, member("a", 1), after=1, step=6, failure=BROKEN) == after[1]

    play(scenario)


def test_a_survivor_goes_on_as_soon_as_the_pulse_of_the_dead_one_ends(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        address = await rendezvous.heartbeat_address()
        await started(rendezvous)
        _, dying = await asyncio.open_connection(*address)
        dying.write(b"a1\n")
        await dying.drain()
        survivor = asyncio.create_task(join(rendezvous, member("a", 0), after=1, step=5, failure=BROKEN))
        await until_held(survivor)
        dying.close()
        answer = await survivor
        assert (answer.generation, answer.rank, answer.world_size, answer.source) == (2, 0, 1, 0)
        assert (await rendezvous.supervise(["a0", "a1"], 0, {})).failed == {"a1": "its process exited"}
        late = await join(rendezvous, member("a", 1), after=1, step=5)
        assert late == Ended("its process exited")

    play(scenario)


def test_a_member_in_a_collective_is_told_that_its_generation_is_broken(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        address = await rendezvous.heartbeat_address()
        await started(rendezvous)
        training = asyncio.create_task(heard(rendezvous, member("a", 0), 1, lambda signals: signals.failed_generation))
        await until_held(training)
        _, dying = await asyncio.open_connection(*address)
        dying.write(b"a1\n")
        await dying.drain()
        dying.close()
        assert await training == Signals(failed_generation=1)
        failure = await events_of(rendezvous, "worker_lost")
        assert [(each.generation, each.member, each.error) for each in failure] == [(1, "a1", "its process exited")]

    play(scenario)


def test_a_loss_is_recorded_once_with_its_generation(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous, size=3)
        for rank in (1, 1, 2):
            who = member("a", rank, 3)
            assert await join(rendezvous, who, after=1, step=5, failure=f"rank {rank} saw it") is None
        failure = await events_of(rendezvous, "worker_lost")
        assert [(each.generation, each.reported_by, each.error) for each in failure] == [(1, "a1", "rank 1 saw it")]

    play(scenario)


# Joining and leaving a run that is healthy.


def test_a_newcomer_is_let_in_at_a_step_boundary(play: Play, long_polls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "BATCH_S", 0.05)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)
        asked = asyncio.create_task(heard(rendezvous, member("a", 0), 1, lambda signals: signals.reconfigure))
        newcomer = asyncio.create_task(joined(rendezvous, member("a", 2)))
        assert await asked == Signals(reconfigure=True, planned=PlannedAssignment(rank=0, world_size=3, step=0))
        assert not newcomer.done()
        answers = [
            *await asyncio.gather(*(joined(rendezvous, member("a", rank), after=1, step=7) for rank in range(2))),
            await newcomer,
        ]
        assert [(each.generation, each.rank, each.world_size) for each in answers] == [(2, 0, 3), (2, 1, 3), (2, 2, 3)]
        assert [(each.source, each.receivers, each.reason) for each in answers] == [(0, (2,), "workers joined")] * 3
        formed = await events_of(rendezvous, "rendezvous")
        assert [(each.generation, each.first_step) for each in formed] == [(1, None), (2, 7)]

    play(scenario)


def test_nobody_is_asked_to_let_in_more_than_there_is_room_for(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "BATCH_S", 0.0)

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        assert await join(rendezvous, member("a", 2)) is None
        assert await rendezvous.poll_signals(member("a", 0), 1, None) == NO_SIGNALS

    play(scenario, RendezvousOptions(min_workers=1, max_workers=2, heartbeat_timeout_s=30.0))


def test_a_newcomer_for_whom_there_is_no_room_any_more_is_told_so_at_once(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        newcomer = asyncio.create_task(joined(rendezvous, member("a", 2)))
        late = member("a", 3)
        await until_held(newcomer)
        await rendezvous.resize(2)
        assert await join(rendezvous, member("a", 2)) == await join(rendezvous, late) == Ended(LEFT)
        with pytest.raises(AssertionError):
            await newcomer
        assert (await rendezvous.supervise(["a0", "a1", "a2", "a3"], 0, {})).dismissed == ["a2", "a3"]
        left = await events_of(rendezvous, "worker_left")
        assert [(each.member, each.kind) for each in left] == [("a2", RESIZE), ("a3", RESIZE)]

    play(scenario)


@pytest.mark.parametrize("resumable", [True, False])
def test_one_that_has_to_go_amid_an_evaluation_commits_if_its_state_is_that_of_a_step(
    play: Play, resumable: bool
) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        alone = member("a", 0, 1)
        await join(rendezvous, alone)
        await rendezvous.leave(alone, 1e-6, "SIGTERM")
        again = await join(rendezvous, alone, 1, 5, False, BROKEN, resumable=resumable)
        assert isinstance(again, Assignment)
        assert (again.handover_only, again.in_collective_task) == (resumable, not resumable)

    play(scenario)


def test_a_member_that_is_through_when_the_run_is_over_is_no_loss(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous.end(member("a", 1), None, {"status": "finished"})
        await rendezvous.retire(member("a", 1))
        assert (await rendezvous.supervise(["a0", "a1"], 0, {})).failed == {}
        assert await events_of(rendezvous, "worker_lost") == []

    play(scenario)


def test_the_driver_hears_how_many_are_alive(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        assert (await rendezvous.wait_for_update(0)).num_alive == 0
        await started(rendezvous)
        assert (await rendezvous.wait_for_update(0)).num_alive == 2
        await rendezvous.retire(member("a", 1))
        assert (await rendezvous.wait_for_update(0)).num_alive == 1

    play(scenario)


# The pulse.


def test_all_members_connect_their_pulses_to_one_address(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        first = await rendezvous.heartbeat_address()
        assert await rendezvous.heartbeat_address() == first

    play(scenario)


def test_a_member_that_falls_silent_is_lost_and_one_that_beats_is_not(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        address = await rendezvous.heartbeat_address()
        await started(rendezvous)
        pulse = await asyncio.to_thread(Heartbeat, lambda: address, "a0", 1.0)
        _, silent = await asyncio.open_connection(*address)
        silent.write(b"a1\n")
        await heard(rendezvous, member("a", 0), 1, lambda signals: signals.failed_generation)
        assert (await rendezvous.supervise(["a0", "a1"], 0, {})).failed == {"a1": "no heartbeat for 1 s"}
        await asyncio.to_thread(pulse.stop)
        silent.close()

    play(scenario, RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=1.0))


# Newcomers.


def test_a_newcomer_that_fails_is_replaced_and_does_not_end_a_run_that_trains(play: Play, long_polls: None) -> None:
    failed = {"status": "failed", "kind": "TrainFunctionError", "error": "no such mount"}

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        assert not await rendezvous.end(member("a", 2), None, failed)
        (failure,) = await events_of(rendezvous, "newcomer_lost")
        assert (failure.member, failure.error) == ("a2", "no such mount")
        orders = await rendezvous.supervise(["a0", "a1", "a2"], 0, {})
        assert orders is not None and orders.failed == {"a2": "no such mount"} and orders.newcomers == ["a2"]
        assert await rendezvous.end(member("a", 0), None, failed)
        assert (await rendezvous.wait_for_update(0)).outcome == failed

    play(scenario)


def test_who_fails_where_nobody_trains_ends_the_run(play: Play, long_polls: None) -> None:
    failed = {"status": "failed", "kind": "TrainFunctionError", "error": "no such mount"}

    async def scenario(rendezvous: Rendezvous) -> None:
        assert await rendezvous.end(member("a", 0), None, failed)
        assert (await rendezvous.wait_for_update(0)).outcome == failed

    play(scenario)


def test_a_newcomer_that_is_killed_costs_nothing_but_its_start(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous._on_failure("a2", "its process exited")
        orders = await rendezvous.supervise(["a0", "a1", "a2", "a3"], 0, {})
        assert orders is not None and orders.failed == {"a2": "its process exited"}
        assert orders.newcomers == ["a2", "a3"], "of one that dies before it ever comes the controller knows first"
        await rendezvous._on_failure("a1", "its process exited")
        orders = await rendezvous.supervise(["a0", "a1", "a2", "a3"], 0, {})
        assert orders is not None and "a1" not in orders.newcomers

    play(scenario)


def test_who_leaves_a_generation_unasked_is_a_loss(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous.retire(member("a", 1))
        (failure,) = await events_of(rendezvous, "worker_lost")
        assert (failure.member, failure.error) == ("a1", "it left its generation without being asked to")
        assert (await rendezvous.poll_signals(member("a", 0), 1, None)).failed_generation == 1
        alone = await join(rendezvous, member("a", 0), 1, 5)
        assert isinstance(alone, Assignment) and alone.world_size == 1

    play(scenario)


def test_a_newcomer_that_others_wait_for_takes_its_place_though_the_run_stops(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        newcomer = asyncio.create_task(join(rendezvous, member("a", 2)))
        await until_held(newcomer)
        newcomer.cancel()  # its call ended without an answer, and it is about to ask again
        await asyncio.gather(*(join(rendezvous, member("a", rank), 1, 5) for rank in (0, 1)))
        await rendezvous.stop()
        place = await join(rendezvous, member("a", 2))
        assert isinstance(place, Assignment) and place.world_size == 3

    play(scenario)


def test_a_newcomer_that_was_told_that_the_run_stops_is_not_waited_for(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        newcomer = asyncio.create_task(join(rendezvous, member("a", 2)))
        await until_held(newcomer)
        await rendezvous.stop()
        newcomer.cancel()
        assert await join(rendezvous, member("a", 2)) == Ended("stopped")
        places = await asyncio.gather(*(join(rendezvous, member("a", rank), 1, 5) for rank in (0, 1)))
        assert [each.world_size for each in places if isinstance(each, Assignment)] == [2, 2]

    play(scenario)
