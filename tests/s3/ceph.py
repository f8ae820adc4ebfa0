"""A real S3 server on this machine: Ceph's RADOS gateway over one monitor and one storage daemon in memory.

`python -m tests.s3.ceph` runs one until it is interrupted, and prints how to reach it. It needs Debian's Ceph packages
but no root: it listens on loopback, keeps its data in a temporary folder, and its processes end with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PACKAGES = "radosgw ceph-mon ceph-osd ceph-common"
PROGRAMS = ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "ceph", "ceph-authtool", "monmaptool", "setpriv")
START_S = 120.0
POLL_S = 0.1

CONFIGURATION = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port},v1:127.0.0.1:{old_mon_port}]
public addr = 127.0.0.1
keyring = {folder}/keyring
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = {memory_bytes}
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon max pg per osd = 500
rgw rados pool pg num min = 1
rgw thread pool size = 32
rgw frontends = beast endpoint=127.0.0.1:{port}
# Free the memory of deleted objects after seconds, not hours.
rgw gc obj min wait = 1
rgw gc processor period = 2
"""


@dataclass(frozen=True)
class Keys:
    """Credentials of a user."""

    access: str
    secret: str


USER = Keys("test", "testsecret")


class CephError(Exception):
    """The server did not start."""


def missing() -> str:
    """Returns which programs are missing on this machine and how to install them; empty if none."""
    programs = [name for name in PROGRAMS if shutil.which(name) is None]
    if not programs:
        return ""
    return f"a Ceph server cannot be started without {', '.join(programs)}; on Debian: apt-get install {PACKAGES}"


class Ceph:
    """A running server.

    Attributes:
        endpoint: its URL.
    """

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self._folder = folder
        mon_port, old_mon_port, port = free_ports(3)
        self.endpoint = f"http://127.0.0.1:{port}"
        (folder / "ceph.conf").write_text(
            CONFIGURATION.format(
                fsid=uuid.uuid4(),
                folder=folder,
                mon_port=mon_port,
                old_mon_port=old_mon_port,
                port=port,
                memory_bytes=memory_bytes,
            )
        )
        self._environment = {**os.environ, "CEPH_CONF": str(folder / "ceph.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Starts the server.

        Raises:
            CephError: it did not start; carries its output.
        """
        (self._folder / "mon").mkdir()
        (self._folder / "osd").mkdir()
        keyring, monmap = str(self._folder / "keyring"), str(self._folder / "monmap")
        self._run("ceph-authtool", "--create-keyring", keyring)
        for name, rights in (
            ("mon.", {"mon": "allow *"}),
            ("client.admin", {"mon": "allow *", "osd": "allow *"}),
            ("client.rgw", {"mon": "allow rwx", "osd": "allow rwx"}),
            ("osd.0", {"mon": "allow profile osd", "osd": "allow *"}),
        ):
            caps = [word for service, right in rights.items() for word in ("--cap", service, right)]
            self._run("ceph-authtool", keyring, "--gen-key", "-n", name, *caps)
        fsid = next(line for line in (self._folder / "ceph.conf").read_text().splitlines() if line.startswith("fsid"))
        address = next(line for line in (self._folder / "ceph.conf").read_text().splitlines() if "mon host" in line)
        identity = ["--fsid", fsid.partition("= ")[2], "--addv", "a", address.partition("= ")[2]]
        self._run("monmaptool", "--create", *identity, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._spawn("ceph-mon", "-f", "-i", "a")
        self._run("ceph", "osd", "create")
        self._run("ceph-osd", "-i", "0", "--mkfs")
        self._spawn("ceph-osd", "-f", "-i", "0")
        self._run("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=local")
        self._spawn("radosgw", "-f", "-n", "client.rgw")
        self._wait_until(self._responds)
        self.add_user("test", USER)

    def add_user(self, name: str, keys: Keys, *, max_bytes: int | None = None) -> None:
        """Adds a user that may create buckets, with a quota of `max_bytes` in all."""
        key = ["--access-key", keys.access, "--secret-key", keys.secret]
        self._run("radosgw-admin", "user", "create", "--uid", name, "--display-name", name, *key)
        if max_bytes is not None:
            which = ["--quota-scope", "user", "--uid", name]
            self._run("radosgw-admin", "quota", "set", *which, "--max-size", str(max_bytes))
            self._run("radosgw-admin", "quota", "enable", *which)

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()  # its data is temporary
            daemon.wait()

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command, cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=START_S
        )
        if done.returncode:
            raise CephError(f"{' '.join(command)} failed: {done.stdout[-1000:]}{done.stderr[-3000:]}")

    def _spawn(self, *command: str) -> None:
        with (self._folder / "output").open("ab") as output:
            daemon = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                cwd=self._folder,
                env=self._environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
        self._daemons.append(daemon)

    def _responds(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=10):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + START_S
        while not condition():
            if any(daemon.poll() is not None for daemon in self._daemons) or time.monotonic() > end:
                output = (self._folder / "output").read_text(errors="replace")
                raise CephError(f"Ceph did not start within {START_S:g} s: {output[-4000:]}")
            time.sleep(POLL_S)


@contextmanager
def running(*, memory_bytes: int = 3 << 30) -> Iterator[Ceph]:
    """Runs a server for the block, and deletes its data afterwards.

    Raises:
        CephError: it did not start, or is not installed.
    """
    if why := missing():
        raise CephError(why)
    folder = Path(tempfile.mkdtemp(prefix="ceph-"))  # short, because socket paths are limited to 107 characters
    ceph = Ceph(folder, memory_bytes)
    try:
        ceph.start()
        yield ceph
    finally:
        ceph.stop()
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Returns free ports on loopback."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with running() as ceph, suppress(KeyboardInterrupt):
            print(f"export AWS_ENDPOINT_URL={ceph.endpoint} AWS_DEFAULT_REGION=us-east-1")
            print(f"export AWS_ACCESS_KEY_ID={USER.access} AWS_SECRET_ACCESS_KEY={USER.secret}", flush=True)
            signal.pause()
    except CephError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
