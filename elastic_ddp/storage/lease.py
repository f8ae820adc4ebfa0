"""The lease on a run: one driver at a time, wherever the others may be, and where it is.

A lease is an object in the run's storage, `driver/000001.json`, that its holder counts up for as long as it lives. Each
taking has a number of its own, its term, and the newest term counts. A lease is taken by creating the next term, which
only one driver can, and given back by marking it as released. The newest object is never removed, so a term is never
given twice without the later of its takers seeing a newer one; older objects are rubbish.

Whether a holder lives is told by its process, where that can be seen, and otherwise by its count: machines' clocks are
not compared.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from types import TracebackType
from typing import Any, Self

from elastic_ddp.errors import ConfigError, DriverReplacedError, StorageError
from elastic_ddp.storage.lease_holder import Driver
from elastic_ddp.storage.storage import Storage

_log = logging.getLogger(__name__)

RENEW_S = 5.0
"""Between two renewals."""
EXPIRES_S = 20.0
"""A holder whose process cannot be seen, and that has not renewed for so long, is taken for dead."""
LOOK_S = 1.0
"""Between two looks at the lease of such a holder."""

_OBJECT = re.compile(r"driver/([0-9]{6,})\.json")
_READ_TRIES = 10


def find_holder(storage: Storage) -> Driver | None:
    """The driver that holds a run's lease, or held it when it died; None if there is none."""
    lease = _newest(storage)
    return None if lease is None or lease.released else lease.driver


@dataclass(frozen=True)
class _Lease:
    """What was seen of a lease."""

    term: int
    data: bytes
    driver: Driver
    released: bool


class DriverLease:
    """This driver's lease on a run. As a context it is released in the end; `acquire` takes it.

    Only the driver uses it. `session` names this life of the driver, and `replaced` is set, and stays so, once another
    driver has taken the run over.

    Args:
        storage: the run's.
        run_name: for messages.
        session: of this driver, as in its ledger.
        note: tells a person at the terminal why it waits, and whom it succeeds.
        driver: who takes it; by default this process.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        storage: Storage,
        run_name: str,
        session: str,
        note: Callable[[str], None],
        *,
        driver: Driver | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.session = session
        self.replaced = threading.Event()
        self._storage = storage
        self._run_name = run_name
        self._note = note
        self._driver = driver or Driver.this_process(session)
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._term: int | None = None
        """Ours, while we hold it."""
        self._count = 0
        self._successor: Driver | None = None
        self._is_failing = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Takes the lease, and keeps it by a thread of its own; nothing if this driver holds it.

        The lease of a dead process of this machine is taken over at once. One that is held elsewhere is watched until
        it is renewed, or for `EXPIRES_S`.

        Raises:
            ConfigError: the run has a live driver; says where, and what to do.
            DriverReplacedError: this driver held it, and another has taken the run over.
            StorageError: the storage failed.
        """
        self.check()
        if self._term is not None:
            return
        while True:
            newest = self._newest()
            before = None if newest is None or newest.released else newest
            if before is not None and not self._is_over(before):
                continue
            if self._take(newest.term + 1 if newest else 1):
                break
        if before is not None:
            self._note(f"run {self._run_name!r} is taken over from a driver that is gone: {before.driver}")
        self._thread = threading.Thread(target=self._keep, name="driver-lease", daemon=True)
        self._thread.start()

    def renew(self, *, ray_address: str | None = None) -> None:
        """Renews it now, and puts Ray's address into it. A failing storage is logged, and met again at the next turn.

        Call it before what only the holder may do: unlike `check`, it asks the storage.

        Raises:
            DriverReplacedError: another driver has taken the run over.
        """
        with self._lock:
            if ray_address is not None:
                self._driver = replace(self._driver, ray_address=ray_address)
            if self._term is not None:
                self._renew(self._term)
        self.check()

    def check(self) -> None:
        """Raises if the lease is known to be lost; costs nothing, so that a loop can call it at every turn.

        Raises:
            DriverReplacedError: another driver has taken the run over; says which.
        """
        if self.replaced.is_set():
            raise DriverReplacedError(
                f"run {self._run_name!r} was taken over by another driver: {self._successor}. This one leaves the run "
                f"to it; a driver is replaced when it is silent for {EXPIRES_S:g} s, as on a machine that is suspended"
            )

    def release(self) -> None:
        """Gives the lease back; nothing if it is not held. A failing storage is logged: whoever comes next then waits
        for `EXPIRES_S`, unless it sees that this process is gone."""
        self._over.set()
        with self._lock:
            if self._term is not None:
                self._renew(self._term, released=True)
            self._term = None
        if self._thread is not None:
            self._thread.join()

    def _keep(self) -> None:
        while not self._over.wait(RENEW_S):
            with self._lock:
                if self._term is not None:  # else released since
                    self._renew(self._term)

    def _renew(self, term: int, *, released: bool = False) -> None:
        """Looks first: the object of a driver that is replaced is not to be written again."""
        try:
            newest = self._newest()
            if newest is not None and newest.term >= term and newest.driver.session != self.session:
                self._successor = newest.driver
                self.replaced.set()
                self._term = None
                return
            self._count += 1
            self._storage.write(_key(term), self._content(released=released))
        except StorageError as error:
            if released or not self._is_failing:  # one line for an outage, not one for every turn in it
                _log.warning("the lease on run %r cannot be renewed: %s", self._run_name, error)
            self._is_failing = True
        else:
            self._is_failing = False

    def _is_over(self, lease: _Lease) -> bool:
        """Whether its holder is dead; False if it has changed hands meanwhile. Refuses if it lives."""
        is_alive = lease.driver.is_alive()
        if is_alive:
            raise self._refusal(lease.driver)
        if is_alive is not None:
            return True
        self._note(
            f"run {self._run_name!r} has a driver that may still live: {lease.driver}. Waiting up to {EXPIRES_S:g} s "
            "for a sign of it"
        )
        deadline = self._clock() + EXPIRES_S
        while True:
            self._sleep(LOOK_S)
            is_last = self._clock() >= deadline  # before looking: this process may be frozen between the two
            now = self._newest()
            if now is None or now.term != lease.term or now.released or now.driver.session != lease.driver.session:
                return False
            if now.data != lease.data:
                raise self._refusal(now.driver)
            if is_last:
                return True

    def _refusal(self, driver: Driver) -> ConfigError:
        return ConfigError(
            f"run {self._run_name!r} in {self._storage.uri} has a live driver: {driver}. Stop it with Ctrl-C there or "
            f"with `elastic-ddp stop {self._run_name}`, or use another name"
        )

    def _take(self, term: int) -> bool:
        """Takes a term; False if another driver came first."""
        try:
            self._storage.create(_key(term), self._content())
        except FileExistsError:
            return False
        self._term = term
        newest = self._newest()
        if newest is not None and newest.driver.session != self.session:
            # A storage that lets two create the same object; or our term was over, and its object removed, since we
            # looked.
            self._term = None
            if newest.term > term:
                self._storage.delete(_key(term))
            return False
        for older in _terms(self._storage):
            if older < term:
                self._storage.delete(_key(older))
        return True

    def _newest(self) -> _Lease | None:
        return _newest(self._storage)

    def _content(self, *, released: bool = False) -> bytes:
        return json.dumps({**asdict(self._driver), "count": self._count, "released": released}, indent=1).encode()


def _key(term: int) -> str:
    return f"driver/{term:06d}.json"


def _newest(storage: Storage) -> _Lease | None:
    """The lease that counts, None if there never was one."""
    for _ in range(_READ_TRIES):
        if not (terms := _terms(storage)):
            return None
        try:
            return _parse(terms[-1], storage.read(_key(terms[-1])))
        except FileNotFoundError:
            continue  # there is a newer one since
    raise StorageError(f"{_key(terms[-1])!r} in {storage.uri} is listed, and cannot be read: it is not there")


def _terms(storage: Storage) -> list[int]:
    matches = (_OBJECT.fullmatch(key) for key in storage.list("driver"))
    return sorted(int(match[1]) for match in matches if match)


def _parse(term: int, data: bytes) -> _Lease:
    """A lease that is torn, or of another version, still counts: whether it changes can be seen."""
    try:
        content: dict[str, Any] = dict(json.loads(data))
    except (TypeError, ValueError):
        content = {}
    known = {field.name: content[field.name] for field in fields(Driver) if field.name in content}
    return _Lease(term, data, Driver(**known), released=content.get("released") is True)
