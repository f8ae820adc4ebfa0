"""Columns to arrays, and the transform that the user gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray.data._internal.output_buffer import BlockOutputBuffer, OutputBlockSizeOption

from elastic_ddp.config.run_config import DataConfig
from elastic_ddp.data.columns import to_numpy
from elastic_ddp.data.index import DatasetIndex, build_index
from elastic_ddp.data.order import EpochShape, FeedPlan
from elastic_ddp.data.source import (
    BLOCK_BYTES,
    Arrays,
    PrepareChunks,
    PreparedChunk,
    Transform,
    _check_tensors,
    _widen,
    check_columns,
    read_chunks,
    transform_generator,
    unpack,
)
from elastic_ddp.errors import DataError


@pytest.fixture
def index(tmp_path: Path) -> DatasetIndex:
    rows = 60
    columns = pa.table({"id": np.arange(rows), "text": [f"row {row}" for row in range(rows)]})
    for part in range(3):
        pq.write_table(columns.slice(part * 20, 20), tmp_path / f"{part}.parquet", row_group_size=7)
    return build_index(str(tmp_path))


def plan_of(index: DatasetIndex, lanes: tuple[int, ...] = (0, 1), first_step: int = 0) -> FeedPlan:
    shape = EpochShape(index.num_rows, num_micro_batches=2, micro_batch_size=4)
    return FeedPlan(
        rows_per_group=index.group_rows,
        shape=shape,
        seed=3,
        options=DataConfig(window_row_groups=2, chunk_rows=5),
        micro_batches=lanes,
        first_step=first_step,
        last_step=2 * shape.steps_per_epoch,
    )


def prepare(
    index: DatasetIndex, transform: Transform | None, *, lanes: tuple[int, ...] = (0, 1), first_step: int = 0
) -> list[PreparedChunk]:
    """The pipeline's two stages, one after the other and without Ray."""
    plan = plan_of(index, lanes, first_step)
    stage = PrepareChunks(plan.seed, transform)
    return [chunk for block in read_chunks(index, plan) for packed in stage(block) for chunk in unpack(packed)]


def message(index: DatasetIndex, transform: Transform | None) -> str:
    with pytest.raises(DataError) as caught:
        prepare(index, transform)
    return str(caught.value)


def lengths(rows: Arrays, random: np.random.Generator) -> Arrays:
    """The id, the length of the text, and noise of another shape and type."""
    size = np.array([len(text) for text in rows["text"]], dtype=np.int16)
    return {"id": rows["id"], "size": size, "noise": random.random((len(size), 2, 3), dtype=np.float32)}


def test_rows_come_out_under_their_row_ids(index: DatasetIndex) -> None:
    chunks = prepare(index, lengths)
    for chunk in chunks:
        assert np.array_equal(chunk.columns["id"], chunk.row_ids)
        assert chunk.columns["size"].tolist() == [len(f"row {row}") for row in chunk.row_ids]
        assert chunk.columns["noise"].shape == (len(chunk.row_ids), 2, 3)
        assert [values.dtype for values in chunk.columns.values()] == [np.int64, np.int16, np.float32]
    for epoch in range(2):
        rows = np.concatenate([chunk.row_ids for chunk in chunks if chunk.epoch == epoch])
        assert sorted(rows) == list(range(60))


def test_a_pipeline_starts_slowly(index: DatasetIndex) -> None:
    """Each of its blocks holds twice as many chunks as the one before it, and one that is full before goes as ever."""
    for first_step, transform, expected in (
        (0, lengths, [2, 4, 8, 14]),  # two lanes, of 28 chunks
        (5, lengths, [3, 6, 11]),  # entered in the midst of chunks: one lane needs two of them for a step
        (0, three_mebibytes, [2, 3, 1, 3, 3, 2, 3, 3, 3, 3, 2]),  # ends of 2, 6 and 14 chunks, and full ones
    ):
        plan, stage = plan_of(index, first_step=first_step), PrepareChunks(3, transform)
        read = list(blocks_of_ray_data(read_chunks(index, plan)))
        packed = blocks_of_ray_data(chunk for block in read for chunk in stage(block))
        assert [block.num_rows for block in packed] == expected
        if transform is lengths:
            assert [block.num_rows for block in read] == expected


def blocks_of_ray_data(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """What Ray Data makes of a stage's tables."""
    buffer = BlockOutputBuffer(OutputBlockSizeOption(target_max_block_size=BLOCK_BYTES))
    for table in tables:
        buffer.add_block(table)
        yield from buffer.iter_ready_blocks()
    buffer.finalize()
    yield from buffer.iter_ready_blocks()


def three_mebibytes(rows: Arrays, random: np.random.Generator) -> Arrays:
    return {"large": np.zeros((len(rows["id"]), (3 << 20) // len(rows["id"])), np.uint8)}


def test_a_random_transform_gives_the_same_rows_to_anyone_at_any_time(index: DatasetIndex) -> None:
    def by_key(chunks: list[PreparedChunk]) -> dict[tuple[int, int, int], tuple[list[int], list[float]]]:
        return {
            (chunk.epoch, chunk.lane, chunk.number): (chunk.row_ids.tolist(), chunk.columns["noise"].tolist())
            for chunk in chunks
        }

    whole = by_key(prepare(index, lengths))
    for lanes, first_step in (((0,), 0), ((1,), 0), ((1, 0), 5), ((0,), 7), ((0, 1), 9)):
        part = by_key(prepare(index, lengths, lanes=lanes, first_step=first_step))
        assert part
        assert part.items() <= whole.items()


def test_every_chunk_has_random_numbers_of_its_own() -> None:
    keys = [
        (seed, epoch, lane, chunk) for seed in (0, 2**40) for epoch in (0, 1) for lane in (0, 1) for chunk in (0, 1)
    ]
    assert len({transform_generator(*key).integers(2**62) for key in keys}) == len(keys)


def test_a_transform_may_write_into_its_arrays(index: DatasetIndex) -> None:
    def double(rows: Arrays, random: np.random.Generator) -> Arrays:
        rows["id"] *= 2
        return {"id": rows["id"]}

    assert all((chunk.columns["id"] == 2 * chunk.row_ids).all() for chunk in prepare(index, double))


def test_any_name_and_shape_passes_through(tmp_path: Path) -> None:
    names = ["row_ids", "epoch", "column:x", ""]
    pq.write_table(pa.table({name: np.arange(9) for name in names}), tmp_path / "a.parquet")

    def add_nothing(rows: Arrays, random: np.random.Generator) -> Arrays:
        assert list(rows) == names
        return {**rows, "nothing": np.zeros((len(rows["epoch"]), 0, 3), np.float16)}

    for chunk in prepare(build_index(str(tmp_path)), add_nothing):
        assert list(chunk.columns) == [*names, "nothing"]
        assert chunk.columns["nothing"].shape == (len(chunk.row_ids), 0, 3)
        assert all(np.array_equal(chunk.columns[name], chunk.row_ids) for name in names)


def test_a_transform_that_raises_is_shown_with_its_traceback(index: DatasetIndex) -> None:
    def fail(rows: Arrays, random: np.random.Generator) -> Arrays:
        raise KeyError("label")

    text = message(index, fail)
    assert "the transform raised KeyError('label') in epoch 0, lane 0, chunk 0" in text
    assert 'raise KeyError("label")' in text


def test_a_transform_that_changes_the_number_of_rows_is_refused(index: DatasetIndex) -> None:
    text = message(index, lambda rows, random: {"id": rows["id"][1:]})
    assert "the transform got 5 rows and returned 4 for 'id'" in text
    assert "leave rows out when the data set is written" in text


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1, 2], "the transform returned list; it has to return a dict of NumPy arrays"),
        ({}, "the transform returned an empty dict"),
        ({"id": [1, 2, 3]}, "the transform returned a list for 'id'"),
        ({"id": np.array(3)}, "it has to be a NumPy array of shape (rows, ...)"),
    ],
)
def test_a_transform_that_returns_something_else_is_refused(
    index: DatasetIndex, returned: object, expected: str
) -> None:
    assert expected in message(index, lambda rows, random: returned)  # type: ignore[arg-type, return-value]


def test_strings_need_a_transform_or_to_be_left_out(index: DatasetIndex) -> None:
    assert "column 'text' holds strings" in message(index, None)
    assert "turn 'text' into numbers with a transform, or choose other columns with data.columns" in message(
        index, None
    )
    assert "leave it out of what it returns" in message(index, lambda rows, random: {"text": rows["text"]})


def test_a_file_replaced_while_training_is_named(index: DatasetIndex) -> None:
    other = pa.table({"id": [1, 2], "text": ["x", "y"]})
    path = index.files[1].path
    pq.write_table(other, path)
    assert path in message(index, lengths)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1, 2, 3], pa.int32()), np.array([1, 2, 3], dtype=np.int32)),
        (pa.array([True, False]), np.array([True, False])),
        (pa.array([1.5, None], pa.float32()), np.array([1.5, np.nan], dtype=np.float32)),
        (pa.array([1.5, 2], pa.float16()), np.array([1.5, 2], dtype=np.float16)),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int16())), np.array([[1, 2], [3, 4]], dtype=np.int16)),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)), np.array([[1, 2], [3, 4]])),
        (pa.array([[[1], [2]], [[3], [4]]], pa.list_(pa.list_(pa.int64(), 1), 2)), np.array([[[1], [2]], [[3], [4]]])),
        (pa.array(["a", "b"]), np.array(["a", "b"], dtype=object)),
        (pa.array([b"a", b"b"]), np.array([b"a", b"b"], dtype=object)),
    ],
)
def test_columns_become_arrays_by_their_type(column: pa.Array, expected: np.ndarray) -> None:
    for values in (column, pa.concat_arrays([column, column]).slice(len(column))):
        found = to_numpy("x", values)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_lists_of_different_lengths_become_an_array_of_arrays() -> None:
    found = to_numpy("x", pa.array([[1, 2], [], [3]]))
    assert found.dtype == object
    assert [values.tolist() for values in found] == [[1, 2], [], [3]]


def test_tensors_of_arrow_and_of_ray_data_keep_their_shape() -> None:
    from ray.data.extensions import ArrowTensorArray

    tensor = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    assert np.array_equal(to_numpy("x", pa.FixedShapeTensorArray.from_numpy_ndarray(tensor)), tensor)
    assert np.array_equal(to_numpy("x", ArrowTensorArray.from_numpy(tensor)), tensor)


@pytest.mark.parametrize("column", [pa.array([1, None]), pa.array([True, None]), pa.array([[1], None])])
def test_nulls_that_an_array_cannot_hold_are_refused(column: pa.Array) -> None:
    with pytest.raises(DataError, match=r"column 'x' .* holds nulls"):
        to_numpy("x", column)


@pytest.mark.parametrize("values", [np.zeros(3, ">i4"), np.zeros(3, np.longdouble), np.zeros(3, np.clongdouble)])
def test_numbers_that_no_tensor_can_hold_are_refused(values: np.ndarray) -> None:
    with pytest.raises(DataError, match="convert them with astype"):
        _check_tensors({"x": values}, transformed=True)


@pytest.mark.parametrize("values", [pa.array(["a", "bc"], pa.string_view()), pa.array([b"a", b"bc"], pa.binary_view())])
def test_views_of_strings_are_read_like_strings(values: pa.Array) -> None:
    assert _widen(pa.chunked_array([values])).take(pa.array([1, 0])).to_pylist() == values.to_pylist()[::-1]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.binary(), pa.struct({"a": pa.int64()}), pa.decimal128(9), pa.list_(pa.string(), 3), pa.null()],
    ids=str,
)
def test_a_column_that_can_be_no_tensor_is_known_by_its_type(kind: pa.DataType) -> None:
    with pytest.raises(DataError, match=r"column 'x' holds .* which no tensor can hold: turn 'x' into numbers"):
        check_columns(pa.schema({"id": pa.int64(), "x": kind}))


def test_columns_that_may_be_tensors_are_left_to_their_values() -> None:
    numbers = [pa.bool_(), pa.uint8(), pa.int64(), pa.float16(), pa.float64()]
    lists = [pa.list_(pa.float32()), pa.large_list(pa.int8()), pa.list_(pa.list_(pa.int64(), 2), 3)]
    tensors = [pa.fixed_shape_tensor(pa.float32(), (2, 3))]
    check_columns(pa.schema([(str(number), kind) for number, kind in enumerate([*numbers, *lists, *tensors])]))
