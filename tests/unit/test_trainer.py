"""What an `ElasticTrainer` refuses before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ddp import ElasticTrainer
from elastic_ddp.errors import ConfigError


def takes_nothing() -> None: ...


def takes_a_run(run: Any, often: int = 3) -> None: ...


@pytest.mark.parametrize(
    ("train", "transform", "message"),
    [
        ("train", None, "train is a str; give the function that trains"),
        (takes_nothing, None, "takes_nothing .* is called with a Run, which it does not take"),
        (takes_a_run, 3, "transform is a int; give a function that gets a dict of NumPy arrays"),
        (takes_a_run, None, "invalid configuration"),
    ],
)
def test_what_cannot_be_called_is_refused_at_once(train: Any, transform: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ElasticTrainer(train, "data", {}, transform=transform)
