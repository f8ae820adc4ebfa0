"""The index of a data set: listing, errors, and how changes are noticed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ddp.data.files import check_version, list_files, read_footer, read_row_group
from elastic_ddp.data.index import build_index, open_index
from elastic_ddp.errors import DataError


class FakeStorage(dict[str, bytes]):
    def read(self, key: str) -> bytes:
        if key not in self:
            raise FileNotFoundError(key)
        return self[key]

    def create(self, key: str, data: bytes) -> None:
        if key in self:
            raise FileExistsError(key)
        self[key] = data


def table(rows: int = 10, start: int = 0) -> pa.Table:
    return pa.table({"id": np.arange(start, start + rows), "text": [f"row {row}" for row in range(rows)]})


def write(path: Path, content: pa.Table | None = None, row_group_size: int = 4) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table() if content is None else content, path, row_group_size=row_group_size)
    return path


def message(call: object, *arguments: object, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        call(*arguments, **options)  # type: ignore[operator]
    return str(caught.value)


def test_row_groups_are_numbered_in_stored_order(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet")
    write(tmp_path / "a.parquet", table(5))
    index = build_index(str(tmp_path))
    assert [Path(file.path).name for file in index.files] == ["a.parquet", "b.parquet"]
    assert index.group_file.tolist() == [0, 0, 1, 1, 1]
    assert index.group_number.tolist() == [0, 1, 0, 1, 2]
    assert index.group_rows.tolist() == [4, 1, 4, 4, 2]
    assert index.first_row_ids.tolist() == [0, 4, 5, 9, 13]
    assert index.num_rows == 15
    assert index.columns == ("id", "text")


def test_a_source_can_be_a_file_a_glob_or_a_list(tmp_path: Path) -> None:
    for name in ("train-1.parquet", "train-2.parquet", "test-1.parquet"):
        write(tmp_path / name)

    def names(source: str | list[str]) -> list[str]:
        return [Path(file.path).name for file in list_files(source)]

    assert names(str(tmp_path / "test-1.parquet")) == ["test-1.parquet"]
    assert names(str(tmp_path / "train-*")) == ["train-1.parquet", "train-2.parquet"]
    in_order = [str(tmp_path / "train-2.parquet"), str(tmp_path / "test-*.parquet")]
    assert names(in_order) == ["train-2.parquet", "test-1.parquet"]


@pytest.mark.parametrize(
    ("table", "columns"),
    [
        (pa.table({name: np.arange(2000) * seed for seed, name in enumerate("abcdefgh")}), ["g", "b"]),
        (pa.table({"s": [{"x": 1, "y": [1, 2]}, {"x": 2, "y": []}], "z": [1, 2]}), ["s"]),
    ],
    ids=["wide", "nested"],
)
def test_only_the_selected_columns_of_a_row_group_are_read(tmp_path: Path, table: pa.Table, columns: list[str]) -> None:
    path = write(tmp_path / "a.parquet", table, row_group_size=2000)
    size = path.stat().st_size
    assert read_row_group(str(path), size, read_footer(str(path), size), 0, columns).equals(table.select(columns))


def test_a_source_without_parquet_files_or_rows_raises(tmp_path: Path) -> None:
    assert f"{tmp_path}/nothing.parquet'" in message(build_index, str(tmp_path / "nothing.parquet"))
    (tmp_path / "data.csv").write_text("1,2")
    assert ".parquet" in message(build_index, str(tmp_path))
    assert "data=[]" in message(build_index, [])
    write(tmp_path / "a.parquet", table(0))
    assert "has 1 Parquet files but no rows" in message(build_index, str(tmp_path))


@pytest.mark.parametrize("texts", [["a good film", "a bad film"], ("a good film",), ["what? *"], ["", "b"], ["a\0b"]])
def test_a_list_of_texts_is_an_error_that_shows_how_to_pass_texts(texts: Sequence[str]) -> None:
    told = message(build_index, texts)
    assert told.startswith("data is a list of strings, which is a list of paths") and 'data={"text": texts}' in told
    assert f"data={texts[0]!r}" in told or f"data={texts!r} names no data" in told


def test_only_a_list_without_any_data_may_be_a_list_of_texts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"x": [1]}))
    missing = tmp_path / "missing.parquet"
    for paths in (str(missing), missing, [missing], (missing,), [str(path), str(missing)]):
        assert message(build_index, paths).startswith(f"data={str(missing)!r} does not exist")
    assert build_index([path]).num_rows == build_index((path,)).num_rows == 1


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no Parquet at all")
    text = message(build_index, str(tmp_path))
    assert text.startswith(f"{tmp_path / 'a.parquet'} (17 bytes) cannot be read as Parquet")


def test_options_in_a_pyarrow_uri_raise_an_error_that_names_the_variable() -> None:
    with pytest.raises(DataError, match=r"endpoint_override.*AWS_ENDPOINT_URL"):
        list_files("s3://bucket/train?endpoint_override=localhost%3A9000&scheme=http")
    with pytest.raises(DataError, match="no Parquet file"):
        list_files("memory://bucket/part-?.parquet/x")


def test_a_storage_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_nothing(*_: object, **__: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.isdir", list_nothing)
    with pytest.raises(DataError, match=r"data='memory://data'.*refused; check the address"):
        list_files("memory://data")


def test_a_file_that_is_named_twice_raises(tmp_path: Path) -> None:
    """An epoch would use its rows twice, under different ids."""
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "a.parquet")
    file = str(tmp_path / "a.parquet")
    for source in ([file, file], [str(tmp_path), file], [str(tmp_path / "*.parquet"), str(tmp_path)]):
        with pytest.raises(DataError) as caught:
            build_index(source)
        assert f"{file} twice, in {source[0]!r} and in {source[1]!r}" in str(caught.value)


def test_different_schemas_raise_an_error_that_names_file_and_columns(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", pa.table({"id": ["x"], "label": [1]}))
    text = message(build_index, str(tmp_path))
    assert text.startswith(f"{tmp_path / 'b.parquet'} does not have the schema of {tmp_path / 'a.parquet'}")
    assert "column 'id' is string instead of int64" in text
    assert "column 'text' (string) is missing" in text
    assert "column 'label' is extra" in text
    assert "data.columns" in text


def test_columns_that_all_files_share_can_be_selected_in_any_order(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", pa.table({"more": [1.0], "text": ["x"], "id": [1]}))
    assert build_index(str(tmp_path), columns=["text", "id"]).columns == ("text", "id")
    text = message(build_index, str(tmp_path), columns=["id", "lable"])
    assert "data.columns names 'lable'" in text and "Choose from id, text" in text


def test_the_index_is_stored_and_reused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    storage = FakeStorage()
    first = open_index(str(tmp_path), storage, columns=["text"])
    stored = dict(storage)
    again = open_index(str(tmp_path), storage, columns=["text"])
    assert (again.files, again.schema, again.fingerprint) == (first.files, first.schema, first.fingerprint)
    for field in ("group_file", "group_number", "group_rows"):
        assert np.array_equal(getattr(again, field), getattr(first, field))
    assert storage == stored and all(key.startswith("data/index-") for key in storage)


def test_a_second_driver_uses_the_index_of_the_first(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    storage = FakeStorage()
    expected = open_index(str(tmp_path), storage)

    class Late(FakeStorage):
        """Has no index at the first read, and one at the write."""

        reads = 0

        def read(self, key: str) -> bytes:
            self.reads += 1
            if self.reads == 1:
                raise FileNotFoundError(key)
            return super().read(key)

    assert open_index(str(tmp_path), Late(storage)).fingerprint == expected.fingerprint


def test_a_changed_data_set_raises_an_error_that_names_the_files(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path / f"{name}.parquet")
    storage = FakeStorage()
    open_index(str(tmp_path), storage)
    write(tmp_path / "a.parquet", table(11))
    (tmp_path / "b.parquet").unlink()
    write(tmp_path / "d.parquet")
    text = message(open_index, str(tmp_path), storage)
    assert f"{tmp_path / 'b.parquet'} is missing" in text
    assert f"{tmp_path / 'd.parquet'} is new" in text
    assert f"{tmp_path / 'a.parquet'} changed (size " in text
    assert "another run name" in text


def test_a_replaced_file_of_the_same_size_is_noticed_when_it_is_listed_and_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    storage = FakeStorage()
    (file,) = open_index(str(path), storage).files
    check_version(file.path, file.size, file.version)
    check_version(file.path, file.size, "ETag=known only for a single file")
    os.utime(path, ns=(1, 1))
    assert f"changed (version {file.version} -> mtime_ns=1)" in message(open_index, str(path), storage)
    assert f"{path} changed since it was indexed" in message(check_version, file.path, file.size, file.version)
    os.unlink(path)
    assert "does not exist any more" in message(check_version, file.path, file.size, file.version)


def test_s3_files_are_indexed_and_their_etags_compared(s3: str) -> None:
    import s3fs

    fs = s3fs.S3FileSystem()
    for name in ("b", "a"):
        with fs.open(f"{s3}/train/{name}.parquet", "wb") as file:
            pq.write_table(table(), file, row_group_size=4)
    storage = FakeStorage()
    index = open_index(f"{s3}/train/", storage)
    assert [file.path for file in index.files] == [f"{s3}/train/a.parquet", f"{s3}/train/b.parquet"]
    assert all(file.version.startswith("ETag=") for file in index.files)
    metadata = read_footer(index.files[1].path, index.files[1].size)
    rows = read_row_group(index.files[1].path, index.files[1].size, metadata, 2, ["text"])
    assert rows["text"].to_pylist() == ["row 8", "row 9"]
    assert open_index(f"{s3}/train/", storage).fingerprint == index.fingerprint
    with fs.open(f"{s3}/train/a.parquet", "wb") as file:  # other rows, the same size
        pq.write_table(table(start=1), file, row_group_size=4)
    assert f"{s3}/train/a.parquet changed" in message(open_index, f"{s3}/train/", storage)


def test_duplicate_column_names_raise(tmp_path: Path) -> None:
    columns = [pa.array([1, 2]), pa.array([3, 4])]
    write(tmp_path / "a.parquet", pa.Table.from_arrays(columns, names=["x", "x"]))
    assert "has more than one column named 'x'" in message(build_index, str(tmp_path))
