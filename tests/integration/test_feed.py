"""The feed on a real Ray: pipelines, threads, failed processes, object storage."""

from __future__ import annotations

import os
import re
import signal
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
from elastic_ddp.data.columns import Arrays
from elastic_ddp.data.feed import MicroBatchFeed
from elastic_ddp.data.feed_cache import FeedCache
from elastic_ddp.data.index import DatasetIndex, build_index
from elastic_ddp.data.ingest import materialize
from elastic_ddp.data.map_style import index_in_memory
from elastic_ddp.data.micro_batches import MicroBatch
from elastic_ddp.data.order import EpochShape, FeedPlan
from elastic_ddp.data.work import Transform
from elastic_ddp.errors import DataError
from elastic_ddp.storage.storage import Storage

NUM_MICRO_BATCHES = 4
MICRO_BATCH_SIZE = 8
ROWS = 600
Rows = dict[tuple[int, int], tuple[list[int], list[float]]]
"""Row ids and noise of each step and micro-batch."""


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


def plan_of(
    num_rows: int,
    rows_per_group: np.ndarray,
    micro_batches: Sequence[int] = range(NUM_MICRO_BATCHES),
    first_step: int = 0,
    last_step: int = 40,
    concurrency: int = 1,
) -> FeedPlan:
    return FeedPlan(
        rows_per_group=rows_per_group,
        shape=EpochShape(num_rows, NUM_MICRO_BATCHES, MICRO_BATCH_SIZE),
        seed=7,
        options=DataConfig(window_row_groups=2, chunk_rows=20, concurrency=concurrency),
        micro_batches=tuple(micro_batches),
        first_step=first_step,
        last_step=last_step,
    )


def make_feed(
    index: DatasetIndex,
    transform: Transform = noisy,
    *,
    micro_batches: Sequence[int] = range(NUM_MICRO_BATCHES),
    first_step: int = 0,
    last_step: int = 40,
    concurrency: int = 1,
) -> MicroBatchFeed:
    plan = plan_of(index.num_rows, index.group_rows, micro_batches, first_step, last_step, concurrency)
    return MicroBatchFeed(index, plan, transform=transform, device=torch.device("cpu"))


def collect(feed: MicroBatchFeed, first_step: int = 0, last_step: int = 40) -> Rows:
    rows: Rows = {}
    with feed:
        for step in range(first_step, last_step):
            for batch in feed.step(step):
                assert batch.rows["id"][: batch.num_rows].tolist() == batch.row_ids.tolist()
                rows[step, batch.index] = batch.row_ids.tolist(), batch.rows["noise"].tolist()
    return rows


def test_workers_together_get_the_rows_of_one_worker_over_two_epochs(index: DatasetIndex) -> None:
    expected = collect(make_feed(index))
    steps = EpochShape(index.num_rows, NUM_MICRO_BATCHES, MICRO_BATCH_SIZE).steps_per_epoch
    for epoch in range(2):
        rows = [row for (step, _), (row_ids, _) in expected.items() if step // steps == epoch for row in row_ids]
        assert sorted(rows) == list(range(ROWS))
    parts = collect(make_feed(index, micro_batches=[2, 0])) | collect(make_feed(index, micro_batches=[1, 3]))
    assert parts == expected
    late = collect(make_feed(index, first_step=15, last_step=25), 15, 25)  # the epoch ends after step 18
    assert late == {key: rows for key, rows in expected.items() if 15 <= key[0] < 25}
    assert collect(make_feed(index, concurrency=2)) == expected


def test_skipped_steps_do_not_change_later_ones(index: DatasetIndex) -> None:
    expected = collect(make_feed(index))
    with make_feed(index, micro_batches=[2, 1]) as feed:
        feed.skip_to(1)  # before any rows are ready
        feed.wait()
        assert feed.is_ready
        feed.skip_to(4)  # with some rows ready, and others in the pipeline
        for step in (4, 5, 30):
            feed.skip_to(step)
            for batch in feed.step(step):
                assert batch.row_ids.tolist() == expected[step, batch.index][0]
                assert batch.rows["noise"].tolist() == expected[step, batch.index][1]
        with pytest.raises(ValueError, match=r"step 30 .* step 31"):
            feed.skip_to(30)


def test_a_prepared_feed_stays_ready_although_it_holds_the_rows_of_one_step(index: DatasetIndex) -> None:
    assert DataConfig().prefetch_micro_batches == NUM_MICRO_BATCHES
    feeds = FeedCache(lambda micro_batches, step, _: make_feed(index, micro_batches=micro_batches, first_step=step))
    for step in range(5, 10):
        is_ready = feeds.prepare(tuple(range(NUM_MICRO_BATCHES)), step)
        assert is_ready or step == 5
        feeds.wait()
    feeds.shut_down()


def test_an_empty_micro_batch_has_rows_of_padding(tmp_path: Path) -> None:
    pq.write_table(content(0, 33), tmp_path / "a.parquet")
    with make_feed(build_index(str(tmp_path)), first_step=1, last_step=2) as feed:
        batches = list(feed.step(1))  # lanes have 9, 8, 8 and 8 rows
    assert [batch.num_rows for batch in batches] == [1, 0, 0, 0]
    assert [len(batch.rows["id"]) for batch in batches] == [1, *[MICRO_BATCH_SIZE] * 3]
    assert [len(batch.row_ids) for batch in batches] == [1, 0, 0, 0]


def test_tensors_may_be_written_to(index: DatasetIndex) -> None:
    with make_feed(index) as feed:
        for batch in feed.step(0):
            batch.rows["id"].zero_()
            assert batch.rows["id"].dtype == torch.int64
            assert batch.rows["noise"].dtype == torch.float64


def test_steps_must_be_taken_in_order(index: DatasetIndex) -> None:
    with make_feed(index, first_step=3, last_step=4) as feed:
        with pytest.raises(ValueError, match=r"step 5 .* step 3 "):
            next(feed.step(5))
        assert len(list(feed.step(3))) == NUM_MICRO_BATCHES
        with pytest.raises(ValueError, match="ends before step 4"):
            next(feed.step(4))


def test_an_error_of_the_transform_is_raised_with_its_traceback(index: DatasetIndex) -> None:
    def fail(rows: Arrays, random: np.random.Generator) -> Arrays:
        raise KeyError("label")

    with make_feed(index, fail) as feed, pytest.raises(DataError) as caught:
        next(feed.step(0))
    assert str(caught.value).startswith("the transform raised KeyError('label') in epoch 0, lane 0, chunk 0:")
    assert "\nKeyError: 'label'\nThe chunk has rows " in str(caught.value)
    assert f" of {Path(index.files[0].path).parent}/" in str(caught.value).splitlines()[-1]
    assert 'raise KeyError("label")' in str(caught.value)
    with make_feed(index, fail) as feed, pytest.raises(DataError, match="the transform raised"):
        feed.wait()  # as a worker does before it joins, so that its peers do not wait for it


def test_a_deleted_file_is_named(index: DatasetIndex) -> None:
    for file in index.files:
        os.unlink(file.path)
    with make_feed(index) as feed, pytest.raises(DataError, match="does not exist any more"):
        next(feed.step(0))


def large(rows: Arrays, random: np.random.Generator) -> Arrays:
    """Returns 256 KiB per row: the pipeline stalls, with its task alive, when some hundred rows wait."""
    pid = np.full(len(rows["id"]), os.getpid())
    return {"id": rows["id"], "pid": pid, "large": np.zeros((len(pid), 1 << 18), np.uint8)}


def pipelines() -> list[str]:
    """Returns the titles of the Ray processes of this session that run a pipeline."""
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
    raise AssertionError("the condition was not met within 10 s")


def test_a_feed_that_released_its_pipeline_yields_its_rows_and_reads_on(index: DatasetIndex) -> None:
    expected = collect(make_feed(index))
    with make_feed(index, large, last_step=20) as feed:
        batches = {0: list(feed.step(0))}
        wait_until(lambda: len(pipelines()) == 1 and feed.is_ready)
        feed.release_pipeline()
        wait_until(lambda: not pipelines())
        with make_feed(index, first_step=5) as next_feed:
            next_feed.wait()
            assert [batch.row_ids.tolist() for batch in next_feed.step(5)] == [expected[5, m][0] for m in range(4)]
        batches |= {step: list(feed.step(step)) for step in range(1, 20)}
    for step, in_step in batches.items():
        assert [batch.row_ids.tolist() for batch in in_step] == [expected[step, m][0] for m in range(4)]


def wide(rows: Arrays, random: np.random.Generator) -> Arrays:
    return {"wide": np.zeros((len(rows["id"]), 1 << 20))}


def test_a_feed_that_is_ahead_does_not_spin_even_if_one_chunk_fills_the_limit(index: DatasetIndex) -> None:
    """Chunks have 160 MiB. A loop without pauses used 0.5 to 1 s of every second."""
    with make_feed(index, wide, micro_batches=[1]) as feed:
        feed.wait()
        wait_until(lambda: _loop_seconds(0.5) < 0.1)
        assert [len(batch.row_ids) for step in range(4) for batch in feed.step(step)] == [MICRO_BATCH_SIZE] * 4


def _loop_seconds(during_s: float) -> float:
    """Returns the CPU seconds of all scheduling loops of Ray Data in this process, during a sleep."""
    loops = [
        thread.native_id for thread in threading.enumerate() if thread.name.startswith("StreamingExecutor-elastic_ddp")
    ]
    assert loops

    def nanoseconds() -> int:
        return sum(int(Path(f"/proc/self/task/{loop}/schedstat").read_text().split()[0]) for loop in loops)

    before = nanoseconds()
    time.sleep(during_s)
    return (nanoseconds() - before) / 1e9


def test_close_frees_tasks_and_threads_and_may_be_repeated(index: DatasetIndex) -> None:
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
    make_feed(index, large).close()  # also before any rows are ready


def test_a_killed_process_is_replaced_without_skipping_or_repeating_rows(index: DatasetIndex) -> None:
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


def test_a_transform_in_which_the_process_dies_twice_is_named(index: DatasetIndex, tmp_path: Path) -> None:
    """The error has the chunk, its rows and their files, the signal, and the stack."""
    deaths = tmp_path / "deaths"

    def decode(rows: Arrays, random: np.random.Generator) -> Arrays:
        if 250 in rows["id"]:
            with deaths.open("a") as file:
                file.write("x")
            os.abort()
        return noisy(rows, random)

    with make_feed(index, decode) as feed, pytest.raises(DataError) as caught:
        for step in range(19):
            list(feed.step(step))
    assert len(deaths.read_text()) == 2
    first, *frames = str(caught.value).splitlines()
    where = r"in epoch 0, lane \d, chunk \d+: rows .*\b50\b.* of .*/1\.parquet"
    assert re.match(rf"the process that runs the transform died of SIGABRT \(Aborted\), {where}", first)
    assert [frame.rpartition(" in ")[2] for frame in frames] == ["decode"]


def test_a_transform_that_hangs_is_named(index: DatasetIndex) -> None:
    def hang(rows: Arrays, random: np.random.Generator) -> Arrays:
        threading.Event().wait()
        return rows

    plan = plan_of(ROWS, index.group_rows)
    feed = MicroBatchFeed(index, plan, transform=hang, device=torch.device("cpu"), hang_timeout_s=0.5)
    with feed, pytest.raises(DataError) as caught:
        next(feed.step(0))
    call = r"the process that runs the transform has made no progress for 0\.5 s, in epoch 0, lane 0, chunk 0: rows .*"
    assert re.match(call + re.escape(str(Path(index.files[0].path).parent)), str(caught.value))
    assert str(caught.value).endswith("\nRaise hang_timeout_s if a call may take longer.")


def test_a_collate_function_in_which_the_process_dies_is_named() -> None:
    def collate(rows: list[int]) -> torch.Tensor:
        if 7 in rows:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(rows)

    index = index_in_memory(list(range(40))).share()
    plan = plan_of(40, np.array([40]), last_step=2)
    feed = MicroBatchFeed(index, plan, collate_fn=collate, device=torch.device("cpu"))
    where = r"in micro-batch \d of step \d: rows .*\b7\b"
    with feed, pytest.raises(DataError, match=f"runs collate_fn died without a signal .*, {where}"):
        for step in range(2):
            list(feed.step(step))


def test_pipelines_run_when_workers_reserve_every_cpu(index: DatasetIndex) -> None:
    @ray.remote(num_cpus=2)
    class Worker:
        def first(self) -> list[int]:
            with make_feed(index) as feed:
                batch: MicroBatch = next(feed.step(0))
                return list(batch.row_ids.tolist())

    assert len(ray.get(Worker.remote().first.remote(), timeout=60)) == MICRO_BATCH_SIZE


def test_a_ray_data_set_is_copied_once_and_read_from_the_copy(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    notes: list[str] = []
    materialize(ray.data.range(3), storage, may_replace=True)
    dataset = ray.data.range_tensor(50, shape=(2, 3))
    path = materialize(dataset, storage, may_replace=True, note=notes.append)  # nothing is committed yet
    assert "ray.data.Dataset again" in notes.pop()
    written = storage.list()
    assert {key.split("/")[1] for key in written} == {"dataset.json", path.rpartition("/")[2]}, (
        "the first copy is deleted"
    )
    assert materialize(ray.data.range(3), storage, may_replace=False, note=notes.append) == path
    assert "existing copy of its ray.data.Dataset" in notes.pop()
    assert storage.list() == written
    index = build_index(path)
    assert index.num_rows == 50

    def keep(rows: Arrays, random: np.random.Generator) -> Arrays:
        assert rows["data"].shape[1:] == (2, 3)
        return rows

    with make_feed(index, keep, last_step=1) as feed:
        for batch in feed.step(0):
            assert batch.rows["data"].shape == (MICRO_BATCH_SIZE, 2, 3)


def test_copies_of_a_ray_data_set_have_their_rows_in_the_same_order(tmp_path: Path) -> None:
    """Files are named in the order in which their tasks start."""

    finished = tmp_path / "finished"
    finished.mkdir()

    def finish_first_block_last(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        end = time.monotonic() + 4  # writing in order waits for this block
        while 0 in rows["id"] and len(list(finished.iterdir())) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        (finished / str(rows["id"].min())).touch()
        return rows

    dataset = ray.data.range(40, override_num_blocks=4).map_batches(finish_first_block_last, num_cpus=0.4)
    index = build_index(materialize(dataset, Storage(tmp_path / "run"), may_replace=False))
    assert len(list(finished.iterdir())) == 4
    assert dataset.context.execution_options.preserve_order is False
    ids = [row for file in index.files for row in pq.read_table(file.path)["id"].to_pylist()]
    assert ids == list(range(40))


def test_a_data_set_is_copied_to_s3_and_read_from_it(s3: str) -> None:
    path = materialize(ray.data.range(ROWS), Storage(f"{s3}/run"), may_replace=False)
    assert path.startswith(f"{s3}/run/data/dataset-")
    index = build_index(path)
    with make_feed(index, lambda rows, random: rows, last_step=19) as feed:
        rows = [row for step in range(19) for batch in feed.step(step) for row in batch.rows["id"][: batch.num_rows]]
    assert sorted(map(int, rows)) == list(range(ROWS))
