"""Runs on Ray: the same weights and samples at any world size and after failures."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
import torch
from ray.data._internal.stats import STATS_ACTOR_NAME, STATS_ACTOR_NAMESPACE

import elastic_ddp as ed
from elastic_ddp.data.files import list_files
from elastic_ddp.driver.node_access import probe_nodes
from elastic_ddp.errors import ConfigError, ReplicasDifferError, TrainFunctionError, WorkersFailedError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger
from elastic_ddp.telemetry.events import PhasesMeasured
from elastic_ddp.worker.job import COMMITS
from tests.inside_run import state_of
from tests.integration import jobs
from tests.single_rank_store import SingleRankStore

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(undisturbed: Mapping[str, Any]) -> Iterator[None]:
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="WARNING")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(calm_folder: Path) -> Path:
    return calm_folder


def fit(folder: Path, name: str, workers: int, *, train: Any = None, **changes: Any) -> ed.RunResult:
    train = train or jobs.make_train(held_out=str(folder / "held-out"))
    config = jobs.settings(str(folder / "runs"), name, workers, **changes)
    return ed.ElasticTrainer(train, str(folder / "data"), config, transform=jobs.jitter).fit()


@pytest.fixture(scope="module")
def calm(cluster: None, folder: Path) -> ed.RunResult:
    """The undisturbed run on one worker. It has finished, so `fit` only returns its result."""
    return fit(folder, "calm", 1)


def assert_same(result: ed.RunResult, calm: ed.RunResult) -> None:
    assert result.status == "finished"
    assert result.steps == calm.steps
    assert result.samples == calm.samples
    assert result.samples_sha256 == calm.samples_sha256
    assert result.weights_sha256 == calm.weights_sha256


def losses(uri: str) -> dict[int, float]:
    return {event.step: event.loss for event in read_ledger(Storage(uri)) if event.event == "steps_completed"}


def test_weights_samples_and_losses_do_not_depend_on_the_number_of_workers(folder: Path, calm: ed.RunResult) -> None:
    best = {"checkpoint": {"every_steps": 10, "keep_best": 1, "best_metric": "validation_loss"}}
    result = fit(folder, "workers-3", 3, **best)
    assert_same(result, calm)
    assert (result.best_step, result.best_metric) == (result.steps, result.metrics["validation_loss"])
    assert (calm.best_step, calm.best_metric) == (None, None)
    assert losses(result.uri) == losses(calm.uri)
    measured = [event for event in read_ledger(Storage(result.uri)) if isinstance(event, PhasesMeasured)]
    steps = [event.step for event in measured if event.generation == 1]
    assert steps == list(range(3, 3 + len(steps))), "all but the first two of a generation, and the last one"
    assert all(len(event.work_s) == len(event.micro_batches) and set(event.phases) for event in measured)
    assert result.metrics == calm.metrics
    assert set(result.metrics) == {"validation_loss", "twice", "grad_norm"}
    assert fit(folder, "workers-3", 3, **best) == result, "fit returns the same result again"


@pytest.mark.chaos  # tests/unit/distributed/test_same_bits.py has a small version
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_runs_in_16_bits_have_the_same_bits_at_any_number_of_workers(
    folder: Path, calm: ed.RunResult, precision: str
) -> None:
    one = fit(folder, f"{precision}-1", 1, precision=precision)
    kill = jobs.kill_once(str(folder / f"killed-{precision}"), rank=1, step=21)
    train = jobs.make_train(kill, str(folder / "held-out"))
    three = fit(folder, f"{precision}-3", 3, train=train, min_workers=1, precision=precision)
    assert_same(three, one)
    assert one.weights_sha256 != calm.weights_sha256
    assert one.samples_sha256 == calm.samples_sha256


@pytest.mark.chaos
def test_a_native_run_uses_the_same_samples_and_is_reproducible(folder: Path, calm: ed.RunResult) -> None:
    def train(run: ed.Run) -> None:
        jobs.make_train(held_out=str(folder / "held-out"))(run)
        for name, transform in (("plain", None), ("squared", lambda rows, random: {"y": rows["y"] ** 2})):
            run.evaluate(
                lambda _, batch: batch["y"].double().mean(), str(folder / "held-out"), transform=transform, name=name
            )

    native, again = (fit(folder, f"native-{number}", 2, train=train, reduction="native") for number in (1, 2))
    assert_same(again, native)
    assert native.samples_sha256 == calm.samples_sha256
    assert native.metrics["validation_loss"] == pytest.approx(calm.metrics["validation_loss"], rel=1e-3)
    y = pq.read_table(folder / "held-out")["y"].to_numpy()
    assert native.metrics["plain"] == pytest.approx(y.mean(), rel=1e-12)
    assert native.metrics["squared"] == pytest.approx((y**2).mean(), rel=1e-12)


def test_an_evaluation_is_the_mean_over_all_rows_counted_once(folder: Path, calm: ed.RunResult) -> None:
    table = pq.read_table(folder / "held-out")
    held_out = {"x": torch.from_numpy(np.stack(table["x"].to_numpy())), "y": torch.from_numpy(table["y"].to_numpy())}
    assert len(held_out["y"]) % 48 % 8, "the last batch is short and has a partial micro-batch"
    newest = SingleRankStore(Storage(calm.uri).at(COMMITS), keep=1).load_latest()
    assert newest is not None and newest[0].step == calm.steps
    model = jobs.Model()
    model.load_state_dict(newest[1]["model"])
    # In float64: sums in float32 differ by more than the tolerance, depending on what ran before in this process.
    with torch.no_grad():
        expected = float(jobs.loss_fn(model.eval().double(), {**held_out, "x": held_out["x"].double()}))
    assert calm.metrics["validation_loss"] == pytest.approx(expected, rel=1e-6)


OUR_TRAINING = """
import os
import torch
from pathlib import Path
import tests.integration.jobs as jobs

def train(run):
    assert os.environ["OURS"] == "is set"
    model = run.prepare(jobs.Model())
    run.load_weights("runs/calm")
    run.prepare(torch.optim.SGD(model.parameters(), lr=float(Path("rate.txt").read_text())))
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(jobs.loss_fn(model, batch))
            step.optimize()
    run.evaluate(jobs.loss_fn, Path("held-out"))

def transform(rows, rng):
    assert os.environ["OURS"] == "is set"
    return {**rows, "x": rows["x"] * float(Path("rate.txt").read_text())}
"""


def test_workers_have_the_modules_relative_paths_and_variables_of_the_driver(
    cluster: None, calm: ed.RunResult, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray was started in another folder, with another `sys.path`, and without the variable."""
    (folder / "rate.txt").write_text("0.5")
    (tmp_path / "our_training.py").write_text(OUR_TRAINING)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(tmp_path)
    ours = importlib.import_module("our_training")
    config = jobs.settings("runs", "relative", 1, steps=2, env={"OURS": "is set"}) | {"storage": Path("runs")}
    result = ed.ElasticTrainer(ours.train, Path("data"), config, transform=ours.transform).fit()
    assert result.status == "finished" and result.uri == f"{folder}/runs/relative" and result.metrics

    monkeypatch.setattr(ours.transform, "__module__", "nowhere")
    monkeypatch.setitem(sys.modules, "nowhere", ours)
    config |= {"name": "nowhere"}
    with pytest.raises(ConfigError, match=r"^transform cannot be loaded on node .*'nowhere'.*loaded it by its file"):
        ed.ElasticTrainer(ours.train, "data", config, transform=ours.transform).fit()
    assert "cannot be loaded" in json.loads((folder / "runs/nowhere/summary.json").read_text())["error"]


def test_each_node_reports_whether_it_sees_the_data_and_the_storage(calm: ed.RunResult, folder: Path) -> None:
    storage = Storage(calm.uri)
    session = storage.list("sessions")[0].rpartition("/")[2]
    files = list_files(str(folder / "data"))
    missing = replace(files[0], path=str(folder / "data/none.parquet"))
    here = ray.util.get_node_ip_address()
    nodes = {ray.get_runtime_context().get_node_id(): here, "0" * 56: "203.0.113.9"}  # the second has left

    probe = partial(probe_nodes, nodes, storage, timeout_s=120.0, note=print)
    assert probe(session, files) == ({}, [])
    problems, _ = probe("another-session", files)
    assert f"node {here} does not see storage=" in str(problems[here])
    problems, _ = probe(session, [missing])
    assert f"node {here} cannot read {missing.path}: " in str(problems[here])
    assert probe_nodes(nodes, storage, session, files, timeout_s=0.0, note=print) == ({}, [here])
    assert not [key for key in storage.list() if "writable" in key], "nothing is left behind"


@pytest.mark.skipif(find_spec("opencensus") is not None, reason="Ray exports metrics from this environment")
def test_a_run_starts_no_actor_for_metrics_that_ray_does_not_export(calm: ed.RunResult) -> None:
    with pytest.raises(ValueError, match="Failed to look up actor"):
        ray.get_actor(STATS_ACTOR_NAME, namespace=STATS_ACTOR_NAMESPACE)


def test_the_summary_has_the_facts_of_the_run(calm: ed.RunResult) -> None:
    summary = json.loads(Storage(calm.uri).read("summary.json"))
    epochs = 44 / 21  # 21 steps of 48 rows make an epoch of 1003
    assert summary["status"] == "finished"
    assert (summary["steps"], summary["epochs"]) == (44, epochs)
    assert summary["samples"] == 2 * jobs.ROWS + 2 * 48
    assert summary["weights_sha256"] == calm.weights_sha256
    assert [(g["world_size"], g["first_step"], g["last_step"], g["reason"]) for g in summary["generations"]] == [
        (1, 0, 44, "start")
    ]
    assert summary["wall_seconds"] > 0 and summary["samples_per_second"] > 0
    parts = dict(summary["goodput"])
    share, total = parts.pop("goodput"), parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total, rel=0.01)
    assert total == pytest.approx(summary["wall_seconds"], rel=0.01)
    assert share == pytest.approx(parts["useful"] / total, abs=0.001) and 0 < share < 1
    assert parts["start_up"] > 0 and parts["checkpoint"] > 0
    assert parts["redone"] == parts["detection"] == parts["waiting"] == 0, "nothing failed"


@pytest.mark.chaos
def test_survivors_continue_and_a_replacement_joins_them(folder: Path, calm: ed.RunResult) -> None:
    kill = jobs.kill_once(str(folder / "alone"), rank=1, step=12)
    hold = jobs.hold_for_others(str(folder / "joined"), step=30)

    def fault(run: ed.Run, step: int) -> None:
        kill(run, step)
        hold(run, step)

    train = jobs.make_train(fault, str(folder / "held-out"))
    result = fit(folder, "alone", 3, train=train, min_workers=1)
    assert_same(result, calm)
    generations = [(g["world_size"], g["first_step"], g["reason"]) for g in result.summary["generations"]]
    assert generations[:2] == [(3, 0, "start"), (2, 12, "worker failed")]
    assert generations[2:] in ([(3, 31, "workers joined")], [(3, 32, "workers joined")]), "once all workers are ready"


@pytest.mark.chaos  # tests/unit/checkpoint/test_replica_check.py has a small version
def test_replicas_that_differ_are_not_committed_and_the_same_command_resumes(folder: Path, calm: ed.RunResult) -> None:
    """A bit flips in the memory of one worker."""
    marker = folder / "flipped"

    def fault(run: ed.Run, step: int) -> None:
        if run.rank == 1 and step == 24 and not marker.exists():
            marker.touch()
            weight = next(state_of(run).module.parameters())
            weight.data.view(-1).view(torch.int32)[7] ^= 1

    train = jobs.make_train(fault, str(folder / "held-out"))
    with pytest.raises(ReplicasDifferError, match=r"ranks 0 and 1 hold different values of model\.0\.weight, "):
        fit(folder, "flipped", 2, train=train)
    newest = SingleRankStore(Storage(folder / "runs" / "flipped").at(COMMITS), keep=1).latest()
    assert marker.exists() and newest is not None and newest.step == 20
    assert_same(fit(folder, "flipped", 2, train=train), calm)


def until_live(driver: subprocess.Popen[str], storage: Storage) -> None:
    """Waits until a driver holds the run's lease and is connected to Ray."""
    while not any(json.loads(storage.read(key))["ray_address"] for key in storage.list("driver")):
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.1)


@pytest.mark.chaos
def test_a_second_driver_of_a_live_run_is_refused_and_disturbs_nothing(folder: Path, calm: ed.RunResult) -> None:
    release = folder / "release"
    how = ("two-drivers", "2", "wait", str(release), "25")
    with jobs.driver(str(folder / "data"), str(folder / "runs"), *how) as first:
        until_live(first, Storage(str(folder / "runs" / "two-drivers")))
        second = jobs.drive(str(folder / "data"), str(folder / "runs"), *how[:2])  # on another Ray cluster
        assert second.returncode == 1
        assert "ConfigError: run 'two-drivers'" in second.stderr
        assert f"has a live driver: pid {first.pid} of " in second.stderr
        assert f" on {socket.gethostname()}, since " in second.stderr
        release.touch()
        _, errors = first.communicate(timeout=120)
        assert first.returncode == 0, errors
    summary = json.loads((folder / "runs" / "two-drivers" / "summary.json").read_text())
    assert summary["weights_sha256"] == calm.weights_sha256
    assert (summary["sessions"], summary["recoveries"]) == (1, 0)


@pytest.mark.chaos
def test_a_driver_that_was_replaced_ends_and_writes_no_summary(folder: Path, cluster: None) -> None:
    how = ("replaced", "1", "wait", str(folder / "never"), "25")
    with jobs.driver(str(folder / "data"), str(folder / "runs"), *how) as first:
        storage = Storage(str(folder / "runs" / "replaced"))
        until_live(first, storage)
        successor = {**json.loads(storage.read("driver/000001.json")), "session": "next", "host": "far", "pid": 7}
        storage.write("driver/000002.json", json.dumps(successor).encode())
        _, errors = first.communicate(timeout=120)
        assert first.returncode == 1
    assert "DriverReplacedError: run 'replaced' was taken over by another driver: pid 7 of " in errors
    assert " on far, since " in errors
    assert "summary.json" not in storage.list()
    assert json.loads(storage.read("driver/000002.json")) == successor


def test_a_finished_run_is_not_trained_again(folder: Path, calm: ed.RunResult) -> None:
    events = read_ledger(Storage(calm.uri))
    assert fit(folder, "calm", 2) == calm
    assert read_ledger(Storage(calm.uri)) == events


@pytest.mark.chaos
def test_a_finished_run_resumes_with_more_steps(folder: Path, calm: ed.RunResult) -> None:
    fit(folder, "longer", 1, steps=15, train=jobs.make_train())
    result = fit(folder, "longer", 2, train=jobs.make_train())
    assert_same(result, calm)


def test_an_error_of_the_training_function_ends_the_run_with_its_traceback(folder: Path, cluster: None) -> None:
    def fault(run: ed.Run, step: int) -> None:
        if step == 3 and run.rank == 1:
            raise KeyError("a mistake of the user's")

    with pytest.raises(TrainFunctionError) as caught:
        fit(folder, "user-error", 2, train=jobs.make_train(fault))
    text = str(caught.value)
    assert text.count("a mistake of the user's") == 2  # the source line and the error
    assert "in fault" in text
    events = read_ledger(Storage(str(folder / "runs" / "user-error")))
    generations = sum(event.event == "generation_started" for event in events)
    assert generations == 1, "errors of the training function are not retried"
    assert sum(event.event == "run_failed" for event in events) == 1
    assert not any(event.event == "worker_failed" for event in events)


@pytest.mark.chaos
def test_a_failed_run_resumes_when_its_function_is_fixed(folder: Path, cluster: None) -> None:
    def wrong(run: ed.Run, step: int) -> None:
        if step == 22:
            raise KeyError("a mistake of the user's")

    def broken(run: ed.Run) -> None:
        raise KeyError("before there is anything")

    settings: dict[str, Any] = {"steps": None, "epochs": 2}
    calm = fit(folder, "epochs", 1, train=jobs.make_train(), **settings)
    assert calm.summary["epochs"] == 2 and calm.steps == calm.summary["total_steps"] == 42
    with pytest.raises(TrainFunctionError):
        fit(folder, "fixed", 1, train=broken, seed=7, **settings)
    with pytest.raises(TrainFunctionError):  # other settings are fine before the first commit
        fit(folder, "fixed", 1, train=jobs.make_train(wrong), **settings)
    fixed = fit(folder, "fixed", 2, train=jobs.make_train(), **settings)
    assert_same(fixed, calm)
    assert fixed.summary["generations"][-1]["first_step"] == 20
    assert fit(folder, "fixed", 1, train=broken, **settings) == fixed, "the run has finished"


def test_a_debugged_run_has_the_bits_of_fit_and_leaves_the_run_as_it_is(folder: Path, calm: ed.RunResult) -> None:
    run = folder / "debugged" / "calm"
    shutil.copytree(folder / "runs" / "calm", run)
    (run / f"checkpoints/commits/{calm.steps}.json").unlink()

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}

    before = files()
    train = jobs.make_train(held_out=str(folder / "held-out"))
    config = jobs.settings(str(folder / "debugged"), "calm", 1)
    for resume in (False, True):
        trainer = ed.ElasticTrainer(train, str(folder / "data"), config, transform=jobs.jitter)
        debugged = trainer.debug(resume=resume)
        assert_same(debugged, calm)
        assert debugged.metrics["validation_loss"] == calm.metrics["validation_loss"]
        assert (debugged.summary["loss"]["first"] == calm.summary["loss"]["first"]) is not resume
    assert files() == before


@pytest.mark.chaos
def test_breakpoint_in_a_worker_or_a_data_process_ends_the_run_at_once(folder: Path, cluster: None) -> None:
    def stop(run: ed.Run, step: int) -> None:
        breakpoint()

    def transform(rows: Any, rng: Any) -> Any:
        breakpoint()
        return rows

    with pytest.raises(ConfigError, match=r"breakpoint\(\) at .*test_run.py:\d+ in stop: .*trainer.debug\(\)"):
        fit(folder, "breaks", 1, train=jobs.make_train(stop))
    config = jobs.settings(str(folder / "runs"), "breaks-too", 1)
    with pytest.raises(ConfigError, match=r"breakpoint\(\) at .*test_run.py:\d+ in transform: "):
        ed.ElasticTrainer(jobs.make_train(), str(folder / "data"), config, transform=transform).fit()


@pytest.mark.chaos
def test_more_failures_than_max_restarts_end_the_run(folder: Path, cluster: None) -> None:
    def fault(run: ed.Run, step: int) -> None:
        if step == 2:
            os._exit(1)

    with pytest.raises(
        WorkersFailedError, match=r"(?s)max_restarts=1 allows.*os._exit\(1\) called by rank 0 at step 2 at"
    ):
        fit(folder, "fails", 1, train=jobs.make_train(fault), max_restarts=1)


def test_a_run_cannot_change_its_settings_or_its_data(folder: Path, calm: ed.RunResult) -> None:
    with pytest.raises(ConfigError, match=r"seed was 0 and is 1.*another name"):
        fit(folder, "calm", 1, seed=1, steps=50)
    with pytest.raises(ConfigError, match="seed was 0 and is 1"):
        fit(folder, "calm", 1, seed=1)  # it has finished
    other = folder / "other"
    other.mkdir()
    jobs.write_rows(str(other), rows=50, seed=3)
    config = jobs.settings(str(folder / "runs"), "calm", 1, steps=50)
    with pytest.raises(ConfigError, match="data was"):
        ed.ElasticTrainer(jobs.make_train(), str(other), config).fit()
