"""The programs and commands of the docs that need Ray work on a live run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"


def programs(page: str) -> dict[str, str]:
    """Returns the Python blocks of a page that have a title, by title."""
    text = (DOCS / page).read_text()
    return dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL))


def test_the_quickstart_trains_and_the_run_handle_controls_it(tmp_path: Path) -> None:
    quickstart = programs("quickstart.md")
    # The run handle's code on the page about elasticity controls a run of that name.
    controls = re.search(
        r"^```python\n(.*?)^```$", (DOCS / "guides/elasticity.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert controls is not None
    # Also with code that Ray copies to the nodes, and with an environment variable.
    settings = (
        """"demo", "runtime_env": {"working_dir": ".", "excludes": ["data", "runs"]}, "env": {"OURS": "is set"}"""
    )
    show = 'import os; from pathlib import Path; print("here:", Path("make_data.py").resolve(), os.environ["OURS"])'
    quickstart["first.py"] = (
        quickstart["first.py"]
        .replace('"first"', settings)
        .replace('"steps": 200', '"steps": 10**6')
        .replace("ed.Run) -> None:\n", f"ed.Run) -> None:\n    {show}\n")
    )
    for name, code in {**quickstart, "controls.py": controls[1]}.items():
        (tmp_path / name).write_text(code)

    call(tmp_path, "make_data.py")
    log = tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
    with log.open("w") as file:
        driver = subprocess.Popen([sys.executable, "first.py"], cwd=tmp_path, env=environment, stdout=file, stderr=file)
    try:
        wait_for_steps(tmp_path / "runs/demo", driver, log)
        address = re.search(r"\d+(\.\d+){3}:\d+", log.read_text())  # of the Ray that the driver has started
        assert address is not None, log.read_text()
        output = call(tmp_path, "controls.py", RAY_ADDRESS=address[0])
        assert re.search(r"committed step [1-9]\d*", output)
        call(tmp_path, "-m", "elastic_ddp.cli.main", "stop", "demo", RAY_ADDRESS=address[0])
        driver.wait(timeout=60)
    finally:
        driver.kill()
        driver.wait()
    assert re.search(r"^stopped \d+ None$", log.read_text(), re.MULTILINE), log.read_text()
    assert re.search(r"here: \S+/working_dir_files/\S+/make_data\.py is set$", log.read_text(), re.MULTILINE)


def wait_for_steps(run: Path, driver: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 120
    while not any("first_step" in segment.read_text() for segment in run.glob("ledger/*.jsonl")):
        assert driver.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.1)


def call(folder: Path, *words: str, **environment: str) -> str:
    """Returns what a Python program prints."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(DOCS.parent), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
