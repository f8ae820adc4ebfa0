"""Local data files: symbolic links, hidden names, and what cannot be read."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ddp.data.files import list_files, read_footer, read_row_group
from elastic_ddp.data.index import build_index
from elastic_ddp.errors import DataError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The folder `train`, with a link to a folder on another disk, a link to a file, and hidden names."""
    for name in ("train/2023/a", "train/b", "otherdisk/2024/c", "file", "train/_temporary/d", "train/.cache/e"):
        write(tmp_path / f"{name}.parquet")
    os.symlink(tmp_path / "otherdisk" / "2024", tmp_path / "train" / "2024")
    os.symlink("../../file.parquet", tmp_path / "train" / "2023" / "link.parquet")
    (tmp_path / "train" / "notes.txt").write_text("no data")
    return tmp_path / "train"


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"x": [1, 2, 3]}), path)
    return path


def forms(folder: Path) -> list[str | list[str]]:
    """The ways to name all files of a folder."""
    return [str(folder), str(folder / "**" / "*.parquet"), [str(folder / "[!n]*")], [str(folder)]]


def found(source: str | list[str]) -> list[str]:
    return sorted(file.path for file in list_files(source))


def find(folder: Path) -> list[str]:
    """The answer of `find -L`, without hidden names."""
    command = f"find -L {folder} -name [._]* -prune -o -name *.parquet -type f -print"
    return sorted(subprocess.run(command.split(), capture_output=True, text=True).stdout.split())


def message(source: str | list[str]) -> str:
    with pytest.raises(DataError) as caught:
        build_index(source)
    return str(caught.value)


def test_folder_glob_and_list_find_what_find_does_with_links_followed(data: Path) -> None:
    expected = [f"{data}/{name}.parquet" for name in ("2023/a", "2023/link", "2024/c", "b")]
    assert find(data) == expected
    for source in forms(data):
        assert found(source) == expected
        assert build_index(source).num_rows == 12
    assert found([f"{data}/b.parquet", f"{data}/20*/*"]) == sorted(expected)
    assert found(f"{data}/20*") == expected[:3], "folders"
    assert found(f"{data}/2024") == found(f"{data}/*4/*.parquet") == [f"{data}/2024/c.parquet"]


def test_loops_of_links_end(data: Path) -> None:
    expected = find(data)
    os.symlink(data, data / "2023" / "above")
    os.symlink(data.parent, data.parent / "otherdisk" / "2024" / "far-above")
    for source in forms(data):
        assert set(expected) < set(found(source))
        assert found(source) == find(data)
    os.symlink("self", data / "self")
    for source in forms(data):
        assert f"{data}/self is a symbolic link to self, which leads back to itself" in message(source)


def test_a_data_file_that_is_a_link_without_a_target_is_named(data: Path) -> None:
    name = "2023/gone.parquet"
    os.symlink("/nowhere/x", data / name)
    for source in [*forms(data), str(data / name)]:
        assert f"{data}/{name} is a symbolic link to /nowhere/x, which does not exist. Restore" in message(source)


@pytest.mark.parametrize("name", ["latest", "2023/notes.txt"])
def test_other_links_without_a_target_are_left_out_with_a_warning(
    data: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    os.symlink("/nowhere/x", data / name)
    for source in (str(data), str(data / "**" / "*.parquet"), [str(data)]):
        caplog.clear()
        assert found(source) == find(data)
        assert f"{data}/{name} is left out: it is a symbolic link to /nowhere/x" in caplog.text
    assert found(str(data / "*" / "*.parquet")) == [
        f"{data}/{path}.parquet" for path in ("2023/a", "2023/link", "2024/c")
    ]
    for named in (name, f"{name}*", f"{name}/*.parquet"):
        assert f"{data}/{name} is a symbolic link to /nowhere/x" in message(str(data / named))


def test_wildcards_match_hidden_names_only_if_the_glob_has_their_first_character(data: Path) -> None:
    assert found(f"{data}/_*/*.parquet") == [f"{data}/_temporary/d.parquet"]
    assert found(f"{data}/.cache") == found(f"{data}/.c*") == [f"{data}/.cache/e.parquet"]
    assert "contains no Parquet file" in message(f"{data}/?temporary/*.parquet")


def test_what_is_not_a_regular_file_raises(data: Path) -> None:
    os.mkfifo(data / "pipe.parquet")
    for source in forms(data):
        assert f"{data}/pipe.parquet is not a regular file" in message(source)


@pytest.fixture
def as_another_user() -> Iterator[tuple[Path, Callable[[], None]]]:
    """A folder that other users may read, and a function that gives up the rights of root, who may read everything."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    user = os.geteuid()
    yield folder, lambda: os.seteuid(65534 if user == 0 else user)
    os.seteuid(user)
    shutil.rmtree(folder)


def test_a_file_or_folder_without_permission_is_named(as_another_user: tuple[Path, Callable[[], None]]) -> None:
    folder, give_up_rights = as_another_user
    file = write(folder / "train" / "a.parquet")
    other = write(folder / "train" / "secret" / "b.parquet").parent
    size, metadata = file.stat().st_size, pq.read_metadata(file)
    other.chmod(0)
    file.chmod(0)
    give_up_rights()
    assert f"{file} cannot be read: " in message(str(file))
    for source in forms(folder / "train"):
        assert f"{other} cannot be read: Permission denied. Allow this user to read it" in message(source)
    for read in (lambda: read_footer(str(file), size), lambda: read_row_group(str(file), size, metadata, 0, ["x"])):
        with pytest.raises(DataError, match=f"{file} cannot be read: .*Permission denied"):
            read()


def test_a_file_that_vanishes_after_it_was_indexed_is_named(data: Path) -> None:
    file = build_index(str(data)).files[1]
    metadata = read_footer(file.path, file.size)
    (data.parent / "file.parquet").unlink()  # the target of a link
    with pytest.raises(DataError, match=f"{file.path} does not exist any more"):
        read_row_group(file.path, file.size, metadata, 0, ["x"])
    shutil.rmtree(data)
    data.write_text("a file instead of the folder")
    with pytest.raises(DataError, match=f"{file.path} does not exist any more"):
        read_row_group(file.path, file.size, metadata, 0, ["x"])


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    metadata = read_footer(str(path), path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[4:40] = bytes(36)
    path.write_bytes(content)
    with pytest.raises((DataError, OSError), match=f"{path}, row group 0, cannot be read"):
        read_row_group(str(path), len(content), metadata, 0, ["x"])
