"""Weighted sampling with replacement: how often rows are drawn, and that draws do not depend on the worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_ddp.config.run_config import DataConfig, RunConfig
from elastic_ddp.data.index import build_index
from elastic_ddp.data.map_style import index_in_memory
from elastic_ddp.data.order import EpochShape, FeedPlan, uniform
from elastic_ddp.data.split import split_into_micro_batches
from elastic_ddp.data.weights import SampleWeights, weights_of
from elastic_ddp.data.work import Work
from elastic_ddp.driver.trainer import ElasticTrainer
from elastic_ddp.errors import ConfigError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.generation import feeds_of
from elastic_ddp.worker.job import COMMITS, Job
from tests.single_rank_store import SingleRankStore

LANES, SIZE = 3, 4
Batches = dict[tuple[int, int], tuple[list[int], list[float]]]


def plan_of(group_rows: list[int], weights: np.ndarray, *, epochs: int = 1, **changes: Any) -> FeedPlan:
    shape = EpochShape(sum(group_rows), LANES, SIZE)
    return replace(
        FeedPlan(
            rows_per_group=np.array(group_rows),
            shape=shape,
            seed=5,
            options=DataConfig(window_row_groups=2, chunk_rows=5),
            micro_batches=(0, 1, 2),
            first_step=0,
            last_step=epochs * shape.steps_per_epoch,
            weights=SampleWeights.create(weights, sum(group_rows), "weights"),
        ),
        **changes,
    )


def rows_of_epoch(plan: FeedPlan) -> np.ndarray:
    """The row ids that the chunks of a plan read."""
    first = np.r_[0, np.cumsum(plan.rows_per_group)]
    windows = {(chunk.lane.number, chunk.window): chunk.lane for chunk in plan.chunks()}
    return np.concatenate(
        [
            first[group] + lane.rows_of_segment(group, start, stop)
            for (_, window), lane in windows.items()
            for group, start, stop in lane.segments(window)
        ]
    )


def test_rows_are_drawn_in_proportion_to_their_weights() -> None:
    """The counts of 200 epochs agree with a multinomial distribution, whose variance is an upper bound here."""
    group_rows = [7, 0, 11, 3, 25, 1]
    weights = np.random.default_rng(0).exponential(size=47) ** 2
    weights[:7] = 0
    weights[20] = 0
    epochs, counts = 200, np.zeros(47)
    plan = plan_of(group_rows, weights)
    steps = plan.shape.steps_per_epoch
    for epoch in range(epochs):
        rows = rows_of_epoch(replace(plan, first_step=epoch * steps, last_step=(epoch + 1) * steps))
        assert len(rows) == 47
        counts += np.bincount(rows, minlength=47)
    expected = epochs * 47 * weights / weights.sum()
    assert (counts[weights == 0] == 0).all()
    assert (np.abs(counts - expected) <= 4.5 * np.sqrt(expected) + 1e-9).all()


def test_one_heavy_row_group_is_read_in_parts_of_its_size() -> None:
    weights = np.ones(1000)
    weights[500:510] = 1e6
    plan = plan_of([10] * 100, weights)
    windows = {(chunk.lane.number, chunk.window): chunk.lane for chunk in plan.chunks()}
    for (_, window), lane in windows.items():
        assert sum(stop - start for _, start, stop in lane.segments(window)) <= 2 * 10
    rows = rows_of_epoch(plan)
    assert (np.bincount(rows, minlength=1000)[500:510] > 60).all()


@pytest.mark.parametrize("start", [0, 3, 4, 1001])
def test_random_numbers_can_be_entered_anywhere(start: int) -> None:
    key = (3, 5, 1, 2, 0)
    assert uniform(key, start, start + 9).tolist() == uniform(key, 0, start + 9)[start:].tolist()
    assert uniform(key, start, start).tolist() == []


def read(path: Path, weights: np.ndarray, **changes: Any) -> Batches:
    """The row ids and values of the micro-batches, without Ray."""
    index = build_index(str(path))
    plan = plan_of(index.group_rows.tolist(), weights, **{"epochs": 2, **changes})
    batches: Batches = {}
    for batch in split_into_micro_batches(plan, Work(index, plan).contents(), lambda: 0):
        assert isinstance(batch.content, list)
        values = np.concatenate([piece["x"] for piece in batch.content]).tolist()
        batches[batch.step, batch.index] = batch.row_ids.tolist(), values
    return batches


@pytest.mark.parametrize("shuffle", [True, False])
def test_draws_are_the_same_on_every_worker_and_at_every_entry(tmp_path: Path, shuffle: bool) -> None:
    for part in range(3):
        values = np.arange(part * 20, part * 20 + 20, dtype=np.float32)
        pq.write_table(pa.table({"x": values}), tmp_path / f"{part}.parquet", row_group_size=7)
    weights = np.arange(60) % 5
    options = DataConfig(window_row_groups=2, chunk_rows=5, shuffle=shuffle)
    expected = read(tmp_path, weights, options=options)
    assert all(values[: len(row_ids)] == row_ids for row_ids, values in expected.values())
    parts = [read(tmp_path, weights, options=options, micro_batches=owned) for owned in ((0, 2), (1,))]
    assert parts[0] | parts[1] == expected
    for first_step in (1, 4, 7):
        late = read(tmp_path, weights, options=options, first_step=first_step)
        assert late == {key: batch for key, batch in expected.items() if key[0] >= first_step}
    epochs: list[list[int]] = [[], []]
    for (step, _), (row_ids, _) in expected.items():
        epochs[step // 5].extend(row_ids)
    assert [len(rows) for rows in epochs] == [60, 60]
    assert sorted(epochs[0]) != sorted(epochs[1])


def test_draws_of_a_data_set_in_memory_are_independent_and_the_same_at_every_entry() -> None:
    weights = np.arange(60) % 5
    plan = plan_of([60], weights)
    steps = plan.shape.steps_per_epoch
    counts = np.zeros(60)
    for step in range(100 * steps):
        for micro_batch in range(LANES):
            rows = plan.rows_in_memory(step, micro_batch)
            start, stop = plan.shape.span(step, micro_batch)
            counts += np.bincount(rows, minlength=60) * (stop > start)
            assert plan.rows_in_memory(step, micro_batch).tolist() == rows.tolist()
    expected = 100 * 60 * weights / weights.sum()
    assert counts.sum() == 100 * 60
    assert (np.abs(counts - expected) <= 4.5 * np.sqrt(expected)).all()


@pytest.fixture
def weighted_table(tmp_path: Path) -> pa.Table:
    """A table of two row groups in two files."""
    table = pa.table({"x": np.arange(6.0), "w": pa.array([0, 1, 2, 3, 4, 5], pa.int32()), "name": list("abcdef")})
    for part in range(2):
        pq.write_table(table.slice(3 * part, 3), tmp_path / f"{part}.parquet", row_group_size=2)
    return table


def test_weights_are_a_column_or_an_array(tmp_path: Path, weighted_table: pa.Table) -> None:
    expected = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    in_files = build_index(str(tmp_path), columns=["x"])
    in_memory = index_in_memory(weighted_table)
    for index in (in_files, in_memory):
        for given in ("w", expected, np.array(expected), torch.tensor(expected), tuple(expected)):
            weights = weights_of(index, given)
            assert weights.values.tolist() == expected
            assert weights.fingerprint == weights_of(in_files, "w").fingerprint != weights_of(in_files, "x")
    for index in (in_files, in_memory):
        with pytest.raises(ConfigError, match=r"'weight': the data set has no such column\. Choose from x"):
            weights_of(index, "weight")
        with pytest.raises(ConfigError, match="column 'name' of sample_weights cannot become an array of numbers"):
            weights_of(index, "name")
    with pytest.raises(ConfigError, match=r"sample_weights='w' names a column, but data .* has rows"):
        weights_of(index_in_memory([{"w": 1.0}]), "w")


def test_a_run_cannot_resume_with_other_weights(tmp_path: Path, weighted_table: pa.Table) -> None:
    settings = {"name": "run", "storage": str(tmp_path / "runs"), "steps": 2}
    config = {**settings, "global_batch_size": 2, "micro_batch_size": 2}

    def job(weights: Any) -> Job:
        trainer = ElasticTrainer(takes_a_run, weighted_table.select(["x", "w"]), config, sample_weights=weights)
        return trainer._create_job(Storage(tmp_path / "runs" / "run"))

    store = SingleRankStore(Storage(tmp_path / "runs" / "run").at(COMMITS), keep=1)
    store.save({"user": {}}, step=1, record=job("w").to_record())
    job([0, 1, 2, 3, 4, 5])  # the values of the column
    for weights in ([1, 1, 1, 1, 1, 1], None):
        with pytest.raises(ConfigError, match="began with other settings: sample_weights was '"):
            job(weights)


def takes_a_run(run: Any) -> None: ...


def test_the_feeds_of_a_run_draw_by_its_weights(monkeypatch: pytest.MonkeyPatch, weighted_table: pa.Table) -> None:
    made: list[FeedPlan] = []
    monkeypatch.setattr("elastic_ddp.worker.generation.MicroBatchFeed", lambda index, plan, **_: made.append(plan))
    index = index_in_memory(weighted_table.select(["x", "w"]))
    settings = {"name": "run", "storage": "runs", "steps": 2, "global_batch_size": 4, "micro_batch_size": 2}
    job = Job(
        config=RunConfig(**settings),
        train=takes_a_run,
        index=index,
        transform=None,
        weights=weights_of(index, "w"),
        storage=Storage("runs"),
    )
    feeds_of(job, torch.device("cpu")).open((0, 1), 0)
    rows = [row for plan in made for step in range(2) for m in (0, 1) for row in plan.rows_in_memory(step, m)]
    assert len(rows) == 6
    assert 0 not in rows
    assert job.identity()["sample_weights"] == job.weights.fingerprint if job.weights else False


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0, 2.0], r"weights has shape \(2,\), and the data set has 3 rows"),
        ([1.0, float("nan"), 2.0], "weights is nan for row 1"),
        ([1.0, 2.0, -0.5], "weights is -0.5 for row 2"),
        ([0.0, 0.0, 0.0], "weights adds up to 0.0"),
        (["a", "b", "c"], "weights cannot become an array of numbers"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(weights: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        SampleWeights.create(weights, 3, "weights")
