"""The text of cluster/slurm/train.sbatch. tests/chaos/test_slurm.py runs it on Slurm."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "cluster/slurm/train.sbatch"


def test_shellcheck_accepts_the_script() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    subprocess.run([shellcheck, SCRIPT], check=True)


def test_the_job_asks_slurm_for_a_signal_before_the_end_and_for_a_requeue() -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SCRIPT.read_text(), re.MULTILINE))
    assert options["signal"].startswith("B:USR1@")
    assert options["ntasks-per-node"] == "1"
    assert "requeue" in options and "no-kill" not in options  # which would keep the job after its first node failed
    assert options["open-mode"] == "append"
