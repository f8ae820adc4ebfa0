"""With FSDP and mirrors, a worker's death costs the step in flight: the run continues from memory, with equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker_processes import COMPARE_TASKS, HAND_OVER, IN_STEP, MOVE, Checkpointed, Compiled, Fault, Plan, workers

WORKERS = [0, *(pytest.param(worker, marks=pytest.mark.chaos) for worker in (1, 2))]
SILENCE = {"heartbeat_timeout_s": 1.0}


@pytest.fixture(autouse=True, scope="module")
def _local_rendezvous() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
        patched.setattr("elastic_ddp.rendezvous.actor.LONG_POLL_S", 0.2)
        yield


def trained(folder: Path, size: int, *faults: Fault, **settings: Any) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Returns the hashes of a run that begins with `size` workers, and its generations."""
    with workers(Plan(folder, settings, faults)) as run:
        run.start(size)
        return run.outcome(), run.generations()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The hashes of a run that nothing disturbs, on one worker."""
    return trained(tmp_path_factory.mktemp("calm"), 1)[0]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_calm_run_has_equal_bits_at_every_size(tmp_path: Path, calm: dict[str, Any], size: int) -> None:
    assert trained(tmp_path, size) == (calm, [(size, 0)])


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("place", IN_STEP)
def test_a_death_costs_the_step_in_flight(tmp_path: Path, calm: dict[str, Any], place: str, worker: int) -> None:
    outcome, generations = trained(tmp_path, 3, Fault(worker, place))
    assert outcome == calm
    is_done = place in ("voted", "optimizer")  # on another rank, the vote may have passed before the death
    assert generations[0] == (3, 0) and generations[1] in ([(2, 3), (2, 4)] if is_done else [(2, 3)])


@pytest.mark.chaos
@pytest.mark.parametrize("worker", range(3))
@pytest.mark.parametrize("place", IN_STEP)
def test_a_worker_that_freezes_costs_the_step_in_flight(
    tmp_path: Path, calm: dict[str, Any], place: str, worker: int
) -> None:
    outcome, generations = trained(tmp_path, 3, Fault(worker, place, kind="stop"), **SILENCE)
    assert outcome == calm and generations[1][0] == 2 and generations[1][1] >= 3


@pytest.mark.parametrize("ahead", range(3))
def test_a_rank_whose_vote_failed_finishes_the_step_that_another_one_has_finished(
    tmp_path: Path, calm: dict[str, Any], ahead: int
) -> None:
    """The other two get no outcome of the vote on step 3, in which no worker dies."""
    faults = [Fault(worker, "voted", kind="fail") for worker in range(3) if worker != ahead]
    outcome, generations = trained(tmp_path, 3, *faults)
    assert (outcome, generations) == (calm, [(3, 0), (3, 4)])


def test_ranks_whose_votes_all_failed_repeat_the_step(tmp_path: Path, calm: dict[str, Any]) -> None:
    outcome, generations = trained(tmp_path, 3, *(Fault(worker, "voted", kind="fail") for worker in range(3)))
    assert (outcome, generations) == (calm, [(3, 0), (3, 3)])


def test_a_death_after_a_vote_that_failed_on_the_others_repeats_the_step(tmp_path: Path, calm: dict[str, Any]) -> None:
    """The only worker that knew that the vote has passed dies."""
    faults = [Fault(0, "optimizer"), Fault(1, "voted", kind="fail"), Fault(2, "voted", kind="fail")]
    outcome, generations = trained(tmp_path, 3, *faults)
    assert (outcome, generations) == (calm, [(3, 0), (2, 3)])


@pytest.mark.parametrize("kind", ["kill", "fail"])
def test_ranks_in_doubt_stay_in_doubt_until_the_state_changes_hands(
    tmp_path: Path, calm: dict[str, Any], kind: str
) -> None:
    """The rank that is a step ahead fails before it has sent what all ranks hold."""
    faults = [Fault(0, HAND_OVER, kind=kind), *(Fault(worker, "voted", kind="fail") for worker in (1, 2))]
    outcome, generations = trained(tmp_path, 3, *faults)
    assert (outcome, generations) == (calm, [(3, 0), (2, 3) if kind == "kill" else (3, 4)])


@pytest.mark.parametrize("worker", range(3))
def test_a_rank_in_doubt_that_has_finished_the_step_does_not_repeat_it(
    tmp_path: Path, calm: dict[str, Any], worker: int
) -> None:
    """A rank fails before rows move, when the ranks in doubt have finished the step."""
    faults = [Fault(worker, MOVE, kind="fail"), *(Fault(each, "voted", kind="fail") for each in (1, 2))]
    outcome, generations = trained(tmp_path, 3, *faults)
    assert (outcome, generations) == (calm, [(3, 0), (3, 4)])


def test_a_death_in_an_evaluation_and_one_right_after_it_cost_nothing(tmp_path: Path, calm: dict[str, Any]) -> None:
    faults = (Fault(3, "evaluation", 4), Fault(1, COMPARE_TASKS))
    with workers(Plan(tmp_path, {}, faults, evaluates_at=4)) as run:
        run.start(4)
        assert run.outcome() == calm
        assert run.generations()[-1] == (2, 4)


def test_a_drain_of_all_workers_in_an_evaluation_commits_the_state(tmp_path: Path, calm: dict[str, Any]) -> None:
    with workers(Plan(tmp_path, {}, evaluates_at=4, num_nodes=1)) as run:
        with run.hold():
            run.start(3)
            run.wait((tmp_path / "evaluates").exists, "the evaluation")
            run.rendezvous.ask("drain", "10.0.0.0", 2.0)
            run.wait(lambda: bool(run.of("commit")), "a commit")
        assert [commit["step"] for commit in run.of("commit")] == [4]
    with workers(Plan(tmp_path, {})) as run:
        run.start(2)
        assert run.outcome() == calm and run.generations() == [(2, 4)]


def test_two_deaths_in_a_row_cost_two_steps(tmp_path: Path, calm: dict[str, Any]) -> None:
    outcome, generations = trained(tmp_path, 4, Fault(0, "exchange", 3), Fault(2, "mirror", 4))
    assert (outcome, generations) == (calm, [(4, 0), (3, 3), (2, 4)])


def test_deaths_of_ranks_that_do_not_mirror_each_other_cost_the_step_in_flight(
    tmp_path: Path, calm: dict[str, Any]
) -> None:
    outcome, generations = trained(tmp_path, 4, Fault(0, "exchange"), Fault(2, "exchange"))
    assert outcome == calm and generations[-1] == (2, 3)


def test_the_run_resumes_from_its_commit_if_a_shard_and_its_mirror_die(tmp_path: Path, calm: dict[str, Any]) -> None:
    faults = [Fault(worker, "vote", 5) for worker in (1, 2)]
    outcome, generations = trained(tmp_path, 3, *faults, checkpoint={"every_steps": 2})
    assert outcome == calm and generations[-1] in [(1, 4), (1, 2)]


def test_without_mirrors_a_death_resumes_from_the_commit(tmp_path: Path, calm: dict[str, Any]) -> None:
    fsdp = {"shard_classes": ["Block"], "mirror": False}
    outcome, generations = trained(tmp_path, 3, Fault(1, "vote", 5), checkpoint={"every_steps": 2}, fsdp=fsdp)
    assert outcome == calm and generations in ([(3, 0), (2, 4)], [(3, 0), (2, 2)])  # the save may not have ended


@pytest.mark.parametrize("worker", WORKERS)
def test_a_death_while_rows_move_does_not_change_the_bits(tmp_path: Path, calm: dict[str, Any], worker: int) -> None:
    faults = [Fault(3, "exchange"), Fault(worker, MOVE)]
    outcome, generations = trained(tmp_path, 4, *faults, checkpoint={"every_steps": 2})
    assert outcome == calm
    assert generations[0] == (4, 0) and generations[-1] in [(2, 3), (2, 2)]


def test_workers_of_one_node_are_mirrored_on_another(tmp_path: Path, calm: dict[str, Any]) -> None:
    """Two workers on each of two nodes. Both of one node die."""
    with workers(Plan(tmp_path, {}, (Fault(0, "exchange"), Fault(2, "exchange")), num_nodes=2)) as run:
        run.start(4)
        assert run.outcome() == calm
        assert run.generations()[-1] == (2, 3)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"precision": "bf16", "clip_grad_norm": 0.1}, {}),
        ({}, {"make_model": Checkpointed, "num_rows": 41}),
        pytest.param({"clip_grad_norm": 0.1}, {}, marks=pytest.mark.chaos),
        pytest.param({"precision": "fp16"}, {}, marks=pytest.mark.chaos),
        pytest.param(
            {"fsdp": {"shard_classes": ["Block"], "reshard_after_forward": False}}, {}, marks=pytest.mark.chaos
        ),
        pytest.param({"fsdp": {"shard_classes": []}}, {}, marks=pytest.mark.chaos),
    ],
    ids=["bf16", "checkpointing, and rows that do not divide", "clipping", "fp16", "parameters stay", "one unit"],
)
def test_a_death_does_not_change_the_bits_of_any_kind_of_job(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    outcomes = []
    for size, faults in [(1, ()), (3, (Fault(1, "exchange"),))]:
        folder = tmp_path / str(size)
        folder.mkdir()
        with workers(Plan(folder, settings, faults, **changes)) as run:
            run.start(size)
            outcomes.append(run.outcome())
            assert run.generations() == ([(1, 0)] if size == 1 else [(3, 0), (2, 3)])
    assert outcomes[0] == outcomes[1]


def test_sizes_change_in_place(tmp_path: Path) -> None:
    settings = {"steps": 60}
    calm_folder = tmp_path / "calm"
    calm_folder.mkdir()
    with workers(Plan(tmp_path, settings, pause_s=0.3, num_nodes=1)) as run:
        with run.hold():
            run.start(1)
            run.wait_for_size(1)
            run.start(2)
            run.wait_for_size(3)
            run.rendezvous.ask("resize", 2)
            run.wait_for_size(2)
            run.rendezvous.ask("resize", 4)
            run.start(2)
            run.wait_for_size(4)
            run.rendezvous.ask("resize", 1)
            run.wait_for_size(1)
        found = run.outcome()
        sizes = iter([size for size, _ in run.generations()])  # workers that start together may join one by one
        assert {event["step"] for event in run.events() if event["event"] == "commit"} == {60}
    assert all(size in sizes for size in (1, 3, 2, 4, 1)), "in this order"
    assert found == trained(calm_folder, 2, **settings)[0]


@pytest.mark.chaos
def test_compiled_blocks_are_not_compiled_again_when_sizes_change(tmp_path: Path) -> None:
    """One worker stays, another one joins and leaves five times."""
    settings = {"steps": 100}
    calm_folder = tmp_path / "calm"
    calm_folder.mkdir()
    with workers(Plan(tmp_path, settings, make_model=Compiled, pause_s=0.3, num_nodes=1)) as run:
        with run.hold():
            run.start(1)
            run.wait_for_size(1)
            for number in range(5):
                run.rendezvous.ask("resize", 2)
                run.start(1)
                run.wait_for_size(2)
                run.rendezvous.ask("resize", 1)
                run.wait_for_size(1)
                if number == 0:
                    num_graphs = run.num_graphs(0)
        found = run.outcome()
        assert run.num_graphs(0) == num_graphs > 0
    with workers(Plan(calm_folder, settings, make_model=Compiled)) as run:
        run.start(2)
        assert run.outcome() == found


def test_mirrors_that_do_not_fit_are_left_out(tmp_path: Path, calm: dict[str, Any]) -> None:
    plan = Plan(tmp_path, {"checkpoint": {"every_steps": 2}}, (Fault(1, "vote", 5),), free_bytes=1000)
    with workers(plan) as run:
        run.start(3)
        assert run.outcome() == calm
        assert run.generations() in ([(3, 0), (2, 4)], [(3, 0), (2, 2)])
        [warned, *_] = [event["text"] for event in run.events() if event["event"] == "warning"]
        assert "have no mirrors: the host of" in warned and "0.00 GB free" in warned


def test_shards_that_do_not_fit_fewer_workers_are_committed_and_wait_for_a_replacement(tmp_path: Path) -> None:
    settings = {"steps": 60, "fsdp": {"shard_classes": ["Block"], "mirror": False}}
    calm_folder = tmp_path / "calm"
    calm_folder.mkdir()
    with workers(Plan(tmp_path, settings, free_bytes=800, pause_s=0.3)) as run:
        with run.hold():
            run.start(3)
            run.wait_for_size(3)
            run.rendezvous.ask("drain", "10.0.0.1", 2.0)
            run.wait(lambda: bool(run.of("commit")), "a commit")
            run.start(1)
            run.wait(lambda: run.generations()[-1][1] > 0, "another generation")
        found = run.outcome()
        [commit, *_] = run.of("commit")
        assert run.generations()[-1] == (3, commit["step"]), "two workers wait for a third one"
    with workers(Plan(calm_folder, settings)) as run:
        run.start(1)
        assert run.outcome() == found
