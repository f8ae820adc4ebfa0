"""Seeds from the place in the run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ddp import seeding
from elastic_ddp.seeding import derive_seed, preserve_rng_state, seed_all

places = st.lists(st.integers(0, 2**40) | st.text(max_size=8), max_size=3).map(tuple)


def draws() -> tuple[float, float, float]:
    """One number from each generator that a training function may use."""
    return torch.rand(1).item(), np.random.random(), random.random()


def test_seeds_never_change_between_versions() -> None:
    """A later version can resume a run."""
    assert derive_seed(0, "init") == 6109011495221250200
    assert derive_seed(17, 3, 5) == 4106087806314617616


@given(st.integers(0, 2**63 - 1), places, places)
def test_different_places_have_different_seeds(
    seed: int, place: tuple[int | str, ...], other: tuple[int | str, ...]
) -> None:
    assert 0 <= derive_seed(seed, *place) < 2**63
    assert (derive_seed(seed, *place) == derive_seed(seed, *other)) == (place == other)


def test_torch_numpy_and_python_are_all_seeded() -> None:
    seed_all(0, 1, 2)
    first, second = draws(), draws()
    seed_all(0, 1, 3)
    other = draws()
    seed_all(0, 1, 2)
    assert (draws(), draws()) == (first, second)
    assert all(number != other_number for number, other_number in zip(first, other, strict=True))


def test_on_a_gpu_only_generators_that_exist_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's manual_seed formats a traceback for each kind of device that the machine lacks, in every step."""
    seeded: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    for name in ("cuda", "xpu", "mtia"):
        record = lambda value, name=name: seeded.append((name, value))  # noqa: E731
        monkeypatch.setattr(getattr(torch, name), "manual_seed_all", record)
    seeding._device_seeder.cache_clear()
    try:
        seed_all(0, 1, 2)
    finally:
        seeding._device_seeder.cache_clear()
    assert seeded == [("cuda", derive_seed(0, 1, 2))]
    assert torch.initial_seed() == derive_seed(0, 1, 2)


def test_the_state_of_all_generators_is_preserved_also_after_an_error() -> None:
    seed_all(1, "a")
    expected = draws()
    seed_all(1, "a")
    with pytest.raises(KeyError), preserve_rng_state(torch.device("cpu")):
        seed_all(2, "b")
        draws()
        raise KeyError
    assert draws() == expected
