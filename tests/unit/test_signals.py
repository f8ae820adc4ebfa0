"""Ctrl-C and SIGTERM in a driver, and SIGTERM in a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from elastic_ddp.signals import StopRequests


def test_a_driver_counts_stop_signals_and_restores_the_handlers() -> None:
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequests() as requests:
        assert requests.count == 0
        os.kill(os.getpid(), signal.SIGINT)
        assert requests.count == 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.count == 2
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, inherited)


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
