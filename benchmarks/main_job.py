"""The main job as a newcomer runs it: `python benchmarks/main_job.py` times `python examples/train.py`.

The folder is empty and no option is given, so that it cuts the text, starts Ray on this machine and trains on two
workers. What counts is the time from the command to its end, and the validation loss after the last step beside that
before the first.
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
        alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        begun = time.monotonic()
        subprocess.run([sys.executable, str(SCRIPT)], cwd=folder, env=alone, check=True)
        seconds = time.monotonic() - begun
        ledger = read_ledger(Storage(str(Path(folder, "runs", "gpt"))))
    first, *_, last = [event.loss for event in ledger if event.event == "evaluation"]
    table = Table(title="python examples/train.py", box=None)
    for column in ("", "measured", "target"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("from the command to its end", f"{seconds:.0f} s", f"{TARGET_S:g} s")
    table.add_row("validation loss at the end", f"{last:.2f}", f"clearly below {first:.2f}")
    Console().print(table)
    raise SystemExit(0 if seconds <= TARGET_S and last < 0.8 * first else 1)


if __name__ == "__main__":
    main()
