"""`even_micro_batches`: generations whose size divides the micro-batches of a step; other workers wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.driver.display import describe_event
from elastic_ddp.errors import ConfigError
from elastic_ddp.rendezvous.actor import Rendezvous
from elastic_ddp.rendezvous.messages import RendezvousOptions
from elastic_ddp.worker.loop import Loop
from tests.inside_run import job_of
from tests.unit.membership_harness import FAILED, MembershipHarness, ids_of
from tests.unit.rendezvous_harness import Play, events_of, started
from tests.unit.single_worker import FakeClient, NewRun, client_of, train


def evenly_divided(names: str, num_micro_batches: int = 4, **sizes: int) -> MembershipHarness:
    """A membership whose named members wait."""
    harness = MembershipHarness(**{"max_workers": 4, "size": len(names), **sizes})
    options = harness.membership.options
    harness.membership.options = replace(options, num_micro_batches=num_micro_batches, even_micro_batches=True)
    harness.all_join(names)
    return harness


def test_three_ready_workers_train_as_two_until_a_fourth_comes() -> None:
    harness = evenly_divided("abc")
    assert harness.names() == ["a", "b"]
    harness.now += 100.0
    assert not harness.wants_change, "the third waits"
    harness.all_join("d")
    assert harness.wants_change
    harness.all_join("ab", step=5)
    formed = harness.formed()
    assert ids_of(formed) == ["a", "b", "c", "d"] and formed.receivers == (2, 3)


def test_a_survivor_that_stands_by_stays_and_replaces_the_next_that_fails() -> None:
    harness = evenly_divided("abcd")
    assert harness.names() == ["a", "b", "c", "d"]
    harness.membership.mark_failed("d", FAILED)
    harness.all_join("abc", step=5)
    assert harness.names() == ["a", "b"] and harness.membership.why_gone("c") is None
    harness.membership.mark_failed("b", FAILED)
    harness.all_join("a", step=9)
    formed = harness.formed()
    assert ids_of(formed) == ["a", "c"] and formed.first_step == 9 and formed.receivers == (1,)


def test_too_few_even_workers_wait_for_min_workers() -> None:
    harness = evenly_divided("abc", min_workers=3)
    assert harness.form() is None
    harness.all_join("d")
    assert harness.names() == ["a", "b", "c", "d"]


def test_the_console_says_how_many_ready_workers_stand_by(play: Play) -> None:
    async def scenario(rendezvous: Rendezvous) -> None:
        assert [isinstance(place, Assignment) for place in await started(rendezvous, size=3)] == [True, True, False]
        (formed,) = await events_of(rendezvous, "generation_formed")
        assert formed.world_size == 2 and formed.standing_by == 1
        assert describe_event(formed) == (
            "1 ready worker waits: even_micro_batches, or the size of the groups of hybrid sharding, allows 2"
        )

    options = RendezvousOptions(min_workers=1, max_workers=4, heartbeat_timeout_s=30.0, num_micro_batches=4)
    play(scenario, replace(options, even_micro_batches=True))


def test_a_generation_that_was_formed_for_an_evaluation_ends_before_the_next_step(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    config: Any = job_of(run).config
    object.__setattr__(config, "even_micro_batches", True)
    monkeypatch.setattr(Loop, "world_size", property(lambda loop: 3 if len(client.joins) < 2 else 1))
    client: FakeClient = client_of(run)
    assert train(run)["steps"] == 6
    assert client.joins == [(None, True), (0, True)]


def test_max_workers_divides_the_micro_batches() -> None:
    settings = {"name": "r", "storage": "runs", "steps": 1, "global_batch_size": 24, "micro_batch_size": 4}
    with pytest.raises(ConfigError, match=r"max_workers=4 does not divide the 6 .* use max_workers=3 or 6"):
        RunConfig(**settings, max_workers=4, even_micro_batches=True)
    RunConfig(**settings, max_workers=3, min_workers=2, even_micro_batches=True)
