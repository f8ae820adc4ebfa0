"""The lease on a run: at most one driver at a time, on any machine, and where that driver is.

A lease is an object in the run's storage, `driver/000001.json`, whose counter its holder increments while it lives.
Each acquisition has a number, its term, and the newest term is valid. A driver acquires the lease by creating the next
term, which only one driver can do, and releases it by marking its term as released. Older objects are deleted. The term
is also the number of the driver's session: sessions are in the order of their terms, whatever the clocks show.

If the holder's process is visible from this machine, the process shows whether the holder lives. Otherwise the counter
of the lease shows it, so the clocks of machines are never compared.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

from elastic_ddp.errors import ConfigError, DriverReplacedError, StorageError
from elastic_ddp.storage.storage import Storage

_log = logging.getLogger(__name__)

RENEW_EVERY_S = 5.0
EXPIRES_AFTER_S = 20.0
"""A lease that is not renewed for this long has expired, if the process of its holder cannot be seen."""
POLL_EVERY_S = 1.0
"""Time between two reads of a lease that may have expired."""

_OBJECT = re.compile(r"driver/([0-9]{6,})\.json")
_READ_ATTEMPTS = 10


@dataclass(frozen=True, kw_only=True)
class Driver:
    """A driver and where it runs. `str` describes it for messages."""

    session: str = ""
    host: str = "an unknown host"
    pid: int = 0
    user: str = "an unknown user"
    command: str = ""
    since: str = "an unknown time"
    """Start time by the clock of its host, in ISO format."""
    ray_address: str | None = None
    """Ray's address; None until the driver has connected to Ray."""
    boot_id: str = ""
    """Boot id of the host's kernel; empty if unknown."""
    pid_namespace: int = 0
    """Inode of the namespace of `pid`."""
    started: int | None = None
    """Start of the process in clock ticks since boot, which tells it from a later process with the same pid."""

    def __str__(self) -> str:
        ray = f"Ray at {self.ray_address}" if self.ray_address else "not connected to Ray"
        command = f", started with `{self.command}`" if self.command else ""
        return f"pid {self.pid} of {self.user} on {self.host}, since {self.since}, {ray}{command}"

    @classmethod
    def this_process(cls) -> Driver:
        """Describes the current process."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # users in containers may have no name
            user = f"user {os.getuid()}"
        boot_id, pid_namespace = _pid_scope()
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            user=user,
            command=shlex.join(sys.orig_argv),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            boot_id=boot_id,
            pid_namespace=pid_namespace,
            started=started(os.getpid()),
        )

    def is_alive(self) -> bool | None:
        """Returns whether the process is alive; None if this process cannot see that."""
        if not self.boot_id or (self.boot_id, self.pid_namespace) != _pid_scope():
            return None
        started_at = started(self.pid)
        if started_at is None:
            try:
                os.kill(self.pid, 0)
            except PermissionError:  # processes of other users may be hidden
                return None
            except ProcessLookupError:
                pass
            return False  # dead, or a zombie
        if started_at != self.started:
            return False
        # This process may have failed to release an earlier lease, for example in a notebook.
        return None if self.pid == os.getpid() else True


def find_holder(storage: Storage) -> Driver | None:
    """Returns the driver that holds a run's lease, or held it when it died; None without one."""
    lease = _read_newest(storage)
    return None if lease is None or lease.released else lease.driver


class _Lease(NamedTuple):
    term: int
    data: bytes
    driver: Driver
    released: bool


class DriverLease:
    """This driver's lease on a run. `acquire` takes it, and the end of the `with` block releases it.

    Attributes:
        session: the unique name of this session in the run's ledger; empty before `acquire`.
        replaced: set when another driver has taken over the run, and never cleared.

    Args:
        storage: the run's folder.
        run_name: the run's name, for messages.
        name_session: returns a new name for a session with this number.
        notify: shows a message at the driver's terminal.
        after: the newest session's number in the ledger, in case a person deleted all leases.
        driver: the driver that takes the lease; by default this process.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        storage: Storage,
        run_name: str,
        name_session: Callable[[int], str],
        notify: Callable[[str], None],
        *,
        after: int = 0,
        driver: Driver | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.session = ""
        self.replaced = threading.Event()
        self._storage = storage
        self._run_name = run_name
        self._name_session = name_session
        self._notify = notify
        self._after = after
        self._driver = driver or Driver.this_process()
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._term: int | None = None
        """The term that this driver holds."""
        self._count = 0
        self._successor: Driver | None = None
        self._is_failing = False
        self._is_released = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Acquires the lease, and renews it from a thread; does nothing if this driver holds it.

        The lease of a dead process on this machine is taken over at once, any other lease after it has expired.

        Raises:
            ConfigError: the run has a live driver; the message names it.
            DriverReplacedError: this driver held the lease, and another driver has taken over.
            StorageError: the storage failed.
        """
        self.check()
        if self._term is not None:
            return
        while True:
            newest = _read_newest(self._storage)
            previous = None if newest is None or newest.released else newest
            if previous is not None and not self._wait_until_expired(previous):
                continue
            if self._create_term(max(newest.term if newest else 0, self._after) + 1):
                break
        if previous is not None:
            self._notify(f"run {self._run_name!r}: taking over from a dead driver: {previous.driver}")
        self._thread = threading.Thread(target=self._renew_periodically, name="driver-lease", daemon=True)
        self._thread.start()

    def renew(self, *, ray_address: str | None = None) -> None:
        """Renews the lease now, and records Ray's address in it. A failure of the storage is logged, not raised.

        Call this before an action that only the holder may take: it raises DriverReplacedError, as `check`, but it
        reads the storage.
        """
        if ray_address is not None:
            self._driver = replace(self._driver, ray_address=ray_address)
        self._renew()
        self.check()

    def check(self) -> None:
        """Raises DriverReplacedError if this driver is known to be replaced. Loops can call it: it reads no storage."""
        if self.replaced.is_set():
            raise DriverReplacedError(
                f"run {self._run_name!r} was taken over by another driver: {self._successor}. This one stops. A driver "
                f"is replaced when it does not renew its lease for {EXPIRES_AFTER_S:g} s, as on a suspended machine"
            )

    def release(self) -> None:
        """Releases the lease if it is held. A failure of the storage is logged; the lease then expires."""
        self._is_released.set()
        if self._thread is not None:
            self._thread.join()
        self._renew(released=True)
        self._term = None

    def _renew_periodically(self) -> None:
        while not self._is_released.wait(RENEW_EVERY_S):
            self._renew()

    def _renew(self, *, released: bool = False) -> None:
        """Writes the lease if this driver holds it, and notes if another driver holds it now."""
        with self._lock:
            if self._term is None:
                return
            try:
                newest = _read_newest(self._storage)
                if newest is not None and newest.term >= self._term and newest.driver.session != self.session:
                    self._successor = newest.driver
                    self._term = None
                    self.replaced.set()
                    return
                self._count += 1
                self._storage.write(_key(self._term), self._content(released=released))
                self._is_failing = False
            except StorageError as error:
                if released or not self._is_failing:  # one log line for each outage
                    _log.warning("the lease on run %r cannot be renewed: %s", self._run_name, error)
                self._is_failing = True

    def _wait_until_expired(self, lease: _Lease) -> bool:
        """Returns True once the holder is dead, and False if the lease changed hands.

        Raises:
            ConfigError: the holder lives.
        """
        is_alive = lease.driver.is_alive()
        if is_alive:
            raise self._refusal(lease.driver)
        if is_alive is False:
            return True
        self._notify(
            f"run {self._run_name!r}: its driver may be alive: {lease.driver}. Waiting up to {EXPIRES_AFTER_S:g} s "
            "for it to renew its lease"
        )
        deadline = self._clock() + EXPIRES_AFTER_S
        while True:
            self._sleep(POLL_EVERY_S)
            is_last = self._clock() >= deadline  # before the read: this process may be suspended between the two
            newest = _read_newest(self._storage)
            holder = (lease.term, lease.driver.session)
            if newest is None or newest.released or (newest.term, newest.driver.session) != holder:
                return False
            if newest.data != lease.data:
                raise self._refusal(newest.driver)
            if is_last:
                return True

    def _refusal(self, driver: Driver) -> ConfigError:
        return ConfigError(
            f"run {self._run_name!r} in {self._storage.uri} has a live driver: {driver}. Stop it with Ctrl-C there or "
            f"with `elastic-ddp stop {self._run_name}`, or use another name"
        )

    def _create_term(self, term: int) -> bool:
        """Acquires a term. Returns False if another driver was first."""
        self.session = self._name_session(term)
        self._driver = replace(self._driver, session=self.session)
        with suppress(FileExistsError):  # perhaps this driver created it, and only the answer was lost
            self._storage.create(_key(term), self._content())
            self._term = term
        newest = _read_newest(self._storage)
        if newest is None or newest.driver.session != self.session:
            # Another driver was first, or this term was over and its object deleted, or two drivers could create it.
            self._term = None
            return False
        self._term = term
        for older in _terms(self._storage):
            if older < term:
                self._storage.delete(_key(older))
        return True

    def _content(self, *, released: bool = False) -> bytes:
        return json.dumps({**asdict(self._driver), "count": self._count, "released": released}, indent=1).encode()


def _key(term: int) -> str:
    return f"driver/{term:06d}.json"


def _read_newest(storage: Storage) -> _Lease | None:
    """Returns the valid lease, None if there never was one."""
    for _ in range(_READ_ATTEMPTS):
        terms = _terms(storage)
        if not terms:
            return None
        with suppress(FileNotFoundError):  # a newer term was created meanwhile
            return _parse(terms[-1], storage.read(_key(terms[-1])))
    raise StorageError(f"cannot read {_key(terms[-1])!r} in {storage.uri}: it is listed but does not exist")


def _terms(storage: Storage) -> list[int]:
    return sorted(int(match[1]) for match in map(_OBJECT.fullmatch, storage.list("driver")) if match)


def _parse(term: int, data: bytes) -> _Lease:
    """Parses a lease. A torn lease, or one of another version, is valid: a change of its bytes shows a live holder."""
    try:
        content: dict[str, Any] = dict(json.loads(data))
    except (TypeError, ValueError):
        content = {}
    known = {field.name: content[field.name] for field in fields(Driver) if field.name in content}
    return _Lease(term, data, Driver(**known), released=content.get("released") is True)


def started(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since boot; None if it is dead or cannot be seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *rest = stat.rpartition(b")")[2].split()  # the process name before it may contain any character
    return None if state in (b"Z", b"X") else int(rest[18])


def _pid_scope() -> tuple[str, int]:
    """Returns the boot id and the pid namespace in which this process's pids are valid; an empty id if unknown."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot_id, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return "", 0
