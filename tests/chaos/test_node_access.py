"""The main job on a cluster whose hosts do not share every folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.hosts import ADDRESSES, Hosts, can_be_made, two_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chaos,
    pytest.mark.skipif(not can_be_made(), reason="network namespaces need root, and iproute2"),
]


def train(hosts: Hosts, storage: str, *options: str) -> tuple[int, str]:
    """Runs the main job on two workers of one CPU, one on each host. Returns its exit code and output."""
    command = [sys.executable, "examples/train.py", "--steps", "4", "--workers", "2", "--storage", storage, *options]
    driver = hosts.start(0, *command, stdout=subprocess.PIPE)
    output, _ = driver.communicate(timeout=240)
    return driver.returncode, output


def test_the_main_job_names_the_host_that_lacks_its_files_and_trains_with_a_shared_folder(
    tmp_path: Path, folder: Path
) -> None:
    with two_hosts() as hosts:
        own = hosts._folder  # each host has its own at that path
        code, output = train(hosts, f"{own}/runs")
        assert code == 1, output
        assert f"error: node {ADDRESSES[1]} does not see storage='{own}/runs/gpt'" in output
        assert "use a folder that they share, or a bucket" in output and "Traceback" not in output

        (Path(own) / "rows").mkdir()
        (Path(own) / "rows/part-0.parquet").write_bytes((folder / "data/part-0.parquet").read_bytes())
        code, output = train(hosts, str(tmp_path / "runs"), "--data", f"{own}/rows", "--name", "rows")
        assert code == 1, output
        assert f"error: node {ADDRESSES[1]} cannot read {own}/rows/part-0.parquet: " in output

        code, output = train(hosts, str(tmp_path / "runs"))
        assert code == 0, output
        assert "gpt finished after 4 steps; weights " in output
