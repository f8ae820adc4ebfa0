"""Columns as arrays, and the user's transform."""

from __future__ import annotations

import random as python_random
import re
import sys
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_ddp.config.run_config import DataConfig
from elastic_ddp.data.columns import Arrays, check_columns, check_tensors, to_numpy, widen
from elastic_ddp.data.index import DatasetIndex, build_index
from elastic_ddp.data.order import EpochShape, FeedPlan, transform_generator
from elastic_ddp.data.packing import Content, load, pack_blocks, pack_rows, unpack_block, unpack_rows
from elastic_ddp.data.work import Transform, Work
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
) -> list[Content]:
    """Returns the chunks that the worker gets, without Ray."""
    plan = plan_of(index, lanes, first_step)
    work = Work(index, plan, transform)
    rows = chain.from_iterable(map(unpack_rows, pack_rows(work.read())))
    packed = chain.from_iterable(map(unpack_block, pack_blocks(map(work.make, rows))))
    return [replace(chunk, value=load(chunk.value.parts)) for chunk in packed]


def message(index: DatasetIndex, transform: Transform | None) -> str:
    with pytest.raises(DataError) as caught:
        prepare(index, transform)
    return str(caught.value)


def lengths(rows: Arrays, random: np.random.Generator) -> Arrays:
    """Returns the id, the length of the text, and noise of another shape and dtype."""
    size = np.array([len(text) for text in rows["text"]], dtype=np.int16)
    return {"id": rows["id"], "size": size, "noise": random.random((len(size), 2, 3), dtype=np.float32)}


def test_rows_keep_their_row_ids(index: DatasetIndex) -> None:
    chunks = prepare(index, lengths)
    for chunk in chunks:
        assert np.array_equal(chunk.value["id"], chunk.row_ids)
        assert chunk.value["size"].tolist() == [len(f"row {row}") for row in chunk.row_ids]
        assert chunk.value["noise"].shape == (len(chunk.row_ids), 2, 3)
        assert [values.dtype for values in chunk.value.values()] == [np.int64, np.int16, np.float32]
    for epoch in range(2):
        rows = np.concatenate([chunk.row_ids for chunk in chunks if chunk.key[0] == epoch])
        assert sorted(rows) == list(range(60))


def by_key(chunks: list[Content]) -> dict[tuple[int, int, int], tuple[list[int], list[Any]]]:
    """The row ids and the random numbers of each chunk."""
    return {chunk.key: (chunk.row_ids.tolist(), chunk.value["noise"].tolist()) for chunk in chunks}


def draw_from_global_generators(rows: Arrays, random: np.random.Generator) -> Arrays:
    size = len(rows["id"])
    drawn = [torch.rand(size).numpy(), np.random.random(size), [python_random.random() for _ in range(size)]]
    return {"id": rows["id"], "noise": np.stack(drawn, axis=1)}


@pytest.mark.parametrize("transform", [lengths, draw_from_global_generators])
def test_a_random_transform_gives_the_same_rows_on_every_worker_and_resume(
    index: DatasetIndex, transform: Transform
) -> None:
    expected = by_key(prepare(index, transform))
    for lanes, first_step in (((0,), 0), ((1,), 0), ((1, 0), 5), ((0,), 7), ((0, 1), 9)):
        part = by_key(prepare(index, transform, lanes=lanes, first_step=first_step))
        assert part and part.items() <= expected.items()
    if transform is draw_from_global_generators:
        numbers = [number for _, noise in expected.values() for number in np.ravel(noise)]
        assert len(set(numbers)) == len(numbers)


def test_a_transform_that_imports_torch_is_seeded_in_its_first_chunk(
    index: DatasetIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that read data start without torch."""
    expected = by_key(prepare(index, draw_from_global_generators))

    def import_and_draw(rows: Arrays, random: np.random.Generator) -> Arrays:
        sys.modules["torch"] = torch
        return draw_from_global_generators(rows, random)

    torch.manual_seed(1)
    monkeypatch.delitem(sys.modules, "torch")
    assert by_key(prepare(index, import_and_draw)) == expected


def test_every_chunk_has_its_own_random_numbers() -> None:
    keys = list(product((0, 2**40), (0, 1), (0, 1), (0, 1)))
    assert len({transform_generator(seed, chunk).integers(2**62) for seed, *chunk in keys}) == len(keys)


def test_a_transform_may_write_into_its_arrays(index: DatasetIndex) -> None:
    def double(rows: Arrays, random: np.random.Generator) -> Arrays:
        rows["id"] *= 2
        return {"id": rows["id"]}

    assert all((chunk.value["id"] == 2 * chunk.row_ids).all() for chunk in prepare(index, double))


def test_a_column_may_have_any_name_and_shape(tmp_path: Path) -> None:
    names = ["row_ids", "epoch", "column:x", ""]
    pq.write_table(pa.table({name: np.arange(9) for name in names}), tmp_path / "a.parquet")

    def add_nothing(rows: Arrays, random: np.random.Generator) -> Arrays:
        assert list(rows) == names
        return {**rows, "nothing": np.zeros((len(rows["epoch"]), 0, 3), np.float16)}

    for chunk in prepare(build_index(str(tmp_path)), add_nothing):
        assert list(chunk.value) == [*names, "nothing"]
        assert chunk.value["nothing"].shape == (len(chunk.row_ids), 0, 3)
        assert all(np.array_equal(chunk.value[name], chunk.row_ids) for name in names)


def test_the_error_of_a_transform_has_its_traceback_and_its_rows(index: DatasetIndex) -> None:
    def fail(rows: Arrays, random: np.random.Generator) -> Arrays:
        raise KeyError("label")

    def leave(rows: Arrays, random: np.random.Generator) -> Arrays:
        sys.exit(3)

    text = message(index, fail)
    assert "the transform raised KeyError('label') in epoch 0, lane 0, chunk 0" in text
    assert 'raise KeyError("label")' in text
    text = message(index, leave)
    assert "the transform raised SystemExit(3) in epoch 0, lane 0, chunk 0" in text
    first = prepare(index, lengths)[0].row_ids
    assert text.endswith(f"\nThe chunk has {index.locate(first.tolist())}.")


def test_rows_are_located_in_their_files(index: DatasetIndex) -> None:
    folder = Path(index.files[0].path).parent
    assert index.locate([21, 3, 59, 20]) == (
        f"row 3 of {folder}/0.parquet; rows 0, 1 of {folder}/1.parquet; row 19 of {folder}/2.parquet"
    )


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1, 2], "the transform returned list"),
        ({}, "the transform returned an empty dict"),
        ({"id": [1, 2, 3]}, "the transform returned a list for 'id'"),
        ({"id": np.array(3)}, "the transform returned a ndarray for 'id'"),
        ({"id": np.arange(4)}, "the transform got 5 rows and returned 4 for 'id'"),
        ({"id": np.array(["a"] * 5)}, "column 'id' holds strings.*from the transform"),
    ],
)
def test_a_result_of_a_transform_that_cannot_be_used_raises(
    index: DatasetIndex, returned: object, expected: str
) -> None:
    assert re.search(expected, message(index, lambda rows, random: returned))  # type: ignore[arg-type, return-value]


def test_strings_need_a_transform_or_other_columns(index: DatasetIndex) -> None:
    assert re.search(r"column 'text' holds strings.* data\.columns", message(index, None))


def test_a_file_replaced_during_training_is_named(index: DatasetIndex) -> None:
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
        (pa.array(np.array([1.5, 2], dtype=np.float16)), np.array([1.5, 2], dtype=np.float16)),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int16())), np.array([[1, 2], [3, 4]], dtype=np.int16)),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)), np.array([[1, 2], [3, 4]])),
        (pa.array([[[1], [2]], [[3], [4]]], pa.list_(pa.list_(pa.int64(), 1), 2)), np.array([[[1], [2]], [[3], [4]]])),
        (pa.array(["a", "b"]), np.array(["a", "b"], dtype=object)),
        (pa.array([b"a", b"b"]), np.array([b"a", b"b"], dtype=object)),
    ],
)
def test_columns_become_arrays_of_their_type(column: pa.Array, expected: np.ndarray) -> None:
    for values in (column, pa.concat_arrays([column, column]).slice(len(column))):
        array = to_numpy("x", values)
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_lists_of_different_lengths_become_an_array_of_arrays() -> None:
    array = to_numpy("x", pa.array([[1, 2], [], [3]]))
    assert array.dtype == object
    assert [values.tolist() for values in array] == [[1, 2], [], [3]]


def test_tensors_of_arrow_and_of_ray_data_keep_their_shape() -> None:
    from ray.data.extensions import ArrowTensorArray

    tensor = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    assert np.array_equal(to_numpy("x", pa.FixedShapeTensorArray.from_numpy_ndarray(tensor)), tensor)
    assert np.array_equal(to_numpy("x", ArrowTensorArray.from_numpy(tensor)), tensor)


@pytest.mark.parametrize("column", [pa.array([1, None]), pa.array([True, None]), pa.array([[1], None])])
def test_nulls_that_an_array_cannot_hold_raise(column: pa.Array) -> None:
    with pytest.raises(DataError, match=r"column 'x' .* has nulls"):
        to_numpy("x", column)


@pytest.mark.parametrize("values", [np.zeros(3, ">i4"), np.zeros(3, np.longdouble), np.zeros(3, np.clongdouble)])
def test_numbers_that_no_tensor_can_hold_raise(values: np.ndarray) -> None:
    with pytest.raises(DataError, match="astype"):
        check_tensors({"x": values}, transformed=True)


NESTED = [{"bytes": b"ab", "names": ["x", "yz"]}, {"bytes": None, "names": []}, None]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.binary_view(), [b"a", b"bc", None]),
        (pa.list_(pa.int32()), [[1, 2], [], None]),
        (pa.list_(pa.list_(pa.string())), [[["a"], []], [], [["b", "c"]]]),
        (pa.list_(pa.string_view(), 2), [["a", "b"], ["c", "d"], ["e", "f"]]),
        (pa.struct({"bytes": pa.binary(), "names": pa.list_(pa.string())}), NESTED),
        (pa.struct({"bytes": pa.binary_view(), "names": pa.list_(pa.string_view())}), NESTED),
        (pa.struct({"label": pa.dictionary(pa.int8(), pa.string())}), [{"label": "a"}, {"label": "b"}, None]),
    ],
    ids=str,
)
def test_strings_and_views_get_64_bit_offsets_and_keep_their_values(kind: pa.DataType, values: list[Any]) -> None:
    column = pa.chunked_array([pa.array(values[:2], kind), pa.array(values[2:], kind)])
    wide = widen(column)
    assert wide.take(pa.array([2, 0])).combine_chunks().to_pylist() == [values[2], values[0]]
    kept = re.sub("large_(string|binary)|dictionary<.*?>", "", str(wide.type))
    assert "string" not in kept and "binary" not in kept
    if values[2] is not None:
        before, after = to_numpy("x", column.chunk(0)), to_numpy("x", widen(column).chunk(0))
        assert str(before.tolist()) == str(after.tolist())


def test_a_window_with_more_than_2_to_the_31_elements_of_lists_names_the_setting(
    index: DatasetIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nulls of no type take no memory."""
    lists = pa.ListArray.from_arrays(pa.array([0, 2**30] + 6 * [2**30], pa.int32()), pa.nulls(2**30))
    monkeypatch.setattr("elastic_ddp.data.source._read_group", lambda *_: pa.table({"x": lists}))
    monkeypatch.setattr(DatasetIndex, "columns", ("x",))
    plan = replace(plan_of(index), options=DataConfig(window_row_groups=4, chunk_rows=5))
    with pytest.raises(DataError) as caught:
        next(Work(index, plan).read())
    assert (
        "cannot be joined: offset overflow while concatenating arrays. Lower data.window_row_groups (now 4), write "
        in (str(caught.value))
    )


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.binary(), pa.struct({"a": pa.int64()}), pa.decimal128(9), pa.list_(pa.string(), 3), pa.null()],
    ids=str,
)
def test_a_column_type_that_no_tensor_can_hold_raises(kind: pa.DataType) -> None:
    with pytest.raises(DataError, match=r"column 'x' holds .* data\.columns"):
        check_columns(pa.schema({"id": pa.int64(), "x": kind}))


def test_column_types_that_tensors_may_hold_are_accepted() -> None:
    numbers = [pa.bool_(), pa.uint8(), pa.int64(), pa.float16(), pa.float64()]
    lists = [pa.list_(pa.float32()), pa.large_list(pa.int8()), pa.list_(pa.list_(pa.int64(), 2), 3)]
    tensors = [pa.fixed_shape_tensor(pa.float32(), (2, 3))]
    check_columns(pa.schema([(str(number), kind) for number, kind in enumerate([*numbers, *lists, *tensors])]))
