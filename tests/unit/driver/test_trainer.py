"""Checks that `ElasticTrainer` makes before it starts workers, and how it concludes a run."""

from __future__ import annotations

import functools
import json
import shutil
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ddp import ElasticTrainer, RunConfig
from elastic_ddp.driver import trainer
from elastic_ddp.driver.start_checks import check_capacity
from elastic_ddp.errors import ConfigError, DataError, StorageError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry.ledger import Ledger, read_ledger
from elastic_ddp.worker.job import COMMITS
from tests.single_rank_store import SingleRankStore
from tests.unit.logged_runs import Keeper, session_events


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    sizes = {"steps": 20, "global_batch_size": 8, "micro_batch_size": 8}
    return {"name": "run", "storage": str(folder), **sizes, **changes}


def store_of(folder: Path) -> SingleRankStore:
    """The commits of a run in this storage."""
    return SingleRankStore(Storage(folder).at("run").at(COMMITS), keep=1)


def takes_nothing() -> None: ...


def takes_a_run(run: Any, often: int = 3) -> None: ...


def yields(run: Any) -> Iterator[None]:
    yield


async def awaits(run: Any) -> None: ...


class Job:
    def __call__(self, run: Any) -> Iterator[None]:
        yield

    def train(self, run: Any) -> None: ...


def with_settings(function: Any) -> Any:
    """A decorator that passes an argument of its own."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return function(*arguments, "settings")

    return call


@with_settings
def takes_settings(run: Any, settings: str) -> None: ...


def takes_rows(rows: Any) -> Any: ...


def yields_rows(rows: Any, rng: Any) -> Iterator[Any]:
    yield rows


@pytest.mark.parametrize(
    "train",
    [
        Job().train,
        functools.partial(Job.train, Job()),
        lambda run: None,
        takes_settings,
        functools.partial(takes_a_run, often=2),
    ],
)
def test_anything_that_takes_a_run_can_be_a_training_function(train: Any, tmp_path: Path) -> None:
    assert ElasticTrainer(train, "data", settings(tmp_path)).config.storage == str(tmp_path)


@pytest.mark.parametrize(
    ("train", "transform", "message"),
    [
        ("train", None, r"'train' .*def train\(run\)"),
        (takes_nothing, None, r"takes_nothing .*def train\(run\)"),
        (takes_a_run, 3, "transform=3 cannot be called with two arguments, a dict of NumPy arrays"),
        (takes_a_run, takes_rows, r"takes_rows .*two arguments.*def transform\(rows, rng\)"),
        (takes_a_run, yields_rows, "transform=<function yields_rows .* generator or async function"),
        (yields, None, "train=<function yields .* generator or async function.*without `yield`"),
        (Job(), None, r"train=<.*Job object .*generator or async function"),
        (awaits, None, "generator or async function"),
        (takes_a_run, None, "invalid configuration"),
    ],
)
def test_functions_and_settings_that_cannot_work_are_refused_at_once(train: Any, transform: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ElasticTrainer(train, "data", {}, transform=transform)


def test_a_run_with_other_data_or_settings_is_refused_and_the_error_names_both(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name, rows in [("a", 64), ("b", 64), ("c", 1280)]:
        pq.write_table(pa.table({"x": range(rows)}), tmp_path / f"{name}.parquet")

    def run_on(*names: str) -> ElasticTrainer:
        return ElasticTrainer(takes_a_run, [str(tmp_path / f"{name}.parquet") for name in names], settings(runs))

    def fit(*names: str) -> None:
        run_on(*names).fit()

    begun = run_on("a", "b")
    store_of(runs).save({"user": {"step": 30}}, step=30, record=begun._create_job(begun._storage).to_record())
    with pytest.raises(ConfigError, match="30 steps done, more than the 20"):
        fit("a", "b")
    with pytest.raises(ConfigError, match=r"data was 128 rows in 2 files .*a.parquet.*b.parquet.* and is 1,280 rows"):
        fit("c")
    pq.write_table(pa.table({"x": range(64)}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet"):
        fit("a", "b")
    with pytest.raises(ConfigError, match=r"data was 128 rows in .* has the same paths but other contents"):
        fit("a", "*b")


def test_a_moved_run_folder_keeps_its_copy_of_a_ray_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "is_ray_dataset", lambda data: True)
    runs, moved = tmp_path / "runs", tmp_path / "moved" / "to"
    copy = runs / "run" / "data" / "dataset-1"
    copy.mkdir(parents=True)
    pq.write_table(pa.table({"x": range(64)}), copy / "a.parquet")
    (runs / "run" / "data" / "dataset.json").write_text('{"folder": "data/dataset-1"}')
    store_of(runs).save({"user": {"step": 2}}, step=2, record={})  # without a commit, the copy is written again

    def job(storage: Path) -> Any:
        run = ElasticTrainer(takes_a_run, "a ray.data.Dataset", settings(storage))
        return run._create_job(run._storage)

    begun = job(runs)
    store_of(runs).save({"user": {"step": 3}}, step=3, record=begun.to_record())
    assert job(runs).index.fingerprint == begun.index.fingerprint
    moved.parent.mkdir()
    shutil.copytree(runs, moved, copy_function=shutil.copy)  # which gives the copy another time of change
    assert job(moved).index.fingerprint == begun.index.fingerprint
    assert job(moved).index.files[0].path == str(moved / "run" / "data" / "dataset-1" / "a.parquet")

    pq.write_table(pa.table({"x": range(72)}), moved / "run" / "data" / "dataset-1" / "a.parquet")
    with pytest.raises(DataError, match="the data set changed"):
        job(moved)
    with pytest.raises(ConfigError, match=r"data was 64 rows .* and is 72 rows"):
        shutil.move(moved, tmp_path / "again")
        job(tmp_path / "again")


def test_drop_last_is_refused_for_a_data_set_without_a_full_batch(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(7)}), tmp_path / "a.parquet")
    config = settings(tmp_path / "runs", data={"drop_last": True})
    with pytest.raises(ConfigError, match=r"data\.drop_last .* 7 rows, fewer than global_batch_size=8"):
        ElasticTrainer(takes_a_run, str(tmp_path / "a.parquet"), config).fit()


def test_a_run_waits_for_nodes_only_on_a_cluster_that_can_grow() -> None:
    config = RunConfig(**settings(Path("runs"), micro_batch_size=1, min_workers=3, max_workers=3))
    nodes = [{"CPU": 2.0}]
    with pytest.raises(ConfigError, match=r"2 workers of .* min_workers=3"):
        check_capacity(nodes, config, num_tasks=1, may_grow=False)
    check_capacity(nodes, config, num_tasks=1, may_grow=True)


def test_a_failing_storage_does_not_hide_why_the_run_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = ElasticTrainer(takes_a_run, "data", settings(tmp_path))

    def fail() -> None:
        raise StorageError("cannot write ledger/1.jsonl: no space left on device")

    session, lease = SimpleNamespace(close_ledger=fail), SimpleNamespace(renew=lambda: None)
    outcome = {"status": "failed", "kind": "StorageError", "error": "2 saves in a row failed"}
    with pytest.raises(StorageError, match=r"^2 saves in a row failed$"):
        trainer._conclude(outcome, session, lease)  # type: ignore[arg-type]
    assert "cannot write ledger/1.jsonl" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(StorageError, match="cannot write ledger"):
        trainer._conclude({"status": "finished"}, session, lease)  # type: ignore[arg-type]


def test_a_finished_run_says_what_to_raise_and_that_edits_have_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {"status": "finished", "steps": 16, "total_steps": 16}
    Storage(tmp_path).at("run").write("summary.json", json.dumps(summary).encode())
    data = {"x": np.zeros(64)}
    in_epochs = {"epochs": 2, "steps": None}
    for amount, text in [(in_epochs, "2 epochs. To resume it, raise epochs;"), ({"steps": 16}, "16 steps. To")]:
        assert ElasticTrainer(takes_a_run, data, settings(tmp_path, **amount)).fit().steps == 16
        printed = " ".join(capsys.readouterr().err.split())
        assert f"has finished its {text}" in printed and "edited settings and code have no effect" in printed


def test_a_finished_run_completes_loggers_that_lack_steps(tmp_path: Path) -> None:
    storage, keeper = Storage(tmp_path).at("run"), Keeper([(1, {})])
    ledger = Ledger(storage, "s000001-20261120T101500Z-ffffff")
    for event in session_events():
        ledger.append(event)
    ledger.close()
    storage.write("summary.json", json.dumps({"status": "finished", "steps": 16, "total_steps": 16}).encode())
    ElasticTrainer(takes_a_run, {"x": np.zeros(64)}, settings(tmp_path, steps=16), loggers=[keeper]).fit()
    assert keeper.steps == [1, 2, 3, 4, 5, 6] and keeper.status == "finished"
    assert len(read_ledger(storage)) == len(session_events())


def test_a_run_whose_commits_lack_the_best_metric_names_those_that_they_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = {"keep_best": 1, "best_metric": "val_accuracy"}
    metrics = {name: {"value": 0.5, "step": 1} for name in ("loss", "validation_accuracy")}
    store_of(tmp_path).save({"user": {}}, step=1, record={"metrics": metrics})
    trainer = ElasticTrainer(takes_a_run, "data", settings(tmp_path, checkpoint=best))
    session = SimpleNamespace(close_ledger=lambda: None)
    trainer._conclude({"status": "finished"}, session, SimpleNamespace(renew=lambda: None))  # type: ignore[arg-type]
    printed = " ".join(capsys.readouterr().err.split())
    assert "best_metric='val_accuracy' has no value" in printed and "have one: loss, validation_accuracy. " in printed


def test_the_traceback_of_a_mistake_shows_only_the_users_frames(tmp_path: Path) -> None:
    for mistake in (
        lambda: ElasticTrainer(takes_nothing, "data", settings(tmp_path)),
        lambda: ElasticTrainer(takes_a_run, str(tmp_path / "nowhere"), settings(tmp_path)).fit(),
    ):
        with pytest.raises((ConfigError, DataError)) as caught:
            mistake()
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert frames[-1] == "call" and len(frames) == 3, frames
        assert caught.value.__suppress_context__


def test_a_training_function_that_cannot_be_serialized_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()

    def train(run: Any) -> None:
        lock.acquire()

    with pytest.raises(ConfigError, match=r"train.*<unlocked _thread\.lock"):
        ElasticTrainer(train, "data", settings(tmp_path))


def test_storage_in_the_memory_of_one_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="storage='memory://a'"):
        ElasticTrainer(takes_a_run, "data", settings(Path(), storage="memory://a"))
