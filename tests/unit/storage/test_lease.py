"""The lease on a run: acquired by one driver, renewed, taken over and released."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.errors import ConfigError, DriverReplacedError, StorageError
from elastic_ddp.storage import lease as lease_module
from elastic_ddp.storage.lease import EXPIRES_AFTER_S, Driver, DriverLease, started
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry.ledger import new_session

REMOTE = replace(
    Driver.this_process(),
    session="remote",
    host="far",
    pid=7,
    user="ada",
    boot_id="another boot",
    ray_address="10.0.0.9:6379",
)
"""A driver on another machine."""


class FakeClock:
    """Advances when a driver sleeps, and then calls `on_sleep`."""

    def __init__(self, on_sleep: Callable[[], None] = lambda: None) -> None:
        self.now = 0.0
        self.on_sleep = on_sleep

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()


class FaultyStorage(Storage):
    """Refuses writes while `failing`, and calls `before_create` before the next create."""

    failing = False
    before_create: Callable[[], None] | None = None

    def write(self, key: str, data: bytes) -> None:
        if self.failing:
            raise StorageError("no space")
        super().write(key, data)

    def create(self, key: str, data: bytes, **options: Any) -> None:
        if (callback := self.before_create) is not None:
            self.before_create = None
            callback()
        super().create(key, data, **options)


class Drivers:
    """Creates leases of several drivers."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.clock = FakeClock()
        self.messages: list[str] = []
        self.made: list[DriverLease] = []

    def __call__(self, session: str, driver: Driver | None = None, storage: Storage | None = None) -> DriverLease:
        made = DriverLease(
            storage or self.storage,
            "moon",
            lambda _: session,
            self.messages.append,
            driver=driver and replace(driver, session=session),
            clock=self.clock.read,
            sleep=self.clock.sleep,
        )
        self.made.append(made)
        return made


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(tmp_path / "runs" / "moon")


@pytest.fixture
def drivers(storage: Storage) -> Iterator[Drivers]:
    drivers = Drivers(storage)
    yield drivers
    for made in drivers.made:
        made.release()


@pytest.fixture
def neighbour() -> Iterator[Driver]:
    """A live driver in another process of this machine."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield neighbour_in(process)
        process.kill()


def neighbour_in(process: subprocess.Popen[bytes]) -> Driver:
    this = Driver.this_process()
    return replace(this, session="neighbour", pid=process.pid, started=started(process.pid), user="bob")


def put(storage: Storage, driver: Driver, *, term: int = 1, count: int = 0, released: bool = False) -> None:
    """Writes the lease of a driver that does not run in this process."""
    content = {**asdict(driver), "count": count, "released": released}
    storage.write(f"driver/{term:06d}.json", json.dumps(content).encode())


def stored_lease(storage: Storage) -> dict[str, Any]:
    """Returns the content of the newest lease."""
    return json.loads(storage.read(storage.list("driver")[-1]))


def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("the condition did not become true within 30 s")


def test_a_lease_records_where_its_driver_is_until_it_is_released(storage: Storage, drivers: Drivers) -> None:
    with drivers("one") as lease:
        lease.acquire()
        lease.acquire()
        lease.renew(ray_address="10.0.0.1:6379")
        assert storage.list() == ["driver/000001.json"]
        lease_of_one = stored_lease(storage)
        assert lease_of_one["session"] == "one" and lease_of_one["released"] is False
        assert lease_of_one["pid"] == os.getpid() and lease_of_one["ray_address"] == "10.0.0.1:6379"
    assert stored_lease(storage)["released"] is True
    with drivers("two") as lease:
        lease.acquire()
        assert storage.list() == ["driver/000002.json"], "older terms are deleted"
        assert stored_lease(storage)["session"] == "two"
    assert drivers.clock.now == 0 and drivers.messages == []


@pytest.mark.parametrize("how", ["reaped", "zombie"])
def test_a_dead_driver_on_this_machine_is_replaced_at_once(storage: Storage, drivers: Drivers, how: str) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        driver = neighbour_in(process)
        put(storage, driver, term=3)
        process.kill()
        if how == "reaped":
            process.wait()
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        drivers("two").acquire()
    assert storage.list() == ["driver/000004.json"] and stored_lease(storage)["session"] == "two"
    assert drivers.clock.now == 0
    assert drivers.messages == [f"run 'moon': taking over from a dead driver: {driver}"]


def test_a_later_process_with_a_dead_drivers_pid_is_not_the_driver(
    storage: Storage, drivers: Drivers, neighbour: Driver
) -> None:
    assert neighbour.started is not None
    put(storage, replace(neighbour, started=neighbour.started - 1))
    drivers("two").acquire()
    assert stored_lease(storage)["session"] == "two" and drivers.clock.now == 0


def test_a_live_driver_on_this_machine_keeps_the_lease(storage: Storage, drivers: Drivers, neighbour: Driver) -> None:
    put(storage, replace(neighbour, ray_address="10.0.0.1:6379"))
    with pytest.raises(ConfigError) as caught, drivers("two") as lease:
        lease.acquire()
    text = str(caught.value)
    assert f"run 'moon' in {storage.uri} has a live driver: pid {neighbour.pid} of bob on {neighbour.host}" in text
    assert f"since {neighbour.since}, Ray at 10.0.0.1:6379" in text
    assert "Stop it with Ctrl-C there or with `elastic-ddp stop moon`, or use another name" in text
    assert stored_lease(storage)["session"] == "neighbour" and drivers.clock.now == 0


def test_a_remote_driver_that_renews_keeps_the_lease(storage: Storage, drivers: Drivers) -> None:
    put(storage, REMOTE)

    def renew() -> None:
        if drivers.clock.now >= 3:
            put(storage, REMOTE, count=1)

    drivers.clock.on_sleep = renew
    with pytest.raises(ConfigError, match=r"live driver: pid 7 of ada on far, .*Ray at 10\.0\.0\.9:6379"):
        drivers("two").acquire()
    assert drivers.clock.now == 3, "refused at the first renewal"
    (message,) = drivers.messages
    assert "may be alive: pid 7 of ada on far" in message and "Waiting up to 20 s" in message
    assert stored_lease(storage)["session"] == "remote"


def test_a_remote_driver_that_does_not_renew_is_replaced(storage: Storage, drivers: Drivers) -> None:
    put(storage, REMOTE)
    drivers("two").acquire()
    assert drivers.clock.now == EXPIRES_AFTER_S
    assert stored_lease(storage)["session"] == "two"
    assert "taking over from a dead driver: pid 7 of ada on far" in drivers.messages[-1]


def test_a_remote_driver_that_releases_is_replaced_at_once(storage: Storage, drivers: Drivers) -> None:
    put(storage, REMOTE)
    drivers.clock.on_sleep = lambda: put(storage, REMOTE, released=True)
    drivers("two").acquire()
    assert drivers.clock.now == 1 and stored_lease(storage)["session"] == "two"


def test_a_wait_ends_when_a_third_driver_acquires_the_lease(
    storage: Storage, drivers: Drivers, neighbour: Driver
) -> None:
    put(storage, REMOTE)
    drivers.clock.on_sleep = lambda: put(storage, neighbour, term=2)
    with pytest.raises(ConfigError, match=f"live driver: pid {neighbour.pid} of bob"):
        drivers("two").acquire()
    assert drivers.clock.now == 1


def test_a_suspended_waiter_reads_the_lease_again_before_it_takes_over(storage: Storage, drivers: Drivers) -> None:
    put(storage, REMOTE)

    def suspend() -> None:
        drivers.clock.now += 3600
        put(storage, REMOTE, count=700)

    drivers.clock.on_sleep = suspend
    with pytest.raises(ConfigError, match="live driver"):
        drivers("two").acquire()


@pytest.mark.parametrize("data", [b"", b'{"session": "fa'])
def test_a_torn_lease_is_polled_like_a_remote_one(storage: Storage, drivers: Drivers, data: bytes) -> None:
    storage.write("driver/000001.json", data)
    drivers("two").acquire()
    assert drivers.clock.now == EXPIRES_AFTER_S and stored_lease(storage)["session"] == "two"


def test_a_lease_with_unknown_fields_is_read(storage: Storage, drivers: Drivers, neighbour: Driver) -> None:
    content = {**asdict(neighbour), "count": 1, "colour": "blue"}
    storage.write("driver/000001.json", json.dumps(content).encode())
    with pytest.raises(ConfigError, match=f"live driver: pid {neighbour.pid} of bob"):
        drivers("two").acquire()


def test_a_lease_of_a_hidden_process_is_polled(
    storage: Storage, drivers: Drivers, neighbour: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(storage, neighbour)
    lease = drivers("two")

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(lease_module, "started", lambda pid: None)
    monkeypatch.setattr(os, "kill", refuse)
    lease.acquire()
    assert drivers.clock.now == EXPIRES_AFTER_S and stored_lease(storage)["session"] == "two"


def test_an_unreleased_lease_of_this_process_expires(
    storage: FaultyStorage, drivers: Drivers, caplog: pytest.LogCaptureFixture
) -> None:
    with drivers("one") as lease:
        lease.acquire()
        storage.failing = True
    assert [record.getMessage() for record in caplog.records] == ["the lease on run 'moon' cannot be renewed: no space"]
    storage.failing = False
    drivers("two").acquire()
    assert drivers.clock.now == EXPIRES_AFTER_S and stored_lease(storage)["session"] == "two"


def test_a_second_driver_in_this_process_is_refused(storage: Storage, drivers: Drivers) -> None:
    first = drivers("one")
    first.acquire()
    drivers.clock.on_sleep = first.renew
    with pytest.raises(ConfigError, match=f"live driver: pid {os.getpid()} of"):
        drivers("two").acquire()


@pytest.mark.parametrize("before", [None, REMOTE])
def test_of_two_drivers_that_see_a_free_lease_one_acquires_it(
    storage: FaultyStorage, drivers: Drivers, neighbour: Driver, before: Driver | None
) -> None:
    if before is not None:
        put(storage, before)
    other = drivers("other", neighbour)
    storage.before_create = other.acquire
    with pytest.raises(ConfigError, match=f"live driver: pid {neighbour.pid} of bob"):
        drivers("two").acquire()
    other.renew()
    assert stored_lease(storage)["session"] == "other"


@pytest.mark.parametrize("where", ["local", "s3"])
def test_of_many_concurrent_drivers_one_acquires_the_lease(
    request: pytest.FixtureRequest, tmp_path: Path, drivers: Drivers, neighbour: Driver, where: str
) -> None:
    storage = Storage(f"{request.getfixturevalue('s3')}/moon" if where == "s3" else tmp_path)
    put(storage, REMOTE, released=True)
    barrier = threading.Barrier(6)
    winners, refused = [], []

    def compete(number: int) -> None:
        lease = drivers(str(number), neighbour, storage)
        barrier.wait()
        try:
            lease.acquire()
        except ConfigError:
            refused.append(number)
        else:
            winners.append(number)

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [stored_lease(storage)["session"]] == [str(number) for number in winners]
    assert len(refused) == 5


def test_a_deleted_term_is_not_acquired_again(storage: FaultyStorage, drivers: Drivers, neighbour: Driver) -> None:
    put(storage, REMOTE, released=True)

    def acquire_two_terms() -> None:
        with drivers("second") as lease:
            lease.acquire()
        drivers("third", neighbour).acquire()
        assert storage.list() == ["driver/000003.json"]

    storage.before_create = acquire_two_terms
    with pytest.raises(ConfigError, match=f"live driver: pid {neighbour.pid} of bob"):
        drivers("slow").acquire()
    assert stored_lease(storage)["session"] == "third"
    drivers.made[-2].renew()


def test_a_suspended_driver_finds_out_that_it_was_replaced(storage: Storage, drivers: Drivers) -> None:
    suspended = drivers("one")
    suspended.acquire()
    suspended.check()
    put(storage, REMOTE, term=2)
    storage.delete("driver/000001.json")
    suspended.check()
    for call in (suspended.renew, suspended.renew, suspended.check, suspended.acquire):
        with pytest.raises(DriverReplacedError, match=r"run 'moon' was taken over.*pid 7 of ada on far.*10\.0\.0\.9"):
            call()
    assert suspended.replaced.is_set()
    suspended.release()
    assert storage.list() == ["driver/000002.json"]
    assert stored_lease(storage)["session"] == "remote" and stored_lease(storage)["released"] is False


def test_a_driver_finds_out_that_its_run_was_deleted_and_restarted(storage: Storage, drivers: Drivers) -> None:
    first = drivers("one")
    first.acquire()
    storage.delete_tree("driver")
    first.renew()
    assert stored_lease(storage)["session"] == "one", "deleted, not replaced"
    put(storage, REMOTE)
    with pytest.raises(DriverReplacedError, match="on far"):
        first.renew()
    assert stored_lease(storage)["session"] == "remote"


def test_the_thread_renews_and_detects_a_successor(
    storage: Storage, drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "RENEW_EVERY_S", 0.01)
    lease = drivers("one")
    lease.acquire()
    until(lambda: stored_lease(storage)["count"] >= 3)
    put(storage, REMOTE, term=2)
    assert lease.replaced.wait(30)
    with pytest.raises(DriverReplacedError, match="on far"):
        lease.check()


def test_a_released_lease_is_not_renewed(storage: Storage, drivers: Drivers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "RENEW_EVERY_S", 0.01)
    with drivers("one") as lease:
        lease.acquire()
        until(lambda: stored_lease(storage)["count"] >= 1)
    assert not any(thread.name == "driver-lease" for thread in threading.enumerate())
    lease.renew()
    assert stored_lease(storage)["released"] is True


def test_a_lease_survives_an_outage_that_is_logged_once(
    storage: FaultyStorage, drivers: Drivers, caplog: pytest.LogCaptureFixture
) -> None:
    lease = drivers("one")
    lease.acquire()
    for outage in range(1, 3):
        storage.failing = True
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                lease.renew(ray_address=f"10.0.0.{outage}:6379")
        assert len(caplog.records) == outage
        assert "the lease on run 'moon' cannot be renewed: no space" in caplog.text
        storage.failing = False
        lease.renew()
        assert stored_lease(storage)["ray_address"] == f"10.0.0.{outage}:6379"


def test_a_lease_acquired_during_an_outage_is_given_back(
    storage: FaultyStorage, drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(prefix: str = "") -> list[str]:
        raise StorageError("no answer")

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="no answer"):
        patch.setattr(storage, "list", fail)
        drivers("one").acquire()

    def start_outage() -> None:
        monkeypatch.setattr(storage, "list", fail)

    storage.before_create = start_outage
    with drivers("two") as lease:
        with pytest.raises(StorageError, match="no answer"):
            lease.acquire()
        monkeypatch.undo()
    assert stored_lease(storage)["released"] is True


def test_each_driver_gets_a_larger_number_for_its_session(storage: Storage) -> None:
    sessions = []
    for _ in range(2):
        with DriverLease(storage, "moon", new_session, print) as lease:
            lease.acquire()
            sessions.append(lease.session)
            assert stored_lease(storage)["session"] == lease.session
    storage.delete_tree("driver")
    with DriverLease(storage, "moon", new_session, print, after=2) as lease:
        lease.acquire()
        sessions.append(lease.session)
    assert [session[:8] for session in sessions] == ["s000001-", "s000002-", "s000003-"]
