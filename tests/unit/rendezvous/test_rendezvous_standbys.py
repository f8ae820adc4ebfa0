"""Standbys as the rendezvous sees them: they are no members, and their failure costs nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from elastic_ddp.rendezvous.actor import Rendezvous
from elastic_ddp.rendezvous.hang import ActivityReport
from elastic_ddp.rendezvous.messages import PlannedAssignment, RendezvousOptions
from elastic_ddp.telemetry.description import describe_event
from elastic_ddp.telemetry.events import FirstStep
from tests.unit.rendezvous_harness import Play, events_of, joined, member, report, signaled, started

OPTIONS = RendezvousOptions(min_workers=1, max_workers=2, heartbeat_timeout_s=30.0)
STANDBY = replace(member("s", 1, size=1), is_standby=True)


async def stand_by(rendezvous: Rendezvous) -> None:
    await rendezvous.heartbeat_address(STANDBY)
    await rendezvous.poll_signals(STANDBY, 0, None, ActivityReport(3, "standby"))


async def first_step(rendezvous: Rendezvous, generation: int) -> None:
    await report(rendezvous, [FirstStep(generation=generation, seconds=0.1, at=0.0)], {"step": 7}, "a0", generation)


def test_a_standby_is_shown_and_is_no_member(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await stand_by(rendezvous)
        status = await rendezvous.status()
        assert [standby["id"] for standby in status["standbys"]] == ["s1"]
        assert len(status["members"]) == 2 == (await rendezvous.wait_for_update(0)).num_alive

    play(scenario, OPTIONS)


def test_a_standby_prepares_for_the_last_place_until_it_gets_one(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await first_step(rendezvous, 1)
        assert await rendezvous.plan_join(STANDBY) == PlannedAssignment(rank=1, world_size=2, step=7)
        await rendezvous.mark_failed("a1", "killed")
        await joined(rendezvous, member("a", 0), after=1, step=7)
        await stand_by(rendezvous)
        assert await rendezvous.plan_join(STANDBY) == PlannedAssignment(rank=1, world_size=2, step=7)

    play(scenario, OPTIONS)


def test_standbys_start_when_all_workers_have_completed_a_step_of_their_generation(play: Play) -> None:
    async def is_steady(rendezvous: Rendezvous, *workers: str) -> bool:
        directives = await rendezvous.supervise([*workers], 0, {})
        assert directives is not None
        return directives.is_steady

    async def scenario(rendezvous: Rendezvous) -> None:
        assert not await is_steady(rendezvous, "a0", "a1"), "they import"
        await started(rendezvous)
        assert not await is_steady(rendezvous, "a0", "a1")
        await first_step(rendezvous, 1)
        assert await is_steady(rendezvous, "a0", "a1")
        await rendezvous.mark_failed("a1", "killed")
        assert not await is_steady(rendezvous, "a0")
        await joined(rendezvous, member("a", 0), after=1, step=7)
        await first_step(rendezvous, 2)
        assert await is_steady(rendezvous, "a0")
        assert not await is_steady(rendezvous, "a0", "s1"), "a standby that has a place has not joined yet"

    play(scenario, OPTIONS)


@pytest.mark.parametrize("is_drained", [False, True])
def test_the_failure_of_a_standby_is_recorded_as_such_unless_its_node_drains(play: Play, is_drained: bool) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        await stand_by(rendezvous)
        if is_drained:
            await rendezvous.supervise(["a0", "a1"], 0, {"id1": 30.0})
        await rendezvous.mark_failed("s1", "killed")
        recorded = await events_of(rendezvous, "newcomer_failed")
        described = ["a standby on 10.0.0.1 (pid 101) failed: killed"]
        assert [describe_event(event) for event in recorded] == ([] if is_drained else described)
        status = await rendezvous.status()
        assert status["standbys"] == [] and len(status["members"]) == 2

    play(scenario, OPTIONS)


def test_the_failure_of_a_standby_is_no_failed_attempt_of_a_run_that_has_lost_its_workers(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        for worker in ("a0", "a1", "s1"):
            if worker == "s1":
                await stand_by(rendezvous)
            await rendezvous.mark_failed(worker, "killed")
        assert {attempt.member for attempt in rendezvous._coordinator.state.attempts.failed} == {"a0", "a1"}

    play(scenario, OPTIONS)


def test_a_generation_with_all_workers_again_has_the_time_since_the_failure_and_its_standbys(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ddp.rendezvous.membership.BATCH_S", 0.0)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)
        await rendezvous.retire(member("a", 1))
        await joined(rendezvous, member("a", 0), after=1, step=5)
        standby = asyncio.create_task(joined(rendezvous, STANDBY))
        await signaled(rendezvous, member("a", 0), 2, lambda signals: signals.reconfigure)
        await asyncio.gather(joined(rendezvous, member("a", 0), after=2, step=7), standby)
        _, short, full = await events_of(rendezvous, "generation_formed")
        assert (short.world_size, short.recovered_s) == (1, None)
        assert full.world_size == 2 and 0.0 < full.recovered_s < 20.0
        assert [each.get("standby", False) for each in full.members] == [False, True]
        assert describe_event(replace(full, recovered_s=1.25)) == (
            "2 workers again, 1.2 s after a failure, 1 former standby among them"
        )

    play(scenario)
