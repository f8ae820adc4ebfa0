"""Runs that begin with the weights of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.job import COMMITS
from elastic_ddp.storage import Storage
from tests.unit.alone import Model, NewRun, prepared, train


@pytest.fixture
def trained(new_run: NewRun, tmp_path: Path) -> str:
    """The folder of a run that was trained for six steps."""
    train(new_run(folder="trained"))
    return str(tmp_path / "trained")


def weights_at_the_beginning(run: object, uri: str, **options: object) -> dict[str, torch.Tensor]:
    model = prepared(run)  # type: ignore[arg-type]
    run.load_weights(uri, **options)  # type: ignore[attr-defined]
    for step in run.steps():  # type: ignore[attr-defined]
        found = {name: each.clone() for name, each in model.state_dict().items()}
        assert step.index == 0
        return found
    raise AssertionError


def weights_in(uri: str) -> dict[str, torch.Tensor]:
    found = CheckpointStore(Storage(uri).at(COMMITS), keep=1).load_latest()
    assert found is not None
    return dict(found[1]["model"])


def test_a_run_begins_with_the_weights_and_nothing_else_of_another(new_run: NewRun, trained: str) -> None:
    found, expected = weights_at_the_beginning(new_run(folder="tuned"), trained), weights_in(trained)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_with_commits_of_its_own_goes_on_from_these(new_run: NewRun, trained: str) -> None:
    calm = train(new_run(folder="own"))
    again = new_run(folder="own", steps=7)
    prepared(again)
    again.load_weights(trained)
    assert [step.index for step in (next(iter(again.steps())),)] == [6]
    assert calm["steps"] == 6


def test_what_does_not_fit_is_refused_by_name(new_run: NewRun, trained: str) -> None:
    run = new_run(folder="tuned")
    model = Model()
    model.append(torch.nn.Linear(1, 2))
    run.prepare(model)
    with pytest.raises(ConfigError, match=r"4\.bias is missing there; 4\.weight is missing there"):
        run.load_weights(trained)
    run.load_weights(trained, strict=False)

    smaller = new_run(folder="smaller")
    smaller.prepare(torch.nn.Sequential(torch.nn.Linear(3, 4)))
    with pytest.raises(ConfigError, match=r"1\.bias is unexpected: the model has no such tensor"):
        smaller.load_weights(trained)

    other = new_run(folder="other")
    other.prepare(torch.nn.Sequential(torch.nn.Linear(3, 5)))
    with pytest.raises(ConfigError, match=r"0\.bias is \(4,\) there and \(5,\) here"):
        other.load_weights(trained, strict=False)


def test_where_there_is_nothing_to_load_that_is_said(new_run: NewRun, trained: str, tmp_path: Path) -> None:
    run = new_run(folder="tuned")
    with pytest.raises(ConfigError, match="before a model was prepared"):
        run.load_weights(trained)
    prepared(run)
    with pytest.raises(ConfigError, match=r"there is no commit in .*; give a run's <storage>/<name>"):
        run.load_weights(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="there is no commit at step 3 in"):
        run.load_weights(trained, step=3)


def test_weights_that_are_not_what_was_committed_are_not_used(new_run: NewRun, trained: str) -> None:
    storage = Storage(trained).at(COMMITS)
    commit = CheckpointStore(storage, keep=1).latest()
    assert commit is not None
    [block, *_] = commit.tensors["model.0.weight"].blocks
    key = commit.objects[block.object].key
    data = bytearray(storage.read(key))
    data[block.start] ^= 1
    storage.write(key, bytes(data))
    with pytest.raises(CheckpointError, match=r"cannot be used: .* does not have the checksum"):
        weights_at_the_beginning(new_run(folder="tuned"), trained)
