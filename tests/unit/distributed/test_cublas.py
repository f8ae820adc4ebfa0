"""When the variable that makes cuBLAS deterministic is removed, without a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from elastic_ddp.distributed.cublas import VALUE, VARIABLE, settle

GPU, MODEL = torch.device("cuda:0"), torch.nn.Linear(2, 2)


class OldTorch:
    """Calls of cuBLAS in a torch that parses the variable at each call, and checks it at some of them."""

    def __init__(self, checked_calls: int) -> None:
        self.checked_calls, self.num_calls = checked_calls, 0

    def multiply(self, device: torch.device) -> None:
        self.num_calls += 1
        if self.num_calls <= self.checked_calls and os.environ.get(VARIABLE) != VALUE:
            raise RuntimeError("Deterministic behavior was enabled, but this operation is not deterministic")


@pytest.fixture(autouse=True)
def hopper_and_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, VALUE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delattr(torch.backends.cuda, "cublas_workspace_size", raising=False)


def test_the_variable_is_removed_after_torch_has_checked_it() -> None:
    torch_of_run = OldTorch(checked_calls=1)
    assert settle(GPU, MODEL, torch_of_run.multiply) and VARIABLE not in os.environ
    torch_of_run.multiply(GPU)


def test_the_variable_stays_if_torch_checks_it_at_every_call() -> None:
    torch_of_run = OldTorch(checked_calls=1_000)
    assert not settle(GPU, MODEL, torch_of_run.multiply) and os.environ[VARIABLE] == VALUE
    torch_of_run.multiply(GPU)


@pytest.mark.parametrize("case", ["another GPU", "another value", "a torch that keeps the size", "a CPU", "an LSTM"])
def test_the_variable_stays_where_removing_it_could_change_bits_or_saves_nothing(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    value = ":16:8" if case == "another value" else VALUE
    monkeypatch.setenv(VARIABLE, value)
    if case == "another GPU":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    if case == "a torch that keeps the size":
        monkeypatch.setattr(torch.backends.cuda, "cublas_workspace_size", lambda: 32 << 20, raising=False)
    model = torch.nn.Sequential(torch.nn.LSTM(2, 2)) if case == "an LSTM" else MODEL
    torch_of_run = OldTorch(checked_calls=1)
    assert not settle(torch.device("cpu") if case == "a CPU" else GPU, model, torch_of_run.multiply)
    assert os.environ[VARIABLE] == value and not torch_of_run.num_calls
