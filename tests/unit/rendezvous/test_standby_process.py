"""A process that stands by: it waits for a place, and uses no GPU before it has one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from elastic_ddp.rendezvous import standby_process


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores what a standby changes in its process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    yield
    standby_process._has_place.set()
    standby_process._predecessor = None


@pytest.fixture
def predecessor() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until a test ends it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


ENDED = 2**22 + 1
"""A process id that Linux never gives."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Initializes CUDA; it records the GPUs that this process sees then."""
    initialize = mock.Mock(side_effect=lambda: os.environ["CUDA_VISIBLE_DEVICES"])
    monkeypatch.setattr(torch._C, "_cuda_init", initialize, raising=False)
    monkeypatch.setattr("elastic_ddp.torch_internals.has_used_cuda", lambda: False)
    return initialize


def test_only_a_standby_waits_for_a_place() -> None:
    standby_process.wait_for_place()
    standby_process.stand_by()
    assert not standby_process.has_place()
    waiting = threading.Thread(target=standby_process.wait_for_place, daemon=True)
    waiting.start()
    assert standby_process.take_place([], ENDED)
    waiting.join(10)
    assert not waiting.is_alive() and standby_process.has_place()


def test_the_first_use_of_cuda_waits_for_the_gpu_of_the_failed_worker(
    cuda: Any, predecessor: subprocess.Popen[bytes]
) -> None:
    standby_process.stand_by(["0"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0", "torch counts the GPUs that a worker would have"
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1", "and does not load the driver for it"
    use = threading.Thread(target=torch._C._cuda_init, daemon=True)
    use.start()
    use.join(0.05)
    assert use.is_alive() and not cuda.called
    assert standby_process.take_place(["3"], predecessor.pid)
    use.join(0.05)
    assert use.is_alive() and not cuda.called, "its memory is not free yet"
    predecessor.kill()
    use.join(10)
    assert cuda.call_count == 1 and os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_standby_that_has_loaded_the_driver_takes_no_place_on_another_gpu(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ddp.torch_internals.has_used_cuda", lambda: True)
    standby_process.stand_by(["0"])
    assert not standby_process.take_place(["3"], ENDED) and not standby_process.has_place()
    assert standby_process.take_place(["0"], ENDED)
