"""Runs that load the weights of another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.rendezvous.hang import Activity
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry.event import Event
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.pretrained import PretrainedWeights
from elastic_ddp.worker.run import Run
from tests.ranks import run_ranks
from tests.single_rank_store import SingleRankStore
from tests.unit.single_worker import Model, NewRun, client_of, prepared, train


@pytest.fixture
def trained(new_run: NewRun, tmp_path: Path) -> str:
    """The folder of a run that was trained for six steps."""
    train(new_run(folder="trained"))
    return str(tmp_path / "trained")


def loaded_weights(run: object, uri: str, **options: object) -> dict[str, torch.Tensor]:
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


def test_a_run_loads_the_weights_of_another_run(new_run: NewRun, trained: str) -> None:
    found, expected = loaded_weights(new_run(folder="tuned"), trained), weights_in(trained)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def refused(run: Run, model: torch.nn.Module, uri: str, **options: Any) -> str:
    """The error of a run with this model that loads those weights."""
    prepared(run, model)
    run.load_weights(uri, **options)
    with pytest.raises(ConfigError) as caught:
        next(iter(run.steps()))
    return str(caught.value)


def larger() -> Model:
    model = Model()
    model.append(torch.nn.Linear(1, 2))
    return model


def test_weights_that_do_not_fit_are_refused_by_name_before_the_first_step(new_run: NewRun, trained: str) -> None:
    error = refused(new_run(folder="tuned"), larger(), trained)
    assert f"step 6 in {trained}" in error and "4.bias is missing in the commit" in error and "strict=False" in error
    error = refused(new_run(folder="smaller"), torch.nn.Sequential(torch.nn.Linear(3, 4)), trained)
    assert "1.bias is missing in the model" in error
    error = refused(new_run(folder="other"), torch.nn.Sequential(torch.nn.Linear(3, 5)), trained, strict=False)
    assert "0.bias is (4,) in the commit and (5,) in the model" in error
    error = refused(new_run(folder="typo"), torch.nn.ModuleDict({"net": Model()}), trained, strict=False)
    assert "0.bias, 0.weight" in error and "net.0.bias" in error


def test_missing_unexpected_and_converted_tensors_are_reported_by_name(
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
    [loaded] = [event for event in client_of(run).events if event["event"] == "weights_loaded"]
    expected = {"missing": missing, "unexpected": unexpected, "converted": converted}
    assert loaded == {"event": "weights_loaded", "uri": trained, "step": 6, **expected}
    assert "2 missing: 2.bias, 2.weight; 2 unexpected: 3.bias, 3.weight; 2 converted: 0.bias from" in caplog.text
    assert torch.equal(model[0].weight, weights_in(trained)["0.weight"].double())


def test_loading_fails_without_a_model_or_a_commit(
    new_run: NewRun, trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = new_run(folder="tuned")
    with pytest.raises(ConfigError, match="before a model was prepared"):
        run.load_weights(trained)
    prepared(run)
    run.load_weights("nothing")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/nothing has no commit.*<storage>/<name>"):
        next(iter(run.steps()))
    another = new_run(folder="tuned-too")
    prepared(another)
    another.load_weights(trained, step=3)
    with pytest.raises(ConfigError, match=r"no commit at step 3.* 6"):
        next(iter(another.steps()))


def test_a_run_with_commits_does_not_need_the_other_run(new_run: NewRun, tmp_path: Path) -> None:
    train(new_run(folder="own"))
    again = new_run(folder="own", steps=7)
    prepared(again)
    again.load_weights(str(tmp_path / "removed"))
    assert next(iter(again.steps())).index == 6


class Binned(Model):
    """A model with an array in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.bins = np.zeros(0)

    def get_extra_state(self) -> dict[str, Any]:
        return {"bins": self.bins}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.bins = state["bins"]


def test_an_array_in_the_extra_state_is_loaded_too(new_run: NewRun, tmp_path: Path) -> None:
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
    """Flips a bit of the weights in the newest commit."""
    storage = Storage(uri).at(COMMITS)
    commit = SingleRankStore(storage, keep=1).latest()
    assert commit is not None
    block = next(tensor.blocks[0] for name, tensor in commit.tensors.items() if name.startswith("model."))
    key = commit.objects[block.object].key
    data = bytearray(storage.read(key))
    data[block.start] ^= 1
    storage.write(key, bytes(data))


def test_damaged_weights_are_not_loaded(new_run: NewRun, trained: str) -> None:
    damage(trained)
    for options in ({}, {"step": 6}):
        with pytest.raises(CheckpointError, match=r"commits/6.json: .* does not have the checksum"):
            loaded_weights(new_run(folder="tuned"), trained, **options)


# Several ranks, and another run that is live.


def weights(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((3, 2), float(step)), "bias": torch.zeros(3)}}


def commit(uri: str, *steps: int, keep: int = 9) -> None:
    store = SingleRankStore(Storage(uri).at(COMMITS), keep=keep)
    for step in steps:
        store.save(weights(step), step=step, record={})


def load(group: ProcessGroup, uri: str, step: int | None = None, out: int = 3) -> tuple[int | str, list[str]]:
    """The step whose weights this rank loads, or the error; and the events that it records."""
    model, events = torch.nn.Linear(2, out), []

    def record(event: Event) -> None:
        events.append(f"{event.event} {getattr(event, 'key', '') or event.step}")

    try:
        PretrainedWeights(uri, step, strict=True).load(model, group, record, Activity())
    except (CheckpointError, ConfigError) as error:
        return f"{type(error).__name__}: {error}", events
    return int(model.weight[0, 0]), events


def load_all(group: ProcessGroup, folder: str) -> list[tuple[int | str, list[str]]]:
    def forbidden(*args: Any) -> Any:
        raise AssertionError("only rank 0 looks for commits")

    plain: Any = Storage.read_into
    if group.rank == 1:
        Storage.read = Storage.listing = Storage.size = forbidden  # type: ignore[method-assign]
    cases = (("damaged", None), ("damaged", 2), ("damaged", 1), ("nothing", None))
    loaded = [load(group, f"{folder}/{uri}", step) for uri, step in cases]
    loaded.append(load(group, f"{folder}/good", out=3 + group.rank))

    def replace_commit_and_read(self: Storage, key: str, start: int, buffer: memoryview) -> int:
        Storage.read_into = plain  # type: ignore[method-assign]
        commit(f"{folder}/good", 2, keep=1)
        return int(plain(self, key, start, buffer))

    if group.rank == 0:
        Storage.read_into = replace_commit_and_read  # type: ignore[method-assign]
    loaded.append(load(group, f"{folder}/good"))
    return loaded


def test_all_ranks_load_the_same_commit_or_raise_the_same_error(tmp_path: Path) -> None:
    commit(str(tmp_path / "damaged"), 1, 2)
    damage(str(tmp_path / "damaged"))
    commit(str(tmp_path / "good"), 1)
    first, second = run_ranks(2, load_all, str(tmp_path))
    assert [result for result, _ in first] == [result for result, _ in second]
    assert not any(events for _, events in second), "rank 0 alone records events"
    newest, damaged, older, missing, misshapen, live = first
    rejected = f"commit_rejected {tmp_path}/damaged/checkpoints/commits/2.json"
    assert newest == (1, [rejected, "weights_loaded 1"]), "the commit before the damaged one"
    assert "CheckpointError" in damaged[0] and "does not have the checksum" in damaged[0]
    assert older == (1, ["weights_loaded 1"])
    assert missing[0].startswith("ConfigError: ") and "has no commit" in missing[0]
    assert misshapen[0].startswith("ConfigError: ") and "weight is (3, 2) in the commit and (4, 2)" in misshapen[0]
    assert live[0] == 2 and live[1][-1] == "weights_loaded 2", "the run removed its first commit during the read"
