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
from collections.abc import Mapping
from configparser import ConfigParser
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.machines import HOME, SHARED, Command, Machine, Site, command_line, give_to_user, until
from tests.chaos.runs import Trial
from tests.integration import jobs

ROOT = Path(__file__).parents[2]
CHECKOUT = HOME / "checkout"
COPIED = ["cluster", "elastic_ddp", "examples", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"]
GCS_PORT, REDIS_PORT = 6379, 6380
STEP = 20
"""The step in which a run waits until it is released."""
NOTICE_S = 60
ON_A_NODE = "RAY_AUTH_MODE=token PATH=~/venv/bin:$PATH"
"""What interactive shells on a node set. Other commands need it."""
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
PROGRAM_FILES = ["tests/__init__.py", "tests/metadata_server.py"]
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

    def install(self) -> None:
        """Does what the guide says once: installs the project on the laptop, and sets addresses, user and key."""
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
        self.config.write_text(text.replace("ssh_user: ubuntu", "ssh_user: trainer"))
        give_to_user(self.site.laptop.home)
        self.laptop(shell_block((ROOT / "docs/guides/cluster.md").read_text()))

    def install_program(self) -> None:
        """Puts the program of the runs and its data into the shared folder."""
        for name in PROGRAM_FILES:
            file = self.site.shared / "job" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, file)
        (self.site.shared / "job/program.py").write_text(PROGRAM)
        (self.site.shared / "data").mkdir()
        jobs.write_rows(str(self.site.shared / "data"))
        give_to_user(self.site.shared)

    def laptop(self, command: str, timeout_s: float = 180) -> str:
        """Runs a command on the laptop, in the checkout, with the virtual environment active."""
        return self.site.run(self.site.laptop, f"set -e; cd {CHECKOUT}; . .venv/bin/activate; {command}", timeout_s)

    def up(self) -> None:
        began = time.monotonic()
        self.laptop("ray up --yes cluster/onprem.yaml", 300)
        print(f"ray up takes {time.monotonic() - began:.1f} s")

    def wait_for_nodes(self) -> None:
        """Switches on workers that are off, and waits until Ray runs on all of them."""
        self.site.boot(*(machine for machine in self.workers if not machine.is_on))
        for machine in self.workers:
            until(partial(has_ray, machine), f"Ray does not run on {machine.name}", 180)

    def start_ray_by_hand(self, machine: Machine) -> None:
        """Does what the guide says for a machine on which Ray has ended."""
        until(lambda: not machine.pids("/raylet/raylet "), f"Ray does not leave {machine.name}", 2 * NOTICE_S)
        line = shell_block((ROOT / "docs/guides/cluster.md").read_text(), "start Ray by hand")
        line = line.replace("192.168.1.11", machine.address).replace("192.168.1.10", self.head.address)
        self.laptop(line.replace("ssh -t", "ssh -tt -i ~/.ssh/elastic-ddp -o StrictHostKeyChecking=no"))

    def start_redis(self) -> None:
        """Follows the comment in the configuration: starts Redis on the head, and keeps Ray's state in it."""
        self.site.run(self.head, f"redis-server --port {REDIS_PORT} --daemonize yes --save '' > /dev/null")
        config = self.config.read_text().replace("# - nohup bash", "- nohup bash")
        redis = f"RAY_REDIS_ADDRESS=127.0.0.1:{REDIS_PORT}"
        self.config.write_text(config.replace("ray start --head", f"{redis} ray start --head"))

    def kill_drivers(self) -> None:
        """Kills drivers that a failed stage has left."""
        for pid in self.head.pids("program.py"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def gcs(self) -> list[int]:
        """The processes of the GCS."""
        return self.head.pids("/gcs/gcs_server ")

    def start(self, name: str) -> Run:
        """Starts a run as the guide does. It waits in a step until it is released."""
        marker = SHARED / f"go-{name}"
        command = f"cd {SHARED}/job && python program.py {name} {marker}"
        line = f"cd {CHECKOUT} && . .venv/bin/activate && ray exec cluster/onprem.yaml {shlex.quote(command)}"
        return Run(self, name, self.site.start(self.site.laptop, line), self.site.shared / marker.name)


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
            sizes = [event.world_size for event in self.events("generation")]
            steps = [event.step for event in self.events("steps")]
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

    def finish(self, calm: Mapping[str, Any]) -> Mapping[str, Any]:
        """Lets the run finish, and checks its steps, weights and samples. Returns its summary."""
        self.release()
        began = time.monotonic()
        self.driver.finish()
        print(f"{self._name}: ends after {time.monotonic() - began:.1f} s")
        facts = jobs.summary(self._cluster.site.shared, self._name)
        self._trial.check_results(facts, calm)
        self._trial.check_steps(facts["generations"])
        return facts


def shell_block(text: str, after: str = "") -> str:
    """Returns the first shell commands of a page after some text, without their comments."""
    block = re.search(r"```sh\n(.*?)```", text[text.index(after) :], re.DOTALL)
    assert block is not None
    return re.sub(r"(?m)\s+# .*$", "", block[1])


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
            name: value.replace("/home/ubuntu", str(HOME)).replace("192.168.1.10", cluster.head.address)
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
