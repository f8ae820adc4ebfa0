"""Machines made of namespaces: each has its own network, processes, /tmp, /dev/shm and ssh server, and one CPU.

For tests that follow the documentation of clusters. Commands run as a user without root, on a `laptop`
that reaches the other machines by ssh only. All machines share one folder. Needs root, and Debian's openssh-server and
rsync.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

USER, UID, GID = "trainer", 61000, 65534
HOME = Path("/home", USER)
SHARED = Path("/mnt/shared")
"""The folder that all machines share."""
NETWORK, PREFIX = "198.51.100.", 25
"""A block reserved for documentation. The laptop is .129, the others follow."""
START_S = 60.0
PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "sshd": "openssh-server", "rsync": "rsync"}
"""Needed programs, and Debian's packages that have them."""
HIDDEN = ("/root", "/tmp", "/home")
"""Folders that differ from those of this machine."""
ROOT = Path(__file__).parents[2]
SITE_PACKAGES = [str(Path(path).resolve()) for path in sys.path if Path(path).name == "site-packages"]
ONLINE_CPUS = "/sys/devices/system/cpu/online"
"""Libraries read the number of CPUs from it."""

BOOT = """
set -eu
folder=$1 name=$2; shift 2
hostname $name
mount -t tmpfs tmpfs /mnt
mkdir /mnt/shared && mount --bind $folder/../shared /mnt/shared
number=0
for path; do
    mkdir /mnt/kept-$number && mount --bind $path /mnt/kept-$number
    number=$((number + 1))
done
mkdir /mnt/machine && mount --bind $folder /mnt/machine
mount -t tmpfs -o mode=755 tmpfs /root
if [ -d /mnt/machine/tmp ]; then mount --bind /mnt/machine/tmp /tmp; else mount -t tmpfs -o mode=1777 tmpfs /tmp; fi
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /home
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /home/trainer /run/sshd
mount --bind /mnt/machine/home /home/trainer
number=0
for path; do
    mkdir -p $path && mount --bind /mnt/kept-$number $path
    number=$((number + 1))
done
mount --bind /mnt/machine/etc /etc
echo 0 > /mnt/cpus
mount --bind /mnt/cpus ONLINE_CPUS
ulimit -n 65536 || true
/usr/sbin/sshd -D -e -f /mnt/machine/sshd_config &
[ ! -e /mnt/machine/services ] || . /mnt/machine/services
wait # as the machine's first process, the shell reaps orphans
""".replace("ONLINE_CPUS", ONLINE_CPUS)
PROBE = f"""
ip link add one type bridge
ip link add two type veth peer name three
mount -t tmpfs tmpfs /mnt
mount --bind /dev/null {ONLINE_CPUS}
"""
SSHD = """
HostKey /mnt/machine/host_key
PidFile none
UseDNS no
UsePAM no
PasswordAuthentication no
"""


def missing(programs: Mapping[str, str] = {}) -> str | None:
    """Returns why the machines cannot be made here, or None. `programs` are needed besides `PROGRAMS`."""
    if os.geteuid() != 0:
        return "machines of namespaces need root"
    path, needed = f"{os.environ['PATH']}:/usr/sbin", {**PROGRAMS, **programs}
    if packages := {package: None for name, package in needed.items() if shutil.which(name, path=path) is None}:
        return f"machines of namespaces need Debian's {', '.join(packages)}"
    probe = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--net", "--fork", "--mount-proc", "sh", "-ec", PROBE]
    done = subprocess.run(probe, capture_output=True, text=True, env={**os.environ, "PATH": path})
    return None if done.returncode == 0 else f"machines of namespaces are not possible here: {done.stderr.strip()}"


class Machine:
    """One machine, which is off until `boot`. Its files outlive `kill`, except those in /tmp of others than the laptop.

    Attributes:
        address: its address.
        home: the user's home folder, as this process sees it.
    """

    def __init__(self, name: str, number: int, folder: Path, site: str) -> None:
        self.name, self.address = name, f"{NETWORK}{129 + number}"
        self.home = folder / name / "home"
        self._folder, self._namespace = folder / name, f"{site}-{name}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_on(self) -> bool:
        return self._process is not None

    @property
    def etc(self) -> Path:
        """Its /etc, as this process sees it."""
        return self._folder / "etc"

    def set_services(self, script: str) -> None:
        """Has the machine start more services when it boots: shell commands of root, as in /etc/rc.local."""
        (self._folder / "services").write_text(script)

    def boot(self) -> None:
        """Starts its ssh server and its services."""
        namespaces = ["--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        keep = {str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix, *SITE_PACKAGES)}
        kept = sorted(path for path in keep if path.startswith(HIDDEN))
        command = ["ip", "netns", "exec", self._namespace, "unshare", *namespaces]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [*command, "bash", "-c", BOOT, "-", str(self._folder), self.name, *kept],
                stdout=log,
                stderr=log,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                start_new_session=True,
            )

    def kill(self) -> None:
        """Ends it with all its processes, as a power failure does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            until(lambda: not self.pids(), f"{self.name} still runs")
            self._process = None

    def pids(self, program: str = "") -> list[int]:
        """Returns the processes with `program` in their command lines, by their ids outside the machine."""
        found = subprocess.run(["ip", "netns", "pids", self._namespace], capture_output=True, text=True)
        return [pid for pid in map(int, found.stdout.split()) if program in command_line(pid)]


def command_line(pid: int) -> str:
    """Returns the command line of a process, empty if it has exited."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


class Command:
    """A command that runs, or has run, on a machine."""

    def __init__(self, line: list[str], output: Path) -> None:
        self.line, self._output = line[-1], output
        with output.open("w") as file:
            self.process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._output.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], Any], what: str, timeout_s: float = 150) -> None:
        """Waits until a condition is true, while the command runs."""

        def is_true() -> bool:
            assert self.process.poll() is None, f"{self.line} has ended: {self.output}"
            return bool(condition())

        try:
            until(is_true, what, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None

    def finish(self, timeout_s: float = 180, *, succeeds: bool = True) -> str:
        """Waits for its end, and returns what it has printed."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"{self.line} takes more than {timeout_s:g} s: {self.output}") from None
        assert (self.process.returncode == 0) == succeeds, f"{self.line}: {self.output}"
        return self.output


class Site:
    """Machines on one network, and what their user types on them.

    Attributes:
        laptop: runs commands of the user, and bridges the network.
        machines: the other machines, off at first.
        shared: the shared folder, as this process sees it.
    """

    def __init__(self, folder: Path, num_machines: int) -> None:
        self._folder, self._name, self._venv = folder, f"ed-{os.getpid()}", folder / "venv"
        names = ["laptop", *(f"machine{number}" for number in range(1, num_machines + 1))]
        self.laptop, *self.machines = [Machine(name, number, folder, self._name) for number, name in enumerate(names)]
        self.shared = folder / "shared"
        self._numbers = itertools.count()
        self._make_files()
        self._make_network()

    def _make_files(self) -> None:
        """Writes the files of all machines: a key for ssh, and a home folder with an empty virtual environment."""
        self.shared.mkdir(parents=True)
        os.chown(self.shared, UID, GID)
        every = [self.laptop, *self.machines]
        make_venv(self._venv)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._folder / "key"], check=True)
        for machine in every:
            folder = self._folder / machine.name
            machine.home.mkdir(parents=True)
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "host_key"], check=True)
            (folder / "sshd_config").write_text(SSHD)
            # Of its own: a package that is installed meanwhile replaces /etc/passwd, and thereby removes a mount there.
            subprocess.run(["cp", "--archive", "/etc", folder / "etc"], check=True)
            with (folder / "etc" / "passwd").open("a") as passwd:
                passwd.write(f"{USER}:*:{UID}:{GID}::{HOME}:/bin/bash\n")
            hosts = [f"{other.address} {other.name}" for other in every]
            (folder / "etc" / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
            (folder / "etc" / "resolv.conf").unlink(missing_ok=True)
            # As Debian's, which only interactive shells read to the end.
            (machine.home / ".profile").write_text(". ~/.bashrc\n")
            (machine.home / ".bashrc").write_text("case $- in *i*) ;; *) return ;; esac\n")
            (machine.home / ".ssh").mkdir(mode=0o700)
            shutil.copy(self._folder / "key.pub", machine.home / ".ssh" / "authorized_keys")
            # The machines reach no package registry: what they need is in the environment already.
            (machine.home / ".config" / "pip").mkdir(parents=True)
            # In this file, "false" turns build isolation off.
            pip = "[install]\nno-index = true\nno-build-isolation = false\n"
            (machine.home / ".config" / "pip" / "pip.conf").write_text(pip)
        for machine in self.machines:
            self.copy_venv(machine, HOME / "venv")
        shutil.copy(self._folder / "key", self.laptop.home / ".ssh" / "elastic-ddp")
        for machine in every:
            give_to_user(machine.home)
        (tmp := self._folder / self.laptop.name / "tmp").mkdir()  # a laptop that is closed keeps its files
        tmp.chmod(0o1777)

    def copy_venv(self, machine: Machine, to: Path) -> None:
        """Makes the virtual environment at a path on a machine, below the user's home."""
        target = machine.home / to.relative_to(HOME)
        shutil.copytree(self._venv, target, symlinks=True)
        for script in (target / "bin").iterdir():
            if not script.is_symlink() and script.is_file():
                script.write_bytes(script.read_bytes().replace(str(self._venv).encode(), str(to).encode()))

    def _make_network(self) -> None:
        bridge = f"{self._name}-laptop"
        for machine in (self.laptop, *self.machines):
            _ip("netns", "add", machine._namespace)
            _ip("-n", machine._namespace, "link", "set", "lo", "up")
        _ip("-n", bridge, "link", "add", "eth0", "type", "bridge")
        for machine in self.machines:
            ends = ["type", "veth", "peer", "name", "eth0", "netns", machine._namespace]
            _ip("-n", bridge, "link", "add", machine.name, *ends)
            _ip("-n", bridge, "link", "set", machine.name, "master", "eth0", "up")
        for machine in (self.laptop, *self.machines):
            _ip("-n", machine._namespace, "addr", "add", f"{machine.address}/{PREFIX}", "dev", "eth0")
            _ip("-n", machine._namespace, "link", "set", "eth0", "up")
            _ip("-n", machine._namespace, "route", "add", "default", "dev", "eth0")

    def cut(self, machine: Machine) -> None:
        """Takes a machine off the network, while its processes run on."""
        _ip("-n", self.laptop._namespace, "link", "set", machine.name, "down")

    def mend(self, machine: Machine) -> None:
        _ip("-n", self.laptop._namespace, "link", "set", machine.name, "up")

    def close_laptop(self) -> None:
        """Takes the laptop off the network and ends its processes. Other machines see no connection end."""
        for machine in self.machines:
            _ip("-n", self.laptop._namespace, "route", "add", "blackhole", f"{machine.address}/32")
        self.laptop.kill()

    def open_laptop(self) -> None:
        for machine in self.machines:
            _ip("-n", self.laptop._namespace, "route", "del", "blackhole", f"{machine.address}/32")
        self.boot(self.laptop)

    def start(self, machine: Machine, command: str) -> Command:
        """Starts a shell command of the user on a machine."""
        options = ["BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
        ssh = ["ssh", "-i", str(self._folder / "key"), *(part for option in options for part in ("-o", option))]
        login = ["ip", "netns", "exec", self.laptop._namespace, *ssh, f"{USER}@{machine.address}"]
        return Command([*login, command], self._folder / f"output-{next(self._numbers)}")

    def run(self, machine: Machine, command: str, timeout_s: float = 180) -> str:
        """Runs a shell command of the user on a machine, and returns what it prints."""
        return self.start(machine, command).finish(timeout_s)

    def boot(self, *machines: Machine) -> None:
        """Switches machines on, and waits until the user can log in."""
        for machine in machines:
            machine.boot()
        for machine in machines:
            until(partial(self._can_log_in, machine), f"there is no ssh server on {machine.name}")

    def _can_log_in(self, machine: Machine) -> bool:
        return self.start(machine, "true").process.wait(START_S) == 0

    def remove(self) -> None:
        """Removes all that belongs to the machines."""
        for machine in (self.laptop, *self.machines):
            machine.kill()
            for pid in machine.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", machine._namespace], capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def site(folder: Path, num_machines: int) -> Iterator[Site]:
    """Makes a laptop, which is on, and machines, which are off, for a block. `folder` must not exist."""
    made = Site(folder, num_machines)
    try:
        made.boot(made.laptop)
        yield made
    finally:
        made.remove()


def until(condition: Callable[[], Any], what: str, timeout_s: float = START_S, every_s: float = 0.2) -> None:
    """Waits until a condition is true. `what` is wrong if it stays false."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"after {timeout_s:g} s: {what}"
        time.sleep(every_s)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def make_venv(venv: Path) -> None:
    """Makes a virtual environment with the packages of this one, and the commands `pip` and `ray`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site_packages,) = venv.glob("lib/python*/site-packages")
    (site_packages / "base.pth").write_text("\n".join(SITE_PACKAGES))
    for name, call in {"pip": "pip._internal.cli.main:main", "ray": "ray.scripts.scripts:main"}.items():
        module, _, function = call.partition(":")
        script = (
            f"#!{venv.absolute()}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        )
        (venv / "bin" / name).write_text(script)
        (venv / "bin" / name).chmod(0o755)


def give_to_user(path: Path) -> None:
    subprocess.run(["chown", "--recursive", "--no-dereference", f"{UID}:{GID}", path], check=True)
