"""The rendezvous, without Ray: what members and the driver are told, and when."""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elastic_ddp.elastic import membership as membership_module
from elastic_ddp.elastic import rendezvous as rendezvous_module
from elastic_ddp.elastic.hang import Whereabouts
from elastic_ddp.elastic.journal import Journal
from elastic_ddp.elastic.members import Member
from elastic_ddp.elastic.membership import LEFT, SUPERSEDED
from elastic_ddp.elastic.memory import Memory
from elastic_ddp.elastic.messages import NOTHING, Ended, News, Prospect, RendezvousOptions, Signals
from elastic_ddp.elastic.pulse import Pulse
from elastic_ddp.elastic.rendezvous import Rendezvous
from elastic_ddp.parallel.process_group import Assignment

LIMIT_S = 20.0
BROKEN = "connection closed"
OPTIONS = RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=30.0)

Play = Callable[..., Any]


def member(group: str, rank: int, size: int = 2) -> Member:
    return Member(
        id=f"{group}{rank}",
        group=group,
        rank_in_group=rank,
        group_size=size,
        node=f"10.0.0.{rank}",
        node_id=f"id{rank}",
        pid=100 + rank,
    )


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Runs a scenario against a rendezvous of its own, whose polls are short."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(rendezvous_module, "POLL_S", 0.05)

    def run(scenario: Callable[[Rendezvous], Awaitable[Any]], options: RendezvousOptions = OPTIONS) -> Any:
        async def within_time() -> Any:
            rendezvous = Rendezvous("lm", 100, options)
            try:
                return await asyncio.wait_for(scenario(rendezvous), LIMIT_S)
            finally:
                if rendezvous._pulses._server is not None:
                    rendezvous._pulses._server.close()

        return asyncio.run(within_time())

    return run


@pytest.fixture
def long_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes at all comes because of a change."""
    monkeypatch.setattr(rendezvous_module, "POLL_S", 1000.0)


async def join(
    rendezvous: Rendezvous,
    who: Member,
    after: int = 0,
    step: int | None = None,
    between_steps: bool = True,
    lost: str | None = None,
) -> Assignment | Ended | Prospect | None:
    return await rendezvous.join(who, after, step, between_steps, lost)


async def started(rendezvous: Rendezvous, group: str = "a", size: int = 2) -> list[Any]:
    return list(await asyncio.gather(*(join(rendezvous, member(group, rank, size)) for rank in range(size))))


async def joined(rendezvous: Rendezvous, who: Member, after: int = 0, step: int | None = None) -> Assignment:
    """Asks, as a link does, until there is an answer."""
    while (answer := await join(rendezvous, who, after, step)) is None or isinstance(answer, Prospect):
        await asyncio.sleep(0)
    assert isinstance(answer, Assignment)
    return answer


async def until_held(*calls: asyncio.Task[Any]) -> None:
    """Lets calls run until they wait for something to happen."""
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(call.done() for call in calls)


async def heard(rendezvous: Rendezvous, who: Member, generation: int, what: Callable[[Signals], object]) -> Signals:
    """Listens, as a link does, until a member is told something."""
    while not what(signals := await rendezvous.listen(who, generation, None)):
        await asyncio.sleep(0)
    return signals


async def events_of(rendezvous: Rendezvous, event: str) -> list[dict[str, Any]]:
    return [each for each in (await rendezvous.follow(0)).events if each["event"] == event]


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
        events = (await rendezvous.follow(0)).events
        assert [event["event"] for event in events] == ["rendezvous"]
        assert (events[0]["world_size"], events[0]["reason"], events[0]["first_step"]) == (2, "start", None)
        assert events[0]["members"] == [
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
    monkeypatch.setattr(membership_module, "GATHER_S", 0.05)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.pulse_address()  # the clock runs from here on
        alone = await join(rendezvous, member("a", 1))
        assert isinstance(alone, Assignment)
        assert (alone.rank, alone.world_size) == (0, 1)

    play(scenario)


def test_members_that_wait_longer_than_a_poll_go_without_those_who_do_not_come(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "GATHER_S", 0.5)  # many polls, as in truth

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.pulse_address()
        async with asyncio.timeout(3):
            while await join(rendezvous, member("a", 1)) is None:
                pass

    play(scenario)


# Losses.


def test_members_that_all_survived_a_broken_connection_get_a_new_generation(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        before = await started(rendezvous)
        after = await asyncio.gather(
            join(rendezvous, member("a", 0), after=1, step=5, lost=BROKEN),
            join(rendezvous, member("a", 1), after=1, step=6, lost=BROKEN),
        )
        assert [answer.generation for answer in before] == [1, 1]
        assert [(each.generation, each.rank, each.source, each.receivers, each.reason) for each in after] == [
            (2, 0, 1, (0,), "worker lost"),
            (2, 1, 1, (0,), "worker lost"),
        ]
        # Its answer was lost, and it asks again.
        assert await join(rendezvous, member("a", 1), after=1, step=6, lost=BROKEN) == after[1]

    play(scenario)


def test_a_survivor_goes_on_as_soon_as_the_pulse_of_the_dead_one_ends(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        address = await rendezvous.pulse_address()
        await started(rendezvous)
        _, dying = await asyncio.open_connection(*address)
        dying.write(b"a1\n")
        await dying.drain()
        survivor = asyncio.create_task(join(rendezvous, member("a", 0), after=1, step=5, lost=BROKEN))
        await until_held(survivor)
        dying.close()
        answer = await survivor
        assert (answer.generation, answer.rank, answer.world_size, answer.source) == (2, 0, 1, 0)
        assert (await rendezvous.supervise(["a0", "a1"], 0, {})).lost == {"a1": "its process ended"}
        late = await join(rendezvous, member("a", 1), after=1, step=5)
        assert late == Ended("its process ended")

    play(scenario)


def test_a_member_in_a_collective_is_told_that_its_generation_is_broken(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        address = await rendezvous.pulse_address()
        await started(rendezvous)
        training = asyncio.create_task(heard(rendezvous, member("a", 0), 1, lambda signals: signals.broken))
        await until_held(training)
        _, dying = await asyncio.open_connection(*address)
        dying.write(b"a1\n")
        await dying.drain()
        dying.close()
        assert await training == Signals(broken=1)
        lost = await events_of(rendezvous, "worker_lost")
        assert [(each["generation"], each["member"], each["error"]) for each in lost] == [
            (1, "a1", "its process ended")
        ]

    play(scenario)


def test_a_loss_is_recorded_once_with_its_generation(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous, size=3)
        for rank in (1, 1, 2):
            who = member("a", rank, 3)
            assert await join(rendezvous, who, after=1, step=5, lost=f"rank {rank} saw it") is None
        lost = await events_of(rendezvous, "worker_lost")
        assert [(each["generation"], each["reported_by"], each["error"]) for each in lost] == [
            (1, "a1", "rank 1 saw it")
        ]

    play(scenario)


def test_members_of_a_group_that_was_started_again_are_told_that_it_is_over(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        survivor = asyncio.create_task(join(rendezvous, member("a", 0), after=1, step=5, lost=BROKEN))
        training = asyncio.create_task(heard(rendezvous, member("a", 1), 1, lambda signals: signals.ended))
        await until_held(survivor, training)
        replaced = await started(rendezvous, "b")
        assert [answer.reason for answer in replaced] == ["worker lost", "worker lost"]
        assert [answer.generation for answer in replaced] == [2, 2]
        assert await survivor == Ended(SUPERSEDED)
        assert (await training).ended == SUPERSEDED
        assert await join(rendezvous, member("a", 1), after=1, step=5, lost=BROKEN) == Ended(SUPERSEDED)

    play(scenario)


# Joining and leaving a run that is healthy.


def test_a_newcomer_is_let_in_at_a_step_boundary(play: Play, long_polls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "SETTLE_S", 0.05)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.pulse_address()
        await started(rendezvous)
        asked = asyncio.create_task(heard(rendezvous, member("a", 0), 1, lambda signals: signals.reconfigure))
        newcomer = asyncio.create_task(joined(rendezvous, member("a", 2)))
        assert await asked == Signals(reconfigure=True, prospect=Prospect(rank=0, world_size=3, step=0))
        assert not newcomer.done()
        answers = [
            *await asyncio.gather(*(joined(rendezvous, member("a", rank), after=1, step=7) for rank in range(2))),
            await newcomer,
        ]
        assert [(each.generation, each.rank, each.world_size) for each in answers] == [(2, 0, 3), (2, 1, 3), (2, 2, 3)]
        assert [(each.source, each.receivers, each.reason) for each in answers] == [(0, (2,), "workers joined")] * 3
        formed = await events_of(rendezvous, "rendezvous")
        assert [(each["generation"], each["first_step"]) for each in formed] == [(1, None), (2, 7)]

    play(scenario)


def test_nobody_is_asked_to_let_in_more_than_there_is_room_for(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "SETTLE_S", 0.0)

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        assert await join(rendezvous, member("a", 2)) is None
        assert await rendezvous.listen(member("a", 0), 1, None) == NOTHING

    play(scenario, RendezvousOptions(min_workers=1, max_workers=2, heartbeat_timeout_s=30.0))


def test_a_member_that_is_through_when_the_run_is_over_is_no_loss(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous.end(member("a", 1), None, {"status": "finished"})
        await rendezvous.retire(member("a", 1))
        assert (await rendezvous.supervise(["a0", "a1"], 0, {})).lost == {}
        assert await events_of(rendezvous, "worker_lost") == []

    play(scenario)


def test_the_driver_hears_how_many_are_alive(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        assert (await rendezvous.follow(0)).num_alive == 0
        await started(rendezvous)
        assert (await rendezvous.follow(0)).num_alive == 2
        await rendezvous.retire(member("a", 1))
        assert (await rendezvous.follow(0)).num_alive == 1

    play(scenario)


# The ear and the mouth of the run.


def test_messages_reach_the_driver_in_order_and_only_the_newest_progress_does(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous, size=1)
        await rendezvous.take([{"event": "one"}, {"event": "two"}], {"step": 1})
        await rendezvous.take([{"event": "three"}], {"step": 2})
        assert await rendezvous.listen(member("a", 0, 1), 1, {"step": 3}) == NOTHING
        news = await rendezvous.follow(0)
        assert [event["event"] for event in news.events] == ["rendezvous", "one", "two", "three"]
        assert (news.progress, news.outcome) == ({"step": 3}, None)
        assert [event["event"] for event in (await rendezvous.follow(3)).events] == ["three"]

    play(scenario)


def test_what_the_driver_has_written_down_is_forgotten() -> None:
    journal = Journal(Memory(None))
    for number in range(1, 6):
        journal.take([{"event": "steps", "step": number}], None)
    assert [event["step"] for event in journal.after(2)] == [3, 4, 5] == [event["step"] for event in journal.after(2)]
    assert [event["step"] for event in journal.after(0)] == [3, 4, 5]
    assert journal.num_events == 5 and journal.last("steps")["step"] == 5
    journal.take([{"event": "steps", "step": 6}], None)
    assert [event["step"] for event in journal.after(5)] == [6] and journal.num_events == 6


def test_the_driver_is_held_until_there_is_news(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        driver = asyncio.create_task(rendezvous.follow(0))
        await until_held(driver)
        await rendezvous.take([{"event": "commit", "step": 7}], None)
        assert [event["step"] for event in (await driver).events] == [7]

    play(scenario)


def test_a_driver_without_news_is_answered_within_a_poll(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        assert await rendezvous.follow(0) == News([], {}, None, 0, False)

    play(scenario)


def test_a_stop_reaches_a_worker_that_waits_and_nobody_new_gets_in(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        waiting = asyncio.create_task(rendezvous.listen(member("a", 0), 1, None))
        await until_held(waiting)
        await rendezvous.stop()
        assert await waiting == Signals(stop=True)
        assert await rendezvous.listen(member("a", 1), 1, None) == Signals(stop=True)
        assert await join(rendezvous, member("a", 2)) == Ended("stopped")
        status = await rendezvous.status()
        assert status["state"] == "stopping"

    play(scenario)


def test_survivors_of_a_run_that_stops_form_once_more_to_commit_what_they_hold(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        survivor = asyncio.create_task(join(rendezvous, member("a", 0), after=1, step=5, lost=BROKEN))
        await rendezvous.retire(member("a", 1))
        await until_held(survivor)  # one is too few to train
        await rendezvous.stop()
        answer = await survivor
        assert (answer.generation, answer.world_size, answer.source) == (2, 1, 0)

    play(scenario, RendezvousOptions(min_workers=2, max_workers=4, heartbeat_timeout_s=30.0))


def test_the_first_outcome_counts_and_ends_everyone(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        waiting = asyncio.create_task(rendezvous.listen(member("a", 1), 1, None))
        joining = asyncio.create_task(join(rendezvous, member("a", 0), after=1, step=9))
        driver = asyncio.create_task(rendezvous.follow(1))
        await until_held(waiting, joining, driver)
        await rendezvous.take([{"event": "commit", "step": 9}], None)
        await rendezvous.end(member("a", 0), {"step": 9}, {"status": "failed", "error": "the first"})
        await rendezvous.end(member("a", 0), None, {"status": "finished"})
        assert await waiting == Signals(ended="failed")
        news = await rendezvous.follow(1)
        assert [event["step"] for event in news.events] == [9]  # nothing that was said before the end is lost
        assert (news.progress, news.outcome) == ({"step": 9}, {"status": "failed", "error": "the first"})
        assert (await driver).events == news.events
        assert await join(rendezvous, member("a", 2)) == Ended("failed")
        assert (await rendezvous.follow(2)).outcome == news.outcome  # at once
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
        said = [{"event": "generation", "generation": 1, "world_size": 2}, {"event": "commit", "step": 5}]
        await rendezvous.take(said, {"step": 6, "loss": 0.5})
        assert (await rendezvous.status())["state"] == "training"
        await rendezvous.stop()
        status = await rendezvous.status()
        assert (status["state"], status["generation"], status["world_size"]) == ("stopping", 1, 2)
        assert (status["step"], status["loss"], status["last_commit"]) == (6, 0.5, 5)
        await rendezvous.end(member("a", 0), None, {"status": "stopped"})
        assert (await rendezvous.status())["state"] == "stopped"

    play(scenario)


# The pulse.


def test_all_members_connect_their_pulses_to_one_address(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        first = await rendezvous.pulse_address()
        assert await rendezvous.pulse_address() == first

    play(scenario)


def test_a_member_that_falls_silent_is_lost_and_one_that_beats_is_not(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        address = await rendezvous.pulse_address()
        await started(rendezvous)
        pulse = await asyncio.to_thread(Pulse, lambda: address, "a0", 1.0)
        _, silent = await asyncio.open_connection(*address)
        silent.write(b"a1\n")
        await heard(rendezvous, member("a", 0), 1, lambda signals: signals.broken)
        assert (await rendezvous.supervise(["a0", "a1"], 0, {})).lost == {"a1": "it was silent for 1 s"}
        await asyncio.to_thread(pulse.stop)
        silent.close()

    play(scenario, RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=1.0))


# What it is asked for.


def where(number: int, place: str) -> Whereabouts:
    return Whereabouts(number, place)


def test_a_member_that_asks_to_go_is_let_go_at_the_next_boundary_and_recorded(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.pulse_address()
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
        assert [each["by"] for each in await events_of(rendezvous, "notice")] == ["SIGTERM"]
        assert [(each["member"], each["kind"]) for each in await events_of(rendezvous, "worker_left")] == [
            ("a1", "drain")
        ]
        orders = await rendezvous.supervise(["a0", "a1"], 0, {})
        assert orders is not None and (orders.dismissed, orders.lost, orders.leaving) == (["a1"], {}, [])

    play(scenario)


def test_of_members_that_all_leave_one_is_to_commit_first(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.pulse_address()
        await started(rendezvous)
        orders = await rendezvous.supervise(["a0", "a1"], 0, {"id0": 0.0, "id1": 0.0})
        assert orders is not None and sorted(orders.leaving) == ["a0", "a1"] and orders.avoid == ["id0", "id1"]
        await heard(rendezvous, member("a", 0), 1, lambda signals: signals.reconfigure)
        first, second = await asyncio.gather(
            joined(rendezvous, member("a", 0), 1, 5), join(rendezvous, member("a", 1), 1, 5)
        )
        assert first.brief and first.world_size == 1
        assert second == Ended(LEFT)
        assert await rendezvous.join(member("a", 0), 2, 5, True, None, 5) == Ended(LEFT)
        assert [each["by"] for each in await events_of(rendezvous, "notice")] == ["Ray", "Ray"]

    play(scenario)


def test_who_asks_for_a_commit_is_told_when_there_is_one(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        request = await rendezvous.checkpoint()
        assert await rendezvous.checkpoint() == request, "one commit answers both"
        assert await rendezvous.committed(request) is None
        signals = await heard(rendezvous, member("a", 0), 1, lambda signals: signals.commit)
        await rendezvous.take([{"event": "commit", "step": 4, "request": None, "time": 0.0}], None)
        assert await rendezvous.committed(request) is None
        await rendezvous.take([{"event": "commit", "step": 7, "request": signals.commit, "time": 0.0}], None)
        assert await rendezvous.committed(request) == 7
        assert await rendezvous.checkpoint() == request + 1

    play(scenario)


def test_a_node_is_drained_by_its_address_or_by_its_id(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.pulse_address()
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
        await rendezvous.pulse_address()
        await started(rendezvous, size=3)
        await rendezvous.resize(1)
        await heard(rendezvous, member("a", 0, 3), 1, lambda signals: signals.reconfigure)
        answers = await asyncio.gather(*(join(rendezvous, member("a", rank, 3), 1, 5) for rank in range(3)))
        assert answers[1:] == [Ended(LEFT), Ended(LEFT)]
        orders = await rendezvous.supervise(["a0", "a1", "a2"], 0, {})
        assert orders is not None and (orders.limit, orders.dismissed) == (1, ["a1", "a2"])

    play(scenario)


# Hangs.


def hang_options(timeout_s: float) -> RendezvousOptions:
    return RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=30.0, hang_timeout_s=timeout_s)


def test_a_worker_that_hangs_is_given_up_after_all_have_said_where_they_are(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ddp.elastic.assembly.STACKS_S", 0.3)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.pulse_address()
        await started(rendezvous)

        async def listens(rank: int, place: str) -> list[Signals]:
            everything = []
            while not (everything and (everything[-1].broken or everything[-1].ended)):
                everything.append(await rendezvous.listen(member("a", rank), 1, None, where(7, place)))
                await asyncio.sleep(0)  # an answer that comes at once leaves no time to others
            return everything

        waits, hangs = await asyncio.gather(listens(0, "reduction"), listens(1, "forward"))
        assert any(each.show_stacks for each in waits) and any(each.show_stacks for each in hangs)
        assert "it hung in 'forward' for 0.3 s (hang_timeout_s)" in str(hangs[-1].ended)
        (hang,) = await events_of(rendezvous, "hang")
        assert hang["culprits"] == ["a1"] and hang["places"] == {"a0": "reduction", "a1": "forward"}
        assert isinstance(await join(rendezvous, member("a", 0), 1, 5), Assignment)
        assert await rendezvous.listen(member("a", 0), 2, None) == NOTHING, "nobody asks for stacks any more"

    play(scenario, hang_options(0.3))


def test_a_collective_that_nobody_completes_is_tried_again(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ddp.elastic.assembly.STACKS_S", 0.1)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.pulse_address()
        await started(rendezvous)
        for rank in (0, 1):
            await rendezvous.listen(member("a", rank), 1, None, where(7, "reduction"))
        while not (await rendezvous.listen(member("a", 0), 1, None, where(7, "reduction"))).broken:
            await asyncio.sleep(0)
        assert not (await rendezvous.supervise(["a0", "a1"], 0, {})).lost  # type: ignore[union-attr]

    play(scenario, hang_options(0.3))


def test_a_function_in_which_all_workers_are_stuck_ends_the_run(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ddp.elastic.assembly.STACKS_S", 0.1)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.pulse_address()
        await started(rendezvous)
        for rank in (0, 1):
            await rendezvous.listen(member("a", rank), 1, None, where(7, "forward"))
        news = await rendezvous.follow(10_000)
        while news.outcome is None:
            news = await rendezvous.follow(10_000)
        assert news.outcome["status"] == "failed"
        assert "all workers have been in 'forward' for 0.3 s (hang_timeout_s)" in news.outcome["error"]

    play(scenario, hang_options(0.3))


def test_a_worker_that_never_comes_is_given_up(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ddp.elastic.assembly.START_S", 0.0)

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        begun = asyncio.get_running_loop().time()
        while not (orders := await rendezvous.supervise(["a0", "a1", "a2"], 0, {})).lost:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - begun >= 0.3
        assert orders is not None and list(orders.lost) == ["a2"]
        (lost,) = await events_of(rendezvous, "newcomer_lost")
        assert "not ready to train 0.3 s after its start (hang_timeout_s)" in lost["error"]
        assert await events_of(rendezvous, "worker_lost") == []

    play(scenario, hang_options(0.3))


def test_waiting_for_workers_is_no_hang_however_long_it_takes(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ddp.elastic.assembly.STACKS_S", 0.0)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.pulse_address()
        await started(rendezvous)
        await rendezvous._on_lost("a1", "its process ended")
        await rendezvous.listen(member("a", 0), 1, None, where(8, "rendezvous"))
        waited, clock = 0.0, asyncio.get_running_loop().time
        begun = clock()
        while waited < 1.0:  # many times the timeout
            assert await join(rendezvous, member("a", 0), 1, 5) is None
            waited = clock() - begun
        assert await events_of(rendezvous, "hang") == []
        assert len(await events_of(rendezvous, "worker_lost")) == 1
        newcomer, _ = await asyncio.gather(join(rendezvous, member("a", 2)), joined(rendezvous, member("a", 0), 1, 5))
        assert isinstance(newcomer, Assignment) and newcomer.reason == "worker lost"

    options = RendezvousOptions(min_workers=2, max_workers=4, heartbeat_timeout_s=30.0, hang_timeout_s=0.1)
    play(scenario, options)


def test_a_newcomer_that_fails_is_replaced_and_does_not_end_a_run_that_trains(play: Play, long_polls: None) -> None:
    failed = {"status": "failed", "kind": "TrainFunctionError", "error": "no such mount"}

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        assert not await rendezvous.end(member("a", 2), None, failed)
        (lost,) = await events_of(rendezvous, "newcomer_lost")
        assert (lost["member"], lost["error"]) == ("a2", "no such mount")
        orders = await rendezvous.supervise(["a0", "a1", "a2"], 0, {})
        assert orders is not None and orders.lost == {"a2": "no such mount"} and orders.newcomers == ["a2"]
        assert await rendezvous.end(member("a", 0), None, failed)
        assert (await rendezvous.follow(0)).outcome == failed

    play(scenario)


def test_who_fails_where_nobody_trains_ends_the_run(play: Play, long_polls: None) -> None:
    failed = {"status": "failed", "kind": "TrainFunctionError", "error": "no such mount"}

    async def scenario(rendezvous: Rendezvous) -> None:
        assert await rendezvous.end(member("a", 0), None, failed)
        assert (await rendezvous.follow(0)).outcome == failed

    play(scenario)


def test_a_newcomer_that_is_killed_costs_nothing_but_its_start(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous._on_lost("a2", "its process ended")
        orders = await rendezvous.supervise(["a0", "a1", "a2", "a3"], 0, {})
        assert orders is not None and orders.lost == {"a2": "its process ended"}
        assert orders.newcomers == ["a2", "a3"], "of one that dies before it ever comes the controller knows first"
        await rendezvous._on_lost("a1", "its process ended")
        orders = await rendezvous.supervise(["a0", "a1", "a2", "a3"], 0, {})
        assert orders is not None and "a1" not in orders.newcomers

    play(scenario)


def test_who_leaves_a_generation_unasked_is_a_loss(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous.retire(member("a", 1))
        (lost,) = await events_of(rendezvous, "worker_lost")
        assert (lost["member"], lost["error"]) == ("a1", "it left its generation, and was not asked to")
        assert (await rendezvous.listen(member("a", 0), 1, None)).broken == 1
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


def test_of_one_presumed_dead_neither_progress_nor_time_counts(play: Play, long_polls: None) -> None:
    ended = {"event": "generation_ended", "time": 0.0, "generation": 1, "account": {"useful": 60.0}}

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await rendezvous.take([], {"step": 7}, "a1")
        await rendezvous._on_lost("a0", "it was silent for 5 s")
        await rendezvous.take([ended], {"step": 3}, "a0", 1)
        assert (await rendezvous.status())["step"] == 7
        assert [each["account"] for each in await events_of(rendezvous, "generation_ended")] == [None]

    play(scenario)


def test_a_commit_is_made_also_where_there_are_too_few_to_train(play: Play, long_polls: None) -> None:
    options = RendezvousOptions(min_workers=2, max_workers=4, heartbeat_timeout_s=30.0, last_commit=3)

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        assert (await rendezvous.status())["last_commit"] == 3, "that it went on from"
        await rendezvous._on_lost("a1", "its process ended")
        waits = asyncio.create_task(join(rendezvous, member("a", 0), 1, 5))
        await until_held(waits)
        request = await rendezvous.checkpoint()
        place = await waits
        assert isinstance(place, Assignment) and place.brief and place.world_size == 1
        commit = {"event": "commit", "step": 5, "request": request, "time": 0.0}
        await rendezvous.take([commit], None, "a0", 1)
        assert await rendezvous.committed(request) == 5
        waits = asyncio.create_task(rendezvous.join(member("a", 0), 2, 5, True, None, committed=5))
        await until_held(waits)
        assert await rendezvous.committed(await rendezvous.checkpoint()) == 5, "there is nothing newer"
        waits.cancel()

    play(scenario, options)


def test_the_store_forgets_what_generations_before_the_last_said(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "TICK_S", 0.01)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.pulse_address()
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
    memory = Memory(str(tmp_path))
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
    assert [line["event"]["event"] for line in Memory(str(tmp_path)).lines()] == ["first", "third"]


def test_a_restarted_rendezvous_knows_what_the_one_before_knew(play: Play, tmp_path: Path) -> None:
    options = RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=0.3, memory=str(tmp_path))
    said = [{"event": "commit", "step": 5, "request": None, "time": 0.0}]

    async def first_life(rendezvous: Rendezvous) -> None:
        await rendezvous.pulse_address()
        await started(rendezvous, size=3)
        await rendezvous.take(said, None, "a0", 1)
        await rendezvous.resize(2)
        await rendezvous.drain("id2", 100.0)

    async def second_life(rendezvous: Rendezvous) -> None:
        host, port = await rendezvous.pulse_address()
        pulses = [Pulse(lambda: (host, port), f"a{rank}", 30.0) for rank in (0, 2)]
        await rendezvous.take(said, None, "a0", 1)  # it had not heard that it arrived
        assert len(await events_of(rendezvous, "commit")) == 1
        status = await rendezvous.status()
        assert (status["wanted"], status["draining"], len(status["members"])) == (2, ["id2"], 3)
        assert status["last_commit"] == 5
        await heard(rendezvous, member("a", 0, 3), 1, lambda signals: signals.broken)
        (lost,) = await events_of(rendezvous, "worker_lost")
        assert (lost["member"], lost["error"]) == ("a1", "it did not come back after the rendezvous was restarted")
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
    monkeypatch.setattr("elastic_ddp.elastic.journal.FORGET_TOGETHER", 100)
    journal = Journal(Memory(str(tmp_path)))
    for number in range(1, 1001):
        journal.take([{"event": "steps", "step": number}], None, "a0", number)
        if number % 10 == 0:
            journal.after(number)
    journal.take([{"event": "commit", "step": 1000}], None, "a0", 1001)
    journal.end({"status": "finished"})
    journal.after(1000)
    assert len(Memory(str(tmp_path)).lines()) < 150
    second = Journal(Memory(str(tmp_path)))
    assert second.num_events == 1001 and second.ended == "finished"
    assert second.after(1000) == [{"event": "commit", "step": 1000}]
    assert second.last("steps") == {"event": "steps", "step": 1000}
    assert second.take([{"event": "again"}], None, "a0", 1001) == [], "the sender had not heard that it arrived"


def test_an_outcome_is_not_forgotten(play: Play, tmp_path: Path) -> None:
    options = RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=30.0, memory=str(tmp_path))

    async def first_life(rendezvous: Rendezvous) -> None:
        await rendezvous.end(member("a", 0), None, {"status": "finished", "steps": 9})

    async def second_life(rendezvous: Rendezvous) -> None:
        assert (await rendezvous.follow(0)).outcome == {"status": "finished", "steps": 9}

    play(first_life, options)
    play(second_life, options)
