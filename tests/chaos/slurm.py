"""A Slurm cluster of Debian's packages on machines made of namespaces, and jobs of cluster/slurm/train.sbatch on it."""

from __future__ import annotations

import re
import secrets
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.chaos.machines import HOME, ROOT, SHARED, UID, Command, Machine, Site, command_line, give_to_user, until
from tests.chaos.onprem import shell_block, wait_for_none

PROGRAMS = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm"}
"""Needed programs, and Debian's packages that have them."""
GUIDE = ROOT / "docs/guides/slurm.md"
CLONE = SHARED / "clone"
"""The clone of the repository, in which the user calls `sbatch`."""
CONFIG = """
ClusterName=machines
SlurmctldHost={head}
SlurmUser=root
AuthType=auth/munge
# A job is requeued so many seconds after its end, and a node is down after 20 s without an answer.
AuthInfo=cred_expire=5
SlurmdTimeout=20
ReturnToService=2
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
MpiDefault=none
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""
SERVICES = """
mkdir -p -m 755 /run/munge /run/slurmctld /run/slurmd
munged --foreground --key-file=/etc/slurm/munge.key --seed-file=/run/munge/seed --pid-file=/run/munge/pid &
until [ -S /run/munge/munge.socket.2 ]; do sleep 0.1; done
slurmd -D &
"""


class Slurm:
    """A cluster on machines that are off. The user types on the first, which also has the controller."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.head, *_ = site.machines
        nodes = [f"NodeName={each.name} NodeAddr={each.address} CPUs=1 State=UNKNOWN" for each in site.machines]
        config = CONFIG.format(head=f"{self.head.name}({self.head.address})", nodes="\n".join(nodes))
        key = secrets.token_bytes(128)
        for machine in site.machines:
            folder = machine.etc / "slurm"
            folder.mkdir(exist_ok=True)
            (folder / "slurm.conf").write_text(config)
            (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # the machines have none, and need none
            (folder / "munge.key").write_bytes(key)
            (folder / "munge.key").chmod(0o400)
            machine.set_services(SERVICES + ("slurmctld -D &\n" if machine is self.head else ""))
            self._make_venv(machine)
        self.clone = site.shared / CLONE.name
        for name in ("cluster", "elastic_ddp", "examples"):
            shutil.copytree(ROOT / name, self.clone / name)
        (self.clone / ".venv").symlink_to(HOME / "venv")
        give_to_user(self.clone)
        site.boot(*site.machines)
        self.wait_until_idle()

    def _make_venv(self, machine: Machine) -> None:
        """Has the virtual environment of a machine find the package in the clone, and its command."""
        (site_packages,) = (machine.home / "venv").glob("lib/python*/site-packages")
        (site_packages / "its.pth").write_text(f"{CLONE}\n")
        ray = (machine.home / "venv/bin/ray").read_text()
        command = machine.home / "venv/bin/elastic-ddp"
        command.write_text(ray.replace("ray.scripts.scripts", "elastic_ddp.cli.main"))
        command.chmod(0o755)

    def start(self, command: str, **environment: str | Path) -> Command:
        """Starts a command in the clone."""
        variables = "".join(f"export {name}={value} && " for name, value in environment.items())
        return self.site.start(self.head, f"cd {CLONE} && {variables}{command}")

    def type(self, command: str, **environment: str | Path) -> str:
        """Runs a command in the clone, and returns what it prints."""
        return self.start(command, **environment).finish()

    def submit(self, arguments: str, options: str = "", **environment: str | Path) -> Command:
        """Submits a job with the guide's command, to all machines by default. They have no GPUs.

        Args:
            arguments: the driver and its arguments.
            options: of `sbatch`.
            environment: environment variables of the user.

        Returns:
            `sbatch --wait`, which prints the job's id and ends with the job and with its exit status.
        """
        sbatch, script = as_written("sbatch").partition(" examples/train.py ")[0].rsplit(" ", 1)
        for_machines = f"--nodes={len(self.site.machines)} --gpus-per-node=0"  # of two values, the later counts
        return self.start(f"{sbatch} {for_machines} {options} --wait --parsable {script} {arguments}", **environment)

    def job(self, job: str) -> dict[str, str]:
        """Returns what `scontrol` shows of a job, such as JobState, Restarts and ExitCode."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.type(f"scontrol show job {job} --oneliner")))

    def wait_for(self, job: str, state: str, restarts: int = 0, timeout_s: float = 120) -> dict[str, str]:
        """Waits for a state of a job, after so many requeues. Returns what `scontrol` shows."""

        def is_there() -> bool:
            shown = self.job(job)
            return (shown["JobState"], shown["Restarts"]) == (state, str(restarts))

        try:
            until(is_there, f"job {job} is not {state}", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.job(job)}\n{self.output(job)}") from None
        return self.job(job)

    def output(self, job: str) -> str:
        """Returns what a job has printed."""
        file = self.clone / f"slurm-{job}.out"
        return file.read_text() if file.exists() else ""

    def wait_until_idle(self) -> None:
        """Waits until no job uses a machine, and no process of a job is left."""
        until(self._is_idle, "not all nodes of Slurm are idle", 120)
        for machine in self.site.machines:
            wait_for_none(partial(of_user, machine), machine)

    def _is_idle(self) -> bool:
        states = self.type("sinfo --noheader --Node --format=%T || true").split()
        return states == ["idle"] * len(self.site.machines)


def as_written(beginning: str) -> str:
    """Returns a command of the guide."""
    lines = shell_block(GUIDE.read_text(), beginning=beginning).splitlines()
    return next(line for line in lines if line.startswith(beginning))


def job_id(sbatch: Command) -> str:
    """Returns the id of a submitted job, which `sbatch` prints first."""
    until(lambda: "\n" in sbatch.output, "sbatch prints no id")
    return sbatch.output.split()[0]


def of_user(machine: Machine) -> list[str]:
    """Returns the command lines of the user's processes on a machine, other than those of ssh."""
    found = []
    for pid in machine.pids():
        with suppress(OSError):
            if Path(f"/proc/{pid}").stat().st_uid == UID and "sshd" not in (line := command_line(pid)):
                found.append(line)
    return [line for line in found if line]
