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
from elastic_ddp.storage import lease_holder as driver_module
from elastic_ddp.storage.lease import EXPIRES_AFTER_S, DriverLease
from elastic_ddp.storage.lease_holder import Driver, started
from elastic_ddp.storage.storage import Storage

FAR = replace(
    Driver.this_process("far"), host="far", pid=7, user="ada", boot_id="another boot", ray_address="10.0.0.9:6379"
)
"""On another machine."""


class Time:
    """Goes on when somebody sleeps; `meanwhile` is what happens then."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.now = 0.0
        self.meanwhile = meanwhile

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


class Faulty(Storage):
    """Refuses writes while `failing`, and lets something happen before the next create."""

    failing = False
    before_create: Callable[[], None] | None = None

    def write(self, key: str, data: bytes) -> None:
        if self.failing:
            raise StorageError("no space")
        super().write(key, data)

    def create(self, key: str, data: bytes, **options: Any) -> None:
        if (happens := self.before_create) is not None:
            self.before_create = None
            happens()
        super().create(key, data, **options)


class Drivers:
    """Makes leases of drivers, and ends their threads."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.time = Time()
        self.notes: list[str] = []
        self.made: list[DriverLease] = []

    def __call__(self, session: str, driver: Driver | None = None, storage: Storage | None = None) -> DriverLease:
        made = DriverLease(
            storage or self.storage,
            "moon",
            session,
            self.notes.append,
            driver=driver and replace(driver, session=session),
            clock=self.time.clock,
            sleep=self.time.sleep,
        )
        self.made.append(made)
        return made


@pytest.fixture
def storage(tmp_path: Path) -> Faulty:
    return Faulty(tmp_path / "runs" / "moon")


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
    here = Driver.this_process("neighbour")
    return replace(here, pid=process.pid, started=started(process.pid), user="bob")


def put(storage: Storage, driver: Driver, *, term: int = 1, count: int = 0, released: bool = False) -> None:
    """The lease of a driver that is not in this process."""
    content = {**asdict(driver), "count": count, "released": released}
    storage.write(f"driver/{term:06d}.json", json.dumps(content).encode())


def held(storage: Storage) -> dict[str, Any]:
    """The lease that counts."""
    return json.loads(storage.read(storage.list("driver")[-1]))


def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen in time")


def test_a_driver_says_where_it_is_for_as_long_as_it_holds_the_lease(storage: Storage, drivers: Drivers) -> None:
    with drivers("one") as lease:
        lease.acquire()
        lease.acquire()
        lease.renew(ray_address="10.0.0.1:6379")
        assert storage.list() == ["driver/000001.json"]
        lease_of_one = held(storage)
        assert lease_of_one["session"] == "one" and lease_of_one["released"] is False
        assert lease_of_one["pid"] == os.getpid() and lease_of_one["ray_address"] == "10.0.0.1:6379"
    assert held(storage)["released"] is True
    with drivers("two") as lease:
        lease.acquire()
        assert storage.list() == ["driver/000002.json"], "what is older is removed"
        assert held(storage)["session"] == "two"
    assert drivers.time.now == 0 and drivers.notes == []


def test_a_lease_that_was_never_taken_leaves_nothing_behind(storage: Storage, drivers: Drivers) -> None:
    with drivers("one"):
        pass
    assert storage.list() == []


def test_a_lease_is_released_after_an_error(storage: Storage, drivers: Drivers) -> None:
    with pytest.raises(KeyError), drivers("one") as lease:
        lease.acquire()
        raise KeyError
    assert held(storage)["released"] is True


@pytest.mark.parametrize("how", ["reaped", "zombie"])
def test_a_dead_driver_of_this_machine_is_succeeded_at_once(storage: Storage, drivers: Drivers, how: str) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        driver = neighbour_in(process)
        put(storage, driver, term=3)
        process.kill()
        if how == "reaped":
            process.wait()
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        drivers("two").acquire()
    assert storage.list() == ["driver/000004.json"] and held(storage)["session"] == "two"
    assert drivers.time.now == 0
    assert drivers.notes == [f"run 'moon': taking over from a dead driver: {driver}"]


def test_a_process_with_the_pid_of_a_dead_driver_is_not_taken_for_it(
    storage: Storage, drivers: Drivers, neighbour: Driver
) -> None:
    assert neighbour.started is not None
    put(storage, replace(neighbour, started=neighbour.started - 1))
    drivers("two").acquire()
    assert held(storage)["session"] == "two" and drivers.time.now == 0


def test_a_live_driver_of_this_machine_is_not_succeeded(storage: Storage, drivers: Drivers, neighbour: Driver) -> None:
    put(storage, replace(neighbour, ray_address="10.0.0.1:6379"))
    with pytest.raises(ConfigError) as caught, drivers("two") as lease:
        lease.acquire()
    text = str(caught.value)
    assert f"run 'moon' in {storage.uri} has a live driver: pid {neighbour.pid} of bob on {neighbour.host}" in text
    assert f"since {neighbour.since}, Ray at 10.0.0.1:6379" in text
    assert "Stop it with Ctrl-C there or with `elastic-ddp stop moon`, or use another name" in text
    assert held(storage)["session"] == "neighbour" and drivers.time.now == 0


def test_a_driver_elsewhere_that_renews_is_not_succeeded(storage: Storage, drivers: Drivers) -> None:
    put(storage, FAR)

    def renew() -> None:
        if drivers.time.now >= 3:
            put(storage, FAR, count=1)

    drivers.time.meanwhile = renew
    with pytest.raises(ConfigError, match=r"live driver: pid 7 of ada on far, .*Ray at 10\.0\.0\.9:6379"):
        drivers("two").acquire()
    assert drivers.time.now == 3, "it is refused as soon as it is known"
    (note,) = drivers.notes
    assert "may be alive: pid 7 of ada on far" in note and "Waiting up to 20 s" in note
    assert held(storage)["session"] == "far"


def test_a_driver_elsewhere_that_does_not_renew_is_succeeded(storage: Storage, drivers: Drivers) -> None:
    put(storage, FAR)
    drivers("two").acquire()
    assert drivers.time.now == EXPIRES_AFTER_S
    assert held(storage)["session"] == "two"
    assert "taking over from a dead driver: pid 7 of ada on far" in drivers.notes[-1]


def test_a_driver_elsewhere_that_goes_is_not_waited_for(storage: Storage, drivers: Drivers) -> None:
    put(storage, FAR)
    drivers.time.meanwhile = lambda: put(storage, FAR, released=True)
    drivers("two").acquire()
    assert drivers.time.now == 1 and held(storage)["session"] == "two"


def test_a_driver_elsewhere_that_is_succeeded_by_another_is_not_waited_for(
    storage: Storage, drivers: Drivers, neighbour: Driver
) -> None:
    put(storage, FAR)
    drivers.time.meanwhile = lambda: put(storage, neighbour, term=2)
    with pytest.raises(ConfigError, match=f"live driver: pid {neighbour.pid} of bob"):
        drivers("two").acquire()
    assert drivers.time.now == 1


def test_who_watches_and_was_frozen_looks_again_before_it_takes_over(storage: Storage, drivers: Drivers) -> None:
    put(storage, FAR)

    def freeze() -> None:
        drivers.time.now += 3600
        put(storage, FAR, count=700)

    drivers.time.meanwhile = freeze
    with pytest.raises(ConfigError, match="live driver"):
        drivers("two").acquire()


@pytest.mark.parametrize("data", [b"", b'{"session": "fa', b"[1]", b"7"])
def test_a_torn_lease_is_watched_like_one_elsewhere(storage: Storage, drivers: Drivers, data: bytes) -> None:
    storage.write("driver/000001.json", data)
    drivers("two").acquire()
    assert drivers.time.now == EXPIRES_AFTER_S and held(storage)["session"] == "two"


def test_a_lease_of_a_later_version_is_understood(storage: Storage, drivers: Drivers, neighbour: Driver) -> None:
    content = {**asdict(neighbour), "count": 1, "colour": "blue"}
    storage.write("driver/000001.json", json.dumps(content).encode())
    with pytest.raises(ConfigError, match=f"live driver: pid {neighbour.pid} of bob"):
        drivers("two").acquire()


def test_a_process_that_is_hidden_from_this_user_is_watched(
    storage: Storage, drivers: Drivers, neighbour: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(storage, neighbour)
    lease = drivers("two")

    def hidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(driver_module, "started", lambda pid: None)
    monkeypatch.setattr(os, "kill", hidden)
    lease.acquire()
    assert drivers.time.now == EXPIRES_AFTER_S and held(storage)["session"] == "two"


def test_a_lease_of_this_process_that_could_not_be_released_is_no_obstacle_for_long(
    storage: Faulty, drivers: Drivers, caplog: pytest.LogCaptureFixture
) -> None:
    with drivers("one") as lease:
        lease.acquire()
        storage.failing = True
    assert [record.getMessage() for record in caplog.records] == ["the lease on run 'moon' cannot be renewed: no space"]
    storage.failing = False
    drivers("two").acquire()
    assert drivers.time.now == EXPIRES_AFTER_S and held(storage)["session"] == "two"


def test_a_second_driver_in_this_process_is_refused_while_the_first_one_lives(
    storage: Storage, drivers: Drivers
) -> None:
    first = drivers("one")
    first.acquire()
    drivers.time.meanwhile = first.renew
    with pytest.raises(ConfigError, match=f"live driver: pid {os.getpid()} of"):
        drivers("two").acquire()


@pytest.mark.parametrize("before", [None, FAR])
def test_of_two_that_see_a_lease_to_take_one_takes_it(
    storage: Faulty, drivers: Drivers, neighbour: Driver, before: Driver | None
) -> None:
    if before is not None:
        put(storage, before)
    other = drivers("other", neighbour)
    storage.before_create = other.acquire
    with pytest.raises(ConfigError, match=f"live driver: pid {neighbour.pid} of bob"):
        drivers("two").acquire()
    other.renew()
    assert held(storage)["session"] == "other"


@pytest.mark.parametrize("where", ["local", "s3"])
def test_of_many_that_take_a_lease_at_once_one_has_it(
    request: pytest.FixtureRequest, tmp_path: Path, drivers: Drivers, neighbour: Driver, where: str
) -> None:
    storage = Storage(f"{request.getfixturevalue('s3')}/moon" if where == "s3" else tmp_path)
    put(storage, FAR, released=True)
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
    assert [held(storage)["session"]] == [str(number) for number in winners]
    assert len(refused) == 5


def test_a_term_that_was_over_long_ago_is_not_taken_again(storage: Faulty, drivers: Drivers, neighbour: Driver) -> None:
    put(storage, FAR, released=True)

    def others_come_and_go() -> None:
        with drivers("second") as lease:
            lease.acquire()
        drivers("third", neighbour).acquire()
        assert storage.list() == ["driver/000003.json"]

    storage.before_create = others_come_and_go
    with pytest.raises(ConfigError, match=f"live driver: pid {neighbour.pid} of bob"):
        drivers("slow").acquire()
    assert storage.list() == ["driver/000003.json"]
    drivers.made[-2].renew()


def test_a_frozen_driver_that_was_replaced_hears_it_and_leaves_the_lease_alone(
    storage: Storage, drivers: Drivers
) -> None:
    frozen = drivers("one")
    frozen.acquire()
    frozen.check()
    put(storage, FAR, term=2)
    storage.delete("driver/000001.json")
    frozen.check()
    for call in (frozen.renew, frozen.renew, frozen.check, frozen.acquire):
        with pytest.raises(DriverReplacedError, match=r"run 'moon' was taken over.*pid 7 of ada on far.*10\.0\.0\.9"):
            call()
    assert frozen.replaced.is_set()
    frozen.release()
    assert storage.list() == ["driver/000002.json"]
    assert held(storage)["session"] == "far" and held(storage)["released"] is False


def test_a_driver_hears_that_it_was_replaced_even_if_its_successor_is_done(storage: Storage, drivers: Drivers) -> None:
    frozen = drivers("one")
    frozen.acquire()
    put(storage, FAR, term=2, released=True)
    with pytest.raises(DriverReplacedError, match="on far"):
        frozen.renew()


def test_a_driver_whose_run_was_removed_and_begun_anew_hears_it(storage: Storage, drivers: Drivers) -> None:
    first = drivers("one")
    first.acquire()
    storage.delete_tree("driver")
    first.renew()
    assert held(storage)["session"] == "one", "it was only removed"
    put(storage, FAR)
    with pytest.raises(DriverReplacedError, match="on far"):
        first.renew()
    assert held(storage)["session"] == "far"


def test_the_thread_renews_and_hears_of_a_successor(
    storage: Storage, drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "RENEW_EVERY_S", 0.01)
    lease = drivers("one")
    lease.acquire()
    until(lambda: held(storage)["count"] >= 3)
    put(storage, FAR, term=2)
    assert lease.replaced.wait(30)
    with pytest.raises(DriverReplacedError, match="on far"):
        lease.check()


def test_a_released_lease_is_renewed_no_more(
    storage: Storage, drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "RENEW_EVERY_S", 0.01)
    with drivers("one") as lease:
        lease.acquire()
        until(lambda: held(storage)["count"] >= 1)
    assert not any(thread.name == "driver-lease" for thread in threading.enumerate())
    lease.renew()
    assert held(storage)["released"] is True


def test_an_outage_of_the_storage_is_logged_once_and_outlived(
    storage: Faulty, drivers: Drivers, caplog: pytest.LogCaptureFixture
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
        assert held(storage)["ray_address"] == f"10.0.0.{outage}:6379"


def test_a_lease_that_is_taken_while_the_storage_fails_is_not_held(
    storage: Faulty, drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(prefix: str = "") -> list[str]:
        raise StorageError("no answer")

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="no answer"):
        patch.setattr(storage, "list", broken)
        drivers("one").acquire()

    def breaks() -> None:
        monkeypatch.setattr(storage, "list", broken)

    storage.before_create = breaks
    with drivers("two") as lease:
        with pytest.raises(StorageError, match="no answer"):
            lease.acquire()
        monkeypatch.undo()
    assert held(storage)["released"] is True, "what was created is given back"
