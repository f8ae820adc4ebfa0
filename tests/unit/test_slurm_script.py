"""cluster/slurm/train.sbatch between fakes of `srun`, `scontrol`, `ray` and the driver, which note their calls."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from ray.scripts.scripts import start as start_command

Start = Callable[..., "subprocess.Popen[bytes]"]
SCRIPT = Path(__file__).parents[2] / "cluster/slurm/train.sbatch"

FAKES = {
    # One process per node, as with --ntasks-per-node=1; SIGTERM ends all of them.
    "srun": r"""
        trap 'kill $(jobs -p) 2>/dev/null; exit 143' TERM
        while [[ $1 == --* ]]; do shift; done
        for node in 0 1 2; do SLURM_NODEID=$node "$@" & done
        wait""",
    "ray": r"""
        echo "$SLURM_NODEID $RAY_AUTH_MODE $(cat "$RAY_AUTH_TOKEN_PATH") $*" >>"$CALLS/ray"
        case "$1 $2" in
            "start --head") touch "$CALLS/head" ;;
            "health-check "*) exec test -e "$CALLS/head" ;;
            *) if [ "$SLURM_NODEID" = 2 ] && mkdir "$CALLS/node-2-failed" 2>/dev/null; then exit 1; fi ;;
        esac
        exec sleep 60""",
    "scontrol": r"""echo "$*" >>"$CALLS/scontrol" """,
    "python": r"""
        case "$*" in
            *token_hex*) echo secret ;;
            *get_node_ip*) echo 198.51.100.1 ;;
            *)
                trap 'touch "$CALLS/committed"; kill $!; exit 0' TERM
                sleep 60 &
                echo "$RAY_ADDRESS $*" >"$CALLS/driver.tmp" && mv "$CALLS/driver.tmp" "$CALLS/driver"
                case "$*" in *fails.py*) kill $!; exit 7 ;; *finishes.py*) kill $!; exit 0 ;; esac
                wait ;;
        esac""",
    "sleep": r"""if [ "$1" = 60 ]; then exec SLEEP 60; fi; exec SLEEP 0.05""",
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the batch script with a driver's arguments; whatever it leaves is killed after the test."""
    programs, jobs = tmp_path / ".venv/bin", []
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    for name, body in FAKES.items():
        code = body.replace("SLEEP", str(shutil.which("sleep")))
        (programs / name).write_text(f"#!/usr/bin/env bash\n{code}\n")
        (programs / name).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "17", "SLURM_CPUS_ON_NODE": "8"}

    def start_job(*arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **slurm, "CALLS": str(tmp_path)}
        environment.pop("VENV", None)  # make passes its own to the tests
        job = subprocess.Popen(["bash", str(SCRIPT), *arguments], env=environment, start_new_session=True)
        jobs.append(job)
        return job

    yield start_job
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def wait_for(path: Path, *texts: str) -> str:
    deadline = time.monotonic() + 30
    while not (path.exists() and all(text in path.read_text() for text in texts)):
        assert time.monotonic() < deadline, f"{path.name} lacks {texts}"
        time.sleep(0.01)
    return path.read_text()


def test_shellcheck_accepts_the_script() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    subprocess.run([shellcheck, SCRIPT], check=True)


def test_the_job_asks_slurm_for_a_signal_before_the_end_and_for_a_requeue() -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SCRIPT.read_text(), re.MULTILINE))
    assert options["signal"].startswith("B:USR1@")
    assert options["ntasks-per-node"] == "1"
    assert "requeue" in options and "no-kill" not in options  # which would keep the job after its first node failed
    assert options["open-mode"] == "append"


def test_the_head_is_on_the_first_node_and_the_others_join_it(start: Start, tmp_path: Path) -> None:
    job = start("train.py", "--name", "a b")
    assert wait_for(tmp_path / "driver") == "198.51.100.1:6379 train.py --name a b\n"
    joins = [f"{node} token secret start --address=198.51.100.1:6379 --num-cpus=8 --block" for node in (1, 2)]
    calls = wait_for(tmp_path / "ray", *joins).splitlines()
    [head] = [call for call in calls if "--head" in call]
    assert head.startswith("0 token secret start --head --port=6379 --node-ip-address=198.51.100.1 ")
    assert head.endswith("--block")
    for call in (head, *joins):  # raises if `ray start` lacks an option
        start_command.make_context("start", call.partition(" start ")[2].split())
    assert job.poll() is None


def test_the_token_is_in_a_file_of_this_user_alone_while_the_job_runs(start: Start, tmp_path: Path) -> None:
    job = start("train.py")
    wait_for(tmp_path / "driver")
    guide = (SCRIPT.parents[2] / "docs/guides/slurm.md").read_text()
    [name] = re.findall(r"RAY_AUTH_TOKEN_PATH=\$PWD/(\S+)", guide)
    token = tmp_path / name.replace("JOB", "17")
    assert token.read_text() == "secret\n" and token.stat().st_mode & 0o777 == 0o600
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 0
    assert not token.exists()


def test_a_node_whose_ray_ended_joins_again(start: Start, tmp_path: Path) -> None:
    start("train.py")
    join = "2 token secret start --address=198.51.100.1:6379"
    deadline = time.monotonic() + 30
    while wait_for(tmp_path / "ray", join).count(join) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_before_the_time_limit_the_run_commits_and_the_job_is_requeued(start: Start, tmp_path: Path) -> None:
    job = start("train.py")
    wait_for(tmp_path / "driver")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 0
    assert (tmp_path / "committed").exists()
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"


def test_a_stopped_job_commits_and_is_not_requeued(start: Start, tmp_path: Path) -> None:
    job = start("train.py")
    wait_for(tmp_path / "driver")
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 0
    assert (tmp_path / "committed").exists()
    assert not (tmp_path / "scontrol").exists()


@pytest.mark.parametrize(("driver", "status"), [("finishes.py", 0), ("fails.py", 7)])
def test_the_job_ends_with_the_drivers_exit_status(driver: str, status: int, start: Start, tmp_path: Path) -> None:
    assert start(driver).wait(30) == status
    assert not (tmp_path / "scontrol").exists()
