"""Runs that start from weights in plain files: safetensors, `torch.save`, and the folder of a Hugging Face model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.rendezvous.hang import Activity
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.pretrained import PretrainedWeights
from tests.ranks import run_ranks
from tests.single_rank_store import SingleRankStore
from tests.unit.single_worker import Model, NewRun, client_of, expect_config_error, prepared

Weights = dict[str, torch.Tensor]
Start = Callable[..., Weights]


def weights_of(seed: int = 1) -> Weights:
    torch.manual_seed(seed)
    return dict(Model().state_dict())


def write_hugging_face(folder: Path, weights: Weights, shards: int) -> None:
    """Writes the files that `save_pretrained` writes: one, or several with an index."""
    folder.mkdir(parents=True)
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return
    names = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    weight_map = {key: names[number % shards] for number, key in enumerate(weights)}
    for name in names:
        save_file({key: weights[key] for key in weights if weight_map[key] == name}, folder / name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def start(new_run: NewRun) -> Start:
    """Starts a run from weights. Returns what it starts with."""

    def begin(uri: Any, module: torch.nn.Module | None = None, **options: Any) -> Weights:
        run = new_run(folder=f"run{len(runs)}")
        runs.append(run)
        model = prepared(run, module)
        run.load_weights(uri, **options)
        next(iter(run.steps()))
        return {name: value.clone() for name, value in model.state_dict().items()}

    runs: list[Any] = []
    begin.runs = runs  # type: ignore[attr-defined]
    return begin


def equal(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def write_all(folder: Path, weights: Weights) -> dict[str, Path]:
    """Writes the same weights in every form. Returns where."""
    save_file(weights, folder / "plain.safetensors")
    torch.save(weights, folder / "plain.pt")
    torch.save(weights, folder / "old.pth", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "model_state_dict": weights, "optimizer": {}}, folder / "nested.pt")
    write_hugging_face(folder / "single", weights, 1)
    write_hugging_face(folder / "sharded model", weights, 3)
    return {
        name: folder / name
        for name in ("plain.safetensors", "plain.pt", "old.pth", "nested.pt", "single", "sharded model")
    }


def test_a_run_starts_from_weights_in_any_form(start: Start, tmp_path: Path) -> None:
    weights = weights_of()
    for name, path in write_all(tmp_path, weights).items():
        assert equal(start(path), weights), name


def test_a_run_starts_from_weights_in_object_storage(start: Start, tmp_path: Path) -> None:
    weights, memory = weights_of(), fsspec.filesystem("memory")
    write_all(tmp_path, weights)
    for name in ("plain.pt", "single", "sharded model"):
        target = name.replace(" ", "-")
        memory.put(str(tmp_path / name), f"/pretrained/{target}", recursive=True)
        assert equal(start(f"memory://pretrained/{target}"), weights), name


def test_the_ledger_names_the_file_and_what_differs(start: Start, tmp_path: Path) -> None:
    weights = {name: value.half() if value.is_floating_point() else value for name, value in weights_of().items()}
    del weights["3.bias"]
    save_file({**weights, "extra": torch.zeros(1)}, tmp_path / "plain.safetensors")
    start(tmp_path / "plain.safetensors", strict=False)
    [loaded] = client_of(start.runs[-1]).events_of("weights_loaded")  # type: ignore[attr-defined]
    assert (loaded["uri"], loaded["step"]) == (f"{tmp_path}/plain.safetensors", None)
    assert (loaded["missing"], loaded["unexpected"]) == (["3.bias"], ["extra"])
    assert "3.weight from float16 to float32" in loaded["converted"]


class LoRA(torch.nn.Module):
    """A frozen layer with a trained update of low rank, named as peft names it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = torch.nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = torch.nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_a_base_model_is_loaded_into_lora_with_a_key_mapping(start: Start, tmp_path: Path) -> None:
    weights = weights_of()
    save_file(weights, tmp_path / "base.safetensors")
    for mapping in (
        {"^": "model.", r"^model\.3\.": "model.3.base_layer."},
        lambda name: f"model.{name}" if name[0] != "3" else f"model.3.base_layer.{name[2:]}",
    ):
        model = Model()
        model[3] = LoRA(model[3])
        found = start(
            tmp_path / "base.safetensors", torch.nn.ModuleDict({"model": model}), strict=False, key_mapping=mapping
        )
        assert torch.equal(found["model.3.base_layer.weight"], weights["3.weight"])
        assert torch.equal(found["model.1.running_mean"], weights["1.running_mean"])
        [loaded] = client_of(start.runs[-1]).events_of("weights_loaded")  # type: ignore[attr-defined]
        assert loaded["missing"] == ["model.3.lora_A.weight", "model.3.lora_B.weight"] and not loaded["unexpected"]


def test_a_key_mapping_leaves_out_tensors_that_it_maps_to_none(start: Start, tmp_path: Path) -> None:
    weights = weights_of()
    save_file({**weights, "head.weight": torch.zeros(9)}, tmp_path / "base.safetensors")
    found = start(tmp_path / "base.safetensors", key_mapping=lambda name: None if name.startswith("head.") else name)
    assert equal(found, weights)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Model(), torch.nn.Linear(3, 4)
        self.head.weight = self.body[0].weight


def test_tied_weights_may_be_in_a_file_once(start: Start, tmp_path: Path) -> None:
    weights = dict(Tied().state_dict())
    del weights["head.weight"]
    save_file(weights, tmp_path / "tied.safetensors")
    found = start(tmp_path / "tied.safetensors", Tied())
    assert torch.equal(found["head.weight"], weights["body.0.weight"])


# Errors.


class Trap:
    """An object that would run code when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('this file has run code')",)


def test_a_pickle_with_other_objects_is_refused_and_runs_no_code(start: Start, tmp_path: Path) -> None:
    torch.save({"model": weights_of(), "config": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(ConfigError, match=r"trap\.pt holds an object of (builtins\.)?exec.*state_dict\(\) alone"):
        start(tmp_path / "trap.pt")


def damaged(file: Path, change: Callable[[bytes], bytes]) -> Path:
    file.write_bytes(change(file.read_bytes()))
    return file


def test_weights_that_are_missing_or_damaged_are_an_error_that_names_the_file(start: Start, tmp_path: Path) -> None:
    write_all(tmp_path, weights_of())
    (tmp_path / "single" / "model.safetensors").rename(tmp_path / "single" / "other.safetensors")
    (tmp_path / "sharded model" / "model-00002-of-00003.safetensors").unlink()
    damaged(tmp_path / "plain.safetensors", lambda data: data[:-8])
    damaged(tmp_path / "plain.pt", lambda data: data[: len(data) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"epoch": 1, "config": {}}, tmp_path / "config.pt")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, tmp_path / "longer.safetensors")
    damaged(tmp_path / "longer.safetensors", lambda data: data.replace(b'"shape":[2]', b'"shape":[4]', 1))
    for name, kind, message in [
        ("nowhere.safetensors", ConfigError, "does not exist on node"),
        ("my weights.pt", ConfigError, "does not exist on node"),
        ("single", ConfigError, r"single has no commit\. Give .* model\.safetensors"),
        ("sharded model", CheckpointError, "model-00002-of-00003.safetensors is missing"),
        ("plain.safetensors", CheckpointError, "plain.safetensors cannot be read"),
        ("longer.safetensors", CheckpointError, r"of shape \(4,\) and float32 has 8 bytes"),
        ("plain.pt", CheckpointError, "plain.pt cannot be read"),
        ("empty.pt", CheckpointError, "empty.pt cannot be read"),
        ("list.pt", ConfigError, "list.pt holds no weights by name, but list"),
        ("config.pt", ConfigError, "config.pt holds no weights by name, but a dict of epoch, config"),
        ("bad", CheckpointError, "is not an index of weights"),
    ]:
        with pytest.raises(kind, match=message):
            start(tmp_path / name)


def test_weights_in_a_file_that_do_not_fit_are_refused_by_name(start: Start, tmp_path: Path) -> None:
    weights = weights_of()
    save_file({f"module.{name}": value for name, value in weights.items()}, tmp_path / "ddp.safetensors")
    with pytest.raises(
        ConfigError, match=r"0\.bias is missing in the file.*module.0.bias is missing in the model"
    ) as bad:
        start(tmp_path / "ddp.safetensors")
    assert str(bad.value).endswith(r'as module.NAME: use key_mapping={r"^module\.": ""}.')
    assert equal(start(tmp_path / "ddp.safetensors", key_mapping={r"^module\.": ""}), weights)
    averaged = torch.optim.swa_utils.AveragedModel(Model()).state_dict()
    torch.save(averaged, tmp_path / "averaged.pt")
    with pytest.raises(ConfigError, match=r"as module.NAME: use key_mapping.*, and strict=False because of the other"):
        start(tmp_path / "averaged.pt")
    start(tmp_path / "averaged.pt", key_mapping={r"^module\.": ""}, strict=False)
    torch.save({**weights_of(), "old.bias": torch.zeros(4)}, tmp_path / "renamed.pt")
    with pytest.raises(ConfigError, match=r"old\.bias is missing in the model\. Build the same model, map the names"):
        start(tmp_path / "renamed.pt")
    save_file({**weights, "0.bias": torch.zeros(7)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"0\.bias is \(7,\) in the file and \(4,\) in the model"):
        start(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_mapping": {"(": "x"}}, ["'('", "key_mapping"]),
        ({"key_mapping": {"a": 3}}, ["'a': 3"]),
        ({"key_mapping": "base."}, ["a str as key_mapping", '{"^": "base."}']),
        ({"key_mapping": {"^0": r"\2"}}, ["'^0'", "group reference"]),
        ({"key_mapping": lambda name: 3}, ["returned 3", "a name, or None"]),
        ({"key_mapping": {"^.+$": "x"}}, ["'x'", "two tensors"]),
        ({"step": 3}, ["step=3", "commits of a run"]),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    new_run: NewRun, tmp_path: Path, options: dict[str, Any], message: list[str]
) -> None:
    save_file(weights_of(), tmp_path / "plain.safetensors")

    def body(run: Any) -> None:
        prepared(run)
        run.load_weights(tmp_path / "plain.safetensors", **options)
        next(iter(run.steps()))

    expect_config_error(new_run(), body, *message)


def test_another_runs_weights_are_renamed_too(start: Start, tmp_path: Path) -> None:
    store = SingleRankStore(Storage(tmp_path / "trained").at(COMMITS), keep=1)
    store.save({"model": weights_of()}, step=1, record={})
    found = start(tmp_path / "trained", torch.nn.ModuleDict({"net": Model()}), key_mapping={"^": "net."})
    assert equal(found, {f"net.{name}": value for name, value in weights_of().items()})


def _load(group: ProcessGroup, uri: str) -> str:
    module = Model()
    try:
        PretrainedWeights(uri, None, strict=True).load(module, group, lambda event: None, Activity())
    except (CheckpointError, ConfigError) as error:
        return re.sub(r"node \S+", "node", str(error))
    return "loaded" if group.rank == 0 and equal(dict(module.state_dict()), weights_of()) else "from rank 0"


def test_rank_0_alone_reads_files_and_all_ranks_raise_its_error(tmp_path: Path) -> None:
    write_hugging_face(tmp_path / "good", weights_of(), 2)
    assert run_ranks(2, _load, str(tmp_path / "good")) == ["loaded", "from rank 0"]
    (tmp_path / "good" / "model-00002-of-00002.safetensors").unlink()
    first, second = run_ranks(2, _load, str(tmp_path / "good"))
    assert first == second and "is missing" in first
