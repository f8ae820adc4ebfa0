"""The cluster of cluster/onprem.yaml on machines made of namespaces, as its user sees it, and runs on it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from configparser import ConfigParser
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.machines import HOME, ROOT, SHARED, USER, Command, Machine, Site, command_line, give_to_user, until
from tests.chaos.runs import Trial
from tests.integration import jobs

GUIDE = "\n".join((ROOT / "docs/guides" / name).read_text() for name in ("cluster.md", "cluster-machines.md"))
CHECKOUT = HOME / "checkout"
COPIED = ["cluster", "elastic_ddp", "examples", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"]
GCS_PORT, REDIS_PORT = 6379, 6380
STEP = 20
"""The step in which a run waits until it is released."""
NOTICE_S = 60
ON_A_NODE = "RAY_AUTH_MODE=token PATH=~/venv/bin:$PATH"
"""What interactive shells on a node set. Other commands need it."""
QUICK_HEAD = (
    "RAY_health_check_period_ms=1000 RAY_health_check_failure_threshold=3 "
    "AUTOSCALER_HEARTBEAT_TIMEOUT_S=3 AUTOSCALER_UPDATE_INTERVAL_S=1"
)
"""Variables with which the head starts Ray on a machine that is back within 10 s, not 50."""
FIND_PROJECT = "cd ~/venv/lib/python3*/site-packages && echo ~/elastic_ddp > its.pth"
KEPT_BY_RAY = "IDLE|DashboardAgent|RuntimeEnvAgent|_StatsActor|_AutoscalingCoordinatorActor"
PROGRAM = f"""
import sys
from pathlib import Path
import elastic_ddp as ed
from tests.chaos.faults import hold
from tests.integration import jobs

name, marker = sys.argv[1:]
config = jobs.settings(
    "{SHARED}/runs", name, 2, min_workers=1, resize_interval_s=1.0, heartbeat_timeout_s=10.0
)
train = jobs.make_train(hold(lambda run, at: at < {STEP} or Path(marker).exists()))
print(ed.ElasticTrainer(train, "{SHARED}/data", config, transform=jobs.jitter).fit())
"""
BUSY = """
import sys, time
from pathlib import Path
import ray

address, marker, started = sys.argv[1:]

@ray.remote(num_cpus=0, max_retries=0, resources={f"node:{address}": 0.01})
def wait():
    Path(started).touch()
    while not Path(marker).exists():
        time.sleep(0.1)

ray.get(wait.remote())
"""
PROGRAM_FILES = ["tests/__init__.py", "tests/inside_run.py", "tests/metadata_server.py"]
PROGRAM_FILES += [f"tests/chaos/{name}.py" for name in ("__init__", "faults", "hosts")]
PROGRAM_FILES += [f"tests/integration/{name}.py" for name in ("__init__", "clusters", "jobs")]


class Cluster:
    """The cluster of `cluster/onprem.yaml`, as its user sees it: a head and two workers.

    Attributes:
        site: the machines.
        head, workers: those of the cluster.
        config: the configuration, on the laptop.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.head, *self.workers = site.machines
        self.config = site.laptop.home / CHECKOUT.relative_to(HOME) / "cluster" / "onprem.yaml"
        self._runs: list[Run] = []

    def install(self, *, quick: bool = False) -> None:
        """Does what the guide says once: installs the project on the laptop, and sets addresses, user and storage.

        Args:
            quick: does not install the project and the extra `cluster`, but has Python find the project's files, which
                `ray up` copies. Also sets `QUICK_HEAD`.
        """
        checkout = self.config.parents[1]
        checkout.mkdir()
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, checkout / name)
        self.site.copy_venv(self.site.laptop, CHECKOUT / ".venv")
        text = self.config.read_text()
        addresses = {"192.168.1.10": self.head.address}
        addresses |= {f"192.168.1.{11 + number}": worker.address for number, worker in enumerate(self.workers)}
        for before, after in addresses.items():
            text = re.sub(rf"{re.escape(before)}\b", after, text)
        text, once = text.replace("ssh_user: ubuntu", f"ssh_user: {USER}"), shell_block(GUIDE)
        text = text.replace("=/srv/runs", f"={SHARED}/runs")
        if quick:
            text = re.sub("(?m)^( *- ).*pip install.*$", rf"\1{FIND_PROJECT}", text)
            text = text.replace("ray start --head", f"{QUICK_HEAD} ray start --head")
            once = re.sub(r"(?m)^pip install .*$", "", once)
        self.config.write_text(text)
        give_to_user(self.site.laptop.home)
        self.laptop(once)

    def install_program(self) -> None:
        """Puts the program of the runs and its data into the shared folder."""
        for name in PROGRAM_FILES:
            file = self.site.shared / "job" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, file)
        (self.site.shared / "job/program.py").write_text(PROGRAM)
        (self.site.shared / "job/busy.py").write_text(BUSY)
        (self.site.shared / "data").mkdir()
        jobs.write_rows(str(self.site.shared / "data"))
        give_to_user(self.site.shared)

    def laptop(self, command: str, timeout_s: float = 180) -> str:
        """Runs a command on the laptop, in the checkout, with the virtual environment active."""
        return self.site.run(self.site.laptop, f"set -e; cd {CHECKOUT}; . .venv/bin/activate; {command}", timeout_s)

    def as_written(self, beginning: str, **changes: str) -> str:
        """Returns a command of the guide for these machines."""
        text = re.sub(r" *\\\n *", " ", shell_block(GUIDE, "## Run", beginning))
        line = next(line for line in text.splitlines() if line.startswith(beginning))
        changes |= {"cluster/cluster.yaml": "cluster/onprem.yaml"}
        for before, after in changes.items():
            line = line.replace(before, after)
        return line

    def up(self) -> None:
        began = time.monotonic()
        self.laptop("ray up --yes cluster/onprem.yaml", 300)
        print(f"ray up takes {time.monotonic() - began:.1f} s")

    def down(self) -> None:
        """Does what the guide says to end Ray on all machines, and does not wait until it ends on the workers."""
        line = self.as_written("ray down", **{"ray down": "ray down --yes"})
        down = self.site.start(self.site.laptop, f"cd {CHECKOUT}; . .venv/bin/activate; {line}")
        until(lambda: not self.gcs, f"the head does not stop: {down.output}")
        for stop in [self.site.start(machine, "bash -ic 'ray stop --grace-period 3'") for machine in self.workers]:
            stop.finish()
        down.finish()

    def wait_for_nodes(self) -> None:
        """Switches on workers that are off, and waits until Ray runs on all of them."""
        self.site.boot(*(machine for machine in self.workers if not machine.is_on))
        for machine in self.workers:
            until(partial(has_ray, machine), f"Ray does not run on {machine.name}", 180)

    def start_ray_by_hand(self, machine: Machine) -> None:
        """Does what the guide says for a machine on which Ray has ended."""
        until(lambda: not machine.pids("/raylet/raylet "), f"Ray does not leave {machine.name}", 2 * NOTICE_S)
        self.ssh_as_written("start Ray by hand", machine)

    def ssh_as_written(self, after: str, machine: Machine, **changes: str) -> str:
        """Runs the first ssh command of the guide after some text, on a machine."""
        line = shell_block(GUIDE, after, "ssh -t")
        changes |= {"192.168.1.11": machine.address, "192.168.1.10": self.head.address}
        changes |= {"ssh -t": "ssh -tt -i ~/.ssh/elastic-ddp -o StrictHostKeyChecking=no"}
        for before, now in changes.items():
            line = line.replace(before, now)
        return self.laptop(line)

    def use_redis(self) -> None:
        """Follows the comment in the configuration: starts Redis on the head, and keeps Ray's state in it."""
        self.start_redis()
        config = self.config.read_text().replace("# - nohup bash", "- nohup bash")
        redis = f"RAY_REDIS_ADDRESS=127.0.0.1:{REDIS_PORT}"
        self.config.write_text(config.replace("ray start --head", f"{redis} ray start --head"))
        self.up()

    def start_redis(self) -> None:
        """Starts Redis on the head as a service would."""
        redis = f"redis-server --port {REDIS_PORT} --dir ~/redis --appendonly yes --daemonize yes"
        self.site.run(self.head, f"mkdir -p ~/redis && {redis} > /dev/null")

    def keep_busy(self, machine: Machine, marker: str) -> None:
        """Runs a task on a machine until a file exists in the shared folder."""
        started = self.site.shared / f"{marker}-started"
        line = f"{ON_A_NODE} python {SHARED}/job/busy.py {machine.address} {SHARED / marker} {SHARED / started.name}"
        self.site.start(self.head, line).wait_until(started.exists, f"no task starts on {machine.name}")

    def stop_runs(self) -> None:
        """Lets runs that a failed stage has left end, and checks that no process of a run is left."""
        for run in self._runs:
            run.release()
        for pid in (*self.head.pids("program.py"), *self.head.pids("busy.py")):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for machine in (self.head, *self.workers):
            wait_for_none(partial(of_runs, machine), machine)
        self._runs.clear()

    def wait_until_nothing_is_left(self) -> None:
        """Waits until no process of the user is on any machine, and checks that there is no file of a run."""
        for machine in filter(lambda machine: machine.is_on, (self.head, *self.workers)):
            wait_for_none(partial(leftovers, machine), machine)
            left = self.site.run(machine, "ls -A /tmp /dev/shm | grep elastic_ddp || true")
            assert not left.strip(), f"{machine.name} has {left}"

    @property
    def gcs(self) -> list[int]:
        """The processes of the GCS."""
        return self.head.pids("/gcs/gcs_server ")

    def start(self, name: str, options: str = "") -> Run:
        """Submits a run as the guide does, and follows its log. It waits in a step until it is released."""
        return self._execute(name, f"elastic-ddp submit {options} --follow {program(name)}")

    def start_by_exec(self, name: str) -> Run:
        """Starts a run with a driver that is a command of `ray exec`."""
        return self._execute(name, f"python {program(name, '')}")

    def submit_through_a_port(self, name: str) -> tuple[Run, Command]:
        """Submits a run from the laptop as the guide does. Returns it with the command that forwards the port."""
        forward = f"cd {CHECKOUT} && . .venv/bin/activate && exec {self.as_written('ray dashboard')}"
        port = self.site.start(self.site.laptop, forward)
        port.wait_until(lambda: self.laptop_can_reach(8265), "ray dashboard forwards no port")
        address = self.as_written("export RAY_API_SERVER_ADDRESS")
        shown = self.laptop(f"{address}; elastic-ddp submit --restarts 3 {program(name, folder=f'{SHARED}/job/')}")
        assert "submitted job program-" in shown
        return self._add(name, port), port

    def laptop_can_reach(self, port: int) -> bool:
        return self.site.start(self.site.laptop, f"exec 3<> /dev/tcp/127.0.0.1/{port}").process.wait() == 0

    def _execute(self, name: str, command: str) -> Run:
        """Starts a run by `ray exec` on the laptop."""
        command = shlex.quote(f"cd {SHARED}/job && {command}")
        line = f"cd {CHECKOUT} && . .venv/bin/activate && ray exec cluster/onprem.yaml {command}"
        return self._add(name, self.site.start(self.site.laptop, line))

    def _add(self, name: str, driver: Command) -> Run:
        self._runs.append(Run(self, name, driver, self.site.shared / marker(name).name))
        return self._runs[-1]


def marker(name: str) -> Path:
    """The file that releases a run."""
    return SHARED / f"go-{name}"


def program(name: str, separator: str = "-- ", folder: str = "") -> str:
    """The program of a run and its arguments."""
    return f"{folder}program.py {separator}{name} {marker(name)}"


class Run:
    """A run on the cluster."""

    def __init__(self, cluster: Cluster, name: str, driver: Command, marker: Path) -> None:
        self.driver = driver
        self._trial = Trial(cluster.site.shared, name)
        self._cluster, self._name, self._marker = cluster, name, marker

    def events(self, *kinds: str) -> list[Any]:
        try:
            return list(self._trial.events(*kinds))
        except FileNotFoundError:
            return []

    def wait_for(self, world_size: int) -> None:
        """Waits until the run trains with this many workers and has come to the step in which it waits."""

        def is_there() -> bool:
            sizes = [event.world_size for event in self.events("generation_started")]
            steps = [event.step for event in self.events("steps_completed")]
            return sizes[-1:] == [world_size] and max(steps, default=0) >= STEP

        began = time.monotonic()
        self.driver.wait_until(is_there, f"{self._name} does not train with {world_size} workers")
        print(f"{self._name}: trains on {world_size} workers after {time.monotonic() - began:.1f} s")

    def status(self) -> dict[str, Any]:
        """Returns what `elastic-ddp status` shows on the head."""
        runs = json.loads(self._cluster.site.run(self._cluster.head, f"{ON_A_NODE} elastic-ddp status --json"))
        return next(run for run in runs if run["name"] == self._name)

    def release(self) -> None:
        self._marker.touch()

    def wait_for_end(self) -> None:
        """Waits for the summary."""
        until(lambda: (self._cluster.site.shared / "runs" / self._name / "summary.json").exists(), "no summary", 300)

    def finish(self, calm: Mapping[str, Any]) -> Mapping[str, Any]:
        """Lets the run finish, and checks its steps, weights and samples. Returns its summary."""
        self.release()
        began = time.monotonic()
        self.driver.finish()
        print(f"{self._name}: ends after {time.monotonic() - began:.1f} s")
        return self.check(calm)

    def check(self, calm: Mapping[str, Any]) -> Mapping[str, Any]:
        """Checks the steps, weights and samples of a run that has ended. Returns its summary."""
        facts = jobs.summary(self._cluster.site.shared, self._name)
        self._trial.check_results(facts, calm)
        self._trial.check_steps(facts["generations"])
        return facts


def shell_block(text: str, after: str = "", beginning: str = "") -> str:
    """Returns the shell commands of a page after some text, without their comments: the first block of them that has
    a line with this beginning."""
    blocks = re.findall(r"```sh\n(.*?)```", text[text.index(after) :], re.DOTALL)
    return next(re.sub(r"(?m)\s+# .*$", "", block) for block in blocks if f"\n{beginning}" in f"\n{block}")


def has_ray(machine: Machine) -> bool:
    """Whether Ray runs, and no command is just starting it."""
    return bool(machine.pids("/raylet/raylet ")) and not machine.pids("ray start --address")


def world_sizes(summary: Mapping[str, Any]) -> list[int]:
    return [generation["world_size"] for generation in summary["generations"]]


class Supervisor(threading.Thread):
    """Does what systemd does with cluster/systemd/ray-node.service, on a machine. Starts at once."""

    def __init__(self, cluster: Cluster, machine: Machine) -> None:
        super().__init__(daemon=True)
        parser = ConfigParser(interpolation=None)
        parser.read(ROOT / "cluster/systemd/ray-node.service")
        self._service = {
            name: value.replace("/home/ubuntu", str(HOME))
            .replace("192.168.1.10", cluster.head.address)
            .replace("/srv/runs", f"{SHARED}/runs")
            for name, value in parser["Service"].items()
        }
        self._site, self._machine = cluster.site, machine
        self._is_stopping = threading.Event()
        (machine.home / "venv/bin/systemctl").symlink_to("/bin/true")  # is-enabled ray-node
        self._site.run(machine, self._service["execstartpre"].removeprefix("-"))
        self.start()

    def run(self) -> None:
        while not self._is_stopping.wait(float(self._service["restartsec"])):
            line = f"env {self._service['environment']} {self._service['execstart']}"
            self._site.start(self._machine, line).process.wait()

    def stop(self) -> None:
        """Sends SIGTERM to the service's main process, and waits for its end."""
        self._is_stopping.set()
        for pid in self._machine.pids("ray start --block"):
            if "bash" not in command_line(pid):
                os.kill(pid, signal.SIGTERM)
        self.join(float(self._service["timeoutstopsec"]))
        assert not self.is_alive(), "the node takes too long to drain"
        (self._machine.home / "venv/bin/systemctl").unlink()


def wait_for_none(processes: Callable[[], list[str]], machine: Machine) -> None:
    """Waits until there is no such process on a machine."""
    try:
        until(lambda: not processes(), "processes are left", 120)
    except AssertionError as error:
        raise AssertionError(f"{error} on {machine.name}: {processes()}") from None


def of_runs(machine: Machine) -> list[str]:
    """Returns the command lines of the processes of runs on a machine. Those that Ray keeps are not among them."""
    lines = map(command_line, machine.pids())
    return [line for line in lines if "program.py" in line or re.match(rf"ray::(?!{KEPT_BY_RAY})", line)]


def leftovers(machine: Machine) -> list[str]:
    """Returns the command lines of the processes on a machine, other than those of ssh and Redis."""
    lines = map(command_line, machine.pids())
    return [line for line in lines if line and not re.match(r"sshd|/usr/sbin/sshd|redis-server|bash -c|unshare", line)]
