"""The configuration: what is refused, in which words, and the ways to give it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from elastic_ddp.config.run_config import DATA_IDENTITY, IDENTITY, CheckpointConfig, DataConfig, RunConfig, read_toml
from elastic_ddp.errors import ConfigError
from elastic_ddp.storage.storage import Storage
from tests.unit.memory_checks import is_let_go_after

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
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    message = str(caught.value)
    assert message.startswith("invalid configuration: ")
    assert "\n" not in message
    return message.removeprefix("invalid configuration: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_sizes": 3}, "global_batch_sizes=3: there is no such setting; did you mean global_batch_size?"),
        (
            {"checkpoint": {"evry_steps": 3}},
            "checkpoint.evry_steps=3: there is no such setting; did you mean every_steps?",
        ),
        ({"data": {"column": ["x"]}}, "data.column=['x']: there is no such setting; did you mean columns?"),
        (
            {"checkpoint": {"bananas": 3}},
            "checkpoint.bananas=3: there is no such setting; the settings here are best_metric, best_mode, "
            "every_seconds, every_steps, interval, keep, keep_best, keep_every_steps, max_failed_saves, max_overhead",
        ),
    ],
)
def test_an_unknown_setting_is_refused_with_the_likeliest_or_all_known_ones(
    changes: dict[str, Any], message: str
) -> None:
    assert refusal(**changes) == message


def test_an_unknown_setting_like_no_other_is_answered_with_all_of_them() -> None:
    message = refusal(zzz=1)
    assert message.startswith("zzz=1: there is no such setting; the settings here are checkpoint, clip_grad_norm, ")
    assert all(setting in message for setting in RunConfig.model_fields)


def test_a_removed_setting_is_refused_with_what_to_do_about_it() -> None:
    message = refusal(in_place=False)
    assert message.startswith("in_place=False: ") and "removed" in message and "delete the line" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": "5"}, "steps='5': input should be a valid integer (a number without quotes or a fraction)"),
        ({"steps": 5.0}, "steps=5.0: input should be a valid integer (a number without quotes or a fraction)"),
        ({"steps": True}, "steps=True: input should be a valid integer (a number without quotes or a fraction)"),
        (
            {"resize_interval_s": True},
            "resize_interval_s=True: input should be a valid number (a number without quotes)",
        ),
        ({"data": {"shuffle": 1}}, "data.shuffle=1: input should be a valid boolean (true or false, without quotes)"),
        ({"data": {"columns": ["x", 3]}}, "data.columns.1=3: input should be a valid string (text in quotes)"),
        ({"data": 3}, "data=3: input should be a valid dictionary or instance of DataConfig"),
        ({"storage": Path("runs")}, f"storage={Path('runs')!r}: input should be a valid string (text in quotes)"),
        (
            {"resources_per_worker": {"CPU": "1"}},
            "resources_per_worker.CPU='1': input should be a valid number (a number without quotes)",
        ),
        ({"reduction": "ring"}, "reduction='ring': input should be 'canonical' or 'native'"),
        ({"precision": "fp16"}, "precision='fp16': input should be 'fp32' or 'bf16'"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_rather_than_converted(changes: dict[str, Any], message: str) -> None:
    assert refusal(**changes) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0: input should be greater than or equal to 1"),
        ({"steps": 10**30}, f"steps={10**30}: input should be less than or equal to {10**15}"),
        ({"micro_batch_size": -16}, "micro_batch_size=-16: input should be greater than or equal to 1"),
        ({"min_workers": 0}, "min_workers=0: input should be greater than or equal to 1"),
        ({"heartbeat_timeout_s": 1e-6}, "heartbeat_timeout_s=1e-06: input should be greater than or equal to 0.1"),
        (
            {"collective_timeout_s": 1e15},
            "collective_timeout_s=1000000000000000.0: input should be less than or equal to 100000000",
        ),
        ({"seed": -1}, "seed=-1: input should be greater than or equal to 0"),
        ({"seed": 2**63}, f"seed={2**63}: input should be less than {2**63}"),
        ({"max_restarts": -2}, "max_restarts=-2: input should be greater than or equal to -1"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm=0.0: input should be greater than 0"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep=0: input should be greater than or equal to 1"),
        ({"checkpoint": {"every_seconds": -1.0}}, "checkpoint.every_seconds=-1.0: input should be greater than 0"),
        (
            {"data": {"num_cpus_per_task": -0.5}},
            "data.num_cpus_per_task=-0.5: input should be greater than or equal to 0",
        ),
        ({"ddp": {"bucket_cap_mb": -1}}, "ddp.bucket_cap_mb=-1: input should be greater than 0"),
        (
            {"resources_per_worker": {"CPU": -1}},
            "resources_per_worker.CPU=-1: input should be greater than or equal to 0",
        ),
    ],
)
def test_a_number_out_of_its_bounds_is_refused_with_the_bound(changes: dict[str, Any], message: str) -> None:
    assert refusal(**changes) == message


def test_settings_that_are_built_on_their_own_are_refused_in_the_same_words() -> None:
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig(every_steps=0)
    assert str(caught.value) == "invalid configuration: every_steps=0: input should be greater than or equal to 1"
    with pytest.raises(ConfigError) as caught:
        DataConfig(colums=["x"])
    assert str(caught.value) == ("invalid configuration: colums=['x']: there is no such setting; did you mean columns?")


def test_columns_may_be_a_list_or_a_tuple() -> None:
    assert DataConfig(columns=["x"]) == DataConfig(columns=("x",))
    assert DataConfig(columns=["x"]).columns == ("x",)
    assert config(data=DataConfig(columns=["x"])) == config(data={"columns": ["x"]})


def test_a_refusal_leaves_no_trace_in_settings_that_are_built_next() -> None:
    for _ in range(2):
        assert refusal(checkpoint={"keep": 0}).startswith("checkpoint.keep=0: ")
        with pytest.raises(ConfigError, match="keep=0"):
            CheckpointConfig(keep=0)


def test_what_is_not_a_number_is_refused() -> None:
    assert refusal(clip_grad_norm=float("nan")).startswith("clip_grad_norm=nan: input should be ")


@pytest.mark.parametrize("name", ["", "a/b", "a b", ".hidden", "-x", "naïve", "a\n", "../up"])
def test_a_name_that_could_not_be_a_folder_is_refused(name: str) -> None:
    assert refusal(name=name) == (
        f"name={name!r}: string should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$' (letters, digits, '.', '_' and "
        "'-', beginning with a letter or digit)"
    )


def test_a_name_may_have_up_to_a_hundred_letters_digits_dots_and_dashes() -> None:
    name = "0.a_B-" + "x" * 94
    assert config(name=name).name == name
    assert refusal(name=name + "x").endswith("string should have at most 100 characters")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"global_batch_size": 100, "micro_batch_size": 32},
            "global_batch_size=100 is not a multiple of micro_batch_size=32; use global_batch_size=96 or 128",
        ),
        (
            {"global_batch_size": 8},
            "global_batch_size=8 is not a multiple of micro_batch_size=16; use global_batch_size=16",
        ),
        (
            {"max_workers": 5},
            "max_workers=5 is above the 4 micro-batches of a step (global_batch_size=64 / micro_batch_size=16), and a "
            "worker needs one; use max_workers=4 or a smaller micro_batch_size",
        ),
        (
            {"min_workers": 3, "max_workers": 2},
            "min_workers=3 is above max_workers=2; raise max_workers or use min_workers=2",
        ),
        (
            {"epochs": 3},
            "steps=10 and epochs=3: give exactly one of the two; steps counts optimizer steps, epochs passes over "
            "the data set",
        ),
        (
            {"steps": None},
            "steps=None and epochs=None: give exactly one of the two; steps counts optimizer steps, epochs passes "
            "over the data set",
        ),
        (
            {"resources_per_worker": {"GPU": 2}},
            "resources_per_worker GPU=2: a worker trains on one GPU, a part of one, or none; use 1 or less",
        ),
        (
            {"resources_per_worker": {}},
            "resources_per_worker={} reserves nothing, so Ray could not count how many workers fit; give at least CPU "
            'or GPU, for example {"CPU": 1}',
        ),
        (
            {"resources_per_worker": {"CPU": 0}},
            "resources_per_worker={'CPU': 0.0} reserves nothing, so Ray could not count how many workers fit; give at "
            'least CPU or GPU, for example {"CPU": 1}',
        ),
    ],
)
def test_values_that_cannot_work_together_are_refused_with_ones_that_can(changes: dict[str, Any], message: str) -> None:
    assert refusal(**changes) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"columns": "x"}}, "'x' is one string; give a list of names, such as [\"x\"]"),
        ({"data": {"columns": ["x", "x"]}}, "['x', 'x'] names something twice; give each name once"),
        ({"resources_per_worker": {"CPU": 1, "gpu": 1}}, "Ray knows no such resource; did you mean GPU?"),
        ({"resources_per_worker": {"CPU": 1, "slot": 1e-5}}, "slot=1e-05: Ray counts in steps of 0.0001; use that or"),
        ({"hang_timeout_s": 1.0}, "hang_timeout_s=1 is below heartbeat_timeout_s=5"),
        ({"storage": "s3:/bucket/runs"}, "is neither a path nor a URI; did you mean s3://bucket/runs?"),
        ({"storage": "s3://"}, "storage='s3://' names no place; give a path or a URI"),
        ({"storage": " "}, "storage=' ' names no place; give a path or a URI"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_with_what_may_be(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(**changes)


def test_what_a_refusal_proposes_is_accepted() -> None:
    for size in (96, 128):
        assert config(global_batch_size=size, micro_batch_size=32).num_micro_batches == size // 32
    assert config(max_workers=4).max_workers == 4
    assert config(resources_per_worker={"GPU": 1}).use_gpu
    assert not config(resources_per_worker={"GPU": 1}).shares_gpu
    assert config(resources_per_worker={"GPU": 0.5}).use_gpu
    assert config(resources_per_worker={"GPU": 0.5}).shares_gpu
    assert not config(resources_per_worker={"GPU": 0, "CPU": 1}).use_gpu


def test_all_mistakes_are_named_at_once() -> None:
    assert refusal(seed=-1, steps="5", checkpoint={"keep": 0}).split("; ") == [
        "seed=-1: input should be greater than or equal to 0",
        "steps='5': input should be a valid integer (a number without quotes or a fraction)",
        "checkpoint.keep=0: input should be greater than or equal to 1",
    ]


def test_whoever_meets_a_refusal_keeps_nothing_in_memory() -> None:
    assert is_let_go_after(lambda: CheckpointConfig(interval=5))  # type: ignore[arg-type]


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(steps=1, micro_batch_size=1, storage="runs")
    assert str(caught.value) == (
        "invalid configuration: name is missing: it has no default; give it a value; "
        "global_batch_size is missing: it has no default; give it a value"
    )


def test_what_only_sharding_uses_is_refused_without_it() -> None:
    with pytest.raises(ConfigError, match=r"fsdp\.shard_classes=\['Block'\] with strategy='ddp', which shards nothing"):
        config(fsdp={"shard_classes": ["Block"]})
    assert config(strategy="fsdp", reduction="native", fsdp={"shard_classes": ["Block"]}).fsdp.shard_classes == (
        "Block",
    )


def test_with_no_interval_a_run_commits_every_minute() -> None:
    assert config().checkpoint == CheckpointConfig(every_seconds=60.0)
    assert (config().checkpoint.every_seconds, config().checkpoint.every_steps) == (60.0, None)
    only_steps = config(checkpoint={"every_steps": 5}).checkpoint
    assert (only_steps.every_seconds, only_steps.every_steps) == (None, 5)
    both = config(checkpoint={"every_steps": 5, "every_seconds": 1}).checkpoint
    assert (both.every_seconds, both.every_steps) == (1.0, 5)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (
            {"interval": "auto", "every_steps": 5},
            "checkpoint with every_steps=5 and interval='auto': an interval is either fixed or follows from what was "
            "measured; give every_steps and every_seconds, or interval and max_overhead",
        ),
        (
            {"every_seconds": 30, "max_overhead": 0.02},
            "checkpoint with every_seconds=30.0 and max_overhead=0.02: an interval is either fixed or follows from "
            "what was measured; give every_steps and every_seconds, or interval and max_overhead",
        ),
        (
            {"interval": 30},
            "checkpoint.interval=30: it is 'auto' or left out; for a fixed interval give every_seconds, or every_steps",
        ),
        ({"interval": "daly"}, "checkpoint.interval='daly': input should be 'auto'"),
        ({"max_overhead": 2.0}, "checkpoint.max_overhead=2.0: input should be less than 1"),
        ({"max_overhead": 0.0}, "checkpoint.max_overhead=0.0: input should be greater than 0"),
        (
            {"keep_best": 3},
            "checkpoint.keep_best=3 without checkpoint.best_metric: the best by what? Give the name of something that "
            "step.log or run.evaluate gets, or loss",
        ),
        (
            {"best_metric": "accuracy"},
            "checkpoint.best_metric='accuracy' without checkpoint.keep_best: nothing is kept by it; give the number "
            "of commits to keep, or leave it out",
        ),
        (
            {"best_mode": "max"},
            "checkpoint.best_mode='max' without checkpoint.keep_best: nothing is kept by it; give the number of "
            "commits to keep, or leave it out",
        ),
        (
            {"keep_best": 1, "best_metric": "x", "best_mode": "highest"},
            "checkpoint.best_mode='highest': input should be 'min' or 'max'",
        ),
        (
            {"keep_every_steps": 0},
            "checkpoint.keep_every_steps=0: input should be greater than or equal to 1",
        ),
    ],
    ids=str,
)
def test_when_to_commit_and_what_to_keep_is_said_in_one_way(checkpoint: dict[str, Any], message: str) -> None:
    assert refusal(checkpoint=checkpoint) == message


def test_an_interval_that_is_measured_has_no_fixed_one_beside_it() -> None:
    for settings in ({"interval": "auto"}, {"max_overhead": 0.02}, {"interval": "auto", "max_overhead": 0.02}):
        checkpoint = config(checkpoint=settings).checkpoint
        assert checkpoint.is_measured and (checkpoint.every_seconds, checkpoint.every_steps) == (None, None)
        assert CheckpointConfig(**checkpoint.model_dump()) == checkpoint
    assert not config().checkpoint.is_measured


def test_storage_that_cannot_be_written_is_refused_when_the_configuration_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for storage in (str(tmp_path / "file" / "runs"), f"file://{tmp_path}/file/runs"):
        with pytest.raises(ConfigError, match=r"storage='.*' cannot be written: .*/file is not a folder; choose"):
            config(storage=storage)
    for give in (lambda: config(storage="~no-such-user/runs"), lambda: Storage("~no-such-user/runs")):
        with pytest.raises(ConfigError, match="cannot be found: ~no-such-user is nobody's home here; give the"):
            give()
    with pytest.raises(
        ConfigError, match=r"for an S3 server use s3://bucket/runs, and give its address as AWS_ENDPOINT_URL"
    ):
        config(storage="http://localhost:9000/bucket")
    with pytest.raises(ConfigError, match=r"storage='s4://b/runs': there is no file system 's4'; use a path"):
        config(storage="s4://b/runs")
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))  # root may write anywhere
    with pytest.raises(ConfigError, match=rf"this user may not write to {tmp_path}, or nobody as"):
        config(storage=str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


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


def test_an_object_a_dict_and_a_file_make_the_same_configuration(tmp_path: Path) -> None:
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


def test_a_job_table_belongs_to_files_only(tmp_path: Path) -> None:
    assert "job=3: there is no such setting" in refusal(job=3)
    (tmp_path / "run.toml").write_text(TOML)
    assert read_toml(tmp_path / "run.toml")["job"]["train"] == "train.py:train"


def test_a_file_that_is_missing_or_is_not_toml_is_refused(tmp_path: Path) -> None:
    missing, broken, binary = (tmp_path / name for name in ("missing.toml", "broken.toml", "binary.toml"))
    broken.write_text("steps == 3")
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(str(missing))
    assert str(caught.value) == f"config={str(missing)!r}: there is no such file; give the path of a TOML file"
    with pytest.raises(ConfigError, match=r"broken\.toml' is not TOML: .*line 1"):
        RunConfig.load(broken)
    with pytest.raises(ConfigError, match=r"binary\.toml' is not TOML: "):
        RunConfig.load(binary)


def test_anything_else_is_refused_with_what_may_be_given() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load([MINIMAL])  # type: ignore[arg-type]
    assert str(caught.value) == "config is a list; it has to be a RunConfig, a dict or the path of a TOML file"


def test_a_configuration_cannot_be_changed() -> None:
    built = config()
    for part, name in (
        (built, "steps"),
        (built.checkpoint, "keep"),
        (built.data, "shuffle"),
        (built.ddp, "static_graph"),
    ):
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
}


def test_the_identity_changes_with_everything_that_decides_the_bits() -> None:
    derived = {"device", "num_threads_per_worker"}
    expected = {*IDENTITY, *derived, *(f"data.{key}" for key in DATA_IDENTITY)}
    assert set(CHANGED) == expected == set(config().identity())
    for key, change in CHANGED.items():
        before, after = config().identity(), config(**change).identity()
        # On a GPU the CPU's threads do not matter.
        changed = {name for name in before if before[name] != after.get(name)}
        assert changed == ({key, "num_threads_per_worker"} if key == "device" else {key})


def test_the_identity_does_not_change_with_what_a_resumed_run_may_change() -> None:
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
    )
    assert other.identity() == config().identity()


def test_the_identity_survives_json() -> None:
    identity = config(data={"columns": ["x", "y"]}, clip_grad_norm=0.1).identity()
    assert json.loads(json.dumps(identity)) == identity
