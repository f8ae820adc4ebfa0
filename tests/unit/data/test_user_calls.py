"""The report of a call in which a data process dies or hangs, with a process in place of Ray's."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from elastic_ddp.data.user_calls import CallRecords, describe_rows, record_calls, recorded
from elastic_ddp.rendezvous.standby_process import process_state
from tests.ranks import PROCESSES


def wait_forever() -> None:
    threading.Event().wait()


def exit_at_once() -> None:
    os._exit(3)


def work(folder: str, function: Callable[[], None], began: object) -> None:
    record_calls(folder)
    with recorded("the transform", "epoch 0, lane 1, chunk 1", np.arange(5)):
        pass
    with recorded("the transform", "epoch 0, lane 1, chunk 2", np.arange(100, 130)):
        began.set()  # type: ignore[attr-defined]
        function()
    threading.Event().wait()


@pytest.fixture
def records() -> Iterator[CallRecords]:
    made = CallRecords()
    yield made
    made.close()
    assert not os.path.exists(made.folder)


@pytest.fixture
def start() -> Iterator[Callable[[CallRecords, Callable[[], None]], object]]:
    """Starts a process that calls a function, and waits until it does."""
    processes = []

    def run(records: CallRecords, function: Callable[[], None]) -> object:
        began = PROCESSES.Event()
        processes.append(PROCESSES.Process(target=work, args=(records.folder, function, began)))
        processes[-1].start()
        assert began.wait(30)
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.join()


CALL = r", in epoch 0, lane 1, chunk 2: rows 100, 101, 102, .*119 of the data set and 10 more"


def divide_by_zero_in_native_code() -> None:
    os.kill(os.getpid(), signal.SIGFPE)


@pytest.mark.parametrize(
    ("function", "how", "frames"),
    [
        (divide_by_zero_in_native_code, r"of SIGFPE \(Floating.point exception\)", ["divide_by_zero_in_native_code"]),
        (os.abort, r"of SIGABRT \(Aborted\)", ["work"]),
        (exit_at_once, r"without a signal .* it called os\._exit, or was killed \(SIGKILL\), .*", []),
    ],
)
def test_the_call_in_which_a_process_died_is_found(
    records: CallRecords, start: Callable[..., object], function: Callable[[], None], how: str, frames: list[str]
) -> None:
    start(records, wait_forever)  # another process of the pipeline, which runs
    start(records, function)
    call = records.find_fatal(describe_rows)
    assert call is not None and call.place == "epoch 0, lane 1, chunk 2"
    first, *stack = str(call).splitlines()
    assert re.fullmatch(f"the process that runs the transform died {how}{CALL}", first), first
    assert [frame.rpartition(" in ")[2] for frame in stack][: len(frames)] == frames


def test_the_reason_that_ray_gives_is_reported(records: CallRecords, start: Callable[..., object]) -> None:
    start(records, exit_at_once)
    call = records.find_fatal(describe_rows, " because memory is short")
    assert call is not None and str(call).startswith("the process that runs the transform died because memory is")


def test_a_process_that_died_outside_of_a_call_is_not_blamed_on_the_function(
    records: CallRecords, start: Callable[..., object]
) -> None:
    start(records, int)
    (process,) = os.listdir(records.folder)
    while os.path.getsize(f"{records.folder}/{process}"):  # until the call ends
        time.sleep(0.001)
    os.kill(int(process), signal.SIGKILL)
    assert records.find_fatal(describe_rows) is None


def test_a_call_that_hangs_is_found_with_its_stack(records: CallRecords, start: Callable[..., object]) -> None:
    start(records, wait_forever)
    assert records.find_hanging(describe_rows, after_s=1000.0, waited_s=10.0) is None
    call = None
    while call is None or "wait_forever" not in str(call):  # until the call waits
        call = records.find_hanging(describe_rows, after_s=0.0, waited_s=0.0)
    first, *stack = str(call).splitlines()
    assert re.fullmatch(f"the process that runs the transform has made no progress for 0 s{CALL}", first), first
    assert stack[-1].startswith("  File ")


def test_time_in_which_the_machine_or_the_process_was_suspended_is_no_hang(
    records: CallRecords, start: Callable[..., object]
) -> None:
    start(records, wait_forever)
    (process,) = os.listdir(records.folder)

    def hangs(waited_s: float) -> bool:
        return records.find_hanging(describe_rows, after_s=60.0, waited_s=waited_s) is not None

    os.utime(f"{records.folder}/{process}", (0, 0))  # the clock shows many years later
    assert [hangs(20.0), hangs(20.0)] == [False, False]
    os.kill(int(process), signal.SIGSTOP)
    while process_state(int(process)) != "T":
        time.sleep(0.001)
    assert not hangs(100.0)
    os.kill(int(process), signal.SIGCONT)
    while process_state(int(process)) == "T":
        time.sleep(0.001)
    assert hangs(20.0)
