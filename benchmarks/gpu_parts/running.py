"""A side of the benchmark in a process of its own, which takes commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import kill_all

from gpu_parts.gate import write_json
from gpu_parts.train import Side

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]


class SideFailedError(Exception):
    """A side died, or did not answer in time."""


class RunningSide:
    """A side in its process. `ask` sends it a command and returns the answer."""

    def __init__(self, side: Side) -> None:
        self.side, self._asked = side, 0
        self.label = f"{side.name}, compiled" if side.is_compiled else side.name
        Path(side.folder).mkdir(parents=True)
        write_json(Path(side.folder, "side.json"), side.to_json())
        path = os.pathsep.join(filter(None, [*FOLDERS, os.environ.get("PYTHONPATH")]))
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": "4", "OMP_NUM_THREADS": "1"}
        with Path(side.folder, "log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--side", f"{side.folder}/side.json"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **threads, "PYTHONPATH": path, "RAY_ADDRESS": "", "PYTHONUNBUFFERED": "1"},
            )

    def begin(self, do: str, **arguments: Any) -> int:
        """Sends a command. Returns its number, for `wait`."""
        self._asked += 1
        write_json(Path(self.side.folder, f"command-{self._asked - 1}.json"), {"do": do, **arguments})
        return self._asked - 1

    def wait(self, number: int, timeout_s: float) -> dict[str, Any]:
        path, deadline = Path(self.side.folder, f"answer-{number}.json"), time.monotonic() + timeout_s
        while not path.exists():
            if self._process.poll() is not None:
                raise SideFailedError(f"the {self.label} side ended:\n{self._end_of_log()}")
            if time.monotonic() > deadline:
                raise SideFailedError(
                    f"the {self.label} side gave no answer in {timeout_s:.0f} s:\n{self._end_of_log()}"
                )
            time.sleep(0.005)
        answer: dict[str, Any] = json.loads(path.read_text())
        if "error" in answer:
            raise RuntimeError(f"the {self.label} side failed:\n{answer['error']}")
        return answer

    def ask(self, do: str, *, timeout_s: float = 60.0, **arguments: Any) -> dict[str, Any]:
        return self.wait(self.begin(do, **arguments), timeout_s)

    def _end_of_log(self) -> str:
        return Path(self.side.folder, "log").read_text(errors="replace")[-3000:]

    def close(self) -> None:
        if self._process.poll() is None:
            kill_all(self._process.pid)
            self._process.wait()
