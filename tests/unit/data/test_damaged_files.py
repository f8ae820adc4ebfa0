"""A power failure leaves files of a run empty or cut. Each is rebuilt, or an error names it and the way out."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.data.index import open_index
from elastic_ddp.data.ingest import materialize
from elastic_ddp.driver.run_handle import get_run
from elastic_ddp.driver.trainer import ElasticTrainer
from elastic_ddp.errors import ConfigError, DataError
from elastic_ddp.storage.lease import Driver, DriverLease
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import Ledger, new_session, read_ledger, summarize
from elastic_ddp.worker.job import COMMITS, Job
from tests.single_rank_store import SingleRankStore
from tests.unit.cli.test_cli import invoke
from tests.unit.report_runs import calm

SETTINGS = {"name": "lm", "steps": 480, "global_batch_size": 8, "micro_batch_size": 8}
FILES = ("summary.json", "data/index", "data/dataset.json", "driver/", "ledger/", "sessions/")


def train(run: Any) -> None: ...


def trainer(folder: Path, **settings: Any) -> ElasticTrainer:
    return ElasticTrainer(train, str(folder / "data"), {**SETTINGS, "storage": str(folder / "runs"), **settings})


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    """The folder of a run that has finished on a data set of 64 rows, with all kinds of files."""
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"x": np.arange(64)}), tmp_path / "data/rows.parquet", row_group_size=16)
    storage, config = Storage(tmp_path / "runs/lm"), RunConfig.load({**SETTINGS, "storage": str(tmp_path / "runs")})
    with DriverLease(storage, "lm", new_session, print) as lease, closing(Ledger(storage, "s1")) as ledger:
        lease.acquire()
        for event in calm():
            ledger.append(event)
    index = open_index(str(tmp_path / "data"), storage)
    job = Job(config=config, train=train, index=index, transform=None, storage=storage)
    SingleRankStore(storage.at(COMMITS), keep=1).save({"user": {}}, step=480, record=job.to_record())
    storage.write("summary.json", json.dumps(summarize(read_ledger(storage), name="lm")).encode())
    storage.write("sessions/s1", b"")
    storage.write("data/dataset-1/0.parquet", b"")
    storage.write("data/dataset.json", json.dumps({"folder": "data/dataset-1"}).encode())
    return storage


def damage(run: Storage, prefix: str, share: float) -> str:
    """Cuts the file whose name begins like this, and returns its name."""
    [key] = [key for key in run.list() if key.startswith(prefix)]
    content = run.read(key)
    run.write(key, content[: int(share * len(content))])
    return key


def test_these_are_all_files_of_a_run(run: Storage) -> None:
    others = [key for key in run.list() if not key.startswith((*FILES, f"{COMMITS}/", "data/dataset-1/"))]
    assert others == [], "commits verify themselves"


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("prefix", FILES)
def test_a_run_with_a_damaged_file_is_known_to_have_finished(
    run: Storage, tmp_path: Path, prefix: str, share: float
) -> None:
    before = {key: run.read(key) for key in run.list()}
    key = damage(run, prefix, share)
    result = trainer(tmp_path).fit()
    assert (result.status, result.steps, result.summary["total_steps"]) == ("finished", 480, 480)
    assert open_index(str(tmp_path / "data"), run).num_rows == 64
    if prefix in ("data/index", "summary.json"):
        restored, old = run.read(key), before[key]
        assert restored == old if prefix != "summary.json" else json.loads(restored)["steps"] == 480
    with pytest.raises(ConfigError, match=r"record of a run|no run is live"):
        get_run(run.uri)
    for command in (["show"], ["events"], ["watch", "--once"]):
        if prefix == "ledger/" and share == 0.0:
            with pytest.raises(ConfigError, match=rf"{key} is empty or damaged.*checkpoints ls.*same command"):
                invoke(*command, run.uri)
        else:
            assert "lm" in invoke(*command, run.uri).output


def test_settings_that_differ_are_refused_also_with_a_damaged_index(run: Storage, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="micro_batch_size was 8 and is 4"):
        trainer(tmp_path, micro_batch_size=4, steps=500).fit()
    (tmp_path / "data/more.parquet").write_bytes((tmp_path / "data/rows.parquet").read_bytes())
    damage(run, "data/index", 0.5)
    with pytest.raises(ConfigError, match="data was "):
        trainer(tmp_path, steps=500).fit()


def test_the_copy_of_a_ray_data_set_is_found_without_its_marker(run: Storage) -> None:
    damage(run, "data/dataset.json", 0.5)
    dataset: Any = None  # it is not read
    assert materialize(dataset, run, may_replace=False) == f"{run.uri}/data/dataset-1"
    run.write("data/dataset-2/0.parquet", b"")
    with pytest.raises(DataError, match=r"data/dataset\.json is damaged.*data/dataset-1, data/dataset-2.*load_weights"):
        materialize(dataset, run, may_replace=False)


def test_a_damaged_lease_is_taken_over_with_the_next_number(run: Storage) -> None:
    damage(run, "driver/", 0.5)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    driver = Driver.this_process()
    options: Any = {"driver": driver, "clock": lambda: now[0], "sleep": sleep}
    with DriverLease(run, "lm", new_session, print, **options) as lease:
        lease.acquire()
        assert lease.session.startswith("s000002-")
