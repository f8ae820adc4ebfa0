"""The configuration: which settings are refused, and the ways to give them."""

from __future__ import annotations

import json
from collections import UserDict, deque
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from elastic_ddp.config.run_config import (
    DATA_IDENTITY,
    IDENTITY,
    CheckpointConfig,
    DataConfig,
    DDPConfig,
    FSDPConfig,
    RunConfig,
    read_toml,
)
from elastic_ddp.errors import ConfigError
from tests.unit.config.memory_checks import frees_memory

MINIMAL: dict[str, Any] = {
    "name": "lm",
    "storage": "s3://bucket/runs",
    "steps": 10,
    "global_batch_size": 64,
    "micro_batch_size": 16,
}


def config(**changes: Any) -> RunConfig:
    return RunConfig(**{**MINIMAL, **changes})


def refusal(**changes: Any) -> str:
    """The message of the ConfigError that these settings raise."""
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    message = str(caught.value)
    assert message.startswith("invalid configuration: ")
    assert "\n" not in message
    return message.removeprefix("invalid configuration: ")


@pytest.mark.parametrize(
    ("changes", "setting", "suggestion"),
    [
        ({"global_batch_sizes": 3}, "global_batch_sizes=3", "did you mean global_batch_size?"),
        ({"checkpoint": {"evry_steps": 3}}, "checkpoint.evry_steps=3", "did you mean every_steps?"),
        ({"zzz": 1}, "zzz=1", ", ".join(sorted(RunConfig.model_fields))),
        ({"checkpoint": {"bananas": 3}}, "checkpoint.bananas=3", ", ".join(sorted(CheckpointConfig.model_fields))),
    ],
)
def test_an_unknown_setting_is_refused_with_the_closest_one_or_all_of_its_table(
    changes: dict[str, Any], setting: str, suggestion: str
) -> None:
    message = refusal(**changes)
    assert message.startswith(f"{setting}: ") and message.endswith(suggestion)


@pytest.mark.parametrize(
    ("changes", "setting", "rule"),
    [
        ({"steps": "5"}, "steps='5'", "without quotes"),
        ({"steps": 5.0}, "steps=5.0", "integer"),
        ({"data": {"shuffle": 1}}, "data.shuffle=1", "true or false"),
        ({"data": {"columns": ["x", 3]}}, "data.columns.1=3", "text in quotes"),
        ({"data": {"columns": "x"}}, "data.columns='x'", 'such as ["name"]'),
        ({"data": 3}, "data=3", "dictionary"),
        ({"storage": b"runs"}, "storage=b'runs'", "text in quotes"),
        ({"resources_per_worker": {"CPU": "1"}}, "resources_per_worker.CPU='1'", "without quotes"),
        ({"loggers": ["tensorbord"]}, "loggers.0='tensorbord'", "'tensorboard'"),
        ({"steps": 0}, "steps=0", "greater than or equal to 1"),
        ({"steps": 10**30}, f"steps={10**30}", f"less than or equal to {10**15}"),
        ({"heartbeat_timeout_s": 1e-6}, "heartbeat_timeout_s=1e-06", "greater than or equal to 0.1"),
        ({"collective_timeout_s": 1e15}, "collective_timeout_s=1000000000000000.0", "less than or equal to 100000000"),
        ({"seed": 2**63}, f"seed={2**63}", f"less than {2**63}"),
        ({"max_restarts": -2}, "max_restarts=-2", "greater than or equal to -1"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm=0.0", "greater than 0"),
        ({"clip_grad_norm": float("nan")}, "clip_grad_norm=nan", "finite"),
        ({"checkpoint": {"max_overhead": 2.0}}, "checkpoint.max_overhead=2.0", "less than 1"),
        ({"resources_per_worker": {"CPU": -1}}, "resources_per_worker.CPU=-1", "greater than or equal to 0"),
    ],
)
def test_a_value_of_the_wrong_type_or_out_of_bounds_is_refused_with_the_rule(
    changes: dict[str, Any], setting: str, rule: str
) -> None:
    message = refusal(**changes)
    assert message.startswith(f"{setting}: ") and rule in message


def test_nested_settings_built_alone_are_refused_under_their_own_names() -> None:
    for _ in range(2):  # an error leaves nothing behind that changes the next one
        assert refusal(checkpoint={"keep": 0}).startswith("checkpoint.keep=0: ")
        with pytest.raises(ConfigError, match=r"^invalid configuration: keep=0: "):
            CheckpointConfig(keep=0)
    with pytest.raises(ConfigError, match=r"^invalid configuration: colums=\['x'\]: .*did you mean columns\?$"):
        DataConfig(colums=["x"])


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "naïve", "a\n", "x" * 101])
def test_a_run_name_that_cannot_be_a_folder_is_refused(name: str) -> None:
    assert refusal(name=name).startswith(f"name={name!r}: ")
    assert config(name="0.a_B-" + "x" * 94).name == "0.a_B-" + "x" * 94


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        (
            {"global_batch_size": 100, "micro_batch_size": 32},
            ["global_batch_size=100", "micro_batch_size=32", "use global_batch_size=96 or 128"],
        ),
        ({"global_batch_size": 8}, ["global_batch_size=8", "micro_batch_size=16", "use global_batch_size=16"]),
        ({"max_workers": 5}, ["max_workers=5", "64 / micro_batch_size=16", "use max_workers=4"]),
        ({"min_workers": 3, "max_workers": 2}, ["min_workers=3", "max_workers=2", "use min_workers=2"]),
        ({"standby_workers": 4, "max_workers": 3}, ["standby_workers=4", "max_workers=3", "use standby_workers=3"]),
        ({"epochs": 3}, ["steps=10 and epochs=3", "exactly one"]),
        ({"steps": None}, ["steps=None and epochs=None", "exactly one"]),
        ({"hang_timeout_s": 1.0}, ["hang_timeout_s=1", "heartbeat_timeout_s=5", "raise hang_timeout_s"]),
        ({"resources_per_worker": {"GPU": 2}}, ["resources_per_worker GPU=2", "use 1 or less"]),
        ({"resources_per_worker": {"CPU": 0}}, ["resources_per_worker={'CPU': 0.0}", '{"CPU": 1}']),
        ({"data": {"columns": ["x", "x"]}}, ["['x', 'x']", "each name once"]),
        (
            {"fsdp": {"shard_classes": ["Block"]}},
            ["fsdp.shard_classes=['Block']", "strategy='ddp'", 'use strategy="fsdp"'],
        ),
    ],
)
def test_contradicting_values_are_refused_with_values_that_work(changes: dict[str, Any], facts: list[str]) -> None:
    message = refusal(**changes)
    assert all(fact in message for fact in facts), message


def test_the_values_that_a_refusal_suggests_are_accepted() -> None:
    for size in (96, 128):
        assert config(global_batch_size=size, micro_batch_size=32).num_micro_batches == size // 32
    assert config(max_workers=4, standby_workers=4).standby_workers == 4
    for gpus, use_gpu, shares_gpu in ((1, True, False), (0.5, True, True), (0, False, False)):
        built = config(resources_per_worker={"GPU": gpus, "CPU": 1})
        assert (built.use_gpu, built.shares_gpu) == (use_gpu, shares_gpu)
    assert config(strategy="fsdp", fsdp={"shard_classes": ["Block"]}).fsdp.shard_classes == ("Block",)


def test_every_invalid_setting_is_named_in_one_error() -> None:
    problems = refusal(seed=-1, steps="5", checkpoint={"keep": 0}).split("; ")
    assert [problem.partition("=")[0] for problem in problems] == ["seed", "steps", "checkpoint.keep"]


def test_a_caught_refusal_frees_its_memory() -> None:
    assert frees_memory(lambda: CheckpointConfig(interval=5))  # type: ignore[arg-type]


def test_the_storage_is_that_of_the_settings_or_of_the_environment_variable_or_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {key: value for key, value in MINIMAL.items() if key != "storage"}
    monkeypatch.delenv("ELASTIC_DDP_STORAGE", raising=False)
    assert RunConfig(**settings).storage == "runs"
    monkeypatch.setenv("ELASTIC_DDP_STORAGE", "s3://of-the-nodes/runs")
    assert RunConfig(**settings).storage == "s3://of-the-nodes/runs"
    assert RunConfig(**settings, storage="s3://bucket/runs").storage == "s3://bucket/runs"
    monkeypatch.setenv("ELASTIC_DDP_STORAGE", "s3:/bucket/runs")
    with pytest.raises(ConfigError, match=r"^ELASTIC_DDP_STORAGE: .* did you mean s3://bucket/runs"):
        RunConfig(**settings)


def test_missing_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"name is missing.*; global_batch_size is missing"):
        RunConfig(steps=1, micro_batch_size=1, storage="runs")


def test_every_setting_has_a_description() -> None:
    models = [RunConfig, CheckpointConfig, DataConfig, DDPConfig, FSDPConfig]
    fields = [(name, field) for model in models for name, field in model.model_fields.items()]
    assert [name for name, field in fields if not field.description] == []


@pytest.mark.parametrize(
    ("given", "seconds", "steps"),
    [
        ({}, 60.0, None),
        ({"every_steps": 5}, None, 5),
        ({"every_steps": 5, "every_seconds": 1}, 1.0, 5),
        ({"interval": "auto"}, None, None),
        ({"max_overhead": 0.02, "interval": "auto"}, None, None),
    ],
)
def test_a_run_commits_every_minute_unless_another_interval_is_given(
    given: dict[str, Any], seconds: float | None, steps: int | None
) -> None:
    checkpoint = config(checkpoint=given).checkpoint
    assert (checkpoint.every_seconds, checkpoint.every_steps) == (seconds, steps)
    assert checkpoint.is_measured is ("interval" in given)
    assert CheckpointConfig(**checkpoint.model_dump()) == checkpoint


@pytest.mark.parametrize(
    ("checkpoint", "facts"),
    [
        ({"interval": "auto", "every_steps": 5}, ["every_steps=5", "interval='auto'"]),
        ({"every_seconds": 30, "max_overhead": 0.02}, ["every_seconds=30.0", "max_overhead=0.02"]),
        ({"keep_best": 3}, ["checkpoint.keep_best=3", "checkpoint.best_metric", "step.log"]),
        ({"best_metric": "accuracy"}, ["checkpoint.best_metric='accuracy'", "checkpoint.keep_best"]),
        ({"keep_best": 1, "best_metric": "x", "best_mode": "highest"}, ["best_mode='highest'", "'min' or 'max'"]),
    ],
    ids=str,
)
def test_checkpoint_settings_that_contradict_each_other_are_refused(
    checkpoint: dict[str, Any], facts: list[str]
) -> None:
    message = refusal(checkpoint=checkpoint)
    assert all(fact in message for fact in facts), message


TOML = """
name = "lm"
storage = "s3://bucket/runs"
steps = 10
global_batch_size = 64
micro_batch_size = 16
resources_per_worker = {CPU = 3}

[job]
train = "train.py:train"
data = "s3://bucket/train/"

[data]
columns = ["x", "y"]

[checkpoint]
every_seconds = 30
"""


def test_a_config_object_a_dict_and_a_file_give_the_same_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TOML)
    settings = {
        **MINIMAL,
        "resources_per_worker": {"CPU": 3},
        "data": {"columns": ["x", "y"]},
        "checkpoint": {"every_seconds": 30},
    }
    built = config(
        resources_per_worker={"CPU": 3.0},
        data=DataConfig(columns=("x", "y")),
        checkpoint=CheckpointConfig(every_seconds=30.0),
    )
    assert RunConfig.load(built) is built
    assert RunConfig.load(settings) == built
    assert RunConfig.load(tmp_path / "run.toml") == built
    assert RunConfig.load(str(tmp_path / "run.toml")) == built
    assert built.data.columns == ("x", "y")
    assert settings["data"] == {"columns": ["x", "y"]}  # a caller's dict is not changed


@pytest.mark.parametrize("section", [UserDict, MappingProxyType])  # OmegaConf's are no dicts either
def test_tables_may_be_any_mapping_and_values_those_of_numpy(section: Callable[[dict[str, Any]], Any]) -> None:
    numpy = section(
        {
            **MINIMAL,
            "steps": np.int64(10),
            "clip_grad_norm": np.float32(0.5),
            "resources_per_worker": section({"CPU": np.int32(3)}),
            "data": section({"columns": deque(["x", "y"]), "shuffle": np.bool_(False), "chunk_rows": np.uint8(7)}),
            "fsdp": section({"shard_classes": np.array(["Block"])}),
            "strategy": np.str_("fsdp"),
            "env": section({"A": "1"}),
            "runtime_env": section({"pip": section({"packages": deque(["einops"])})}),
        }
    )
    built = config(
        clip_grad_norm=0.5,
        resources_per_worker={"CPU": 3.0},
        data={"columns": ["x", "y"], "shuffle": False, "chunk_rows": 7},
        fsdp={"shard_classes": ["Block"]},
        strategy="fsdp",
        env={"A": "1"},
        runtime_env={"pip": {"packages": ["einops"]}},
    )
    assert RunConfig.load(numpy) == built and RunConfig(**numpy) == built
    assert CheckpointConfig(keep=np.int64(3)).keep == 3
    assert json.loads(json.dumps(built.recorded())) == json.loads(json.dumps(RunConfig.load(numpy).recorded()))
    assert refusal(data=section({"chunk_row": np.int64(3)})).startswith("data.chunk_row=3: ")
    assert refusal(steps=np.float64(2.5)).startswith("steps=2.5: ")


def test_a_file_may_have_a_byte_order_mark_and_only_a_file_a_job_table(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf" + TOML.encode())
    assert RunConfig.load(tmp_path / "run.toml").data.columns == ("x", "y")
    assert read_toml(tmp_path / "run.toml")["job"]["train"] == "train.py:train"
    assert refusal(job=3).startswith("job=3: ")


def test_anything_but_settings_and_toml_files_is_refused(tmp_path: Path) -> None:
    missing, broken, binary = (tmp_path / name for name in ("missing.toml", "broken.toml", "binary.toml"))
    broken.write_text("steps == 3")
    binary.write_bytes(b"\xff\xfe")
    for path, reason in (
        (str(missing), "No such file"),
        (broken, "line 1"),
        (binary, "utf-8"),
        (tmp_path, "directory"),
    ):
        with pytest.raises(ConfigError, match=rf"{Path(path).name}' is not a TOML file.*{reason}"):
            RunConfig.load(path)
    with pytest.raises(ConfigError, match="config is a list; give a RunConfig, a dict or the path of a TOML file"):
        RunConfig.load([MINIMAL])  # type: ignore[arg-type]


def test_a_configuration_cannot_be_changed() -> None:
    for part, name in ((config(), "steps"), (config().checkpoint, "keep")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, name, 3)


CHANGED: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "global_batch_size": {"global_batch_size": 128},
    "micro_batch_size": {"micro_batch_size": 8},
    "reduction": {"reduction": "native"},
    "precision": {"precision": "bf16"},
    "clip_grad_norm": {"clip_grad_norm": 1.0},
    "device": {"resources_per_worker": {"CPU": 1, "GPU": 1}},
    "num_threads_per_worker": {"num_threads_per_worker": 3},
    "data.columns": {"data": {"columns": ["x"]}},
    "data.shuffle": {"data": {"shuffle": False}},
    "data.window_row_groups": {"data": {"window_row_groups": 5}},
    "data.chunk_rows": {"data": {"chunk_rows": 5}},
    "data.drop_last": {"data": {"drop_last": True}},
}


def test_the_identity_changes_with_every_setting_that_decides_the_bits() -> None:
    derived = {"device", "num_threads_per_worker"}
    expected = {*IDENTITY, *derived, *(f"data.{key}" for key in DATA_IDENTITY)}
    assert set(CHANGED) == expected == set(config().identity())
    for key, change in CHANGED.items():
        before, after = config().identity(), config(**change).identity()
        # On a GPU the CPU's threads do not matter.
        changed = {name for name in before if before[name] != after.get(name)}
        assert changed == ({key, "num_threads_per_worker"} if key == "device" else {key})


def test_the_identity_ignores_settings_that_a_resumed_run_may_change() -> None:
    other = config(
        name="other",
        storage="gs://elsewhere",
        steps=None,
        epochs=2,
        min_workers=2,
        max_workers=4,
        max_restarts=-1,
        log_every_steps=1,
        checkpoint={"every_steps": 1, "keep": 9},
        data={"prefetch_micro_batches": 9, "concurrency": 2},
        ddp={"bucket_cap_mb": 1},
        env={"NCCL_DEBUG": "INFO"},
        runtime_env={"pip": ["einops"]},
    )
    assert other.identity() == config().identity()


def test_the_identity_survives_json() -> None:
    identity = config(data={"columns": ["x", "y"]}, clip_grad_norm=0.1).identity()
    assert json.loads(json.dumps(identity)) == identity
