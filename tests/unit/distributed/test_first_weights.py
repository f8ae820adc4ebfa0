"""A model that was built on the meta device is made unit by unit, and no rank ever has more than a unit as a whole."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from elastic_ddp.distributed.first_weights import FirstWeights
from elastic_ddp.distributed.fsdp import FSDPStrategy
from elastic_ddp.distributed.fsdp_units import check_room, locate_parameters
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.rendezvous.hang import Activity
from elastic_ddp.worker import weight_files
from elastic_ddp.worker.pretrained import PretrainedWeights
from tests.fsdp_workers import LIMIT_S, WIDTH, Block, Fault, Plan, hashes, workers
from tests.ranks import run_ranks
from tests.unit.distributed.test_fsdp import config_of
from tests.unit.single_worker import CPU

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from fsdp_parts.live_bytes import LiveBytes


def by_name(module: torch.nn.Module) -> None:
    """Initializes the tensors that a module has itself."""
    if isinstance(module, torch.nn.Linear):
        torch.nn.init.normal_(module.weight, std=0.3)
        if module.bias is not None:
            torch.nn.init.normal_(module.bias)
    if isinstance(module, torch.nn.BatchNorm1d):
        module.reset_parameters()
    if isinstance(module, Scaled):
        module.scale.fill_(2.0)
        module.table = torch.arange(WIDTH, dtype=torch.float32)
        module.newest.fill_(-1)


class Scaled(torch.nn.Module):
    """Has a parameter and a buffer of its own, and no reset_parameters()."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))
        self.table: torch.Tensor
        self.register_buffer("table", torch.zeros(WIDTH), persistent=False)
        self.newest: torch.Tensor
        self.register_buffer("newest", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.table


class Model(torch.nn.Module):
    def __init__(self, middle: Callable[[], torch.nn.Module] = torch.nn.Identity) -> None:
        super().__init__()
        self.first, self.middle = torch.nn.Linear(3, WIDTH), middle()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.encode, self.decode = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.decode(self.encode(self.norm(x)))


def on_meta(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    with torch.device("meta"):
        return make()


META = functools.partial(on_meta, Model)
ODD = functools.partial(Model, Scaled)
ODD_META = functools.partial(on_meta, ODD)


def trained(folder: Path, size: int, make_model: Callable[[], torch.nn.Module], **changes: Any) -> dict[str, Any]:
    settings = {"steps": 4, **changes.pop("settings", {})}
    with workers(Plan(folder, settings, make_model=make_model, **changes)) as run:
        run.start(size)
        return hashes(run)


def test_first_weights_depend_neither_on_the_units_nor_on_the_strategy(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"fsdp": {"shard_classes": []}}, {"strategy": "ddp", "fsdp": {}}]
    first, *others = [
        trained(tmp_path / str(number), 2, META, settings=settings) for number, settings in enumerate(changes)
    ]
    assert others == [first, first]


def test_with_a_function_weights_depend_neither_on_the_size_nor_on_deaths(tmp_path: Path) -> None:
    without_mirror = {"checkpoint": {"every_steps": 2}, "fsdp": {"shard_classes": ["Block"], "mirror": False}}
    changes: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (3, {"faults": (Fault(1, "exchange", 2),)}),
        (3, {"faults": (Fault(1, "exchange", 3),), "settings": without_mirror}),
    ]
    first, *others = [
        trained(tmp_path / str(number), size, ODD_META, param_init_fn=by_name, **each)
        for number, (size, each) in enumerate(changes)
    ]
    assert others == [first, first]


def error_of(folder: Path, settings: dict[str, Any], make_model: Callable[[], torch.nn.Module], **changes: Any) -> str:
    """Returns the error of a run of two workers."""
    with workers(Plan(folder, settings, make_model=make_model, **changes)) as run:
        run.start(2)
        error: str = run.finish(LIMIT_S, status="failed")["error"]
        return error


def by_parameters(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)


def test_an_initialization_that_reaches_into_sharded_units_is_refused(tmp_path: Path) -> None:
    error = error_of(tmp_path, {}, META, param_init_fn=by_parameters)
    assert "changed blocks.0.inner.weight" in error and "parameters(recurse=False)" in error, error


def fill(module: torch.nn.Module) -> None:
    raise AssertionError("the model has weights")


def _built(group: ProcessGroup) -> list[float]:
    """Returns the sums of the shards' parameters as a whole, and of rank 0 as it built them."""
    torch.manual_seed(group.rank)
    module = Wide()
    built = sum(float(parameter.double().sum()) for parameter in module.parameters())
    is_unit = functools.partial(_is_kind, torch.nn.Sequential)
    first = FirstWeights(0, fill)
    model = PreparedModel(module, device=CPU, bf16=False, is_unit=is_unit, first_weights=first)
    FSDPStrategy(model, config_of("fsdp"), group).shard([], begins=True)
    whole = sum(float(parameter.full_tensor().double().sum()) for parameter in module.parameters())  # type: ignore[operator]
    return [whole, built]


def test_a_model_that_was_built_with_weights_begins_with_those_of_rank_0() -> None:
    first, second = run_ranks(2, _built)
    assert first[0] == second[0] == pytest.approx(first[1]) != pytest.approx(second[1])


class Wide(torch.nn.Sequential):
    """Ten blocks, and a layer that is in no block."""

    def __init__(self) -> None:
        blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.ReLU()) for _ in range(10)]
        super().__init__(*blocks, torch.nn.Linear(64, 8, bias=False))


def shard_wide(group: ProcessGroup) -> tuple[FSDPStrategy, torch.nn.Module]:
    module = on_meta(Wide)
    is_unit = functools.partial(_is_kind, torch.nn.Sequential)
    model = PreparedModel(module, device=CPU, bf16=False, is_unit=is_unit, first_weights=FirstWeights(0))
    return FSDPStrategy(model, config_of("fsdp"), group), module


def _is_kind(kind: type[torch.nn.Module], module: torch.nn.Module) -> bool:
    return isinstance(module, kind)


def _peak(group: ProcessGroup) -> tuple[int, int, int]:
    """Returns the most bytes that were live beyond those before, those of the shard, and those of a block."""
    strategy, module = shard_wide(group)
    with LiveBytes({}) as live:
        live.point = "building"
        live.note("before")
        strategy.shard([], begins=True)
    shard = sum(parameter.to_local().nbytes for parameter in module.parameters())  # type: ignore[operator]
    return live.peaks["building"] - live.peaks["before"], shard, 64 * 64 * 4


def test_while_it_is_built_a_rank_has_one_unit_more_than_its_shard() -> None:
    for peak, shard, block in run_ranks(2, _peak):
        assert shard < peak <= shard + block * 1.02


def _load(group: ProcessGroup, file: str) -> tuple[list[int], bool]:
    """Returns how many rows of each tensor this rank read, and whether its shards have the values in the file."""
    strategy, module = shard_wide(group)
    strategy.shard([], begins=True)
    plain, num_rows = weight_files._safetensors, []

    def counted(content: Any, source: str) -> dict[str, Any]:
        def read(stored: weight_files.FileTensor, rows: range) -> torch.Tensor:
            num_rows.append(len(rows))
            return stored.read(rows)

        return {
            name: weight_files.FileTensor(stored.shape, stored.dtype, functools.partial(read, stored))
            for name, stored in plain(content, source).items()
        }

    weight_files._safetensors = counted
    weights = PretrainedWeights(file, step=None, strict=True)
    weights.load(module, group, lambda event: None, Activity(), strategy.layout([]))
    saved = weight_files.WeightFiles.find(file)
    assert saved is not None
    with saved.opened(lambda: None) as stored:
        is_equal = all(
            torch.equal(parameter.full_tensor(), stored[name].whole())  # type: ignore[operator]
            for name, parameter in module.named_parameters()
        )
    return num_rows[:11], is_equal


def test_each_row_of_a_file_is_read_by_one_rank(tmp_path: Path) -> None:
    save_file(Wide().state_dict(), tmp_path / "wide.safetensors")
    results = run_ranks(3, _load, str(tmp_path / "wide.safetensors"))
    assert sorted(sum(rows) for rows in zip(*(rows for rows, _ in results), strict=True)) == [8, *[64] * 10]
    assert all(is_equal for _, is_equal in results)


def test_weights_are_loaded_into_shards_of_a_model_on_the_meta_device(tmp_path: Path) -> None:
    torch.manual_seed(5)
    weights = Model().state_dict()
    torch.save(weights, tmp_path / "model.pt")
    save_file({name: weights[name] for name in weights if name != "decode.weight"}, tmp_path / "model.safetensors")
    expected = trained(tmp_path / "plain", 1, Model, weights=tmp_path / "model.safetensors")
    for name in ("model.safetensors", "model.pt"):
        assert trained(tmp_path / f"with {name}", 3, META, weights=tmp_path / name) == expected
    commit = tmp_path / "plain/run"
    expected = trained(tmp_path / "from a commit", 1, Model, weights=commit)
    assert trained(tmp_path / "from a commit, on meta", 3, META, weights=commit) == expected


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_what_nothing_initializes_is_refused_by_name(tmp_path: Path, strategy: str) -> None:
    settings = {"strategy": strategy, **({"fsdp": {}} if strategy == "ddp" else {})}
    error = error_of(tmp_path, settings, ODD_META)
    names = r"middle\.newest, middle\.scale, middle\.table"
    assert re.search(rf"nothing has initialized {names}\. .*param_init_fn", error), error


def test_weights_of_a_file_must_cover_what_nothing_initializes(tmp_path: Path) -> None:
    weights = ODD().state_dict()
    save_file({name: weights[name] for name in weights if name != "decode.weight"}, tmp_path / "odd.safetensors")
    error = error_of(tmp_path / "run", {}, ODD_META, weights=tmp_path / "odd.safetensors")
    assert "nothing has initialized middle.table. " in error, error


class Reaching(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.blocks[1].inner.weight.sum(0)  # type: ignore[union-attr, operator]


def test_a_parameter_that_is_used_outside_of_its_unit_is_an_error_with_advice(tmp_path: Path) -> None:
    error = error_of(tmp_path, {}, Reaching)
    assert "self.blocks[1].inner.weight.sum(0)" in error
    assert "uses a sharded parameter outside of the forward of its FSDP unit" in error, error


def test_a_model_that_does_not_fit_is_refused_with_the_number_of_workers_that_would_do() -> None:
    """A block takes 16,384 bytes, and as many for its gradient; all take 331,776."""
    module = on_meta(Wide)
    units = {module, *(each for each in module if isinstance(each, torch.nn.Sequential))}  # type: ignore[attr-defined]
    locations = locate_parameters(module, units)
    check_room(locations, 4, 130_000, offloads=False)
    check_room(locations, 1, 40_000, offloads=True)  # only a unit must fit
    with pytest.raises(ConfigError, match=r"needs 0\.00 GB for its shard .* fits 6 workers or more: set min_workers"):
        check_room(locations, 4, 90_000, offloads=False)
    with pytest.raises(ConfigError, match=r"largest FSDP unit alone, Sequential, .*smaller modules"):
        check_room(locations, 4, 30_000, offloads=False)
