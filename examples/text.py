"""Any text as Parquet: windows of bytes, cut once and kept in ./data."""

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CACHE = Path("data")
HELD_OUT_WINDOWS = 1000


def is_text(data: str | None) -> bool:
    """Whether `data` has to be turned into Parquet first: nothing given, or a local folder without Parquet files."""
    return data is None or (Path(data).is_dir() and not any(Path(data).rglob("*.parquet")))


def text_windows(folder: str | None, context: int) -> tuple[str, str]:
    """Paths of Parquet folders (training, held out) with the text below `folder`; every 20th window is held out.

    Args:
        folder: with text files; by default the source text of this Python's standard library.
        context: bytes that the model sees; a window has one more.
    """
    source = Path(folder or sysconfig.get_path("stdlib"))
    suffixes = (".py", ".txt", ".md", ".rst")
    files = sorted(f for f in source.rglob("*") if f.suffix in suffixes and "site-packages" not in f.parts)
    versions = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = hashlib.sha256(repr((versions, context)).encode()).hexdigest()[:12]
    train, held_out = (CACHE / name / "train").resolve(), (CACHE / name / "held-out").resolve()
    if not (train.exists() and held_out.exists()):
        text = np.frombuffer(b"\n\n".join(file.read_bytes() for file in files), dtype=np.uint8)
        count = len(text) // (context + 1)
        if count < 2:
            raise SystemExit(f"--data {source}: {len(text)} bytes of text ({', '.join(suffixes)}) make no two windows")
        windows = text[: count * (context + 1)].reshape(count, context + 1)
        held = np.arange(count) % 20 == min(19, count - 1)
        write_windows(windows[~held], train)
        write_windows(windows[held][:HELD_OUT_WINDOWS], held_out)
    return str(train), str(held_out)


def write_windows(windows: np.ndarray, path: Path, row_group_rows: int = 1024) -> None:
    """Writes windows of bytes, (rows, length); the folder appears when it is complete."""
    table = pa.table({"window": pa.FixedSizeListArray.from_arrays(pa.array(windows.reshape(-1)), windows.shape[1])})
    unfinished = path.with_suffix(".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, unfinished / "part-0.parquet", row_group_size=row_group_rows)
    unfinished.rename(path)
