"""Hybrid sharding: groups of ranks each hold the whole model in shards, with the bits of full sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.assignment import Resharding, Shards
from elastic_ddp.errors import ConfigError
from elastic_ddp.rendezvous.members import JoinRequest, Member
from elastic_ddp.rendezvous.messages import RendezvousOptions
from elastic_ddp.rendezvous.planner import largest_size, resharding, shared_by
from tests.fsdp_workers import Fault, Plan, generations, hashes, hold, wait_for_size, workers
from tests.unit.worker.test_fsdp_deaths import trained

HYBRID = {"shard_classes": ["Block"], "sharding": "hybrid", "shard_size": 2}
FULL = {"shard_classes": ["Block"]}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The hashes of a run with full sharding that nothing disturbs, on one worker."""
    return trained(tmp_path_factory.mktemp("calm"), 1, fsdp=FULL)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_grad_norm": 0.1, "precision": "bf16"},
        pytest.param({"global_batch_size": 10}, marks=pytest.mark.chaos),
    ],
    ids=["clipped, bf16", "micro-batches that four ranks do not divide"],
)
def test_hybrid_has_the_bits_of_full_sharding(tmp_path: Path, settings: dict[str, Any]) -> None:
    outcomes, sizes = [], []
    by_node = {**HYBRID, "shard_size": None}  # two of the workers are on each node
    for name, size, fsdp in (("full", 1, FULL), ("hybrid", 4, by_node)):
        with workers(Plan(tmp_path / name, {**settings, "fsdp": fsdp}, num_nodes=2)) as run:
            run.start(size)
            outcomes.append(hashes(run))
            assert generations(run) == [(size, 0)]
            commit: Any = run.rendezvous.events("commit_succeeded")[-1]
            sizes.append(commit.num_bytes)
    assert outcomes[0] == outcomes[1]
    assert sizes[1] < 1.2 * sizes[0], "each shard is committed once"


@pytest.mark.parametrize("worker", [1, *(pytest.param(worker, marks=pytest.mark.chaos) for worker in (0, 2, 3))])
@pytest.mark.parametrize(
    "place", ["exchange", *(pytest.param(place, marks=pytest.mark.chaos) for place in ("forward", "vote", "voted"))]
)
def test_after_a_death_the_shard_comes_from_its_replica(
    tmp_path: Path, calm: dict[str, Any], place: str, worker: int
) -> None:
    outcome, formed = trained(tmp_path, 4, Fault(worker, place), fsdp=HYBRID)
    assert outcome == calm and formed in ([(4, 0), (2, 3)], [(4, 0), (2, 4)])


def test_the_run_resumes_from_its_commit_if_all_replicas_of_a_shard_die(tmp_path: Path, calm: dict[str, Any]) -> None:
    faults = [Fault(worker, "vote", 5) for worker in (1, 3)]
    outcome, formed = trained(tmp_path, 4, *faults, fsdp=HYBRID, checkpoint={"every_steps": 2})
    assert outcome == calm and formed[-1] in [(2, 4), (2, 2)]


@pytest.mark.chaos
def test_groups_come_and_go_in_place(tmp_path: Path) -> None:
    settings = {"steps": 80, "fsdp": HYBRID}
    plan = Plan(tmp_path, settings, pause_s=0.5, num_nodes=2)
    with workers(plan) as run:
        with hold(plan):
            run.start(4)
            wait_for_size(run, 4)
            run.rendezvous.ask("resize", 2)
            wait_for_size(run, 2)
            run.rendezvous.ask("resize", 4)
            run.start(2)
            wait_for_size(run, 4)
        found = hashes(run)
    assert found == trained(tmp_path / "full", 2, **{**settings, "fsdp": FULL})[0]


@pytest.mark.chaos
def test_a_worker_that_stood_by_comes_back_with_old_shards(tmp_path: Path) -> None:
    settings = {"steps": 80, "fsdp": HYBRID}
    plan = Plan(tmp_path, settings, (Fault(1, "exchange", 0),), pause_s=0.5, num_nodes=2)
    with workers(plan) as run:
        with hold(plan):
            run.start(4)
            wait_for_size(run, 2)
            run.start(1)
            wait_for_size(run, 4)
        found = hashes(run)
    assert found == trained(tmp_path / "full", 2, **{**settings, "fsdp": FULL})[0]


def requests_of(nodes: str) -> list[JoinRequest]:
    return [
        JoinRequest(
            member=Member(id=f"{number}", group_size=1, rank_in_group=0, node=node, node_id=node, pid=1),
            step=5,
            between_steps=True,
            shards=Shards(2, (number % 2,)),
        )
        for number, node in enumerate(nodes)
    ]


@pytest.mark.parametrize(
    ("nodes", "shard_size", "size", "group"),
    [
        ("aabb", 2, 4, 2),
        ("aab", 2, 2, None),
        ("aaabbb", 0, 6, 3),
        ("aaabb", 0, 3, None),
        ("aabbc", 0, 4, 2),
        ("a", 2, 0, None),
        ("abcd", 0, 4, None),
    ],
)
def test_workers_that_fill_no_group_stand_by(nodes: str, shard_size: int, size: int, group: int | None) -> None:
    requests = requests_of(nodes)
    options = RendezvousOptions(min_workers=1, max_workers=8, heartbeat_timeout_s=30.0, shard_size=shard_size)
    assert largest_size(requests, 8, options) == size
    assert shared_by(requests[:size], shard_size) == group


def test_several_ranks_keep_the_same_shard() -> None:
    requests = requests_of("aabb")
    plan = resharding(requests, [request.member.id for request in requests], 2)
    assert plan == Resharding(2, ((0,), (1,), (0,), (1,)), (0, 1, 2, 3), 2)


@pytest.mark.parametrize(
    ("fsdp", "message"),
    [
        ({"sharding": "hybrid", "shard_size": 3}, "leaves one group with max_workers=4"),
        ({"shard_size": 2}, "has no effect with fsdp.sharding='full'"),
        ({"sharding": "hybrid", "max_workers": 1}, "needs several groups of workers"),
        ({"sharding": "hybrid", "shard_size": 2, "max_workers": 5, "min_workers": 5}, "allows 4 of max_workers=5"),
    ],
)
def test_settings_that_make_no_replicas_are_refused(tmp_path: Path, fsdp: dict[str, Any], message: str) -> None:
    changes = {name: fsdp.pop(name) for name in ("max_workers", "min_workers") if name in fsdp}
    changes = {"max_workers": 4, **changes, "fsdp": fsdp}
    with pytest.raises(ConfigError, match=message):
        RunConfig(**{**Plan(tmp_path, changes).all_settings, "name": "test", "storage": str(tmp_path)})
