"""The configuration of a run: frozen data, validated when built."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from elastic_ddp.config.environment import check_env, check_runtime_env
from elastic_ddp.config.settings import MAX_STEP, Names, PositiveFloat, PositiveInt, Seconds, Settings, check_distinct
from elastic_ddp.config.storage_uri import check_storage_uri, default_storage
from elastic_ddp.errors import ConfigError

RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
StorageUri = Annotated[
    str,
    BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value),
    AfterValidator(check_storage_uri),
]
LoggerNames = Annotated[
    tuple[Literal["tensorboard", "wandb", "mlflow"], ...], Field(strict=False), AfterValidator(check_distinct)
]

IDENTITY = ("seed", "global_batch_size", "micro_batch_size", "reduction", "precision", "clip_grad_norm")
"""Settings that decide the weights' bits. A resumed run must keep them."""
DATA_IDENTITY = ("columns", "shuffle", "window_row_groups", "chunk_rows", "drop_last")
"""Settings under `data` that a resumed run must keep."""


class CheckpointConfig(Settings):
    """When the run commits its state, which commits it keeps, and what a resume takes from them."""

    every_steps: PositiveInt | None = None
    """Commit when this many steps have passed since the last commit."""
    every_epochs: PositiveInt | None = None
    """Commit at the end of every such number of epochs, or at the next step at which no commit is being written. Can be
    combined with `every_steps` and `every_seconds`."""
    every_seconds: PositiveFloat | None = None
    """Commit at the first step boundary this many seconds after the last commit. Can be combined with `every_steps`.
    Default: 60 if none of `every_steps`, `every_epochs`, `interval` and `max_overhead` is set. A run also commits when
    it is stopped and when it ends."""
    interval: Literal["auto"] | None = None
    """`auto` measures the best time between commits: √(2 · C · T) seconds, after Young and Daly. C is how long a
    commit holds up training. T is the run's mean time between worker failures, one hour before the first. The first
    commit comes after 60 s. Cannot be combined with `every_steps`, `every_epochs` or `every_seconds`."""
    max_overhead: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Largest share of the training time that commits may take, such as `0.02`. Alone, it sets the time between
    commits; with `interval`, it limits how often `auto` commits. Cannot be combined with `every_steps`, `every_epochs`
    or `every_seconds`."""
    keep: PositiveInt = 2
    """Number of newest commits to keep. Older ones are deleted after a newer commit is complete."""
    keep_every_steps: PositiveInt | None = None
    """Also keep the first commit at or after every multiple of this many steps, permanently."""
    keep_best: PositiveInt | None = None
    """Also keep this many commits with the best value of `best_metric`."""
    best_metric: str | None = None
    """Metric that ranks commits: a name given to `step.log` or `run.evaluate`, or `loss` for the training loss. A value
    counts for the next commit after it was measured."""
    best_mode: Literal["min", "max"] = "min"
    """Whether the best value of `best_metric` is the smallest (`min`) or the largest (`max`)."""
    max_failed_saves: Annotated[int, Field(ge=0, le=MAX_STEP)] = 3
    """Number of consecutive saves that may fail before the run ends with an error. Training continues after a failed
    save. A save fails if no storage operation completes for 10 minutes."""
    hyperparameters: Literal["saved", "code"] = "saved"
    """Which hyperparameters of optimizers and schedulers a resumed run uses where the code has changed since the
    commit: the `saved` ones, as `load_state_dict` does, or those in the `code`. See
    [checkpoints](../guides/checkpoints.md#resume-with-other-hyperparameters)."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        def given(*names: str) -> list[str]:
            return [f"{name}={value!r}" for name in names if (value := getattr(self, name)) is not None]

        fixed = given("every_steps", "every_epochs", "every_seconds")
        measured = given("interval", "max_overhead")
        if fixed and measured:
            raise ValueError(
                f"checkpoint with {' and '.join(fixed + measured)}: the interval is either fixed or measured; give "
                "every_steps, every_epochs and every_seconds, or interval and max_overhead"
            )
        if not fixed and not measured:
            object.__setattr__(self, "every_seconds", 60.0)
        if (self.keep_best is None) != (self.best_metric is None):
            raise ValueError(
                f"checkpoint.keep_best={self.keep_best} and checkpoint.best_metric={self.best_metric!r}: give both, a "
                "number of commits and a name used in step.log or run.evaluate, or loss; or give neither"
            )
        return self

    @property
    def is_measured(self) -> bool:
        """Whether the interval between commits is measured rather than fixed."""
        return self.interval is not None or self.max_overhead is not None


class DataConfig(Settings):
    """How rows are read, ordered and fed. The data set itself is an argument of `ElasticTrainer`."""

    columns: Annotated[Names, Field(min_length=1)] | None = None
    """Columns to read. Default: all."""
    shuffle: bool = True
    """Shuffle the rows in every epoch, seeded by `seed`. With `false`, each micro-batch of a step reads its own
    contiguous part of the data set in stored order."""
    window_row_groups: PositiveInt = 4
    """Number of row groups whose rows are shuffled together. More row groups shuffle better and take more memory: a
    worker holds one window of untransformed rows for each of its micro-batches."""
    drop_last: bool = False
    """Leave out the last step of an epoch if its global batch is not full. Which rows are left out differs in every
    epoch, unless `shuffle` is false."""
    chunk_rows: PositiveInt = 1024
    """Number of rows in one call of the transform. A worker holds about one chunk of transformed rows for each of its
    micro-batches; lower this if transformed rows are large. For data in memory and with a `collate_fn`, a chunk is one
    micro-batch."""
    prefetch_micro_batches: PositiveInt = 4
    """Number of micro-batches to load onto the device ahead of the step."""
    concurrency: PositiveInt = 1
    """Number of processes per worker that transform and collate. For data in memory, they also fetch the rows. Parquet
    is read by one further process, unless this is 1."""
    num_cpus_per_task: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves for each of these tasks. With 0, the tasks share the workers' CPUs; raise it if the
    transform is heavy and the nodes have spare CPUs. The tasks of an evaluation reserve none."""


class DDPConfig(Settings):
    """Options of `torch.nn.parallel.DistributedDataParallel`, under its own names."""

    bucket_cap_mb: PositiveFloat = 25.0
    """Size of the buckets in which gradients are reduced, in MiB."""
    gradient_as_bucket_view: bool = True
    """Store gradients in the reduction buckets instead of copying them there, which halves their memory."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same way."""
    find_unused_parameters: bool = False
    """Allow a loss that depends on only some of the parameters. DDP then searches the autograd graph in every forward
    pass."""
    comm_hook: Literal["bf16", "fp16", "powersgd"] | None = None
    """One of torch's communication hooks, which compress the gradients that ranks exchange. Requires
    `reduction = "native"`. `powersgd` compresses from the tenth step of each generation on, with rank 1, and starts
    its error feedback anew in each generation."""


class FSDPConfig(Settings):
    """How FSDP shards the model."""

    shard_classes: Names = ()
    """Class names of the modules to shard and gather one at a time, such as a transformer's block. Parameters outside
    of them are gathered together; without any, the whole model is."""
    sharding: Literal["full", "grad_op", "hybrid"] = "full"
    """`full` (ZeRO-3) frees a unit's gathered parameters after its forward pass and gathers them again for its backward
    pass. With `grad_op` (close to ZeRO-2) they stay in between: less communication, more memory, and the same bits.
    `hybrid` shards as `full` does inside of groups of `shard_size` workers, each of which has the whole model."""
    shard_size: Annotated[int, Field(ge=2)] | None = None
    """With `hybrid`, the number of workers that share a model. Workers that fill no group stand by. By default, the
    number of workers on the node that has the most. With one group, the run shards as `full` does, with mirrors."""
    cpu_offload: bool = False
    """Keep shards, their gradients and the optimizer's state in the memory of the host, where the optimizer steps them.
    A GPU then holds gathered units and activations."""
    mirror: bool = True
    """Keep each shard and its optimizer state on a second rank, too. If a worker dies, only the step in flight is
    repeated. With `false`, the run resumes from its newest commit, and a rank needs half the memory between steps."""


class VerifyConfig(Settings):
    """How a run looks for workers that compute wrong values; see [Silent corruption](../guides/verify.md)."""

    every_steps: Annotated[int, Field(ge=0)] = 0
    """After how many steps ranks compute a micro-batch of each other again, and compare bits; 0 for never. Such a step
    takes one micro-batch longer. Requires `reduction = "canonical"`. With FSDP, shards are compared with their mirrors
    instead."""
    action: Literal["warn", "drain", "stop", "rollback"] = "warn"
    """Reaction to a worker at fault. `warn` continues with it. `drain` continues without it and its node, or with one
    worker fewer if all are on one node. `rollback` does that and resumes from the newest commit of a state that was
    verified. `stop` ends the run. If nothing tells which of several workers is right, all but `warn` end the run."""


class RunConfig(Settings):
    """The configuration of a run: everything but its code and its data.

    Raises:
        ConfigError: a setting is unknown, has the wrong type, or contradicts another one.
    """

    name: RunName
    """Name of the run. Starting the same name in the same storage resumes the run."""
    storage: StorageUri = Field(default_factory=default_storage)
    """Where runs are stored: a local path, or an fsspec URI such as `s3://bucket/runs`. Every node must reach it. The
    store must be able to create an object only if it does not exist; the driver tests this at the start. Default: the
    environment variable `ELASTIC_DDP_STORAGE` of the driver, or else `runs`, a folder in its working directory."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights, the order of the rows, and the random numbers in a step."""
    steps: PositiveInt | None = None
    """Number of optimizer steps to run. Give either `steps` or `epochs`."""
    epochs: PositiveInt | None = None
    """Number of passes over the data set to run. Give either `steps` or `epochs`."""
    global_batch_size: PositiveInt
    """Number of rows in one optimizer step, the same at every world size. A multiple of `micro_batch_size`."""
    micro_batch_size: PositiveInt
    """Number of rows in one forward and backward pass."""
    min_workers: PositiveInt = 1
    """Smallest number of workers to train with. Training waits while there are fewer."""
    max_workers: PositiveInt = 1
    """Largest number of workers to train with. At most `global_batch_size / micro_batch_size`."""
    standby_workers: Annotated[int, Field(ge=0, le=MAX_STEP)] = 0
    """Number of standbys on each node with workers, at most `max_workers`: processes that have built everything and
    replace a worker that fails there. A standby reserves no resources and no GPU memory, but uses host memory."""
    even_micro_batches: bool = False
    """Train only with numbers of workers that divide the micro-batches of a step, so that every worker has as many.
    Other ready workers wait. Set it if the training function runs collectives for each micro-batch."""
    resources_per_worker: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        default_factory=lambda: {"CPU": 1.0}
    )
    """Resources that Ray reserves for each worker, such as `{CPU = 4, GPU = 1}`. With a GPU, training runs on it. With
    a fraction, such as `GPU = 0.5`, workers share a GPU and reduce gradients on the host; use that for tests."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """`ddp` keeps the whole model on every worker. `fsdp` shards parameters, gradients and optimizer state. Shards move
    between the workers when one fails, joins or leaves; see `fsdp.mirror`."""
    reduction: Literal["canonical", "native"] = "canonical"
    """`canonical` sums gradients to the same bits at every world size. `native` is PyTorch's reduction. With DDP on an
    H100, a step took 1.4 to 1.7 times as long with `canonical` as with plain PyTorch; with `native` the larger model
    had 0.92 to 0.96 of plain's throughput. On CPUs both are close to plain: see
    [benchmarks](../benchmarks-training.md#on-a-gpu)."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the forward pass. `bf16` and `fp16` use autocast, or with `fsdp` parameters that are gathered in
    this precision. Weights, gradients and optimizer state stay in fp32. `fp16` scales the loss as
    `torch.amp.GradScaler` does; it is for GPUs without bf16."""
    clip_grad_norm: PositiveFloat | None = None
    """Largest 2-norm of all gradients together; larger gradients are scaled down to it. Default: no clipping."""
    on_nonfinite: Literal["stop", "skip", "ignore"] = "stop"
    """What a step does if a loss or a gradient is NaN or infinite. `stop` ends the run with an error before anything
    changes. `skip` leaves model, optimizers and schedulers unchanged and continues with the next step. `ignore` does
    not check. Unless it is `ignore`, a run whose weights are NaN or infinite ends with an error and does not commit
    them."""
    max_restarts: Annotated[int, Field(ge=-1, le=MAX_STEP)] = 100
    """Number of worker failures and failed starts before the run ends with an error; -1 for no limit. Not counted:
    workers that fail before their first step while others train, and workers on a drained node. Errors of the training
    function are never retried, and three failures in a row at the same step always end the run."""
    log_every_steps: PositiveInt = 10
    """Number of steps between two writes of logged values to the ledger."""
    loggers: LoggerNames = ()
    """Where the driver sends the values of each logged step: any of `tensorboard`, `wandb` and `mlflow`. Each step is
    logged once, in order, also after failures and a resume. More in
    [TensorBoard, W&B and MLflow](../guides/loggers.md)."""
    resize_interval_s: Seconds = 5.0
    """Seconds between two checks whether the cluster can hold more workers, up to `max_workers`."""
    heartbeat_timeout_s: Annotated[Seconds, Field(ge=0.1)] = 5.0
    """Seconds without a heartbeat after which a worker counts as failed. A process that exits is detected at once.
    Heartbeats continue during long computations, unless one call holds Python's global interpreter lock."""
    hang_timeout_s: Seconds = 600.0
    """Seconds without progress on any rank after which the run counts as hung. All stacks are then recorded, and the
    workers that the others wait for are replaced. It must exceed the longest micro-batch, compilation included. One
    storage operation may take five minutes longer. A new worker gets this long, at least two minutes, to become
    ready."""
    drain_deadline_s: Seconds = 30.0
    """Seconds that a worker may stay after SIGTERM. It leaves at the next step boundary if `min_workers` remain.
    Otherwise it waits for new workers, for at most half of this time. Also the time to finish a save when a worker
    leaves or the run ends."""
    collective_timeout_s: Seconds = 1800.0
    """Seconds that a collective may wait for a slow rank."""
    num_threads_per_worker: PositiveInt | None = None
    """Value of `torch.set_num_threads` in every worker. Default: the worker's CPUs."""
    env: Annotated[dict[str, str], BeforeValidator(check_env)] = Field(default_factory=dict, repr=False)
    """Environment variables of the workers and of the processes that read and transform their data, such as
    `{NCCL_DEBUG = "INFO"}`. They are set before Python starts. Credentials are refused, because Ray writes the values
    to its logs. The ledger records the names only."""
    runtime_env: Annotated[dict[str, Any], BeforeValidator(check_runtime_env)] = Field(default_factory=dict, repr=False)
    """Code that Ray copies to the nodes or installs there, such as `{working_dir = "."}` or `{pip = ["einops"]}`: the
    fields of Ray's [runtime environment](https://docs.ray.io/en/latest/ray-core/handling-dependencies.html). `fit`
    passes them to `ray.init`; a program that calls `ray.init` itself passes them there. The ledger records the names of
    the fields only."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When the run commits, which commits it keeps, and what a resume takes from them."""
    data: DataConfig = Field(default_factory=DataConfig)
    """How rows are read, ordered and fed."""
    ddp: DDPConfig = Field(default_factory=DDPConfig)
    """Options of `strategy = "ddp"`."""
    fsdp: FSDPConfig = Field(default_factory=FSDPConfig)
    """Options of `strategy = "fsdp"`."""
    verify: VerifyConfig = Field(default_factory=VerifyConfig)
    """How the run looks for workers that compute wrong values."""

    @property
    def shard_size(self) -> int | None:
        """The number of workers that share a model; 0 for all workers of a node, None for all of the run."""
        is_hybrid = self.strategy == "fsdp" and self.fsdp.sharding == "hybrid"
        return self.fsdp.shard_size or 0 if is_hybrid else None

    @model_validator(mode="after")
    def _check_strategy(self) -> Self:
        fsdp = self.fsdp
        size = self.fsdp.shard_size
        most = self.max_workers
        if self.ddp.comm_hook is not None and (self.strategy, self.reduction) != ("ddp", "native"):
            settings = f"strategy={self.strategy!r} and reduction={self.reduction!r}"
            raise ValueError(
                f"ddp.comm_hook={self.ddp.comm_hook!r} has no effect with {settings}: it compresses the gradients of "
                'DDP\'s own all-reduce; use strategy="ddp" and reduction="native", or remove it'
            )
        for setting, is_set in (
            (f"shard_classes={list(fsdp.shard_classes)}", fsdp.shard_classes),
            ("cpu_offload=true", fsdp.cpu_offload),
            ('sharding="hybrid"', fsdp.sharding == "hybrid"),
        ):
            if is_set and self.strategy != "fsdp":
                raise ValueError(
                    f'fsdp.{setting} has no effect with strategy={self.strategy!r}; use strategy="fsdp", or remove it'
                )
        if fsdp.sharding == "hybrid" and most < 2:
            raise ValueError(
                f'fsdp.sharding="hybrid" needs several groups of workers, and max_workers={most} allows one; raise '
                'max_workers, or use "full"'
            )
        if size is not None and fsdp.sharding != "hybrid":
            raise ValueError(
                f'fsdp.shard_size={size} has no effect with fsdp.sharding={fsdp.sharding!r}; use "hybrid", or remove it'
            )
        if size is not None and most < 2 * size:
            raise ValueError(
                f"fsdp.shard_size={size} leaves one group with max_workers={most}, so no shard has a replica; use "
                f'max_workers={2 * size} or more, or fsdp.sharding="full"'
            )
        if size is not None and (largest := most // size * size) < self.min_workers <= most:
            raise ValueError(
                f"fsdp.shard_size={size} allows {largest} of max_workers={most}, which is below "
                f"min_workers={self.min_workers}; use a lower min_workers, or a multiple of {size} as max_workers"
            )
        if self.verify.every_steps and self.strategy == "ddp" and self.reduction != "canonical":
            raise ValueError(
                f"verify.every_steps={self.verify.every_steps} compares the bits of gradients, which are equal on all "
                f'workers only with reduction="canonical", but this run has {self.reduction!r}; set '
                'reduction="canonical", or remove verify.every_steps'
            )
        if self.verify.every_steps and self.strategy == "fsdp" and not fsdp.mirror:
            raise ValueError(
                f"verify.every_steps={self.verify.every_steps} compares shards with their mirrors, and "
                "fsdp.mirror=false leaves none; set it to true, or remove verify.every_steps"
            )
        return self

    @model_validator(mode="after")
    def _check_sizes_and_resources(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"steps={self.steps} and epochs={self.epochs}: give exactly one; steps counts optimizer steps, epochs "
                "counts passes over the data set"
            )
        if self.global_batch_size % self.micro_batch_size:
            below = self.global_batch_size // self.micro_batch_size * self.micro_batch_size
            choices = [str(size) for size in (below, below + self.micro_batch_size) if size]
            raise ValueError(
                f"global_batch_size={self.global_batch_size} is not a multiple of "
                f"micro_batch_size={self.micro_batch_size}; use global_batch_size={' or '.join(choices)}"
            )
        for name in ("min_workers", "standby_workers"):
            value = getattr(self, name)
            if value > self.max_workers:
                raise ValueError(
                    f"{name}={value} is above max_workers={self.max_workers}; "
                    f"raise max_workers or use {name}={self.max_workers}"
                )
        if self.max_workers > self.num_micro_batches:
            raise ValueError(
                f"max_workers={self.max_workers} is above the {self.num_micro_batches} micro-batches of a step "
                f"(global_batch_size={self.global_batch_size} / micro_batch_size={self.micro_batch_size}), and every "
                f"worker needs one; use max_workers={self.num_micro_batches} or a smaller micro_batch_size"
            )
        if self.even_micro_batches and self.num_micro_batches % self.max_workers:
            even = [size for size in range(1, self.num_micro_batches + 1) if self.num_micro_batches % size == 0]
            below = max(filter(self.max_workers.__gt__, even))
            above = min(filter(self.max_workers.__lt__, even))
            raise ValueError(
                f"max_workers={self.max_workers} does not divide the {self.num_micro_batches} micro-batches of a step, "
                f"as even_micro_batches requires; use max_workers={below} or {above}"
            )
        if self.hang_timeout_s < self.heartbeat_timeout_s:
            raise ValueError(
                f"hang_timeout_s={self.hang_timeout_s:g} is below heartbeat_timeout_s={self.heartbeat_timeout_s:g}; "
                "raise hang_timeout_s, so that a failed worker is not reported as a hang"
            )
        gpus = self.resources_per_worker.get("GPU", 0.0)
        if gpus > 1.0:
            raise ValueError(f"resources_per_worker GPU={gpus:g}: a worker trains on at most one GPU; use 1 or less")
        if not any(self.resources_per_worker.values()):
            raise ValueError(
                f"resources_per_worker={self.resources_per_worker} reserves nothing, so Ray cannot count how many "
                'workers fit; give CPU or GPU, for example {"CPU": 1}'
            )
        return self

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches in one step, at every world size."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def use_gpu(self) -> bool:
        """Whether workers train on GPUs."""
        return self.resources_per_worker.get("GPU", 0.0) > 0

    @property
    def shares_gpu(self) -> bool:
        """Whether several workers share one GPU."""
        return 0.0 < self.resources_per_worker.get("GPU", 0.0) < 1.0

    @property
    def num_threads(self) -> int:
        """Number of threads of a CPU operation in every worker."""
        return self.num_threads_per_worker or max(1, int(self.resources_per_worker.get("CPU", 1)))

    def identity(self) -> dict[str, Any]:
        """Returns the settings that decide the weights' bits, as JSON values. A resumed run must have the same."""
        settings: dict[str, Any] = {key: getattr(self, key) for key in IDENTITY}
        settings["device"] = "cuda" if self.use_gpu else "cpu"
        if not self.use_gpu:  # the number of threads decides how a CPU operation splits its sums
            settings["num_threads_per_worker"] = self.num_threads
        for key in DATA_IDENTITY:
            value = getattr(self.data, key)
            settings[f"data.{key}"] = list(value) if isinstance(value, tuple) else value
        return settings

    def recorded(self) -> dict[str, Any]:
        """Returns all settings for the ledger; of `env` and `runtime_env` the names, in case a value is a secret."""
        return {**self.model_dump(), "env": sorted(self.env), "runtime_env": sorted(self.runtime_env)}

    @classmethod
    def load(cls, config: RunConfig | Mapping[str, Any] | str | os.PathLike[str]) -> RunConfig:
        """Builds a configuration from a RunConfig, a mapping, or the path of a TOML file.

        A `[job]` table in the file belongs to `elastic-ddp run` and is ignored here.

        Raises:
            ConfigError: the file cannot be read, or a setting is invalid.
        """
        if isinstance(config, RunConfig):
            return config
        if isinstance(config, Mapping):
            return cls(**config)
        if isinstance(config, str | os.PathLike):
            return cls(**{key: value for key, value in read_toml(config).items() if key != "job"})
        raise ConfigError(f"config is a {type(config).__name__}; give a RunConfig, a dict or the path of a TOML file")


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the content of a TOML file; ConfigError if it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"config={os.fspath(path)!r} is not a TOML file that can be read: {reason}") from None
