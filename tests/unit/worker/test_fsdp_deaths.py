"""With FSDP and mirrors, a worker's death costs the step in flight: the run continues from memory, with equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fsdp_workers import (
    COMPARE_TASKS,
    HAND_OVER,
    IN_STEP,
    LIMIT_S,
    MOVE,
    Checkpointed,
    Compiled,
    Fault,
    Plan,
    generations,
    hashes,
    hold,
    num_graphs,
    steps_of_commits,
    wait_for_size,
    workers,
)

WORKERS = [0, *(pytest.param(worker, marks=pytest.mark.chaos) for worker in (1, 2))]
"""`make test` has one of these, and `make chaos` all."""
PLACES = [
    place if place in ("exchange", "vote", "optimizer") else pytest.param(place, marks=pytest.mark.chaos)
    for place in IN_STEP
]
SILENCE = {"heartbeat_timeout_s": 1.0}


def trained(folder: Path, size: int, *faults: Fault, **settings: Any) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Returns the hashes of a run that begins with `size` workers, and its generations."""
    with workers(Plan(folder, settings, faults)) as run:
        run.start(size)
        return hashes(run), generations(run)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The hashes of a run that nothing disturbs, on one worker."""
    return trained(tmp_path_factory.mktemp("calm"), 1)[0]


@pytest.mark.chaos  # the runs with deaths have these bits, too
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_calm_run_has_equal_bits_at_every_size(tmp_path: Path, calm: dict[str, Any], size: int) -> None:
    assert trained(tmp_path, size) == (calm, [(size, 0)])


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("place", PLACES)
def test_a_death_costs_the_step_in_flight(tmp_path: Path, calm: dict[str, Any], place: str, worker: int) -> None:
    outcome, formed = trained(tmp_path, 3, Fault(worker, place))
    assert outcome == calm
    is_done = place in ("voted", "optimizer")  # on another rank, the vote may have passed before the death
    assert formed[0] == (3, 0) and formed[1] in ([(2, 3), (2, 4)] if is_done else [(2, 3)])


@pytest.mark.chaos
@pytest.mark.parametrize("worker", range(3))
@pytest.mark.parametrize("place", IN_STEP)
def test_a_worker_that_freezes_costs_the_step_in_flight(
    tmp_path: Path, calm: dict[str, Any], place: str, worker: int
) -> None:
    outcome, formed = trained(tmp_path, 3, Fault(worker, place, kind="stop"), **SILENCE)
    assert outcome == calm and formed[1][0] == 2 and formed[1][1] >= 3


@pytest.mark.chaos
@pytest.mark.parametrize("step", [1, 6])
def test_a_rank_in_doubt_of_a_step_that_overflows_in_fp16_finishes_it(tmp_path: Path, step: int) -> None:
    """Early steps overflow, and are left out: the loss scale is that of the rank ahead, too."""
    settings: dict[str, Any] = {"precision": "fp16"}
    expected = trained(tmp_path / "calm", 1, **settings)[0]
    faults = [Fault(worker, "voted", step, kind="fail") for worker in (0, 2)]
    outcome, formed = trained(tmp_path / "doubt", 3, *faults, **settings)
    assert (outcome, formed) == (expected, [(3, 0), (3, step + 1)])


def doubt(*ranks: int) -> tuple[Fault, ...]:
    """Ranks that get no outcome of the vote on step 3, in which no worker dies."""
    return tuple(Fault(rank, "voted", kind="fail") for rank in ranks)


DOUBTS: dict[str, tuple[tuple[Fault, ...], tuple[int, int]]] = {
    "rank 0 has finished the step": (doubt(1, 2), (3, 4)),
    "rank 1 has finished the step": (doubt(0, 2), (3, 4)),
    "rank 2 has finished the step": (doubt(0, 1), (3, 4)),
    "all votes failed": (doubt(0, 1, 2), (3, 3)),
    "rank 0 alone has finished it, and dies": ((Fault(0, "optimizer"), *doubt(1, 2)), (2, 3)),
    "rank 0 dies before it sends the state": ((Fault(0, HAND_OVER), *doubt(1, 2)), (2, 3)),
    "rank 0 fails before it sends the state": ((Fault(0, HAND_OVER, kind="fail"), *doubt(1, 2)), (3, 4)),
    "rank 0 fails before rows move": ((Fault(0, MOVE, kind="fail"), *doubt(1, 2)), (3, 4)),
    "rank 1 fails before rows move": ((Fault(1, MOVE, kind="fail"), *doubt(1, 2)), (3, 4)),
}
"""Faults, and the size and the first step of the generation that follows."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.chaos) if case[:6] in ("rank 1", "rank 2") else case for case in DOUBTS],
)
def test_ranks_in_doubt_finish_a_step_that_another_one_has_finished_or_all_repeat_it(
    tmp_path: Path, calm: dict[str, Any], case: str
) -> None:
    """A rank stays in doubt until the state changes hands. A step that it has finished then is not repeated."""
    faults, expected = DOUBTS[case]
    assert trained(tmp_path, 3, *faults) == (calm, [(3, 0), expected])


def test_a_death_in_an_evaluation_and_one_right_after_it_cost_nothing(tmp_path: Path, calm: dict[str, Any]) -> None:
    faults = (Fault(3, "evaluation", 4), Fault(1, COMPARE_TASKS))
    with workers(Plan(tmp_path, {}, faults, evaluates_at=4)) as run:
        run.start(4)
        assert hashes(run) == calm
        assert generations(run)[-1] == (2, 4)


def test_a_drain_of_all_workers_in_an_evaluation_commits_the_state(tmp_path: Path, calm: dict[str, Any]) -> None:
    plan = Plan(tmp_path, {}, evaluates_at=4, num_nodes=1)
    with workers(plan) as run:
        with hold(plan):
            run.start(3)
            run.wait((tmp_path / "evaluates").exists, "the evaluation", LIMIT_S)
            run.rendezvous.ask("drain", "10.0.0.0", 2.0)
            run.wait(lambda: steps_of_commits(run), "a commit", LIMIT_S)
        assert steps_of_commits(run) == [4]
    with workers(Plan(tmp_path, {})) as run:
        run.start(2)
        assert hashes(run) == calm and generations(run) == [(2, 4)]


def test_two_deaths_in_a_row_cost_two_steps(tmp_path: Path, calm: dict[str, Any]) -> None:
    outcome, formed = trained(tmp_path, 4, Fault(0, "exchange", 3), Fault(2, "mirror", 4))
    assert (outcome, formed) == (calm, [(4, 0), (3, 3), (2, 4)])


def test_the_run_resumes_from_its_commit_if_a_shard_and_its_mirror_die(tmp_path: Path, calm: dict[str, Any]) -> None:
    faults = [Fault(worker, "vote", 5) for worker in (1, 2)]
    outcome, formed = trained(tmp_path, 3, *faults, checkpoint={"every_steps": 2})
    assert outcome == calm and formed[-1] in [(1, 4), (1, 2)]


@pytest.mark.chaos  # as without memory for mirrors
def test_without_mirrors_a_death_resumes_from_the_commit(tmp_path: Path, calm: dict[str, Any]) -> None:
    fsdp = {"shard_classes": ["Block"], "mirror": False}
    outcome, formed = trained(tmp_path, 3, Fault(1, "vote", 5), checkpoint={"every_steps": 2}, fsdp=fsdp)
    assert outcome == calm and formed in ([(3, 0), (2, 4)], [(3, 0), (2, 2)])  # the save may not have ended


@pytest.mark.parametrize("worker", WORKERS)
def test_a_death_while_rows_move_does_not_change_the_bits(tmp_path: Path, calm: dict[str, Any], worker: int) -> None:
    faults = [Fault(3, "exchange"), Fault(worker, MOVE)]
    outcome, formed = trained(tmp_path, 4, *faults, checkpoint={"every_steps": 2})
    assert outcome == calm
    assert formed[0] == (4, 0) and formed[-1] in [(2, 3), (2, 2)]


def test_workers_of_one_node_are_mirrored_on_another(tmp_path: Path, calm: dict[str, Any]) -> None:
    """Two workers on each of two nodes. Both of one node die."""
    with workers(Plan(tmp_path, {}, (Fault(0, "exchange"), Fault(2, "exchange")), num_nodes=2)) as run:
        run.start(4)
        assert hashes(run) == calm
        assert generations(run)[-1] == (2, 3)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"precision": "bf16", "clip_grad_norm": 0.1}, {}),
        ({}, {"make_model": Checkpointed, "num_rows": 41}),
        pytest.param({"clip_grad_norm": 0.1}, {}, marks=pytest.mark.chaos),
        pytest.param({"precision": "fp16"}, {}, marks=pytest.mark.chaos),
        pytest.param({"fsdp": {"shard_classes": ["Block"], "sharding": "grad_op"}}, {}, marks=pytest.mark.chaos),
        pytest.param({"fsdp": {"shard_classes": []}}, {}, marks=pytest.mark.chaos),
        pytest.param({"fsdp": {"shard_classes": ["Block"], "cpu_offload": True}}, {}, marks=pytest.mark.chaos),
    ],
    ids=[
        "bf16",
        "checkpointing, and rows that do not divide",
        "clipping",
        "fp16",
        "parameters stay",
        "one unit",
        "offload",
    ],
)
@pytest.mark.parametrize(
    "place", ["exchange", *(pytest.param(place, marks=pytest.mark.chaos) for place in ("mirror", "vote", "optimizer"))]
)
def test_a_death_does_not_change_the_bits_of_any_kind_of_job(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], place: str
) -> None:
    outcomes = []
    for size, faults in [(1, ()), (3, (Fault(1, place),))]:
        with workers(Plan(tmp_path / str(size), settings, faults, **changes)) as run:
            run.start(size)
            outcomes.append(hashes(run))
            is_done = place == "optimizer" and generations(run)[-1] == (2, 4)  # the others may have passed the vote
            assert generations(run) == ([(1, 0)] if size == 1 else [(3, 0), (2, 4 if is_done else 3)])
    assert outcomes[0] == outcomes[1]


@pytest.mark.chaos
def test_compiled_blocks_are_not_compiled_again_when_sizes_change(tmp_path: Path) -> None:
    """One worker stays, another one joins and leaves five times."""
    settings = {"steps": 100}
    plan = Plan(tmp_path, settings, make_model=Compiled, pause_s=0.3, num_nodes=1)
    with workers(plan) as run:
        with hold(plan):
            run.start(1)
            wait_for_size(run, 1)
            for number in range(5):
                run.rendezvous.ask("resize", 2)
                run.start(1)
                wait_for_size(run, 2)
                run.rendezvous.ask("resize", 1)
                wait_for_size(run, 1)
                if number == 0:
                    count = num_graphs(plan)
        found = hashes(run)
        assert num_graphs(plan) == count > 0
    with workers(Plan(tmp_path / "calm", settings, make_model=Compiled)) as run:
        run.start(2)
        assert hashes(run) == found


def test_mirrors_that_do_not_fit_are_left_out(tmp_path: Path, calm: dict[str, Any]) -> None:
    plan = Plan(tmp_path, {"checkpoint": {"every_steps": 2}}, (Fault(1, "vote", 5),), free_bytes=1000)
    with workers(plan) as run:
        run.start(3)
        assert hashes(run) == calm
        assert generations(run) in ([(3, 0), (2, 4)], [(3, 0), (2, 2)])
        warnings: list[Any] = run.rendezvous.events("warned")
        assert "have no mirrors: the host of" in warnings[0].text and "0.00 GB free" in warnings[0].text


def test_shards_that_do_not_fit_fewer_workers_are_committed_and_wait_for_a_replacement(tmp_path: Path) -> None:
    settings = {"steps": 20, "fsdp": {"shard_classes": ["Block"], "mirror": False}}
    plan = Plan(tmp_path, settings, free_bytes=800, pause_s=0.3)
    with workers(plan) as run:
        with hold(plan):
            run.start(3)
            wait_for_size(run, 3)
            run.rendezvous.ask("drain", "10.0.0.1", 2.0)
            run.wait(lambda: steps_of_commits(run), "a commit", LIMIT_S)
            run.start(1)
            run.wait(lambda: generations(run)[-1][1] > 0, "another generation", LIMIT_S)
        found = hashes(run)
        assert generations(run)[-1] == (3, steps_of_commits(run)[0]), "two workers wait for a third one"
    assert trained(tmp_path / "calm", 1, **settings)[0] == found
