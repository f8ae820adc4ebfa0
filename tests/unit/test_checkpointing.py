"""When a run commits, as one worker sees it."""

from __future__ import annotations

import errno
import json
import logging
import math
import platform
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.checkpoint import Commit, CommitCatalog
from elastic_ddp.checkpoint.interval import FIRST_INTERVAL_S
from elastic_ddp.checkpoint.metrics import Metrics
from elastic_ddp.checkpoint.saver import RankFailedError
from elastic_ddp.errors import (
    CheckpointError,
    DriverReplacedError,
    PeerFailedError,
    ReplicasDifferError,
    StorageError,
)
from elastic_ddp.storage import retry, watchdog
from elastic_ddp.storage.lease import DriverLease
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker import checkpointing
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from tests.ranks import alone
from tests.single_rank_store import SingleRankStore
from tests.unit.crafted_commits import signed
from tests.unit.single_worker import PEER_FAILURE, NewRun, Place, link_of, prepared, train, train_and_count
from tests.unit.test_checkpoint import corrupt

GROUP: Any = SimpleNamespace(aborted=False)


def commit(folder: Path, step: int) -> None:
    SingleRankStore(Storage(folder / "run").at(COMMITS), keep=2).save({"user": {}}, step=step, record={})


def test_a_commit_that_did_not_come_to_be_is_made_up_for_by_the_next_rank_0(new_run: NewRun, tmp_path: Path) -> None:
    checkpointing = new_run(checkpoint={"every_steps": 10, "every_seconds": 1000})._loop.checkpointer
    commit(tmp_path, 10)
    checkpointing._note(20)
    checkpointing.refresh_newest(20)
    assert not checkpointing.is_committed(20, GROUP) and checkpointing.step == 10
    assert checkpointing.should_commit(21)


def test_a_commit_that_was_made_sets_the_clock_for_the_next_rank_0_too(new_run: NewRun, tmp_path: Path) -> None:
    checkpointing = new_run(checkpoint={"every_steps": 10, "every_seconds": 1000})._loop.checkpointer
    commit(tmp_path, 20)
    checkpointing._note(20)
    noted_at = checkpointing._at
    checkpointing.refresh_newest(20)
    assert checkpointing.is_committed(20, GROUP) and checkpointing._at == noted_at
    assert not checkpointing.should_commit(21) and checkpointing.should_commit(30)


def test_a_new_rank_0_knows_what_was_measured_before_it_came(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(checkpoint={"every_steps": 10, "keep_best": 1, "best_metric": "accuracy"})
    before = Metrics()
    before.update(10, {"accuracy": 0.75})
    store = SingleRankStore(Storage(tmp_path / "run").at(COMMITS), keep=2)
    store.save({"user": {}}, step=20, record=before.to_record())
    run._loop.checkpointer.refresh_newest(20)
    assert run._loop.checkpointer.is_committed(20, GROUP)
    record = run._loop.checkpointer._record(run._loop.state, 2)
    assert {name: record[name] for name in before.to_record()} == before.to_record()


@pytest.mark.parametrize("steps_done", [15, 20])
def test_a_bad_commit_that_was_passed_over_and_stays_is_not_the_newest_of_a_new_rank_0(
    new_run: NewRun, tmp_path: Path, steps_done: int
) -> None:
    """Whether the run has come back to its step, or not yet."""
    checkpointing = new_run(checkpoint={"every_steps": 10})._loop.checkpointer
    commit(tmp_path, 10)
    commit(tmp_path, 20)
    storage = Storage(tmp_path / "run").at(COMMITS)
    [skeleton] = storage.list("step=20")
    corrupt(storage, skeleton, "flip")
    checkpointing.refresh_newest(steps_done)
    assert not checkpointing.is_committed(20, GROUP)
    assert checkpointing.step == 10 and checkpointing.should_commit(20)


def rejected_by(run: Run) -> list[str]:
    return [said["key"] for said in link_of(run).said if said["event"] == "commit_rejected"]


def test_a_bad_commit_that_a_new_rank_0_finds_is_in_the_ledger(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(checkpoint={"every_steps": 10})
    commit(tmp_path, 10)
    commit(tmp_path, 20)
    storage = Storage(tmp_path / "run").at(COMMITS)
    corrupt(storage, storage.list("step=20")[0], "flip")
    run._loop.checkpointer.refresh_newest(20)
    assert not run._loop.checkpointer.is_committed(20, GROUP)
    assert rejected_by(run) == ["commits/20.json"]


def test_a_bad_commit_that_a_save_sets_aside_is_in_the_ledger(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(checkpoint={"every_steps": 2})

    def in_step(step: Step) -> None:
        run._loop.checkpointer.close(60)
        if step.index == 2:
            Storage(tmp_path / "run").at(COMMITS).write("commits/4.json", b"torn")

    train(run, in_step)
    assert rejected_by(run) == ["commits/4.json"]
    [said] = [said for said in link_of(run).said if said["event"] == "commit_rejected"]
    assert "is not the manifest of a commit" in said["reason"]
    assert link_of(run).steps_of("commit") == [2, 4, 6]


def test_a_worker_that_begins_again_still_hears_what_the_storage_says_of_the_newest(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, newest = new_run(checkpoint={"every_steps": 10, "every_seconds": 1000}), checkpointing._newest
    commit(tmp_path, 10)
    begun = threading.Event()

    def slow(*asked: Any) -> Any:
        begun.wait(10)
        return newest(*asked)

    monkeypatch.setattr(checkpointing, "_newest", slow)
    run._loop.checkpointer._note(20)
    run._loop.checkpointer.refresh_newest(20)
    threading.Timer(0.2, begun.set).start()
    again = run._loop.restart().checkpointer
    assert again.step == 10 and again.should_commit(21)


def test_what_is_committed_while_the_storage_is_asked_counts(new_run: NewRun, tmp_path: Path) -> None:
    checkpointing = new_run()._loop.checkpointer
    commit(tmp_path, 10)
    checkpointing._note(20)
    checkpointing._known_step = 20  # by this worker
    checkpointing._ask_storage(10, (0, 0), 20)
    assert checkpointing.is_committed(20, GROUP)


def test_what_is_committed_once_more_at_the_same_step_while_the_storage_is_asked_counts(
    new_run: NewRun, tmp_path: Path
) -> None:
    checkpointing = new_run()._loop.checkpointer
    commit(tmp_path, 10)
    checkpointing._note(20)  # by those who were lost with it
    begun = checkpointing._begun
    checkpointing._begun, checkpointing._known_step = (3, 1), 20  # by this worker
    checkpointing._ask_storage(20, begun, 20)
    assert checkpointing.is_committed(20, GROUP)


def test_a_storage_that_does_not_answer_ends_nothing(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise StorageError("down")

    monkeypatch.setattr(CommitCatalog, "candidates", fails)
    checkpointing = new_run(checkpoint={"every_steps": 10})._loop.checkpointer
    checkpointing._note(20)
    checkpointing.refresh_newest(20)
    assert not checkpointing.is_committed(20, GROUP), "nobody can say so"
    assert not checkpointing.should_commit(21)
    assert checkpointing.step == 20


def test_workers_of_a_driver_that_was_replaced_commit_nothing(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run()
    storage = Storage(tmp_path / "run")
    with DriverLease(storage, "test", "another", print) as lease:
        lease.acquire()
        with pytest.raises(DriverReplacedError, match="was taken over by another driver: pid"):
            train(run)
        assert not storage.list(COMMITS), "nothing is left of what it wrote"
    assert link_of(run).steps_of("commit") == []


def test_a_driver_that_cannot_be_read_once_costs_no_commit(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retry, "FIRST_BACKOFF_S", 0.01)
    run, whole, failed = new_run(), Storage.sizes, []

    def fails_once(self: Storage, prefix: str = "") -> dict[str, int]:
        if prefix.startswith("driver") and not failed:
            failed.append(prefix)
            raise StorageError("503 SlowDown")
        return whole(self, prefix)

    monkeypatch.setattr(Storage, "sizes", fails_once)
    train(run)
    assert failed and link_of(run).steps_of("commit") and not link_of(run).steps_of("commit_failed")
    assert "retrying in 0.01 s: 503 SlowDown" in caplog.text


def test_a_run_whose_commits_were_all_set_aside_does_not_start_over(new_run: NewRun, tmp_path: Path) -> None:
    """As where a saver that stood still removed the commit before, once its own was found bad."""
    storage = Storage(tmp_path / "run").at(COMMITS)
    store = SingleRankStore(storage, keep=1)
    bad = store.save({"user": {}}, step=10, record={})
    store.set_aside(bad.key, bad.attempt)
    [aside] = storage.list("set-aside")
    checkpointing = new_run()._loop.checkpointer
    with pytest.raises(CheckpointError, match=r"no commit but those set aside .* not silently") as said:
        checkpointing.restore(alone(), lambda: None)
    assert aside in str(said.value)
    storage.delete(aside)
    assert checkpointing.restore(alone(), lambda: None) is None


@pytest.mark.parametrize("was_set_aside", [False, True])
def test_a_run_of_which_no_commit_can_be_used_begins_again_once_what_is_named_is_deleted(
    new_run: NewRun, tmp_path: Path, was_set_aside: bool
) -> None:
    checkpointing = new_run()._loop.checkpointer
    commit(tmp_path, 1)
    folders = [tmp_path / "run" / COMMITS / "commits"]
    if was_set_aside:
        commit(tmp_path, 2)
        (folders[0] / "2.json").write_bytes(b"torn")
        assert checkpointing.restore(alone(), lambda: None) == {"user": {}}
        folders.append(folders[0].with_name("set-aside"))
    (folders[0] / "1.json").write_bytes(b"torn")
    named = " and ".join(map(str, folders))
    with pytest.raises(CheckpointError, match=f"delete {re.escape(named)} to begin again, .* not silently"):
        checkpointing.restore(alone(), lambda: None)
    for each in folders:
        shutil.rmtree(each)
    assert checkpointing.restore(alone(), lambda: None) is None


def test_a_worker_that_was_presumed_dead_restores_and_sets_nothing_aside(new_run: NewRun, tmp_path: Path) -> None:
    run, storage = new_run(), Storage(tmp_path / "run").at(COMMITS)
    commit(tmp_path, 1)
    commit(tmp_path, 2)
    storage.write("commits/2.json", b"torn")
    link_of(run).presumed_dead = True
    with pytest.raises(PeerFailedError):
        run._loop.checkpointer.restore(alone(), lambda: None)
    assert storage.list("commits") == ["commits/1.json", "commits/2.json"]
    link_of(run).presumed_dead = False
    assert run._loop.checkpointer.restore(alone(), lambda: None) == {"user": {}}
    assert storage.list("commits") == ["commits/1.json"]


def test_a_commit_says_of_what_and_with_what_it_was_made(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run()
    train(run)
    newest = SingleRankStore(Storage(tmp_path / "run").at(COMMITS), keep=1).latest()
    assert newest is not None
    made_with = {name: version(name) for name in ("elastic-ddp", "torch", "ray", "pyarrow")}
    assert newest.record["versions"] == {"python": platform.python_version(), **made_with}
    job = run._loop.job
    assert (newest.step, newest.record["generation"]) == (job.total_steps, 1)
    assert newest.record["epoch"] == job.shape.epoch_of(newest.step)
    assert newest.record["data"] == job.index.fingerprint
    assert newest.record["identity"] == json.loads(json.dumps(job.config.identity()))
    assert newest.record["identity"]["seed"] == job.config.seed


# Intervals that follow from what was measured.


def test_the_interval_follows_from_the_time_that_a_save_holds_training_up(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointing = new_run(checkpoint={"max_overhead": 0.02})._loop.checkpointer
    assert checkpointing._interval is not None
    now = [1000.0]
    monkeypatch.setattr("elastic_ddp.worker.checkpointing.time", SimpleNamespace(monotonic=lambda: now[0]))
    checkpointing._note(3)
    now[0] += 59.0
    assert not checkpointing.should_commit(4), "a minute, as nothing was measured"
    now[0] += 2.0
    assert checkpointing.should_commit(4)
    checkpointing._interval.stalled(0.2)
    checkpointing._note(4)
    now[0] += 9.9
    assert not checkpointing.should_commit(5)
    now[0] += 0.2
    assert checkpointing.should_commit(5)


def test_what_was_measured_and_chosen_is_in_the_ledger_and_in_the_commit(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(checkpoint={"interval": "auto"})
    interval = run._loop.checkpointer._interval
    assert interval is not None

    def in_step(step: Step) -> None:
        run._loop.checkpointer.close(60)
        if step.index in (1, 3):
            link_of(run).commit_requested += 1

    train(run, in_step)
    events = [each for each in link_of(run).said if each["event"] == "commit"]
    assert [each["step"] for each in events] == [2, 4, 6]
    assert len(interval._stalls) == len(interval._saves) == 3
    assert 0 < interval._stalls[-1] < interval._saves[-1] < 60.0
    assert events[-1]["interval_s"] == pytest.approx(interval.seconds, rel=0.05)
    newest = SingleRankStore(Storage(tmp_path / "run").at(COMMITS), keep=1).latest()
    assert newest is not None and newest.record["losses"] == 0 and newest.record["watched_s"] > 0


def test_a_worker_that_becomes_rank_0_knows_the_losses_that_those_before_have_counted(
    new_run: NewRun, tmp_path: Path
) -> None:
    checkpointing = new_run(checkpoint={"interval": "auto"})._loop.checkpointer
    SingleRankStore(Storage(tmp_path / "run").at(COMMITS), keep=2).save(
        {"user": {}}, step=10, record={"losses": 20, "watched_s": 10_004.0}
    )
    checkpointing._note(10)
    checkpointing.refresh_newest(20)
    checkpointing._hear_of_newest()
    assert checkpointing._interval is not None
    known = checkpointing._interval.record()
    assert known["losses"] == 20 and known["watched_s"] >= 10_004.0


def test_a_fixed_interval_is_none_that_was_chosen(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(checkpoint={"every_steps": 3})
    train(run, closes_first(run))
    assert {each["interval_s"] for each in link_of(run).said if each["event"] == "commit"} == {None}
    newest = SingleRankStore(Storage(tmp_path / "run").at(COMMITS), keep=1).latest()
    assert newest is not None and "losses" not in newest.record


def test_losses_of_peers_are_counted_in_this_life_and_the_next(new_run: NewRun) -> None:
    settings = {"interval": "auto"}
    run = new_run(checkpoint=settings)
    failure: list[int] = []

    def lose(step: Step) -> None:
        if step.index in (2, 4) and step.index not in failure:
            failure.append(step.index)
            raise dist.DistNetworkError(PEER_FAILURE)

    train(run, lose)
    assert run._loop.checkpointer._interval is not None
    assert run._loop.checkpointer._interval.record()["losses"] == 2
    resumed = new_run(checkpoint=settings, steps=8)
    train(resumed)
    assert resumed._loop.checkpointer._interval is not None
    assert resumed._loop.checkpointer._interval.record()["losses"] == 2
    assert (
        resumed._loop.checkpointer._interval.record()["watched_s"]
        > run._loop.checkpointer._interval.record()["watched_s"] / 2
    )


def test_what_was_measured_stays_known_where_the_training_function_begins_again(new_run: NewRun) -> None:
    """Losses between two commits count each, though a commit that is gone back to knows of none of them."""
    run = new_run(checkpoint={"interval": "auto"})
    run._loop.checkpointer.measured(0, {"accuracy": 0.5})
    measured, failure = run._loop.checkpointer._interval, []
    assert measured is not None
    measured.stalled(0.5)
    measured.saved(1.5)

    def lose(place: Place, step: int) -> None:
        if (place, step) in (("optimizer", 1), ("optimizer", 2)) and step not in failure:
            failure.append(step)
            raise dist.DistNetworkError(PEER_FAILURE)

    train_and_count(run, lose)
    assert failure == [1, 2]
    last = [each for each in link_of(run).said if each["event"] == "commit"][-1]
    assert measured.record()["losses"] == 2 and last["interval_s"] == pytest.approx(measured.seconds, rel=0.1)
    assert last["interval_s"] != FIRST_INTERVAL_S


def test_a_run_that_begins_again_from_nothing_knows_nothing_of_the_steps_that_it_makes_once_more(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, failure = new_run(checkpoint={"every_steps": 2}), []
    break_storage(monkeypatch, lambda: not failure)

    def lose(place: Place, step: int) -> None:
        if (place, step) == ("optimizer", 3) and not failure:
            run._loop.checkpointer.measured(step, {"accuracy": 0.5})
            run._loop.checkpointer.close(60)
            failure.append(step)
            raise dist.DistNetworkError(PEER_FAILURE)

    train_and_count(run, lose)
    client = link_of(run)
    assert client.steps_of("commit_failed") == [2]
    assert client.steps_of("commit")[0] == 2, "one may be under way when the next is due, but for the first"
    newest = CommitCatalog(Storage(tmp_path / "run").at(COMMITS)).latest()
    assert newest is not None and set(newest.record["metrics"]) == {"loss"}


def test_a_worker_that_begins_again_knows_its_metrics_and_its_newest_commit(new_run: NewRun) -> None:
    """It may get the state of a peer, and is rank 0 all the same."""
    run = new_run(checkpoint={"every_steps": 2})
    train(run)
    run._loop.checkpointer.measured(6, {"accuracy": 0.5})
    again = run._loop.restart()
    checkpointing = again.checkpointer
    assert checkpointing._record(again.state, 1)["metrics"]["accuracy"] == {"value": 0.5, "step": 6}
    assert checkpointing.step == 6 and not checkpointing.should_commit(7) and checkpointing.should_commit(8)


def test_the_loss_of_all_workers_counts_when_others_go_on(new_run: NewRun) -> None:
    settings = {"interval": "auto"}
    train(new_run(checkpoint=settings))
    resumed = new_run(checkpoint=settings, steps=8)
    join = link_of(resumed).join
    link_of(resumed).join = lambda **asked: replace(join(**asked), reason="worker lost")  # type: ignore[method-assign]
    train(resumed)
    assert resumed._loop.checkpointer._interval is not None
    assert resumed._loop.checkpointer._interval.record()["losses"] == 1


# What a commit knows of metrics, and which commits are kept by them.


def log_and_evaluate(run: Run, values: dict[int, float], *, before: bool = False) -> None:
    """Evaluates after some steps, or before them, with a commit behind each step."""

    def evaluate(value: float) -> None:
        run.evaluate(lambda *_: torch.tensor(value), "held-out")

    model = prepared(run)
    for step in run.steps():
        run._loop.checkpointer.close(60)  # of the step before
        if before and step.index in values:
            evaluate(values[step.index])
        with step:
            for batch in step.micro_batches():
                loss = model(batch["x"]).square().mean()
                step.backward(loss)
                step.log(index=float(step.index))
            step.optimize()
        if not before and step.index in values:
            evaluate(values[step.index])
    run._loop.finish()


@pytest.fixture
def _evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation is what the loss function gives."""
    monkeypatch.setattr(
        "elastic_ddp.worker.run.evaluate", lambda generation, job, loss_fn, *_: float(loss_fn(None, None))
    )


def records(folder: Path) -> dict[int, dict[str, Any]]:
    store = SingleRankStore(Storage(folder / "run").at(COMMITS), keep=1)
    return {step: each.record["metrics"] for step, each in store.all_commits() if isinstance(each, Commit)}


@pytest.mark.usefixtures("_evaluations")
def test_a_commit_knows_the_newest_value_of_every_metric_and_when_it_was_measured(
    new_run: NewRun, tmp_path: Path
) -> None:
    run = new_run(checkpoint={"every_steps": 1, "keep": 9}, log_every_steps=2)
    log_and_evaluate(run, {1: 0.5, 3: float("nan"), 4: 0.25})
    found = records(tmp_path)
    assert [found[step].get("validation_loss") for step in sorted(found)] == [
        None,
        {"value": 0.5, "step": 2},
        {"value": 0.5, "step": 2},
        None,  # JSON has no NaN, and a commit is worth more than a metric
        {"value": 0.25, "step": 5},
        {"value": 0.25, "step": 5},
    ]
    assert [found[step]["index"] for step in sorted(found)] == [
        {"value": value, "step": step} for value, step in [(0.0, 1), (0.0, 1), (2.0, 3), (2.0, 3), (4.0, 5), (5.0, 6)]
    ]
    assert [found[step]["loss"]["step"] for step in sorted(found)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("_evaluations")
def test_where_commits_stay_by_a_metric_the_last_one_comes_after_the_last_evaluation(
    new_run: NewRun, tmp_path: Path
) -> None:
    settings = {"every_steps": 3, "keep": 1, "keep_best": 1, "best_metric": "validation_loss"}
    log_and_evaluate(new_run(checkpoint=settings), {2: 0.5, 5: 0.125})
    assert {step: found["validation_loss"]["value"] for step, found in records(tmp_path).items()} == {6: 0.125}


def test_what_the_function_raises_after_the_last_step_costs_no_step_that_was_to_be_committed(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(checkpoint={"every_steps": 3, "keep": 9})
    monkeypatch.setattr(run._loop, "finish", dict)  # it is not come to
    train(run, closes_first(run))
    run._loop.close(intact=False)
    run._loop.shut_down()
    assert sorted(records(tmp_path)) == [3, 6]


@pytest.mark.usefixtures("_evaluations")
def test_the_commits_with_the_best_evaluations_stay(new_run: NewRun, tmp_path: Path) -> None:
    settings = {"every_steps": 1, "keep": 1, "keep_best": 2, "best_metric": "validation_loss", "keep_every_steps": 4}
    log_and_evaluate(new_run(checkpoint=settings), {0: 0.9, 1: 0.3, 2: 0.6, 4: 0.5})
    assert sorted(records(tmp_path)) == [2, 4, 5, 6], "4 as a multiple, and 6 as the newest"


@pytest.mark.usefixtures("_evaluations")
def test_an_evaluation_that_follows_a_commit_counts_for_the_next_commit(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(checkpoint={"every_steps": 1, "keep": 1, "keep_best": 1, "best_metric": "validation_loss"})
    log_and_evaluate(run, {1: 0.9, 2: 0.3, 3: 0.6, 4: 0.5, 5: 0.7}, before=True)
    assert sorted(records(tmp_path)) == [3, 6]


@pytest.mark.parametrize(("every", "at", "before"), [(2, 3, [2]), (6, 5, [])])
def test_a_run_whose_replicas_differ_ends_at_the_commit_before_and_goes_on_from_there(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, at: int, before: list[int]
) -> None:
    """It is told at the next step, or where the run ends."""

    def differ(samples: Any) -> None:
        raise ReplicasDifferError("ranks 0 and 1 hold different values of model.weight")

    def from_there_on(step: Step) -> None:
        if step.index == at:
            patches.setattr("elastic_ddp.checkpoint.writer.check_same", differ)

    settings = {"every_steps": every, "keep": 9, "max_failed_saves": 0}
    first = new_run(checkpoint=settings)
    with (
        monkeypatch.context() as patches,
        pytest.raises(ReplicasDifferError, match=r"ranks 0 and 1 hold different values of model\.weight"),
    ):
        train(first, closes_first(first, from_there_on))
    assert sorted(records(tmp_path)) == before
    assert [each["counts"] for each in link_of(first).said if each["event"] == "commit_failed"] == [False]
    first._loop.close(intact=False)
    resumed = new_run(checkpoint=settings)
    train(resumed, closes_first(resumed))
    assert resumed.position.step == 6 and max(records(tmp_path)) == 6


def test_ranks_that_end_with_different_weights_end_the_run(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    monkeypatch.setattr(run._loop, "_compare", lambda generation: ["a" * 64, "b" * 64])
    with pytest.raises(ReplicasDifferError, match=r"ranks ended with different weights: \{0: 'a"):
        train(run)
    run._loop.close(intact=False)


@pytest.mark.parametrize("what", ["seed", "data"])
def test_a_commit_of_another_run_is_passed_over(new_run: NewRun, tmp_path: Path, what: str) -> None:
    first = new_run(checkpoint={"every_steps": 2, "keep": 9})
    train(first, closes_first(first))
    storage = Storage(tmp_path / "run").at(COMMITS)
    body = json.loads(storage.read("commits/6.json"))
    (body["record"] if what == "data" else body["record"]["identity"])[what] = "other"
    body["record"]["identity"] |= {"of a version to come": 1}
    storage.write("commits/6.json", signed(body))
    resumed = new_run(checkpoint={"every_steps": 2, "keep": 9}, steps=8)
    train(resumed)
    assert link_of(resumed).steps_of("resumed") == [4]
    [reason] = {said["reason"] for said in link_of(resumed).said if said["event"] == "commit_rejected"}
    assert f"commits/6.json is of another run, where {what} is 'other'; here {what} is " in reason
    [aside] = storage.list("set-aside")
    assert aside.startswith("set-aside/6-")


def test_a_commit_that_knows_more_or_less_of_what_defines_a_run_is_used(new_run: NewRun, tmp_path: Path) -> None:
    train(new_run(checkpoint={"every_steps": 2}))
    storage = Storage(tmp_path / "run").at(COMMITS)
    body = json.loads(storage.read("commits/6.json"))
    for identity in ({"of a version to come": 1}, None):
        body["record"]["identity"] = identity
        storage.write("commits/6.json", signed(body))
        resumed = new_run(checkpoint={"every_steps": 2}, steps=6)
        train(resumed)
        assert link_of(resumed).steps_of("resumed") == [6]


@pytest.mark.usefixtures("_evaluations")
def test_a_resumed_run_still_knows_what_was_measured(new_run: NewRun, tmp_path: Path) -> None:
    log_and_evaluate(new_run(checkpoint={"keep": 9}), {5: 0.5})
    log_and_evaluate(new_run(checkpoint={"keep": 9, "every_steps": 1}, steps=7), {})
    assert records(tmp_path)[7]["validation_loss"] == {"value": 0.5, "step": 6}


def test_a_best_metric_that_nobody_measures_is_said_once(new_run: NewRun, caplog: pytest.LogCaptureFixture) -> None:
    run = new_run(checkpoint={"every_steps": 1, "keep_best": 1, "best_metric": "accuracy"})
    with caplog.at_level(logging.WARNING):
        train(run, closes_first(run))
    [said] = [each.getMessage() for each in caplog.records if "best_metric" in each.getMessage()]
    assert said.startswith("checkpoint.best_metric='accuracy' has no value") and said.endswith("have one: loss")


def test_a_save_that_outlived_its_generation_removes_nothing(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(checkpoint={"every_steps": 2, "keep": 1})
    storage, orphan = Storage(tmp_path / "run").at(COMMITS), f"step=0/attempt={'a' * 32}"
    storage.write(f"{orphan}/0-0.bin", b"of those who came after, perhaps")
    go = slow_storage(monkeypatch)
    failure: list[int] = []

    def in_step(step: Step) -> None:
        if step.index == 4 and not failure:
            failure.append(4)
            raise dist.DistNetworkError(PEER_FAILURE)
        if step.index == 4:
            go.set()
            run._loop.checkpointer.close(60)
            assert [*records(tmp_path)] == [2] and storage.list(orphan)

    train(run, in_step)
    assert failure and [*records(tmp_path)] == [6] and not storage.list(orphan)


# Saves that fail, or take long.


def closes_first(run: Run, then: Callable[[Step], None] = lambda step: None) -> Callable[[Step], None]:
    """In every step the save of the one before has ended."""

    def in_step(step: Step) -> None:
        run._loop.checkpointer.close(60)
        then(step)

    return in_step


def break_storage(monkeypatch: pytest.MonkeyPatch, broken: Callable[[], bool]) -> None:
    write = Storage.write

    def fail(storage: Storage, key: str, data: bytes | memoryview) -> None:
        if key.startswith("step=") and broken():
            raise StorageError(f"cannot write {key!r}: no space left") from OSError(errno.ENOSPC, "no space left")
        write(storage, key, data)

    monkeypatch.setattr(Storage, "write", fail)


def test_training_goes_on_after_saves_that_failed(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = new_run(checkpoint={"every_steps": 1, "max_failed_saves": 2})
    now = [0]
    break_storage(monkeypatch, lambda: now[0] in (1, 2))
    train(run, closes_first(run, lambda step: now.__setitem__(0, step.index)))
    assert link_of(run).steps_of("commit_failed") == [2, 3]
    assert link_of(run).steps_of("commit") == [1, 4, 5, 6]
    [failed, *_] = [said for said in link_of(run).said if said["event"] == "commit_failed"]
    assert "no space left" in failed["error"] and failed["counts"] and failed["of_storage"]


def test_a_rank_that_falls_silent_though_none_is_lost_is_a_failure_and_none_of_the_storage(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not get better by being tried again at once, and for ever."""
    run = new_run(checkpoint={"every_steps": 2})
    writer = run._loop.checkpointer._saver._writer
    silence = RankFailedError("rank 1 fell silent for 15 s")
    monkeypatch.setattr(writer, "write", mock.Mock(side_effect=[silence, *[mock.DEFAULT] * 2], wraps=writer.write))
    train(run, closes_first(run))
    assert link_of(run).steps_of("commit_failed") == [2] and link_of(run).steps_of("commit") == [4, 6]
    [failed] = [said for said in link_of(run).said if said["event"] == "commit_failed"]
    assert failed["counts"] and not failed["of_storage"]


def test_a_save_whose_generation_lost_a_rank_comes_again_at_once_and_is_not_counted(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(checkpoint={"every_steps": 3, "max_failed_saves": 0})
    write, go, failure = run._loop.checkpointer._saver._writer.write, threading.Event(), list[int]()

    def write_or_lose(*arguments: Any) -> Any:
        if failure:
            return write(*arguments)
        assert go.wait(60)
        raise RankFailedError("rank 1 was lost")

    monkeypatch.setattr(run._loop.checkpointer._saver._writer, "write", write_or_lose)

    def in_step(step: Step) -> None:
        if step.index == 3 and not failure:
            run._loop.checkpointer.generation_ended(intact=False)
            go.set()
            run._loop.checkpointer.close(60)
            failure.append(3)
            raise dist.DistNetworkError(PEER_FAILURE)
        run._loop.checkpointer.close(60)

    train(run, in_step)
    assert link_of(run).steps_of("commit_failed") == [3] and link_of(run).steps_of("commit") == [4, 6]
    assert not any(said["counts"] for said in link_of(run).said if said["event"] == "commit_failed")


def test_a_save_that_outlives_its_generation_where_commits_of_later_steps_lie_comes_again_at_once(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They were passed over when the run resumed, and may be good. No worker is lost for that, nor a save counted."""
    run = new_run(checkpoint={"every_steps": 3, "max_failed_saves": 0})
    write, go, ended = run._loop.checkpointer._saver._writer.write, threading.Event(), list[int]()

    def write_late(*arguments: Any) -> Any:
        assert go.wait(60)
        return write(*arguments)

    monkeypatch.setattr(run._loop.checkpointer._saver._writer, "write", write_late)

    def in_step(step: Step) -> None:
        if step.index == 3 and not ended:
            commit(tmp_path, 90)
            run._loop.checkpointer.generation_ended(intact=True)
            go.set()
            run._loop.checkpointer.close(60)
            (tmp_path / "run" / COMMITS / "commits" / "90.json").unlink()
            ended.append(3)
        run._loop.checkpointer.close(60)

    train(run, in_step)
    [failed] = [said for said in link_of(run).said if said["event"] == "commit_failed"]
    assert failed["step"] == 3 and "SupersededError: there is a commit of step 90" in failed["error"]
    assert not failed["counts"] and link_of(run).steps_of("commit") == [4, 6]


def test_a_save_in_which_the_storage_hangs_counts_as_failed_and_others_follow(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(checkpoint={"every_steps": 1, "max_failed_saves": 2})
    go, now = threading.Event(), [0]
    break_storage(monkeypatch, lambda: now[0] in (1, 2) and not go.wait(60))

    def in_step(step: Step) -> None:
        now[0] = step.index
        monkeypatch.setattr(watchdog, "STALL_TIMEOUT_S", 0.2 if step.index in (1, 2) else 60.0)

    train(run, closes_first(run, in_step))
    assert link_of(run).steps_of("commit_failed") == [2, 3] and link_of(run).steps_of("commit") == [1, 4, 5, 6]
    go.set()


def test_the_last_commit_is_waited_for_and_says_why_it_failed(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "REST_S", 0.01)
    run = new_run(checkpoint={"max_failed_saves": 2})
    break_storage(monkeypatch, lambda: True)
    with pytest.raises(StorageError, match="no space left"):
        train(run)
    assert link_of(run).steps_of("commit_failed") == [6] * 3


def test_a_storage_that_fails_for_a_while_does_not_take_the_last_commit(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "REST_S", 0.01)
    run = new_run()
    break_storage(monkeypatch, lambda: len(link_of(run).steps_of("commit_failed")) < 3)
    assert train(run)["steps"] == 6
    assert link_of(run).steps_of("commit_failed") == [6] * 3 and link_of(run).steps_of("commit") == [6]


def test_a_commit_that_somebody_asked_for_is_not_tried_again_at_every_step(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    client = link_of(run)
    client.commit_requested, now = 1, [0]
    break_storage(monkeypatch, lambda: now[0] < 5)

    def in_step(step: Step) -> None:
        now[0] = step.index
        if step.index == 4:
            run._loop.checkpointer._rests_until = 0.0

    train(run, closes_first(run, in_step))
    assert client.steps_of("commit_failed") == [1, 5] and client.steps_of("commit") == [6]
    assert [said["request"] for said in client.said if said["event"] == "commit"] == [1]


def test_storage_gets_longer_to_recover_after_each_failure_in_a_row(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rests = new_run(checkpoint={"every_steps": 1}), list[float]()
    now = [0]
    break_storage(monkeypatch, lambda: now[0] in (0, 1, 3))

    def in_step(step: Step) -> None:
        now[0] = step.index
        rests.append(max(0.0, run._loop.checkpointer._rests_until - time.monotonic()))

    train(run, closes_first(run, in_step))
    assert [round(each / checkpointing.REST_S) for each in rests] == [0, 1, 2, 0, 1, 0]


def test_membership_does_not_change_by_a_commit_that_has_just_failed(new_run: NewRun) -> None:
    """Sharded workers begin again from one that is made right before."""
    run = new_run()
    prepared(run)
    for is_sharded, rests, votes in [(True, True, False), (False, True, True), (True, False, True)]:
        link_of(run).reconfigure_requested = True
        run._loop.checkpointer._rests_until = math.inf if rests else 0.0
        run._state.layout = (lambda name: None) if is_sharded else None
        assert run._loop._votes(1)["reconfigure"] is votes


def slow_storage(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes of states wait for it."""
    go, write = threading.Event(), Storage.write

    def slowly(storage: Storage, key: str, data: bytes | memoryview) -> None:
        assert not key.startswith("step=") or go.wait(60)
        write(storage, key, data)

    monkeypatch.setattr(Storage, "write", slowly)
    return go


def test_a_save_that_is_due_while_another_is_written_is_left_out_and_that_is_said(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(steps=12, checkpoint={"every_steps": 2})
    go = slow_storage(monkeypatch)

    def in_step(step: Step) -> None:
        if step.index >= 7:
            go.set()
            run._loop.checkpointer.close(60)

    train(run, in_step)
    assert link_of(run).steps_of("commit_left_out") == [4, 6]
    assert link_of(run).steps_of("commit") == [2, 8, 10, 12]


def test_a_commit_that_makes_up_for_one_of_a_dead_rank_0_comes_as_soon_as_it_can(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(steps=12, checkpoint={"every_steps": 4})
    checkpointing, go, write = run._loop.checkpointer, threading.Event(), Storage.write

    def slowly(storage: Storage, key: str, data: bytes | memoryview) -> None:
        assert not key.startswith("step=4/") or go.wait(60)
        write(storage, key, data)

    monkeypatch.setattr(Storage, "write", slowly)

    def in_step(step: Step) -> None:
        if step.index == 4:  # rank 0 of the save of step 4 has died, and this worker, which takes its place, writes on
            checkpointing.refresh_newest(4)
            checkpointing._hear_of_newest()
        if step.index >= 6:
            go.set()
            checkpointing.close(60)

    train(run, in_step)
    assert link_of(run).steps_of("commit_left_out") == []
    assert link_of(run).steps_of("commit") == [4, 7, 11, 12]


def test_a_commit_that_is_under_way_for_somebody_is_not_due_again(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    go, due = slow_storage(monkeypatch), dict[int, bool]()

    def in_step(step: Step) -> None:
        client, checkpointing = link_of(run), run._loop.checkpointer
        due[step.index] = checkpointing.should_commit(step.index)
        if step.index in (1, 3):
            client.commit_requested += 1
        if step.index == 4:
            go.set()
            checkpointing.close(60)

    train(run, in_step)
    assert due == {0: False, 1: False, 2: False, 3: False, 4: True, 5: False}
    said = [(each["step"], each["request"]) for each in link_of(run).said if each["event"] == "commit"]
    assert said[:2] == [(2, 1), (5, 2)] and link_of(run).steps_of("commit_left_out") == []


def test_a_commit_that_somebody_waits_for_is_not_left_out(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(checkpoint={"every_steps": 2})
    go = slow_storage(monkeypatch)

    def in_step(step: Step) -> None:
        if step.index == 3:
            link_of(run).commit_requested = 1
        if step.index == 4:
            go.set()
            run._loop.checkpointer.close(60)

    train(run, in_step)
    said = [(each["step"], each["request"]) for each in link_of(run).said if each["event"] == "commit"]
    assert said[:2] == [(2, None), (5, 1)] and link_of(run).steps_of("commit_left_out") == []
