"""Who trains together: the state machine, and the rendezvous around it, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from elastic_ddp.elastic import rendezvous as rendezvous_module
from elastic_ddp.elastic.membership import Member, Membership
from elastic_ddp.elastic.rendezvous import Ended, Rendezvous, Signals
from elastic_ddp.parallel.process_group import Assignment


def member(group: str, rank: int, size: int = 2) -> Member:
    return Member(
        id=f"{group}{rank}", group=group, rank_in_group=rank, group_size=size, node=f"10.0.0.{rank}", pid=100 + rank
    )


def formed(membership: Membership, group: str, size: int = 2) -> str:
    """Has a whole group arrive and form; the reason."""
    for rank in range(size):
        assert membership.arrive(member(group, rank, size))
    generation = membership.form()
    assert generation is not None
    return generation.reason


def test_a_generation_forms_when_the_whole_group_waits_and_not_before() -> None:
    membership = Membership()
    assert membership.form() is None
    for rank in (2, 0):
        assert membership.arrive(member("a", rank, 3))
        assert membership.form() is None
    assert membership.arrive(member("a", 2, 3))  # asks again, and counts once
    assert membership.form() is None
    assert membership.arrive(member("a", 1, 3))
    generation = membership.form()
    assert generation is not None
    assert (generation.number, generation.reason) == (1, "start")
    assert membership.current == generation
    assert membership.form() is None


def test_members_are_ranked_as_in_their_group_in_whatever_order_they_came() -> None:
    membership = Membership()
    for rank in (3, 1, 0, 2):
        membership.arrive(member("a", rank, 4))
    generation = membership.form()
    assert generation is not None
    assert [each.rank_in_group for each in generation.members] == [0, 1, 2, 3]


def test_a_restarted_group_supersedes_the_one_before() -> None:
    membership = Membership()
    assert formed(membership, "a") == "start"
    assert not membership.is_superseded(member("a", 0))
    assert membership.arrive(member("b", 0))
    assert membership.is_superseded(member("a", 0))
    assert not membership.is_superseded(member("b", 1))


def test_a_late_member_of_an_old_group_is_refused_and_takes_nobodys_place() -> None:
    membership = Membership()
    membership.arrive(member("a", 0))
    membership.arrive(member("b", 0))
    assert not membership.arrive(member("a", 1))
    assert not membership.arrive(member("a", 1), lost="connection closed")
    assert membership.loss_reported is None
    assert membership.form() is None  # a0 waited in vain, and a1 is no part of b
    membership.arrive(member("b", 1))
    generation = membership.form()
    assert generation is not None
    assert [each.group for each in generation.members] == ["b", "b"]


def test_a_group_that_has_not_arrived_yet_is_not_superseded() -> None:
    membership = Membership()
    assert not membership.is_superseded(member("a", 0))
    membership.arrive(member("a", 0))
    assert not membership.is_superseded(member("b", 0))


def test_a_group_that_comes_back_whole_after_a_broken_connection_forms_again() -> None:
    membership = Membership()
    formed(membership, "a", 3)
    for rank in (2, 0):
        assert membership.arrive(member("a", rank, 3), lost="connection closed")
        assert membership.form() is None
    assert membership.arrive(member("a", 1, 3), lost="connection reset")
    generation = membership.form()
    assert generation is not None
    assert (generation.number, generation.reason, len(generation.members)) == (2, "worker lost", 3)


def test_a_generation_of_another_size_without_a_loss_was_formed_to_resize() -> None:
    membership = Membership()
    assert formed(membership, "a", 2) == "start"
    assert formed(membership, "b", 3) == "resize"
    assert formed(membership, "c", 1) == "resize"
    assert membership.generation == 3


def test_a_generation_of_the_same_size_replaces_one_that_broke() -> None:
    membership = Membership()
    formed(membership, "a")
    assert formed(membership, "b") == "worker lost"


def test_a_generation_after_a_reported_loss_replaces_one_that_broke_whatever_its_size() -> None:
    membership = Membership()
    formed(membership, "a", 3)
    assert membership.arrive(member("a", 1, 3), lost="connection closed")
    assert membership.arrive(member("a", 2, 3), lost="another word for it")
    assert membership.loss_reported == "connection closed"
    assert formed(membership, "b", 2) == "worker lost"
    assert membership.loss_reported is None
    assert formed(membership, "c", 3) == "resize"


# The rendezvous.


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Rendezvous], Awaitable[Any]]], Any]]:
    """Runs a scenario against a rendezvous of its own, whose polls are short."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(rendezvous_module, "POLL_S", 0.05)

    def play(scenario: Callable[[Rendezvous], Awaitable[Any]]) -> Any:
        async def within_time() -> Any:
            return await asyncio.wait_for(scenario(Rendezvous("lm", 100)), 20)

        return asyncio.run(within_time())

    yield play


@pytest.fixture
def long_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes at all comes because of a change."""
    monkeypatch.setattr(rendezvous_module, "POLL_S", 1000.0)


async def started(rendezvous: Rendezvous, group: str = "a", size: int = 2) -> list[Any]:
    return list(await asyncio.gather(*(rendezvous.join(member(group, rank, size), 0, None) for rank in range(size))))


async def until_held(*calls: asyncio.Task[Any]) -> None:
    """Lets calls run until they wait for something to happen."""
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(call.done() for call in calls)


Play = Callable[[Callable[[Rendezvous], Awaitable[Any]]], Any]


def test_members_that_join_get_their_ranks_and_a_store_that_answers(run: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        first, second = await started(rendezvous)
        assert isinstance(first, Assignment)
        assert (first.generation, first.rank, first.world_size, first.reason) == (1, 0, 2, "start")
        assert (second.generation, second.rank) == (1, 1)
        store = dist.TCPStore(first.store_host, first.store_port, is_master=False, wait_for_workers=False)
        store.set("key", "value")
        assert store.get("key") == b"value"
        events, _, _ = await rendezvous.follow(0)
        assert [event["event"] for event in events] == ["rendezvous"]
        assert events[0]["members"] == [
            {"rank": 0, "node": "10.0.0.0", "pid": 100},
            {"rank": 1, "node": "10.0.0.1", "pid": 101},
        ]

    run(scenario)


def test_a_member_that_waits_alone_is_told_to_ask_again_within_a_poll(run: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        assert await rendezvous.join(member("a", 0), 0, None) is None
        assert await rendezvous.join(member("a", 0), 0, None) is None

    run(scenario)


def test_a_member_whose_answer_was_lost_gets_it_again(run: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        answers = await started(rendezvous)
        assert await rendezvous.join(member("a", 1), 0, None) == answers[1]

    run(scenario)


def test_survivors_of_a_lost_worker_wait_to_be_superseded(run: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        survivor = asyncio.create_task(rendezvous.join(member("a", 0), 1, "connection closed"))
        training = asyncio.create_task(rendezvous.listen(member("a", 1), None))
        await until_held(survivor)
        replaced = await started(rendezvous, "b")
        assert [answer.reason for answer in replaced] == ["worker lost", "worker lost"]
        assert [answer.generation for answer in replaced] == [2, 2]
        assert await survivor == Ended("superseded by a newer worker group")
        signals = await training
        if signals.ended is None:  # it was told of the loss first
            signals = await rendezvous.listen(member("a", 1), None)
        assert signals == Signals(stop=False, ended="superseded by a newer worker group")
        late = await rendezvous.join(member("a", 1), 1, "connection closed")
        assert late == Ended("superseded by a newer worker group")

    run(scenario)


def test_members_that_all_survived_a_broken_connection_get_a_new_generation(run: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        before = await started(rendezvous)
        after = await asyncio.gather(*(rendezvous.join(member("a", rank), 1, "connection closed") for rank in range(2)))
        assert [answer.generation for answer in before] == [1, 1]
        assert [(answer.generation, answer.rank, answer.reason) for answer in after] == [
            (2, 0, "worker lost"),
            (2, 1, "worker lost"),
        ]
        # Its answer was lost, and it asks again.
        assert await rendezvous.join(member("a", 1), 1, "connection closed") == after[1]

    run(scenario)


def test_a_loss_is_recorded_once_with_its_generation(run: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous, size=3)
        for rank in (1, 1, 2):
            assert await rendezvous.join(member("a", rank, 3), 1, f"rank {rank} saw it") is None
        events, _, _ = await rendezvous.follow(1)
        assert [(event["event"], event["generation"], event["error"]) for event in events] == [
            ("worker_lost", 1, "rank 1 saw it")
        ]
        assert events[0]["reported_by"] == "a1"

    run(scenario)


def test_messages_reach_the_driver_in_order_and_only_the_newest_progress_does(run: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        a = member("a", 0, 1)
        await started(rendezvous, size=1)
        await rendezvous.take([{"event": "one"}, {"event": "two"}], {"step": 1})
        await rendezvous.take([{"event": "three"}], {"step": 2})
        assert await rendezvous.listen(a, None) == Signals(False, None)
        events, progress, outcome = await rendezvous.follow(0)
        assert [event["event"] for event in events] == ["rendezvous", "one", "two", "three"]
        assert (progress, outcome) == ({"step": 2}, None)
        events, _, _ = await rendezvous.follow(3)
        assert [event["event"] for event in events] == ["three"]

    run(scenario)


def test_the_driver_is_held_until_there_is_news(run: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        driver = asyncio.create_task(rendezvous.follow(0))
        await until_held(driver)
        await rendezvous.take([{"event": "commit", "step": 7}], None)
        events, _, _ = await driver
        assert [event["step"] for event in events] == [7]

    run(scenario)


def test_a_driver_without_news_is_answered_within_a_poll(run: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        assert await rendezvous.follow(0) == ([], {}, None)

    run(scenario)


def test_a_stop_reaches_a_worker_that_waits_and_no_generation_forms_any_more(run: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        waiting = asyncio.create_task(rendezvous.listen(member("a", 0), None))
        await until_held(waiting)
        await rendezvous.stop()
        assert await waiting == Signals(stop=True, ended=None)
        assert await rendezvous.listen(member("a", 1), None) == Signals(stop=True, ended=None)
        for each, lost in ((member("b", 0), None), (member("a", 0), "connection closed")):
            assert await rendezvous.join(each, 0, lost) == Ended("stopped")

    run(scenario)


def test_the_first_outcome_counts_and_ends_everyone(run: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        waiting = asyncio.create_task(rendezvous.listen(member("a", 1), None))
        driver = asyncio.create_task(rendezvous.follow(1))
        await until_held(waiting, driver)
        await rendezvous.take([{"event": "commit", "step": 9}], None)
        await rendezvous.end({"step": 9}, {"status": "failed", "error": "the first"})
        await rendezvous.end(None, {"status": "finished"})
        assert await waiting == Signals(stop=False, ended="failed")
        events, progress, outcome = await rendezvous.follow(1)
        assert [event["step"] for event in events] == [9]  # nothing that was said before the end is lost
        assert (progress, outcome) == ({"step": 9}, {"status": "failed", "error": "the first"})
        assert (await driver)[0] == events
        assert await rendezvous.join(member("b", 0), 0, None) == Ended("failed")
        assert await rendezvous.follow(2) == ([], {"step": 9}, outcome)  # at once

    run(scenario)


def test_the_status_follows_the_run(run: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        fresh = await rendezvous.status()
        assert (fresh["name"], fresh["state"], fresh["total_steps"]) == ("lm", "starting", 100)
        assert fresh["step"] is fresh["last_commit"] is fresh["generation"] is None
        said = [{"event": "generation", "generation": 1, "world_size": 2}, {"event": "commit", "step": 5}]
        await rendezvous.stop()  # so that nobody is held
        await rendezvous.take(said, {"step": 6, "loss": 0.5})
        status = await rendezvous.status()
        assert (status["state"], status["generation"], status["world_size"]) == ("stopping", 1, 2)
        assert (status["step"], status["loss"], status["last_commit"]) == (6, 0.5, 5)
        await rendezvous.end(None, {"status": "stopped"})
        assert (await rendezvous.status())["state"] == "stopped"

    run(scenario)
