"""Ctrl-C and SIGTERM to a driver, and SIGTERM to a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from elastic_ddp.signals import StopRequests


def test_a_driver_counts_what_asks_it_to_stop_and_hears_as_before_afterwards() -> None:
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is to ignore it
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequests() as requests:
        assert requests.count == 0
        os.kill(os.getpid(), signal.SIGINT)
        assert requests.count == 1, "the first one asks"
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.count == 2, "the second one insists"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, inherited)


WORKER = """
import os, signal, sys, threading
from elastic_ddp import signals

signals.listen_for_sigterm()
told = threading.Event()
signals.on_sigterm(told.set)
os.kill(os.getpid(), signal.SIGTERM)
assert told.wait(30)
signals.exit_on_sigterm()
print("still there", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGTERM)
threading.Event().wait(30)
print("and still")
"""


def test_sigterm_is_a_notice_while_a_worker_works_and_ends_it_afterwards() -> None:
    process = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate("go on\n", timeout=60)
    assert (out.strip(), process.returncode) == ("still there", 128 + signal.SIGTERM)
