"""A driver's checks before it starts workers: the user's functions, the run's identity, the cluster's capacity."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.runtime_env import RuntimeEnv
from ray.util import inspect_serializability

from elastic_ddp.checkpoint import CommitCatalog
from elastic_ddp.config.capacity import check_cpus, explain_shortage
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.map_style import MapStyleIndex
from elastic_ddp.errors import ConfigError
from elastic_ddp.ray_internals.this_job import COPIES
from elastic_ddp.worker.job import COMMITS, Job

_SIGNATURES = {
    "train": (1, "one argument, the Run", "def train(run)"),
    "transform": (2, "two arguments, a dict of NumPy arrays and a generator", "def transform(rows, rng)"),
    "collate_fn": (1, "one argument, a list of rows", "def collate(rows)"),
}
"""Number of arguments of the user's functions, their names, and a definition."""


def check_functions(train: Any, transform: Any, collate_fn: Any) -> None:
    """Raises ConfigError if workers cannot call the training function, the transform, or the collate function."""
    for name, function in (("train", train), ("transform", transform), ("collate_fn", collate_fn)):
        if function is None and name != "train":
            continue
        num_arguments, arguments, definition = _SIGNATURES[name]
        if not (callable(function) and _takes(function, num_arguments)):
            raise ConfigError(
                f"{name}={function!r} cannot be called with {arguments}. Define it as `{definition}`, and bind further "
                "arguments with functools.partial."
            )
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_kind(code) for is_kind in kinds for code in (function, type(function).__call__)):
            raise ConfigError(
                f"{name}={function!r} is a generator or async function, and calling it does not run its code. Define "
                "it with `def`, and without `yield`."
            )
        is_serializable, culprits = inspect_serializability(function, print_file=io.StringIO())
        if not is_serializable:
            objects = ", ".join(repr(culprit.obj) for culprit in culprits)
            raise ConfigError(
                f"{function!r} cannot be sent to workers: it holds {objects}, which belongs to this process (a lock, "
                "an open file, a connection). Create it inside the function."
            )


def _takes(function: Any, num_arguments: int) -> bool:
    """Returns whether a function's own signature accepts this number of positional arguments."""
    try:
        # Not the signature of the function that it wraps: a decorator may pass arguments of its own.
        inspect.signature(function, follow_wrapped=False).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:  # some functions implemented in C have no signature
        pass
    return True


def check_runtime_env(runtime_env: Mapping[str, Any]) -> None:
    """Raises ConfigError for fields or values of a runtime environment that Ray does not have."""
    known = sorted(name for name in RuntimeEnv.known_fields - {"env_vars"} if not name.startswith("_"))
    unknown = [name for name in runtime_env if name not in known]
    if unknown:
        raise ConfigError(
            f"runtime_env.{unknown[0]}: Ray's runtime environment has no such field; its fields are {', '.join(known)}"
        )
    try:
        RuntimeEnv(**runtime_env)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"runtime_env={dict(runtime_env)!r} is not valid: {error}") from error


def check_is_kept(storage: str, uri: str) -> None:
    """Raises ConfigError if the storage is in a copy of the working directory that Ray has made, and will remove."""
    if COPIES in uri:
        raise ConfigError(
            f"storage={storage!r} is in a copy of the working directory, {uri}, which Ray removes after the job. Use a "
            "bucket, or the absolute path of a folder that all nodes share."
        )


def check_identity(job: Job) -> None:
    """Raises ConfigError if the run has commits, and all were made with other settings or data."""
    newest = None
    for commit in CommitCatalog(job.storage.at(COMMITS)).manifests():
        difference = job.difference_to(commit.record)
        if difference is None:
            return
        newest = newest or difference
    if newest is not None:
        config = job.config
        raise ConfigError(
            f"run {config.name!r} in {config.storage} began with other settings: {newest}. Restore these settings, or "
            "use another name; run.load_weights can start that run from the weights of this one."
        )


def check_steps(index: DatasetIndex | MapStyleIndex, config: RunConfig) -> None:
    """Raises ConfigError if an epoch has no step."""
    if config.data.drop_last and index.num_rows < config.global_batch_size:
        raise ConfigError(
            f"data.drop_last leaves out short batches, and the data set has {index.num_rows:,} rows, fewer than "
            f"global_batch_size={config.global_batch_size:,}: an epoch would have no step. Set data.drop_last = false, "
            "or use a smaller global_batch_size."
        )


def check_capacity(nodes: Sequence[Mapping[str, float]], config: RunConfig, *, num_tasks: int, may_grow: bool) -> None:
    """Raises ConfigError if the run can never start on these nodes or, if the cluster `may_grow`, on more nodes."""
    check_cpus(nodes, config, num_tasks)
    shortage = explain_shortage(nodes, config.resources_per_worker, config.min_workers)
    if shortage is not None and not may_grow:
        raise ConfigError(f"{shortage}. No node can join: this Ray cluster was started for this run on this machine.")


def warn_about_data(index: DatasetIndex | MapStyleIndex, config: RunConfig, note: Callable[[str], None]) -> None:
    """Prints a warning if the data set is read more than 1.5 times an epoch, is smaller than a global batch, or varies
    between reads."""
    groups = len(index.group_rows)
    lanes = config.num_micro_batches
    read_factor = (groups + lanes - 1) / groups
    if read_factor > 1.5 and isinstance(index, DatasetIndex):
        note(
            f"row groups that cross a lane boundary are read more than once: {read_factor:.1f} times the data set in "
            f"an epoch, with {groups:,} row groups and {lanes} micro-batches in a step. Write row groups of at most "
            f"{max(1, index.num_rows // (10 * lanes)):,} rows (row_group_size in pyarrow and Ray Data)."
        )
    if index.num_rows < config.global_batch_size:
        note(
            f"the data set has {index.num_rows:,} rows, fewer than global_batch_size={config.global_batch_size:,}: "
            "each step is one epoch"
        )
    if isinstance(index, MapStyleIndex) and index.varying_row is not None:
        note(
            f"data[{index.varying_row}] differs between two reads with equal seeds, so the result depends on the "
            "number of workers and on restarts. In __getitem__, draw from the global generators of torch, NumPy or "
            "Python, which are seeded for each micro-batch, and not from a generator that the data set keeps."
        )
