"""The feed on a real Ray: pipelines, threads, lost processes, object storage."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch

from elastic_ddp.config.run_config import DataConfig
from elastic_ddp.data.feed import MicroBatchFeed
from elastic_ddp.data.index import DatasetIndex, build_index
from elastic_ddp.data.ingest import materialize
from elastic_ddp.data.micro_batches import MicroBatch
from elastic_ddp.data.order import EpochShape, FeedPlan
from elastic_ddp.data.source import Arrays, Transform
from elastic_ddp.errors import DataError
from elastic_ddp.storage.storage import Storage

NUM_MICRO_BATCHES = 4
MICRO_BATCH_SIZE = 8
ROWS = 600
Rows = dict[tuple[int, int], tuple[list[int], list[float]]]
"""Row ids and noise by step and micro-batch."""


@pytest.fixture(scope="module", autouse=True)
def _ray(_s3_endpoint: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", _s3_endpoint)  # before Ray starts: its processes inherit it
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="warning")
        yield
        ray.shutdown()


def content(start: int, stop: int) -> pa.Table:
    return pa.table({"id": np.arange(start, stop), "text": [f"row {row}" for row in range(start, stop)]})


@pytest.fixture
def index(tmp_path: Path) -> DatasetIndex:
    for part in range(3):
        pq.write_table(content(part * 200, part * 200 + 200), tmp_path / f"{part}.parquet", row_group_size=30)
    return build_index(str(tmp_path))


def noisy(rows: Arrays, random: np.random.Generator) -> Arrays:
    return {"id": rows["id"], "noise": random.random(len(rows["id"]))}


def make_feed(
    index: DatasetIndex,
    transform: Transform = noisy,
    *,
    micro_batches: Sequence[int] = range(NUM_MICRO_BATCHES),
    first_step: int = 0,
    last_step: int = 40,
    concurrency: int = 1,
) -> MicroBatchFeed:
    plan = FeedPlan(
        rows_per_group=index.group_rows,
        shape=EpochShape(index.num_rows, NUM_MICRO_BATCHES, MICRO_BATCH_SIZE),
        seed=7,
        options=DataConfig(window_row_groups=2, chunk_rows=20, concurrency=concurrency),
        micro_batches=tuple(micro_batches),
        first_step=first_step,
        last_step=last_step,
    )
    return MicroBatchFeed(index, plan, transform=transform, device=torch.device("cpu"))


def collect(feed: MicroBatchFeed, first_step: int = 0, last_step: int = 40) -> Rows:
    found: Rows = {}
    with feed:
        for step in range(first_step, last_step):
            for batch in feed.step(step):
                assert batch.rows["id"][: batch.num_rows].tolist() == batch.row_ids.tolist()
                found[step, batch.index] = batch.row_ids.tolist(), batch.rows["noise"].tolist()
    return found


def test_workers_together_get_what_one_worker_gets_over_two_epochs(index: DatasetIndex) -> None:
    whole = collect(make_feed(index))
    steps = EpochShape(index.num_rows, NUM_MICRO_BATCHES, MICRO_BATCH_SIZE).steps_per_epoch
    for epoch in range(2):
        rows = [row for (step, _), (row_ids, _) in whole.items() if step // steps == epoch for row in row_ids]
        assert sorted(rows) == list(range(ROWS))
    parts = collect(make_feed(index, micro_batches=[2, 0])) | collect(make_feed(index, micro_batches=[1, 3]))
    assert parts == whole
    late = collect(make_feed(index, first_step=15, last_step=25), 15, 25)  # the epoch ends after step 18
    assert late == {key: rows for key, rows in whole.items() if 15 <= key[0] < 25}
    assert collect(make_feed(index, concurrency=2)) == whole


def test_steps_that_are_left_out_change_nothing_of_those_that_follow(index: DatasetIndex) -> None:
    whole = collect(make_feed(index))
    with make_feed(index, micro_batches=[2, 1]) as feed:
        feed.skip_to(1)  # before anything is there
        feed.wait()
        assert feed.is_ready
        feed.skip_to(4)  # with some of it there, and some on its way
        for step in (4, 5, 30):
            feed.skip_to(step)
            for batch in feed.step(step):
                assert batch.row_ids.tolist() == whole[step, batch.index][0]
                assert batch.rows["noise"].tolist() == whole[step, batch.index][1]
        with pytest.raises(ValueError, match="step 30 asked of a feed that stands at step 31"):
            feed.skip_to(30)


def test_an_empty_micro_batch_holds_one_row_that_does_not_count(tmp_path: Path) -> None:
    pq.write_table(content(0, 33), tmp_path / "a.parquet")
    with make_feed(build_index(str(tmp_path)), first_step=1, last_step=2) as feed:
        batches = list(feed.step(1))  # lanes have 9, 8, 8 and 8 rows
    assert [batch.num_rows for batch in batches] == [1, 0, 0, 0]
    assert [len(batch.rows["id"]) for batch in batches] == [1, 1, 1, 1]
    assert [len(batch.row_ids) for batch in batches] == [1, 0, 0, 0]


def test_tensors_are_their_own_and_may_be_written_to(index: DatasetIndex) -> None:
    with make_feed(index) as feed:
        for batch in feed.step(0):
            batch.rows["id"].zero_()
            assert batch.rows["id"].dtype == torch.int64
            assert batch.rows["noise"].dtype == torch.float64


def test_steps_are_taken_one_after_the_other(index: DatasetIndex) -> None:
    with make_feed(index, first_step=3, last_step=4) as feed:
        with pytest.raises(ValueError, match="step 5 asked of a feed that stands at step 3"):
            next(feed.step(5))
        assert len(list(feed.step(3))) == NUM_MICRO_BATCHES
        with pytest.raises(ValueError, match="ends before step 4"):
            next(feed.step(4))


def test_an_error_of_the_transform_reaches_the_consumer_with_its_traceback(index: DatasetIndex) -> None:
    def fail(rows: Arrays, random: np.random.Generator) -> Arrays:
        raise KeyError("label")

    with make_feed(index, fail) as feed, pytest.raises(DataError) as caught:
        next(feed.step(0))
    assert str(caught.value).startswith("the transform raised KeyError('label') in epoch 0, lane 0, chunk 0:")
    assert str(caught.value).endswith("KeyError: 'label'")
    assert 'raise KeyError("label")' in str(caught.value)
    with make_feed(index, fail) as feed, pytest.raises(DataError, match="the transform raised"):
        feed.wait()  # as a worker does before it joins: nobody is to wait for one that cannot read


def test_a_file_that_went_is_named(index: DatasetIndex) -> None:
    for file in index.files:
        os.unlink(file.path)
    with make_feed(index) as feed, pytest.raises(DataError, match="is gone since the data set was listed"):
        next(feed.step(0))


def large(rows: Arrays, random: np.random.Generator) -> Arrays:
    """256 KiB a row: the pipeline stands still, with its task alive, once some hundred rows wait."""
    pid = np.full(len(rows["id"]), os.getpid())
    return {"id": rows["id"], "pid": pid, "large": np.zeros((len(pid), 1 << 18), np.uint8)}


def pipelines() -> list[str]:
    """The titles of the Ray processes of this session that are running a pipeline."""
    titles = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and _descends(int(entry.name)):
                titles.append((entry / "cmdline").read_text().split("\0")[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [title for title in titles if title.startswith("ray::ReadChunks")]


def _descends(pid: int) -> bool:
    while pid > 1 and pid != os.getpid():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == os.getpid()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = threading.Event()
    for _ in range(500):
        if condition():
            return
        deadline.wait(0.02)
    raise AssertionError("the condition did not come about within 10 s")


def test_a_feed_that_rests_lives_on_what_it_has_and_then_reads_on(index: DatasetIndex) -> None:
    whole = collect(make_feed(index))
    with make_feed(index, large, last_step=20) as feed:
        found = {0: list(feed.step(0))}
        wait_until(lambda: len(pipelines()) == 1 and feed.is_ready)
        feed.rest()
        wait_until(lambda: not pipelines())
        with make_feed(index, first_step=5) as next_one:
            next_one.wait()
            assert [batch.row_ids.tolist() for batch in next_one.step(5)] == [whole[5, m][0] for m in range(4)]
        found |= {step: list(feed.step(step)) for step in range(1, 20)}
    for step, batches in found.items():
        assert [batch.row_ids.tolist() for batch in batches] == [whole[step, m][0] for m in range(4)]


def wide(rows: Arrays, random: np.random.Generator) -> Arrays:
    return {"wide": np.zeros((len(rows["id"]), 1 << 20))}


def test_a_feed_that_is_ahead_keeps_no_core_busy_also_where_one_chunk_fills_the_room(index: DatasetIndex) -> None:
    """160 MiB each. A loop that goes round without end took 0.5 to 1 s of every second."""
    with make_feed(index, wide, micro_batches=[1]) as feed:
        feed.wait()
        wait_until(lambda: _loop_seconds(0.5) < 0.1)
        assert [len(batch.row_ids) for step in range(4) for batch in feed.step(step)] == [MICRO_BATCH_SIZE] * 4


def _loop_seconds(during_s: float) -> float:
    """What all loops of Ray Data in this process compute in a while."""
    loops = [each.native_id for each in threading.enumerate() if each.name.startswith("StreamingExecutor-elastic_ddp")]
    assert loops

    def nanoseconds() -> int:
        return sum(int(Path(f"/proc/self/task/{loop}/schedstat").read_text().split()[0]) for loop in loops)

    before = nanoseconds()
    time.sleep(during_s)
    return (nanoseconds() - before) / 1e9


def test_closing_in_the_middle_frees_tasks_and_threads_and_may_be_repeated(index: DatasetIndex) -> None:
    before = set(threading.enumerate())
    feed = make_feed(index, large)
    next(feed.step(0))
    wait_until(lambda: len(pipelines()) == 1)
    feed.close()
    feed.close()
    wait_until(lambda: not pipelines())
    assert not [thread for thread in threading.enumerate() if thread not in before and "feed" in thread.name]
    with pytest.raises(ValueError, match="the feed is closed"):
        next(feed.step(1))
    make_feed(index, large).close()  # also before anything has come


def test_a_lost_process_is_made_up_for_and_no_row_is_lost_or_repeated(index: DatasetIndex) -> None:
    rows: list[int] = []
    pids: list[int] = []
    with make_feed(index, large, last_step=19) as feed:
        for step in range(19):
            for batch in feed.step(step):
                rows += batch.row_ids.tolist()
                pids += batch.rows["pid"][: batch.num_rows].tolist()
            if step == 1:
                os.kill(pids[0], 9)
    assert sorted(rows) == list(range(ROWS))
    assert len(set(pids)) == 2


def test_processes_that_are_lost_again_and_again_end_the_feed(index: DatasetIndex) -> None:
    def crash(rows: Arrays, random: np.random.Generator) -> Arrays:
        os._exit(1)

    with make_feed(index, crash) as feed, pytest.raises(ray.exceptions.RayError):
        next(feed.step(0))


def test_pipelines_run_while_workers_hold_every_cpu(index: DatasetIndex) -> None:
    @ray.remote(num_cpus=2)
    class Worker:
        def first(self) -> list[int]:
            with make_feed(index) as feed:
                batch: MicroBatch = next(feed.step(0))
                return list(batch.row_ids.tolist())

    assert len(ray.get(Worker.remote().first.remote(), timeout=60)) == MICRO_BATCH_SIZE


def test_a_ray_data_set_is_written_once_and_read_from_there(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    notes: list[str] = []
    materialize(ray.data.range(3), storage, may_replace=True)
    dataset = ray.data.range_tensor(50, shape=(2, 3))
    path = materialize(dataset, storage, may_replace=True, note=notes.append)  # before anything was trained on it
    assert notes.pop().startswith("nothing is committed yet, so the ray.data.Dataset is written once more")
    written = storage.list()
    assert {key.split("/")[1] for key in written} == {"dataset.json", path.rpartition("/")[2]}, "the other one is gone"
    assert materialize(ray.data.range(3), storage, may_replace=False, note=notes.append) == path
    assert notes.pop().startswith("the run goes on with the copy of its ray.data.Dataset that it began with")
    assert storage.list() == written
    index = build_index(path)
    assert index.num_rows == 50

    def keep(rows: Arrays, random: np.random.Generator) -> Arrays:
        assert rows["data"].shape[1:] == (2, 3)
        return rows

    with make_feed(index, keep, last_step=1) as feed:
        for batch in feed.step(0):
            assert batch.rows["data"].shape == (MICRO_BATCH_SIZE, 2, 3)


def test_two_copies_of_a_ray_data_set_have_their_rows_in_the_same_order(tmp_path: Path) -> None:
    """Files are named as their tasks begin, and those after a stage of its own begin as its tasks end."""

    through = tmp_path / "through"
    through.mkdir()

    def first_last(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        end = time.monotonic() + 10  # in the right order they wait for it
        while 0 in rows["id"] and len(list(through.iterdir())) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        (through / str(rows["id"].min())).touch()
        return rows

    dataset = ray.data.range(40, override_num_blocks=4).map_batches(first_last, num_cpus=0.4)
    index = build_index(materialize(dataset, Storage(tmp_path / "run"), may_replace=False))
    assert len(list(through.iterdir())) == 4
    assert dataset.context.execution_options.preserve_order is False
    ids = [row for file in index.files for row in pq.read_table(file.path)["id"].to_pylist()]
    assert ids == list(range(40))


def test_data_is_written_to_s3_and_read_from_there_over_http(s3: str) -> None:
    path = materialize(ray.data.range(ROWS), Storage(f"{s3}/run"), may_replace=False)
    assert path.startswith(f"{s3}/run/data/dataset-")
    index = build_index(path)
    with make_feed(index, lambda rows, random: rows, last_step=19) as feed:
        rows = [row for step in range(19) for batch in feed.step(step) for row in batch.rows["id"][: batch.num_rows]]
    assert sorted(map(int, rows)) == list(range(ROWS))
