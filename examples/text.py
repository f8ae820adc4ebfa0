"""Converts text files to Parquet files of byte windows, cached in ./data."""

import errno
import hashlib
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CACHE = Path("data")
HELD_OUT_WINDOWS = 500


def is_text(data: str | None) -> bool:
    """Returns whether `data` must be converted first: it is None, or a local folder without Parquet files."""
    return data is None or (Path(data).is_dir() and not any(Path(data).rglob("*.parquet")))


def text_windows(folder: str | None, context: int) -> tuple[str, str]:
    """Returns two folders of Parquet files, for training and for evaluation. Every 20th window is held out.

    Args:
        folder: folder of text files; by default the source code of Python's standard library.
        context: context length in bytes; a window has one byte more.
    """
    source = Path(folder or sysconfig.get_path("stdlib"))
    suffixes = (".py", ".txt", ".md", ".rst")
    files = sorted(f for f in source.rglob("*") if f.suffix in suffixes and "site-packages" not in f.parts)
    versions = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = hashlib.sha256(repr((versions, context, HELD_OUT_WINDOWS)).encode()).hexdigest()[:12]
    windows_folder = (CACHE / name).resolve()
    if not windows_folder.exists():
        text = np.frombuffer(b"\n\n".join(file.read_bytes() for file in files), dtype=np.uint8)
        count = len(text) // (context + 1)
        if count < 2:
            raise SystemExit(
                f"--data {source}: {len(text)} bytes of text ({', '.join(suffixes)}) are less than two windows."
            )
        windows = text[: count * (context + 1)].reshape(count, context + 1)
        held = np.arange(count) % 20 == min(19, count - 1)
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=".unfinished-") as unfinished:
            write_windows(windows[~held], Path(unfinished, name, "train"))
            write_windows(windows[held][:HELD_OUT_WINDOWS], Path(unfinished, name, "held-out"))
            try:
                Path(unfinished, name).rename(windows_folder)  # atomic: the folder is complete when it appears
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another process was faster
                    raise
    return str(windows_folder / "train"), str(windows_folder / "held-out")


def write_windows(windows: np.ndarray, folder: Path, row_group_rows: int = 1024) -> None:
    """Writes windows of bytes, of shape (rows, length)."""
    table = pa.table({"window": pa.FixedSizeListArray.from_arrays(pa.array(windows.reshape(-1)), windows.shape[1])})
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "part-0.parquet", row_group_size=row_group_rows)
