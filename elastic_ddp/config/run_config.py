"""The configuration of a run: plain data, validated when built."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import fsspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from elastic_ddp.errors import ConfigError

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)

MAX_STEP = 10**15
"""A run of a microsecond a step would get there in thirty years; every reader of JSON has such a number exactly."""
PositiveInt = Annotated[int, Field(ge=1, le=MAX_STEP)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MAX_DURATION_S = 1e8
"""Three years; timers of libraries do not take any number."""
Seconds = Annotated[float, Field(gt=0, le=MAX_DURATION_S, allow_inf_nan=False)]
RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]

IDENTITY = ("seed", "global_batch_size", "micro_batch_size", "reduction", "precision", "clip_grad_norm")
"""Settings that a run cannot change when it is resumed: another value would make it another run."""

DATA_IDENTITY = ("columns", "shuffle", "window_row_groups", "chunk_rows")
"""The same for the settings under `data`."""


_within: ContextVar[bool] = ContextVar("within", default=False)
"""Whether settings are being built of which others are a part."""


def _accept_list(value: Any) -> Any:
    """TOML and JSON have lists where there are tuples here."""
    if isinstance(value, str):
        raise ValueError(f'{value!r} is one string; give a list of names, such as ["{value}"]')
    if isinstance(value, list | tuple) and len(set(map(str, value))) < len(value):
        raise ValueError(f"{value!r} names something twice; give each name once")
    return tuple(value) if isinstance(value, list) else value


def local_path(text: str) -> Path:
    """The folder that a user names, absolute.

    Raises:
        ConfigError: it is in the home of somebody who is not there.
    """
    try:
        return Path(os.path.abspath(Path(text).expanduser()))
    except RuntimeError as error:
        user = Path(text).parts[0]
        raise ConfigError(
            f"storage={text!r} cannot be found: {user} is nobody's home here; give the folder's whole path"
        ) from error


def _refuse_number(value: Any) -> Any:
    """Where others expect an interval of so many seconds or steps."""
    if isinstance(value, int | float):
        raise ValueError(
            f"checkpoint.interval={value!r}: it is 'auto' or left out; for a fixed interval give every_seconds, or "
            "every_steps"
        )
    return value


class _Settings(BaseModel):
    """Plain data, validated when built. What is wrong is a ConfigError."""

    model_config = _STRICT

    def __init__(self, **values: Any) -> None:
        if _within.get():  # a part of other settings, which say where it is
            super().__init__(**values)
            return
        token = _within.set(True)
        try:
            super().__init__(**values)
        except ValidationError as error:
            why = _explain(error, type(self))
        else:
            return
        finally:
            _within.reset(token)
        raise ConfigError(why)  # not in that block: see `mistakes`


class CheckpointConfig(_Settings):
    """When state is committed and how much of it is kept."""

    every_steps: PositiveInt | None = None
    """Commit whenever this many steps have passed since the last commit."""
    every_seconds: PositiveFloat | None = None
    """Commit at the first step boundary this many seconds after the last commit. Both may be given; with neither, nor
    one of the two below, a run commits every 60 seconds. A run always commits when it is stopped, and at its end: after
    the last step, or with `best_metric` when the training function has returned."""
    interval: Annotated[Literal["auto"] | None, BeforeValidator(_refuse_number)] = None
    """`auto`: commit as often as loses the least time, by the interval of Young and Daly: the square root of twice what
    a save costs times the mean time between losses of workers. The cost is the time for which a save holds training
    up, as measured; losses are those that the run has seen, and one per hour before it has seen any. Never more often
    than a save takes. The first commit comes after 60 seconds."""
    max_overhead: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Commit as often as costs at most this share of the time, 0.02 for example, by the same measured cost. With
    `interval`, the bound to that."""
    keep: PositiveInt = 2
    """The newest commits that are kept; older ones are deleted once a newer one is complete."""
    keep_every_steps: PositiveInt | None = None
    """The first commit at or after every multiple of this many steps is kept for good, too."""
    keep_best: PositiveInt | None = None
    """This many commits with the best value of `best_metric` are also kept. A value counts for the next commit that is
    begun after it was measured."""
    best_metric: str | None = None
    """A name given to `step.log` (known every `log_every_steps` steps), the `name` of a `run.evaluate`, or `loss`, the
    training loss of a step."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger value of it is better."""
    max_failed_saves: Annotated[int, Field(ge=0, le=MAX_STEP)] = 3
    """Saves in a row that may fail, for want of the storage for example, before the run ends with an error. After each
    training goes on, and the commit before is the newest. A save in which nothing that was asked of the storage
    comes to an end for ten minutes has failed, too."""

    @model_validator(mode="after")
    def _check_interval(self) -> Self:
        def given(*names: str) -> list[str]:
            return [f"{name}={value!r}" for name in names if (value := getattr(self, name)) is not None]

        fixed, measured = given("every_steps", "every_seconds"), given("interval", "max_overhead")
        if fixed and measured:
            raise ValueError(
                f"checkpoint with {' and '.join(fixed + measured)}: an interval is either fixed or follows from what "
                "was measured; give every_steps and every_seconds, or interval and max_overhead"
            )
        if not fixed and not measured:
            object.__setattr__(self, "every_seconds", 60.0)
        return self

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        if self.keep_best is not None and self.best_metric is None:
            raise ValueError(
                f"checkpoint.keep_best={self.keep_best} without checkpoint.best_metric: the best by what? Give the "
                "name of something that step.log or run.evaluate gets, or loss"
            )
        for name, default in (("best_metric", None), ("best_mode", "min")):
            if self.keep_best is None and (value := getattr(self, name)) != default:
                raise ValueError(
                    f"checkpoint.{name}={value!r} without checkpoint.keep_best: nothing is kept by it; give the "
                    "number of commits to keep, or leave it out"
                )
        return self

    @property
    def is_measured(self) -> bool:
        """Whether the interval follows from what was measured."""
        return self.interval is not None or self.max_overhead is not None


class DataConfig(_Settings):
    """How rows are read, ordered and fed. The data set itself is an argument of `ElasticTrainer`."""

    columns: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_accept_list)] | None = None
    """Columns to read; all of them by default."""
    shuffle: bool = True
    """A seeded permutation for every epoch; False reads the rows in their stored order. A step takes the next ones of
    each of M lanes, so a global batch comes from M places of the data set either way."""
    window_row_groups: PositiveInt = 4
    """Row groups whose rows are shuffled together. The quality of the shuffle grows with it, and so does memory: a
    worker holds one window, before the transform, for each of its micro-batches."""
    chunk_rows: PositiveInt = 1024
    """Rows that one call of the transform sees. Chunks are the same for every world size. A worker holds about one
    chunk, after the transform, for each of its micro-batches: lower it where transformed rows are large."""
    prefetch_micro_batches: PositiveInt = 4
    """Micro-batches that are ready on the device before the step asks for them."""
    concurrency: PositiveInt = 1
    """Transforms that run at a time for one worker. With 1, one process reads and transforms; with more, one reads
    and this many transform."""
    num_cpus_per_task: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves for each such task. With 0, tasks run beside workers that hold every CPU; raise it
    where a transform is heavy and CPUs are left over."""


class DDPConfig(_Settings):
    """Options of `torch.nn.parallel.DistributedDataParallel`, under its own names."""

    bucket_cap_mb: PositiveFloat = 25.0
    """MiB of gradients that are reduced together, during the backward."""
    gradient_as_bucket_view: bool = True
    """Gradients lie in the memory that they are reduced in. Torch's own default is False, and takes them twice."""
    static_graph: bool = False
    """The same parameters are used, and in the same way, in every step."""
    find_unused_parameters: bool = False
    """A loss may depend on only some of the parameters; to find out which takes a walk through each graph."""


class FSDPConfig(_Settings):
    """Options of `torch.distributed.fsdp.fully_shard`."""

    shard_classes: Annotated[tuple[str, ...], BeforeValidator(_accept_list)] = ()
    """Names of the classes of modules, such as a transformer's block, that are sharded and gathered one at a time. The
    model as a whole takes what is in none of them: without any, all of it is gathered at once."""
    reshard_after_forward: bool = True
    """Let go of gathered parameters after the forward, and gather them again for the backward. False takes more memory
    and half of that communication, and none but the first in the other micro-batches of a step."""


class RunConfig(_Settings):
    """Everything that defines a run but its code and its data.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type, or the values cannot work together.
    """

    name: RunName
    """The run's name. Fitting the same name in the same storage again resumes it."""
    storage: str
    """Where runs live: a local path, or the fsspec URI (`s3://bucket/runs`, `gs://…`) of a store that creates an object
    only where there is none, which is tried when the run starts. On several nodes it has to be reachable from all of
    them."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The one seed: weights, order of the rows and randomness inside steps all follow from it."""
    steps: PositiveInt | None = None
    """Optimizer steps to run. Give this or `epochs`."""
    epochs: PositiveInt | None = None
    """Passes over the data set to run. Give this or `steps`."""
    global_batch_size: PositiveInt
    """Rows of one optimizer step, the same at every world size."""
    micro_batch_size: PositiveInt
    """Rows of one forward and backward."""
    min_workers: PositiveInt = 1
    """Training waits while there are fewer workers."""
    max_workers: PositiveInt = 1
    """Workers are never more than this, nor more than micro-batches in a step."""
    resources_per_worker: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        default_factory=lambda: {"CPU": 1.0}
    )
    """What Ray reserves for one worker, for example `{CPU = 4, GPU = 1}`. With a GPU, training runs on it;
    with a part of one, such as 0.5, workers share it, and gradients go through the host (gloo): for tests."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """`ddp`: every worker holds the whole model. `fsdp`: each holds a shard of its parameters, gradients and optimizer
    state; when membership changes, training goes on from the newest commit, which is made right before a change that is
    planned."""
    reduction: Literal["canonical", "native"] = "canonical"
    """`canonical`: gradients have the same bits at every world size. `native`: torch's own, a little faster, and all
    that there is with `fsdp`, whose default it is."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16`: the model's forward runs under autocast or, with `fsdp`, with parameters gathered in bf16; weights,
    gradients and optimizer stay fp32."""
    clip_grad_norm: PositiveFloat | None = None
    """The total 2-norm that gradients are clipped to."""
    max_restarts: Annotated[int, Field(ge=-1, le=MAX_STEP)] = 100
    """Times that workers may be lost, or a group of them not be started as one died meanwhile; -1 for no limit. What
    does not count: workers that never trained while others do, and those whose node was drained, by Ray or a person,
    when they had started. Errors of the training function are never retried."""
    log_every_steps: PositiveInt = 10
    """How often logged values are written to the ledger."""
    resize_interval_s: Seconds = 5.0
    """How often the cluster is asked for room for more workers, up to `max_workers`."""
    heartbeat_timeout_s: Annotated[Seconds, Field(ge=0.1)] = 5.0
    """Silence of a worker that is taken for its death: it is stopped, or its machine is cut off. One whose process ends
    is noticed at once. A worker that computes for long is not silent, unless one call holds Python's lock so long."""
    hang_timeout_s: Seconds = 600.0
    """For how long no worker may get anywhere (to the next micro-batch, through a collective) before the run is taken
    to hang. A save or a restore gets somewhere as long as the storage is at work: an operation of it may take five
    minutes, however short this is. The stacks of all workers are recorded then, and those that others wait for are
    replaced. It has to be longer than the longest micro-batch, the first one's compilation included. A worker that is
    not ready to train so long after its start, or after two minutes if that is longer, is replaced too."""
    drain_deadline_s: Seconds = 30.0
    """How long a worker that gets SIGTERM may stay. It leaves at a step boundary: the next one if the others are enough
    without it, otherwise once others have joined, or half of the time is over. Also how long a worker that leaves, or
    whose run has ended, may take to end its save."""
    collective_timeout_s: Seconds = 1800.0
    """How long a collective may wait for a slow worker."""
    num_threads_per_worker: PositiveInt | None = None
    """`torch.set_num_threads` in every worker; by default as many as the worker has CPUs."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    ddp: DDPConfig = Field(default_factory=DDPConfig)
    fsdp: FSDPConfig = Field(default_factory=FSDPConfig)

    @field_validator("storage")
    @classmethod
    def _check_storage(cls, storage: str) -> str:
        """What can be known without a network: `ElasticTrainer` writes, reads and deletes a small object there."""
        protocol, separator, rest = storage.partition("://")
        if not storage.strip() or (separator and protocol != "memory" and not rest.strip("/")):
            raise ValueError(f"storage={storage!r} names no place; give a path or a URI such as s3://bucket/runs")
        if not separator and re.match(r"[a-z0-9]{2,}:/", storage):
            raise ValueError(
                f"storage={storage!r} is neither a path nor a URI; did you mean {storage.replace(':/', '://')}?"
            )
        if protocol in ("http", "https"):
            raise ValueError(
                f"storage={storage!r} is the address of a server, which nothing can be written to by itself; for an S3 "
                "server use s3://bucket/runs, and give its address as AWS_ENDPOINT_URL"
            )
        if separator and protocol not in ("file", "local"):
            if protocol not in fsspec.available_protocols():
                raise ValueError(
                    f"storage={storage!r}: there is no file system {protocol!r}; use a path, or a URI that "
                    "fsspec knows, such as s3://bucket/runs"
                )
            return storage
        path = local_path(rest if separator else storage)
        there = next(each for each in (path, *path.parents) if each.exists())
        if not there.is_dir():
            raise ValueError(f"storage={storage!r} cannot be written: {there} is not a folder; choose another")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(
                f"storage={storage!r} cannot be written: this user may not write to {there}, or nobody as "
                "it is mounted read-only; change that, or choose another folder"
            )
        return storage

    @model_validator(mode="after")
    def _reduce_shards(self) -> Self:
        if self.strategy == "fsdp" and self.reduction == "canonical":
            if "reduction" in self.model_fields_set:
                raise ValueError(
                    'reduction="canonical" is for strategy="ddp": sharded gradients have the same bits at one world '
                    'size, but not at another; use reduction="native", or strategy="ddp"'
                )
            object.__setattr__(self, "reduction", "native")
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            both = f"steps={self.steps} and epochs={self.epochs}: give exactly one of the two"
            raise ValueError(f"{both}; steps counts optimizer steps, epochs passes over the data set")
        if self.global_batch_size % self.micro_batch_size:
            below = self.global_batch_size // self.micro_batch_size * self.micro_batch_size
            choices = [str(size) for size in (below, below + self.micro_batch_size) if size]
            raise ValueError(
                f"global_batch_size={self.global_batch_size} is not a multiple of "
                f"micro_batch_size={self.micro_batch_size}; use global_batch_size={' or '.join(choices)}"
            )
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers={self.min_workers} is above max_workers={self.max_workers}; "
                f"raise max_workers or use min_workers={self.max_workers}"
            )
        if self.max_workers > self.num_micro_batches:
            raise ValueError(
                f"max_workers={self.max_workers} is above the {self.num_micro_batches} micro-batches of a step "
                f"(global_batch_size={self.global_batch_size} / micro_batch_size={self.micro_batch_size}), and a "
                f"worker needs one; use max_workers={self.num_micro_batches} or a smaller micro_batch_size"
            )
        for name, amount in self.resources_per_worker.items():
            if 0 < amount < 0.0001:
                raise ValueError(
                    f"resources_per_worker {name}={amount:g}: Ray counts in steps of 0.0001; use that or more, or 0"
                )
            if name.upper() in ("CPU", "GPU") and name != name.upper():
                raise ValueError(
                    f"resources_per_worker {name}: Ray knows no such resource; did you mean {name.upper()}?"
                )
        if self.strategy != "fsdp" and self.fsdp.shard_classes:
            raise ValueError(
                f"fsdp.shard_classes={list(self.fsdp.shard_classes)} with strategy={self.strategy!r}, which shards "
                'nothing; use strategy="fsdp", or leave it out'
            )
        if self.hang_timeout_s < self.heartbeat_timeout_s:
            raise ValueError(
                f"hang_timeout_s={self.hang_timeout_s:g} is below heartbeat_timeout_s={self.heartbeat_timeout_s:g}: "
                "a hang is what is left when all workers are alive; raise it"
            )
        gpus = self.resources_per_worker.get("GPU", 0.0)
        if gpus > 1.0:
            raise ValueError(
                f"resources_per_worker GPU={gpus:g}: a worker trains on one GPU, a part of one, or none; use 1 or less"
            )
        if not any(self.resources_per_worker.values()):
            raise ValueError(
                f"resources_per_worker={self.resources_per_worker} reserves nothing, so Ray could not count how many "
                'workers fit; give at least CPU or GPU, for example {"CPU": 1}'
            )
        return self

    @property
    def num_micro_batches(self) -> int:
        """M: the micro-batches of one step, at every world size."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def use_gpu(self) -> bool:
        return self.resources_per_worker.get("GPU", 0.0) > 0

    @property
    def shares_gpu(self) -> bool:
        """Whether workers get a part of a GPU each."""
        return 0.0 < self.resources_per_worker.get("GPU", 0.0) < 1.0

    @property
    def num_threads(self) -> int:
        """Threads of an operation in every worker: the setting, or as many as the worker has CPUs."""
        return self.num_threads_per_worker or max(1, int(self.resources_per_worker.get("CPU", 1)))

    def identity(self) -> dict[str, Any]:
        """The settings that decide the run's bits; a resumed run must have the same."""
        settings: dict[str, Any] = {key: getattr(self, key) for key in IDENTITY}
        settings["device"] = "cuda" if self.use_gpu else "cpu"
        if not self.use_gpu:
            # How many threads share an operation decides how its sums are split.
            settings["num_threads_per_worker"] = self.num_threads
        for key in DATA_IDENTITY:
            value = getattr(self.data, key)
            settings[f"data.{key}"] = list(value) if isinstance(value, tuple) else value
        return settings

    @classmethod
    def load(cls, config: RunConfig | Mapping[str, Any] | str | os.PathLike[str]) -> RunConfig:
        """From what `ElasticTrainer` takes: a RunConfig, a dict, or the path of a TOML file.

        A `[job]` table in the file belongs to `elastic-ddp run` and is left out here.
        """
        if isinstance(config, RunConfig):
            return config
        if isinstance(config, Mapping):
            return cls(**config)
        if isinstance(config, str | os.PathLike):
            return cls(**{key: value for key, value in read_toml(config).items() if key != "job"})
        raise ConfigError(
            f"config is a {type(config).__name__}; it has to be a RunConfig, a dict or the path of a TOML file"
        )


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a TOML file, or a ConfigError that says what is wrong with it."""
    try:
        return tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"config={os.fspath(path)!r}: there is no such file; give the path of a TOML file") from None
    except OSError as error:
        raise ConfigError(f"config={os.fspath(path)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config={os.fspath(path)!r} is not TOML: {error}") from None


_FIXES = {
    "int_type": " (a number without quotes or a fraction)",
    "float_type": " (a number without quotes)",
    "bool_type": " (true or false, without quotes)",
    "string_type": " (text in quotes)",
    "string_pattern_mismatch": " (letters, digits, '.', '_' and '-', beginning with a letter or digit)",
}
"""What may be given instead, by pydantic's type of the mistake, where its message does not say so."""


_REMOVED = {
    "in_place": "this setting was removed, delete the line. Workers always join and leave while the others train",
}
"""Settings of earlier versions, and what to do about them."""


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line for each mistake: the setting, the value, the rule and what may be given instead."""
    lines = []
    for mistake in error.errors(include_url=False):
        where = ".".join(str(part) for part in mistake["loc"])
        value = mistake["input"]
        if mistake["type"] == "extra_forbidden":
            what = _REMOVED.get(where) or f"there is no such setting; {_known(mistake['loc'], model)}"
            lines.append(f"{where}={value!r}: {what}")
        elif mistake["type"] == "missing":
            lines.append(f"{where} is missing: it has no default; give it a value")
        elif mistake["type"] == "value_error":
            lines.append(str(mistake["ctx"]["error"]))
        else:
            lines.append(
                f"{where}={value!r}: {mistake['msg'][0].lower()}{mistake['msg'][1:]}{_FIXES.get(mistake['type'], '')}"
            )
    return "invalid configuration: " + "; ".join(lines)


def _known(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """The settings that exist where an unknown one was given, the likeliest first."""
    import difflib

    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    names = list(model.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"did you mean {close[0]}?" if close else f"the settings here are {', '.join(sorted(names))}"
