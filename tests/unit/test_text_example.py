"""The text of `examples/train.py`, which is stored where all nodes can read it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from elastic_ddp.data.files import list_files, read_footer

_spec = importlib.util.spec_from_file_location("text", Path(__file__).parents[2] / "examples/text.py")
assert _spec is not None and _spec.loader is not None
text: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(text)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a line of text\n" * 200)
    return str(tmp_path / "texts")


def test_the_text_is_written_once_into_the_storage_of_the_runs(folder: str, tmp_path: Path) -> None:
    train, held_out = text.text_windows(folder, 31, str(tmp_path / "runs"))
    before = list_files([train, held_out])
    assert [file.path for file in before] == [f"{train}/part-0.parquet", f"{held_out}/part-0.parquet"]
    windows = pq.read_table(train)["window"].to_pylist()
    assert bytes(windows[0]) == (b"a line of text\n" * 3)[:32] and len(windows) == 89
    os.utime(f"{folder}/a.txt", (0, 0))  # as after a new installation of Python
    assert text.text_windows(folder, 31, str(tmp_path / "runs")) == (train, held_out)
    assert list_files([train, held_out]) == before, "a run resumes with the same files"
    assert not list(tmp_path.rglob("runs/**/.*")), "no unfinished file is left"


def test_the_text_can_be_stored_in_a_bucket(folder: str) -> None:
    train, _ = text.text_windows(folder, 31, "memory://bucket/runs/")
    assert train.startswith("memory://bucket/runs/text/")
    (file,) = list_files(train)
    assert read_footer(file.path, file.size).num_rows == 89


def test_a_text_of_less_than_two_windows_is_refused(folder: str, tmp_path: Path) -> None:
    (Path(folder) / "a.txt").write_text("short")
    with pytest.raises(SystemExit, match="less than two windows"):
        text.text_windows(folder, 31, str(tmp_path))
