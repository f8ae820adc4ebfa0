"""Ctrl-C and SIGTERM to a driver."""

from __future__ import annotations

import os
import signal

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
