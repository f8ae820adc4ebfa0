"""What an `ElasticTrainer` refuses before anything is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from elastic_ddp import ElasticTrainer
from elastic_ddp.errors import ConfigError, DataError, StorageError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import COMMITS
from tests.single_rank_store import SingleRankStore


def takes_nothing() -> None: ...


def takes_a_run(run: Any, often: int = 3) -> None: ...


@pytest.mark.parametrize(
    ("train", "transform", "message"),
    [
        ("train", None, "train is a str; give the function that trains"),
        (takes_nothing, None, "takes_nothing .* is called with a Run, which it does not take"),
        (takes_a_run, 3, "transform is a int; give a function that gets a dict of NumPy arrays"),
        (takes_a_run, None, "invalid configuration"),
    ],
)
def test_what_cannot_be_called_is_refused_at_once(train: Any, transform: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ElasticTrainer(train, "data", {}, transform=transform)


def test_a_run_with_other_data_is_refused_with_what_both_are(tmp_path: Path) -> None:
    settings = {"name": "run", "storage": str(tmp_path / "runs"), "global_batch_size": 8, "micro_batch_size": 8}
    for name, rows in [("a", 64), ("b", 64), ("c", 1280)]:
        pq.write_table(pa.table({"x": range(rows)}), tmp_path / f"{name}.parquet")

    def fit(*names: str) -> None:
        data = [str(tmp_path / f"{name}.parquet") for name in names]
        ElasticTrainer(takes_a_run, data, {**settings, "steps": 20}).fit()

    store = SingleRankStore(Storage(tmp_path / "runs").at("run").at(COMMITS), keep=1)
    store.save({"user": {"step": 30}}, step=30, record={})
    with pytest.raises(ConfigError, match="does not go back"):
        fit("a", "b")
    with pytest.raises(ConfigError, match=r"data was 128 rows in 2 files .*a.parquet.*b.parquet.* and is 1,280 rows"):
        fit("c")
    pq.write_table(pa.table({"x": range(64)}), tmp_path / "b.parquet")  # another time of its last change
    with pytest.raises(DataError, match=r"b\.parquet"):
        fit("a", "b")
    with pytest.raises(ConfigError, match=r"data was 128 rows in .* is the same, with other contents"):
        fit("a", "*b")


def test_room_that_can_never_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"name": "run", "storage": str(tmp_path), "steps": 1, "global_batch_size": 8, "micro_batch_size": 1}
    trainer = ElasticTrainer(takes_a_run, "data", {**settings, "min_workers": 3, "max_workers": 3})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    with pytest.raises(ConfigError, match=r"2 workers of .* min_workers=3.* Ray was started for this run alone"):
        trainer._check_resources(may_grow=False)
    trainer._check_resources(may_grow=True)
    printed = capsys.readouterr().err
    assert printed.startswith("waiting for nodes: 2 workers of") and "min_workers=3" in printed


def test_a_run_does_not_go_back(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(64)}), tmp_path / "rows.parquet")
    settings = {"name": "run", "storage": str(tmp_path / "runs"), "global_batch_size": 8, "micro_batch_size": 8}
    store = SingleRankStore(Storage(tmp_path / "runs").at("run").at(COMMITS), keep=1)
    store.save({"user": {"step": 30}}, step=30, record={})
    trainer = ElasticTrainer(takes_a_run, str(tmp_path / "rows.parquet"), {**settings, "steps": 20})
    (tmp_path / "runs/run/run.json").write_text("{}")
    with pytest.raises(ConfigError, match="began with other settings"):
        trainer.fit()
    (tmp_path / "runs/run/run.json").unlink()
    with pytest.raises(ConfigError, match="has 30 steps behind it, and is to have 20: a run does not go back"):
        trainer.fit()


def test_a_storage_that_fails_still_does_not_hide_why_a_run_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"name": "run", "storage": str(tmp_path), "steps": 1, "global_batch_size": 8, "micro_batch_size": 1}
    trainer = ElasticTrainer(takes_a_run, "data", settings)

    def is_full() -> None:
        raise StorageError("cannot write ledger/1.jsonl: no space left on device")

    session, lease = SimpleNamespace(close_ledger=is_full), SimpleNamespace(renew=lambda: None)
    outcome = {"status": "failed", "kind": "StorageError", "error": "2 saves in a row failed"}
    with pytest.raises(StorageError, match=r"^2 saves in a row failed$"):
        trainer._conclude(outcome, session, lease)  # type: ignore[arg-type]
    assert "how the run ended: cannot write ledger/1.jsonl" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(StorageError, match="cannot write ledger"):
        trainer._conclude({"status": "finished"}, session, lease)  # type: ignore[arg-type]
