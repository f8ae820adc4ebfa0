"""Measures `python examples/train.py` in an empty folder: `python benchmarks/main_job.py`.

The job converts its text, starts Ray on this machine and trains on two workers. The benchmark reports the time from
start to end, and the validation loss after the last step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger

TARGET_S = 180.0
SCRIPT = Path(__file__).parents[1] / "examples" / "train.py"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        started_at = time.monotonic()
        subprocess.run([sys.executable, str(SCRIPT)], cwd=folder, env=environment, check=True)
        seconds = time.monotonic() - started_at
        ledger = read_ledger(Storage(str(Path(folder, "runs", "gpt"))))
    first, *_, last = [event.value for event in ledger if event.event == "evaluation_finished"]
    table = Table(title="python examples/train.py", box=None)
    for column in ("", "measured", "target"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("time from start to end", f"{seconds:.0f} s", f"{TARGET_S:g} s")
    table.add_row("validation loss at the end", f"{last:.2f}", f"below {0.8 * first:.2f}, from {first:.2f}")
    Console().print(table)
    raise SystemExit(0 if seconds <= TARGET_S and last < 0.8 * first else 1)


if __name__ == "__main__":
    main()
