"""The rendezvous, without Ray: drains, commits and resizes on request."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.torch_store import StoreConnection
from elastic_ddp.rendezvous import actor as rendezvous_module
from elastic_ddp.rendezvous.actor import Rendezvous
from elastic_ddp.rendezvous.membership import LEFT
from elastic_ddp.rendezvous.messages import Ended, RendezvousOptions
from elastic_ddp.telemetry.event import Event
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


def test_a_member_with_sigterm_leaves_at_the_next_step_boundary(play: Play, long_polls: None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)
        listening = asyncio.create_task(signaled(rendezvous, member("a", 0), 1, lambda signals: signals.reconfigure))
        await until_blocked(listening)
        await rendezvous.leave(member("a", 1), 0.0, "SIGTERM")
        await listening
        first, second = await asyncio.gather(
            joined(rendezvous, member("a", 0), 1, 5), join(rendezvous, member("a", 1), 1, 5)
        )
        assert (first.generation, first.world_size, first.reason) == (2, 1, "workers left")
        assert second == Ended(LEFT)
        assert [event.by for event in await events_of(rendezvous, "drain_noticed")] == ["SIGTERM"]
        assert [(event.member, event.kind) for event in await events_of(rendezvous, "worker_left")] == [("a1", "drain")]
        directives = await rendezvous.supervise(["a0", "a1"], 0, {})
        assert directives is not None and (directives.dismissed, directives.failed, directives.leaving) == (
            ["a1"],
            {},
            [],
        )

    play(scenario)


def test_one_of_the_members_of_drained_nodes_commits_first(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)
        directives = await rendezvous.supervise(["a0", "a1"], 0, {"id0": 0.0, "id1": 0.0})
        assert (
            directives is not None and sorted(directives.leaving) == ["a0", "a1"] and directives.avoid == ["id0", "id1"]
        )
        await signaled(rendezvous, member("a", 0), 1, lambda signals: signals.reconfigure)
        first, second = await asyncio.gather(
            joined(rendezvous, member("a", 0), 1, 5), join(rendezvous, member("a", 1), 1, 5)
        )
        assert first.handover_only and first.world_size == 1
        assert second == Ended(LEFT)
        assert await join(rendezvous, member("a", 0), 2, 5, committed=5) == Ended(LEFT)
        assert [event.by for event in await events_of(rendezvous, "drain_noticed")] == ["Ray", "Ray"]

    play(scenario)


def test_a_commit_fulfills_all_requests_made_before_its_start_and_no_later_ones(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        first, second = await rendezvous.checkpoint(), await rendezvous.checkpoint()
        assert await rendezvous.committed(first) is None
        signals = await signaled(rendezvous, member("a", 0), 1, lambda signals: signals.commit == second)
        later = await rendezvous.checkpoint()
        await report(rendezvous, [ledger_event("commit_succeeded", step=4, request=None, at=0.0)], None)
        assert await rendezvous.committed(first) is None
        await report(rendezvous, [ledger_event("commit_succeeded", step=7, request=signals.commit, at=0.0)], None)
        assert await rendezvous.committed(first) == await rendezvous.committed(second) == 7, "one commit fulfills both"
        assert await rendezvous.committed(later) is None
        await signaled(rendezvous, member("a", 0), 1, lambda signals: signals.commit == later)

    play(scenario)


@pytest.mark.parametrize(("status", "answer"), [("failed", None), ("finished", 7)])
def test_a_failed_run_fulfills_no_commit_request(play: Play, status: str, answer: int | None) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await report(rendezvous, [ledger_event("commit_succeeded", step=7, request=None, at=0.0)], None)
        request = await rendezvous.checkpoint()
        await rendezvous.end(member("a", 0), None, {"status": status, "error": "4 saves in a row failed"})
        for failed in ("a0", "a1", "a2"):
            await rendezvous.mark_failed(failed, "its process exited")
        assert await rendezvous.committed(request) == answer

    play(scenario)


def test_a_save_from_before_a_restore_may_not_be_committed(play: Play, tmp_path: Path, long_polls: None) -> None:
    """This holds for a member that has left, and after a restart of the rendezvous."""
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


@pytest.mark.parametrize("to_repair", ["the storage", "the cause"])
def test_failed_saves_are_counted_over_all_ranks(play: Play, tmp_path: Path, long_polls: None, to_repair: str) -> None:
    """The count survives a restart of the rendezvous, and a commit resets it."""
    options = RendezvousOptions(
        min_workers=1, max_workers=4, heartbeat_timeout_s=30.0, max_failed_saves=2, snapshot_folder=str(tmp_path)
    )

    async def first_life(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        saves = [failed_save(1), failed_save(2), ledger_event("commit_succeeded", step=3, at=0.0)]
        await report(rendezvous, saves, None, "a0", 1)
        await report(rendezvous, [failed_save(4)], None, "a0", 4)
        await report(rendezvous, [failed_save(4)], None, "a0", 4)  # a repeated call
        await rendezvous.mark_failed("a0", "killed")
        await report(rendezvous, [failed_save(5)], None, "a0", 5)  # the run continues without it
        await report(rendezvous, [failed_save(5), failed_save(6, counts=False)], None, "a1", 1)
        assert (await rendezvous.wait_for_update(0)).outcome is None

    async def second_life(rendezvous: Rendezvous) -> None:
        await report(rendezvous, [failed_save(7, of_storage=to_repair == "the storage")], None, "b0", 1)
        outcome = (await rendezvous.wait_for_update(0)).outcome
        assert outcome is not None and (outcome["status"], outcome["kind"]) == ("failed", "StorageError")
        for fact in ("3 saves", "checkpoint.max_failed_saves=2", "step 7 is full", "step 3", f"Repair {to_repair}"):
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
        assert len(status["members"]) == 3, "the members are still there"

        for node_id in ("id1", "elsewhere"):
            await rendezvous.undrain(node_id)
        assert (await rendezvous.status())["draining"] == ["id2"]
        directives = await rendezvous.supervise(["a0", "a1", "a2"], 0, {})
        assert directives is not None and (directives.avoid, directives.leaving) == (["id2"], ["a2"])
        events = (await rendezvous.wait_for_update(0)).events
        assert [event.node_id for event in events if event.event == "drain_cancelled"] == ["id1"]

    play(scenario)


def test_a_commit_is_made_with_too_few_workers_to_train(play: Play, long_polls: None) -> None:
    options = RendezvousOptions(min_workers=2, max_workers=4, heartbeat_timeout_s=30.0, last_commit=3)

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        assert (await rendezvous.status())["last_commit"] == 3, "the commit that the run resumed from"
        await rendezvous.mark_failed("a1", "its process exited")
        waits = asyncio.create_task(join(rendezvous, member("a", 0), 1, 5))
        await until_blocked(waits)
        request = await rendezvous.checkpoint()
        place = await waits
        assert isinstance(place, Assignment) and place.handover_only and place.world_size == 1
        commit = ledger_event("commit_succeeded", step=5, request=request, at=0.0)
        await report(rendezvous, [commit], None, "a0", 1)
        assert await rendezvous.committed(request) == 5
        waits = asyncio.create_task(join(rendezvous, member("a", 0), 2, 5, committed=5))
        await until_blocked(waits)
        assert await rendezvous.committed(await rendezvous.checkpoint()) == 5, "it has committed its state"
        waits.cancel()

    play(scenario, options)


def test_the_store_deletes_keys_of_earlier_generations(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "TICK_S", 0.01)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)
        store = StoreConnection().connect(*await rendezvous.store_address(), timeout_s=60)
        for number in (1, 2):
            store.set(f"generation{number}/key", "2")
        store.set("generation10/key", "2")
        await asyncio.gather(*(joined(rendezvous, member("a", rank), 1, 5) for rank in (0, 1)))
        while "generation1/key" in store.list_keys():
            await asyncio.sleep(0.01)
        assert {"generation2/key", "generation10/key"} <= set(store.list_keys())

    play(scenario)


def test_a_profile_is_refused_until_all_ranks_of_the_one_before_have_answered(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)
        first = await rendezvous.request_profile([0, 1], 2, False)
        assert isinstance(first, int)
        await rendezvous.answer(member("a", 1), first, {"trace": "a"})
        assert await rendezvous.request_profile([1], 2, False) == "another profile is not complete yet"
        await rendezvous.answer(member("a", 0), first, {"trace": "b"})
        second = await rendezvous.request_profile([1], 2, False)
        assert second == first + 1
        await rendezvous.mark_failed("a1", "its process exited")
        assert (await rendezvous.answers(second) or [])[0]["answer"] == {"error": "its process exited"}

    play(scenario)
