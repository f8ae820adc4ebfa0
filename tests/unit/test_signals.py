"""Ctrl-C and SIGTERM in a driver, and SIGTERM in a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from elastic_ddp.signals import StopRequests

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def test_a_driver_records_stop_signals_and_restores_the_handlers() -> None:
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopRequests() as requests:
        assert not requests.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert requests.requested and not requests.at_once
        os.kill(os.getpid(), signal.SIGINT)
        assert requests.at_once
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_supervisor_that_sends_its_signal_again_does_not_prevent_the_commit(number: int) -> None:
    inherited = signal.signal(number, signal.SIG_DFL)  # `nohup` makes a process ignore SIGHUP
    with StopRequests() as requests:
        for _ in range(5):
            os.kill(os.getpid(), number)
        assert requests.requested and not requests.at_once
    signal.signal(number, inherited)


def test_a_signal_that_the_process_ignores_stops_no_run() -> None:
    """`nohup` makes a process ignore SIGHUP."""
    inherited = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequests() as requests:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not requests.requested
    signal.signal(signal.SIGHUP, inherited)


WORKER = """
import os, signal, sys, threading
from elastic_ddp import signals

signals.listen_for_sigterm()
received = threading.Event()
signals.on_sigterm(received.set)
os.kill(os.getpid(), signal.SIGTERM)
assert received.wait(30)
signals.exit_on_sigterm()
print("alive", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGTERM)
threading.Event().wait(30)
print("still alive")
"""


def test_sigterm_notifies_a_working_worker_and_ends_one_that_has_left() -> None:
    process = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate("continue\n", timeout=60)
    assert (out.strip(), process.returncode) == ("alive", 128 + signal.SIGTERM)


CHILDREN = """
import multiprocessing, os, signal, subprocess, threading, time
from elastic_ddp import signals

{set_up}
fork = multiprocessing.get_context("fork")

def train():  # in another thread than the main one, as in a worker
    for _ in range(20):
        with fork.Pool(4) as pool:  # its end terminates the children
            assert pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]
    for _ in range(50):
        child = fork.Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()  # at once, perhaps before the child has run any Python code
        child.join()
        assert child.exitcode == -signal.SIGTERM, child.exitcode
    for options in {{}}, {{"preexec_fn": lambda: None}}:
        child = subprocess.Popen(["sleep", "60"], **options)
        child.terminate()
        assert child.wait() == -signal.SIGTERM

thread = threading.Thread(target=train)
thread.start()
thread.join()
{check}
print("done")
"""
IN_A_WORKER = {
    "set_up": "signals.listen_for_sigterm()",
    "check": "assert not signals._received.is_set(), 'the worker takes a signal to a child for its own'",
}
IN_A_DRIVER = {
    "set_up": "requests = signals.StopRequests().__enter__()",
    "check": "assert not requests.requested",
}


@pytest.mark.parametrize("process", [IN_A_WORKER, IN_A_DRIVER], ids=["worker", "driver"])
def test_children_of_a_process_are_terminated_without_a_notice_to_the_process(process: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN.format(**process)], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
