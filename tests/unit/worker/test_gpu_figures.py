"""The utilization of a GPU, which is read beside the steps."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from elastic_ddp.worker.gpu_figures import Utilization

GPU = torch.device("cuda", 0)


def test_a_slow_reading_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    may_return = threading.Event()

    def read(device: Any) -> int:
        may_return.wait()
        return 75

    monkeypatch.setattr(torch.cuda, "utilization", read)
    utilization = Utilization(GPU)
    assert utilization.newest() is utilization.newest() is None
    may_return.set()
    end = time.monotonic() + 10
    while (value := utilization.newest()) is None:
        assert time.monotonic() < end
    assert value == 0.75
    utilization._reader.shutdown()


def test_a_worker_without_nvml_has_no_utilization_and_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, called = [], threading.Event()

    def fail(device: Any) -> int:
        calls.append(device)
        called.set()
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", fail)
    utilization = Utilization(GPU)
    assert utilization.newest() is None and called.wait(10)
    utilization._reader.shutdown()
    assert utilization.newest() is utilization.newest() is None
    assert calls == [GPU]
