"""Micro-batches of data sets in memory, and of a `collate_fn`, as the worker gets them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from elastic_ddp.data.index import build_index
from elastic_ddp.data.micro_batches import map_tensors
from elastic_ddp.data.order import scatter
from elastic_ddp.data.packing import dump, load
from elastic_ddp.errors import DataError
from tests.unit.data.in_memory import MICRO_BATCH_SIZE, NUM_MICRO_BATCHES, Noisy, pad, plain, read, values_of


@given(st.integers(1, 300), st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_the_rows_of_an_epoch_are_a_permutation(length: int, seed: int, epoch: int) -> None:
    key = (seed, 3, epoch, 0, 0)
    order = scatter(np.arange(length), length, key)
    assert sorted(order.tolist()) == list(range(length))
    assert scatter(np.array([length - 1]), length, key) == order[-1]


def test_every_permutation_is_about_equally_likely() -> None:
    orders = [tuple(scatter(np.arange(4), 4, (0, 3, epoch, 0, 0)).tolist()) for epoch in range(1200)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert ((counts - 50) ** 2 / 50).sum() < 49.7  # chi-squared, 23 degrees of freedom, p = 0.001


def test_a_sorted_data_set_in_memory_is_fully_shuffled() -> None:
    labels = scatter(np.arange(100_000), 100_000, (0, 3, 0, 0, 0)) * 10 // 100_000
    counts = np.stack([(labels.reshape(-1, 100) == label).sum(1) for label in range(10)])
    assert counts.var() == pytest.approx(100 * 0.1 * 0.9, rel=0.1)


@pytest.mark.parametrize("collate_fn", [None, pad])
def test_micro_batches_in_memory_do_not_depend_on_workers_or_processes(collate_fn: Any) -> None:
    data: Any = Noisy()
    if collate_fn is None:
        data = [{"id": row, "x": np.float32(row)} for row in range(41)]
    expected = values_of(read(data, collate_fn=collate_fn))
    for epoch in range(2):
        rows = [row for (step, _), (row_ids, _) in expected.items() if step // 4 == epoch for row in row_ids]
        assert sorted(rows) == list(range(41))
    for processes in (2, 3):
        assert values_of(read(data, collate_fn=collate_fn, processes=processes)) == expected
    parts = [read(data, collate_fn=collate_fn, micro_batches=owned) for owned in ([2, 0], [1], [3])]
    assert {key: values for part in parts for key, values in values_of(part).items()} == expected
    late = values_of(read(data, collate_fn=collate_fn, first_step=3, last_step=6, processes=2))
    assert late == {key: values for key, values in expected.items() if 3 <= key[0] < 6}


def test_each_row_is_collated_with_its_own_values_and_other_random_numbers_in_each_micro_batch() -> None:
    batches = [batch for batch in read(Noisy(), collate_fn=pad).values() if batch.num_rows]
    for batch in batches:
        assert batch.rows["id"].tolist() == batch.row_ids.tolist()
        assert batch.rows["names"] == [f"row {row}" for row in batch.row_ids]
        assert batch.rows["tokens"].shape == (batch.num_rows, max(row % 5 + 1 for row in batch.row_ids))
    noise = [tuple(batch.rows["noise"].flatten().tolist()) for batch in batches]
    assert len(set(noise)) == len(noise)


def test_an_empty_micro_batch_is_a_collated_batch_of_full_size() -> None:
    batches = read(Noisy(13), collate_fn=pad)
    assert [batches[1, number].num_rows for number in range(NUM_MICRO_BATCHES)] == [1, 0, 0, 0]
    assert [len(batches[1, number].rows["id"]) for number in range(NUM_MICRO_BATCHES)] == [1, *[MICRO_BATCH_SIZE] * 3]


def test_without_shuffle_a_lane_has_its_part_of_the_rows_in_order() -> None:
    batches = read([{"id": row} for row in range(24)], shuffle=False)
    assert [batches[step, 1].row_ids.tolist() for step in range(2)] == [[6, 7, 8], [9, 10, 11]]


class Pair(NamedTuple):
    x: torch.Tensor
    label: int


@pytest.mark.parametrize(
    "rows",
    [
        [(torch.full((2,), float(row)), row) for row in range(24)],
        [Pair(torch.full((2,), float(row)), row) for row in range(24)],
        [{"a": {"b": [row, torch.tensor(row)]}, "text": str(row)} for row in range(24)],
        list(range(24)),
        torch.arange(48.0).reshape(24, 2),
        np.arange(48).reshape(24, 2),
        TensorDataset(torch.arange(24), torch.arange(24.0)),
        Subset(TensorDataset(torch.arange(48)), list(range(0, 48, 2))),
    ],
    ids=["tuples", "named-tuples", "nested", "numbers", "tensor", "array", "tensor-data-set", "subset"],
)
def test_rows_are_collated_as_by_a_data_loader(rows: Any) -> None:
    for batch in read(rows, last_step=2).values():
        expected = default_collate([rows[row] for row in batch.row_ids])
        assert type(batch.rows) is type(expected) and plain(batch.rows) == plain(expected)


COLUMNS = {"id": np.arange(41), "x": np.arange(82, dtype=np.float32).reshape(41, 2)}
TABLE = pa.table({"id": COLUMNS["id"], "x": [list(row) for row in COLUMNS["x"]]})


@pytest.mark.parametrize(
    "data",
    [COLUMNS, {name: torch.from_numpy(values) for name, values in COLUMNS.items()}, TABLE, TABLE.to_pandas()],
    ids=["arrays", "tensors", "arrow", "pandas"],
)
def test_columns_in_memory_become_tensors(data: Any) -> None:
    for batch in read(data, processes=2).values():
        if batch.num_rows:
            assert batch.rows["id"].tolist() == batch.row_ids.tolist()
            assert batch.rows["x"].tolist() == COLUMNS["x"][batch.row_ids].tolist()
            batch.rows["x"].zero_()


def test_columns_in_memory_are_transformed_and_collated() -> None:
    def double(rows: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"id": rows["id"], "y": 2 * rows["x"] + rng.random()}

    batches = read(COLUMNS, transform=double)
    assert batches[0, 0].rows.keys() == {"id", "y"} and len(batches[0, 0].rows["y"]) == MICRO_BATCH_SIZE
    rows = read(COLUMNS, transform=double, collate_fn=lambda rows: rows)
    assert [row["y"].tolist() for row in rows[0, 0].rows] == batches[0, 0].rows["y"].tolist()
    tensors = {name: torch.from_numpy(values) for name, values in COLUMNS.items()}
    assert isinstance(read(tensors, collate_fn=lambda rows: rows)[0, 0].rows[0]["x"], torch.Tensor)


def test_parquet_with_ragged_columns_and_strings_is_collated(tmp_path: Path) -> None:
    ragged = pa.array([list(range(row % 4)) for row in range(41)])
    table = pa.table({"id": np.arange(41), "tokens": ragged, "text": [f"row {row}" for row in range(41)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    index = build_index(str(tmp_path))

    def collate(rows: list[dict[str, Any]]) -> Any:
        return [(int(row["id"]), row["tokens"].tolist(), row["text"], torch.rand(()).item()) for row in rows]

    options = {"window_row_groups": 2, "chunk_rows": 4}
    expected = read(index, collate_fn=collate, **options)
    seen = [row for key, batch in expected.items() if key[0] < 4 for row in batch.row_ids]
    assert sorted(seen) == list(range(41))
    for batch in expected.values():
        assert [row[0] for row in batch.rows][: batch.num_rows] == batch.row_ids.tolist()
        assert all(row[1:3] == (list(range(row[0] % 4)), f"row {row[0]}") for row in batch.rows)
    parts = [read(index, collate_fn=collate, micro_batches=owned, **options) for owned in ([2, 0], [1, 3])]
    assert {key: value for part in parts for key, value in values_of(part).items()} == values_of(expected)


def message(data: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(data, **options)
    return str(caught.value)


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> int:
        if row == 5:
            raise KeyError("label")
        return row


class FailingAtOnce(Failing):
    def __getitems__(self, rows: list[int]) -> list[int]:
        return [self[row] for row in rows]


class Dropping(TensorDataset):
    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows if row != 5]


def fail_at_4(rows: Any, rng: np.random.Generator) -> Any:
    if 4 in rows["x"]:
        raise KeyError("label")
    return rows


def test_errors_name_the_rows_the_micro_batch_and_the_exception() -> None:
    text = message(Failing(), shuffle=False)
    assert "data[5] raised KeyError('label') in micro-batch 0 of step 1, rows 3, 4, 5:" in text
    assert 'raise KeyError("label")' in text
    assert "data.__getitems__([3, 4, 5]) raised KeyError('label')" in message(FailingAtOnce(), shuffle=False)

    def fail(rows: list[Any]) -> Any:
        raise ValueError(len(rows))

    text = message(Noisy(), collate_fn=fail, shuffle=False)
    assert "collate_fn raised ValueError(3) in micro-batch 0 of step 0, rows 0, 1, 2:" in text and "in fail" in text
    text = message({"x": np.zeros(24)}, collate_fn=fail, shuffle=False)
    assert "collate_fn raised ValueError(3)" in text
    assert text.endswith("\nMicro-batch 0 of step 0 has rows 0, 1, 2 of the data set.")
    assert "collate_fn returned None" in message(Noisy(), collate_fn=lambda rows: None)
    text = message(Noisy(), collate_fn=lambda rows: {"lock": threading.Lock()}, shuffle=False)
    assert "micro-batch 0 of step 0 cannot be sent" in text and "lock" in text and "collate_fn" in text
    text = message([torch.zeros(row + 1) for row in range(24)], shuffle=False)
    assert "default_collate" in text and "equal shapes" in text and "pass a collate_fn" in text
    text = message([{"a": 1, "b": 2}, {"a": 1}] * 12, shuffle=False)
    assert "one has the keys ['a', 'b']" in text and "['a']" in text
    text = message([{"a": 1}, {"a": 1, "b": 2}] * 12, shuffle=False)
    assert "['a', 'b']" in text
    text = message({"x": np.arange(24)}, transform=fail_at_4, shuffle=False)
    assert "the transform raised KeyError('label')" in text
    assert text.endswith("\nMicro-batch 0 of step 1 has rows 3, 4, 5 of the data set.")
    text = message(Dropping(torch.arange(24)), shuffle=False)
    assert "__getitems__ returned 2 rows for 3 row numbers in micro-batch 0 of step 1" in text


def test_pickled_objects_keep_values_dtypes_and_shapes(tmp_path: Path) -> None:
    whole = np.memmap(tmp_path / "tokens", np.int32, "w+", shape=(20,))
    whole[:] = np.arange(20)
    values = {
        "bf16": torch.randn(3, 4).bfloat16(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5),
        "transposed": torch.randn(3, 5).t(),
        "sparse": torch.eye(3).to_sparse(),
        "objects": [Pair(torch.arange(2), 1), "text", None],
        "mapped": whole[4:10],
    }
    copies = load(dump(values))
    assert repr(copies) == repr(values)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    assert [part.tolist() for part in load(dump(nested)).unbind()] == [[1, 1], [0, 0, 0]]
    quantized = torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.1, 5, torch.quint8)
    assert load(dump(quantized)).dequantize().tolist() == quantized.dequantize().tolist()
    assert isinstance(copies["mapped"], np.memmap)
    assert sum(map(len, dump(values["mapped"]))) < 300  # the file is opened again


class Movable:
    def __init__(self) -> None:
        self.device: Any = None

    def to(self, device: Any) -> Movable:
        self.device = device
        return self


def test_tensors_of_every_container_are_moved() -> None:
    batch = {"a": [torch.ones(1), (torch.ones(1), "b")], "c": Pair(torch.ones(1), 2), "d": Movable(), "e": np.ones(1)}
    moved = map_tensors(lambda tensor: tensor + 1, batch, lambda value: value.to("there"))
    assert moved["a"][0] == 2 and moved["a"][1][0] == 2 and moved["a"][1][1] == "b"
    assert moved["c"].x == 2 and type(moved["c"]) is Pair
    assert moved["d"].device == "there" and moved["e"] is batch["e"]
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    assert map_tensors(lambda tensor: tensor + 1, packed) is packed


class OnOneNode:
    """Stands for a data set of which a node lacks a file or a module."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> int:
        return row

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise state["error"]("what it needs")


@pytest.mark.parametrize("error", [ModuleNotFoundError, FileNotFoundError])
def test_a_data_set_that_a_node_cannot_load_is_an_error_with_the_fix(error: type[Exception]) -> None:
    with pytest.raises(DataError, match=rf"data cannot be loaded .*{error.__name__}.*what it needs.*node"):
        read(OnOneNode(error))
