"""The rendezvous, without Ray: hangs."""

from __future__ import annotations

import asyncio

import pytest

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.rendezvous.actor import Rendezvous
from elastic_ddp.rendezvous.messages import NO_SIGNALS, RendezvousOptions, Signals
from tests.unit.rendezvous_harness import Play, at_place, events_of, join, joined, member, started


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ddp.rendezvous.actor.TICK_S", 0.02)
    monkeypatch.setattr("elastic_ddp.rendezvous.supervisor.STACKS_WITHIN_S", 0.1)


def hang_options(timeout_s: float) -> RendezvousOptions:
    return RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=30.0, hang_timeout_s=timeout_s)


def test_a_hanging_worker_fails_after_all_have_recorded_their_stacks(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ddp.rendezvous.supervisor.STACKS_WITHIN_S", 0.5)

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)

        async def poll(rank: int, place: str) -> list[Signals]:
            received = []
            while not (received and (received[-1].failed_generation or received[-1].ended)):
                received.append(await rendezvous.poll_signals(member("a", rank), 1, None, at_place(7, place)))
                for request in received[-1].requests:
                    await rendezvous.answer(member("a", rank), request.number, {"place": place, "stacks": f"{rank}"})
                await asyncio.sleep(0)  # lets other tasks run
            return received

        _, hangs = await asyncio.gather(poll(0, "reduction"), poll(1, "forward"))
        assert "hung in 'forward' for 0.3 s (hang_timeout_s)" in str(hangs[-1].ended)
        recorded = [(event.member, event.stacks) for event in await events_of(rendezvous, "stacks_recorded")]
        assert recorded == [("a0", "0"), ("a1", "1")]
        (hang,) = await events_of(rendezvous, "hang_detected")
        assert hang.culprits == ["a1"] and hang.places == {"a0": "reduction", "a1": "forward"}
        assert isinstance(await join(rendezvous, member("a", 0), 1, 5), Assignment)
        signals = await rendezvous.poll_signals(member("a", 0), 2, None, received=1)
        assert signals == NO_SIGNALS, "stacks are not requested any more"

    play(scenario, hang_options(0.3))


def test_workers_that_come_after_an_abort_continue(play: Play) -> None:
    """An FSDP forward waits for other ranks to gather parameters."""

    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)
        for rank in (0, 1):
            await rendezvous.poll_signals(member("a", rank), 1, None, at_place(7, "forward"))
        while not (await rendezvous.poll_signals(member("a", 0), 1, None, at_place(7, "forward"))).failed_generation:
            await asyncio.sleep(0)
        at = at_place(8, "rendezvous")
        await rendezvous.poll_signals(member("a", 0), 1, None, at)
        assert isinstance(await joined(rendezvous, member("a", 0), 1, 5), Assignment)
        first, second = await events_of(rendezvous, "hang_detected")
        assert (first.culprits, second.culprits) == ([], ["a1"])
        assert list((await rendezvous.supervise(["a0", "a1"], 0, {})).failed) == ["a1"]  # type: ignore[union-attr]

    play(scenario, hang_options(0.3))


def test_a_training_function_in_which_all_workers_hang_ends_the_run(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)

        async def hang(rank: int) -> None:
            while True:
                await rendezvous.poll_signals(member("a", rank), 1, None, at_place(7, "forward"))
                await asyncio.sleep(0)

        workers = [asyncio.create_task(hang(rank)) for rank in (0, 1)]
        while (news := await rendezvous.wait_for_update(0)).outcome is None:
            await asyncio.sleep(0.01)
        for task in workers:
            task.cancel()
        assert news.outcome["status"] == "failed"
        assert "'forward' without progress for 0.2 s (hang_timeout_s)" in news.outcome["error"]
        assert len([event for event in news.events if event.event == "hang_detected"]) == 2, "one before an abort"

    play(scenario, hang_options(0.2))


def test_only_saves_without_progress_are_a_hang(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)
        clock = asyncio.get_running_loop().time
        begun = clock()
        while (saving_s := clock() - begun) < 0.7:  # two timeouts
            for rank in (0, 1):
                at = at_place(7, "commit")._replace(worked_s=saving_s)
                await rendezvous.poll_signals(member("a", rank), 1, None, at)
        assert await events_of(rendezvous, "hang_detected") == []
        news = await rendezvous.wait_for_update(10_000)
        while news.outcome is None:
            news = await rendezvous.wait_for_update(10_000)
        assert news.outcome["status"] == "failed" and news.outcome["kind"] == "StorageError"
        assert "for 0.3 s (hang_timeout_s)" in news.outcome["error"]

    play(scenario, hang_options(0.3))


def test_a_worker_that_never_joins_fails(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ddp.rendezvous.supervisor.START_TIMEOUT_S", 0.0)

    async def scenario(rendezvous: Rendezvous) -> None:
        await started(rendezvous)
        begun = asyncio.get_running_loop().time()
        while not (directives := await rendezvous.supervise(["a0", "a1", "a2"], 0, {})).failed:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - begun >= 0.2
        assert directives is not None and list(directives.failed) == ["a2"]
        (failure,) = await events_of(rendezvous, "newcomer_failed")
        assert "not ready to train 0.2 s after its start (hang_timeout_s)" in failure.error
        assert await events_of(rendezvous, "worker_failed") == []

    play(scenario, hang_options(0.2))


def test_waiting_for_workers_is_no_hang(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        await rendezvous.heartbeat_address()
        await started(rendezvous)
        await rendezvous.mark_failed("a1", "its process exited")
        await rendezvous.poll_signals(member("a", 0), 1, None, at_place(8, "rendezvous"))
        waited, clock = 0.0, asyncio.get_running_loop().time
        begun = clock()
        while waited < 0.4:  # many timeouts
            assert await join(rendezvous, member("a", 0), 1, 5) is None
            waited = clock() - begun
        assert await events_of(rendezvous, "hang_detected") == []
        assert len(await events_of(rendezvous, "worker_failed")) == 1
        newcomer, _ = await asyncio.gather(join(rendezvous, member("a", 2)), joined(rendezvous, member("a", 0), 1, 5))
        assert isinstance(newcomer, Assignment) and newcomer.reason == "worker failed"

    options = RendezvousOptions(min_workers=2, max_workers=4, heartbeat_timeout_s=30.0, hang_timeout_s=0.1)
    play(scenario, options)
