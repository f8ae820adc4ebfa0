"""Converts text files to Parquet files of byte windows, in the folder of the runs, so that all nodes can read them."""

import hashlib
import sysconfig
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HELD_OUT_WINDOWS = 500


def is_text(data: str | None) -> bool:
    """Returns whether `data` must be converted first: it is None, or a local folder without Parquet files."""
    return data is None or (Path(data).is_dir() and not any(Path(data).rglob("*.parquet")))


def text_windows(folder: str | None, context: int, storage: str) -> tuple[str, str]:
    """Returns two folders of Parquet files, for training and for evaluation. Every 20th window is held out.

    Args:
        folder: folder of text files; by default the source code of Python's standard library.
        context: context length in bytes; a window has one byte more.
        storage: a path or URI. The files are written below it once, into a folder named after their content.
    """
    source = Path(folder or sysconfig.get_path("stdlib"))
    suffixes = (".py", ".txt", ".md", ".rst")
    files = sorted(f for f in source.rglob("*") if f.suffix in suffixes and "site-packages" not in f.parts)
    text = b"\n\n".join(file.read_bytes() for file in files)
    count = len(text) // (context + 1)
    if count < 2:
        raise SystemExit(
            f"--data {source}: {len(text)} bytes of text ({', '.join(suffixes)}) are less than two windows."
        )
    windows = np.frombuffer(text, dtype=np.uint8)[: count * (context + 1)].reshape(count, context + 1)
    held = np.arange(count) % 20 == min(19, count - 1)
    name = hashlib.sha256(repr((context, HELD_OUT_WINDOWS)).encode() + text).hexdigest()[:12]
    parts = {"train": windows[~held], "held-out": windows[held][:HELD_OUT_WINDOWS]}
    folders = {part: f"{storage.rstrip('/')}/text/{name}/{part}" for part in parts}
    for part, rows in parts.items():
        write_windows(rows, folders[part])
    return folders["train"], folders["held-out"]


def write_windows(windows: np.ndarray, folder: str | Path, row_group_rows: int = 1024) -> None:
    """Writes windows of bytes, of shape (rows, length), into a folder or URI, unless it has them already."""
    fs, path = fsspec.url_to_fs(f"{folder}/part-0.parquet")
    if fs.exists(path):
        return
    table = pa.table({"window": pa.FixedSizeListArray.from_arrays(pa.array(windows.reshape(-1)), windows.shape[1])})
    content = pa.BufferOutputStream()
    pq.write_table(table, content, row_group_size=row_group_rows)
    if "://" in str(folder):
        fs.pipe_file(path, content.getvalue().to_pybytes())
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(path).with_name(f".{uuid.uuid4().hex}")
    unfinished.write_bytes(content.getvalue())
    unfinished.rename(path)  # atomic: the file is complete when it appears
