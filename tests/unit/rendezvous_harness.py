"""Calls that members make to a rendezvous under test, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.rendezvous.actor import Rendezvous
from elastic_ddp.rendezvous.hang import ActivityReport
from elastic_ddp.rendezvous.members import JoinRequest, Member
from elastic_ddp.rendezvous.messages import Ended, PlannedAssignment, RendezvousOptions, Signals
from elastic_ddp.telemetry.event import Event

LIMIT_S = 20.0
BROKEN = "connection closed"
OPTIONS = RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=30.0)

Play = Callable[..., Any]


def member(group: str, rank: int, size: int = 2) -> Member:
    return Member(
        id=f"{group}{rank}",
        rank_in_group=rank,
        group_size=size,
        node=f"10.0.0.{rank}",
        node_id=f"id{rank}",
        pid=100 + rank,
    )


async def join(
    rendezvous: Rendezvous,
    who: Member,
    after: int = 0,
    step: int | None = None,
    between_steps: bool = True,
    failure: str | None = None,
    *,
    committed: int | None = None,
    resumable: bool = True,
    account: dict[str, float] | None = None,
    activity: ActivityReport | None = None,
) -> Assignment | Ended | PlannedAssignment | None:
    request = JoinRequest(
        member=who,
        step=step,
        between_steps=between_steps,
        committed=committed,
        resumable=resumable,
        after=after,
        failure=failure,
        account=account,
        activity=activity,
    )
    return await rendezvous.join(request)


async def report(
    rendezvous: Rendezvous,
    reports: list[Event],
    progress: dict[str, Any] | None = None,
    sender: str = "",
    first: int = 0,
) -> None:
    """Reports events, with numbers from `first` on."""
    for number, event in enumerate(reports, first):
        await rendezvous.report(event, progress, sender, number)


async def started(rendezvous: Rendezvous, group: str = "a", size: int = 2) -> list[Any]:
    return list(await asyncio.gather(*(join(rendezvous, member(group, rank, size)) for rank in range(size))))


async def joined(rendezvous: Rendezvous, who: Member, after: int = 0, step: int | None = None) -> Assignment:
    """Repeats a join request until there is an assignment, as a client does."""
    while (answer := await join(rendezvous, who, after, step)) is None or isinstance(answer, PlannedAssignment):
        await asyncio.sleep(0)
    assert isinstance(answer, Assignment)
    return answer


async def until_blocked(*calls: asyncio.Task[Any]) -> None:
    """Lets calls run until they wait for a change."""
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(call.done() for call in calls)


async def signaled(
    rendezvous: Rendezvous, who: Member, generation: int, condition: Callable[[Signals], object]
) -> Signals:
    """Polls until a member gets certain signals, as a client does."""
    while not condition(signals := await rendezvous.poll_signals(who, generation, None)):
        await asyncio.sleep(0)
    return signals


async def events_of(rendezvous: Rendezvous, event: str) -> list[Event]:
    return [recorded for recorded in (await rendezvous.wait_for_update(0)).events if recorded.event == event]


def at_place(number: int, place: str) -> ActivityReport:
    return ActivityReport(number, place)
