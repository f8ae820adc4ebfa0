"""Runs that begin with the weights of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.rendezvous.hang import Activity
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry.events import Event
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.pretrained import Weights
from elastic_ddp.worker.run import Run
from tests.ranks import run_ranks
from tests.single_rank_store import SingleRankStore
from tests.unit.crafted_commits import plant
from tests.unit.single_worker import Model, NewRun, client_of, prepared, train


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
    found = SingleRankStore(Storage(uri).at(COMMITS), keep=1).load_latest()
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


def refused(run: Run, model: torch.nn.Module, uri: str, **options: Any) -> str:
    """Why a run with this model does not begin with those weights."""
    prepared(run, model)
    run.load_weights(uri, **options)
    with pytest.raises(ConfigError) as caught:
        next(iter(run.steps()))
    return str(caught.value)


def larger() -> Model:
    model = Model()
    model.append(torch.nn.Linear(1, 2))
    return model


def test_what_does_not_fit_is_refused_by_name_before_the_first_step(new_run: NewRun, trained: str) -> None:
    said = refused(new_run(folder="tuned"), larger(), trained)
    assert f"step 6 in {trained} do not fit" in said and "4.bias is missing there; 4.weight is missing there" in said
    said = refused(new_run(folder="smaller"), torch.nn.Sequential(torch.nn.Linear(3, 4)), trained)
    assert "1.bias is unexpected: the model has no such tensor" in said
    said = refused(new_run(folder="other"), torch.nn.Sequential(torch.nn.Linear(3, 5)), trained, strict=False)
    assert "0.bias is (4,) there and (5,) here" in said and "such as a new head, another name in the model" in said
    said = refused(new_run(folder="typo"), torch.nn.ModuleDict({"net": Model()}), trained, strict=False)
    assert "not one name is the same: there 0.bias, 0.weight" in said and "and here net.0.bias" in said


def test_a_name_that_is_no_unicode_text_does_not_fit_like_any_other(new_run: NewRun, tmp_path: Path) -> None:
    tensor = {"kind": "tensor", "value": "w", "dtype": "float32", "shape": [1]}
    skeleton = json.dumps({"model": {"kind": "dict", "value": [["\ud800w", tensor]]}}).encode()
    plant(Storage(tmp_path / "crafted").at(COMMITS), 1, skeleton, {"model.w": torch.ones(1)})
    said = refused(new_run(folder="tuned"), Model(), str(tmp_path / "crafted"))
    assert r"\ud800w is unexpected" in said


def test_what_is_left_out_or_converted_is_told_by_name(
    new_run: NewRun, trained: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, model = new_run(folder="tuned"), larger()
    del model[2:4]  # the dropout, and the layer after it
    model[0].double()
    prepared(run, model)
    run.load_weights(trained, strict=False)
    next(iter(run.steps()))
    missing, unexpected = ["2.bias", "2.weight"], ["3.bias", "3.weight"]
    converted = [f"0.{name} from float32 to float64" for name in ("bias", "weight")]
    [said] = [each for each in client_of(run).events if each["event"] == "weights_loaded"]
    expected = {"missing": missing, "unexpected": unexpected, "converted": converted}
    assert said == {"event": "weights_loaded", "uri": trained, "step": 6, **expected}
    assert "2 missing: 2.bias, 2.weight; 2 unexpected: 3.bias, 3.weight; 2 converted: 0.bias from" in caplog.text
    assert torch.equal(model[0].weight, weights_in(trained)["0.weight"].double())


def test_where_there_is_nothing_to_load_that_is_said(
    new_run: NewRun, trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = new_run(folder="tuned")
    with pytest.raises(ConfigError, match="before a model was prepared"):
        run.load_weights(trained)
    prepared(run)
    run.load_weights("nothing")
    with pytest.raises(ConfigError, match=rf"there is no commit in {tmp_path}/nothing; give a run's <storage>/<name>"):
        next(iter(run.steps()))
    another = new_run(folder="tuned-too")
    prepared(another)
    another.load_weights(trained, step=3)
    with pytest.raises(ConfigError, match=r"there is no commit at step 3 in .*; there are those at 6"):
        next(iter(another.steps()))


def test_a_run_that_has_commits_does_not_need_the_other_any_more(new_run: NewRun, trained: str, tmp_path: Path) -> None:
    train(new_run(folder="own"))
    again = new_run(folder="own", steps=7)
    prepared(again)
    again.load_weights(str(tmp_path / "removed"))
    assert next(iter(again.steps())).index == 6


class Binned(Model):
    """Keeps an array with its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bins = np.zeros(0)

    def get_extra_state(self) -> dict[str, Any]:
        return {"bins": self.bins}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.bins = state["bins"]


def test_an_array_beside_the_weights_comes_with_them(new_run: NewRun, tmp_path: Path) -> None:
    before, after = Binned(), Binned()
    before.bins = np.linspace(0, 1, 5)
    store = SingleRankStore(Storage(tmp_path / "other").at(COMMITS), keep=1)
    store.save({"model": before.state_dict()}, step=1, record={})
    run = new_run()
    model = run.prepare(after)
    run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    run.load_weights(str(tmp_path / "other"))
    next(iter(run.steps()))
    assert after.bins.tolist() == before.bins.tolist()


def damage(uri: str) -> None:
    """A bit of the weights in the newest commit is not what was committed any more."""
    storage = Storage(uri).at(COMMITS)
    commit = SingleRankStore(storage, keep=1).latest()
    assert commit is not None
    block = next(each.blocks[0] for name, each in commit.tensors.items() if name.startswith("model."))
    key = commit.objects[block.object].key
    data = bytearray(storage.read(key))
    data[block.start] ^= 1
    storage.write(key, bytes(data))


def test_weights_that_are_not_what_was_committed_are_not_used(new_run: NewRun, trained: str) -> None:
    damage(trained)
    for options in ({}, {"step": 6}):
        with pytest.raises(CheckpointError, match=r"cannot be used: commits/6.json: .* does not have the checksum"):
            weights_at_the_beginning(new_run(folder="tuned"), trained, **options)


# Several ranks, and a run that goes on meanwhile.


def weights(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((3, 2), float(step)), "bias": torch.zeros(3)}}


def commit(uri: str, *steps: int, keep: int = 9) -> None:
    store = SingleRankStore(Storage(uri).at(COMMITS), keep=keep)
    for step in steps:
        store.save(weights(step), step=step, record={})


def begin(group: ProcessGroup, uri: str, step: int | None = None, out: int = 3) -> tuple[Any, list[str]]:
    """The step whose weights a rank begins with, or why it does not, and what is told of commits before that."""
    model, said = torch.nn.Linear(2, out), []

    def record(event: Event) -> None:
        said.append(f"{event.event} {getattr(event, 'key', '') or event.step}")

    try:
        Weights(uri, step, strict=True).load(model, group, record, Activity())
    except (CheckpointError, ConfigError) as error:
        return f"{type(error).__name__}: {error}", said
    return int(model.weight[0, 0]), said


def begin_all(group: ProcessGroup, folder: str) -> list[tuple[Any, list[str]]]:
    def nothing(*args: Any) -> Any:
        raise AssertionError("rank 0 alone looks for commits")

    plain: Any = Storage.read_into
    found = []
    if group.rank == 1:
        Storage.read = Storage.sizes = Storage.size = nothing  # type: ignore[method-assign]
    for uri, step in (("damaged", None), ("damaged", 2), ("damaged", 1), ("nothing", None)):
        found.append(begin(group, f"{folder}/{uri}", step))
    found.append(begin(group, f"{folder}/good", out=3 + group.rank))

    def read_into(self: Storage, key: str, start: int, buffer: memoryview) -> int:
        Storage.read_into = plain  # type: ignore[method-assign]
        commit(f"{folder}/good", 2, keep=1)
        return int(plain(self, key, start, buffer))

    if group.rank == 0:
        Storage.read_into = read_into  # type: ignore[method-assign]
    found.append(begin(group, f"{folder}/good"))
    return found


def test_all_ranks_begin_with_the_same_commit_or_say_the_same(tmp_path: Path) -> None:
    commit(str(tmp_path / "damaged"), 1, 2)
    damage(str(tmp_path / "damaged"))
    commit(str(tmp_path / "good"), 1)
    first, second = run_ranks(2, begin_all, str(tmp_path))
    assert [each for each, _ in first] == [each for each, _ in second] and not any(said for _, said in second)
    fallback, damaged, chosen, nothing, other, live = first
    passed_over = f"commit_rejected {tmp_path}/damaged/checkpoints/commits/2.json"
    assert fallback == (1, [passed_over, "weights_loaded 1"]), "the one before"
    assert "CheckpointError" in damaged[0] and "does not have the checksum" in damaged[0], "it was asked for"
    assert chosen == (1, ["weights_loaded 1"])
    assert nothing[0].startswith("ConfigError: run.load_weights: there is no commit in")
    assert other[0].startswith("ConfigError: ") and "weight is (3, 2) there and (4, 2) here" in other[0]
    assert live[0] == 2 and live[1][-1] == "weights_loaded 2", "the one that was read is not kept any more"
