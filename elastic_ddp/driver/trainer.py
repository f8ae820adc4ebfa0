"""The driver of a run: checks everything that can be checked, starts the workers, and keeps the record."""

from __future__ import annotations

import inspect
import io
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import ray
from ray.util import inspect_serializability
from rich.console import Console
from rich.text import Text

from elastic_ddp import errors
from elastic_ddp.checkpoint import CommitCatalog
from elastic_ddp.config.capacity import check_cpus, explain_shortage
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.data.index import DatasetIndex, open_index
from elastic_ddp.data.ingest import materialize
from elastic_ddp.data.source import check_columns
from elastic_ddp.driver.cluster import connect_or_start
from elastic_ddp.driver.session import Session
from elastic_ddp.errors import ConfigError, StorageError, TrainFunctionError
from elastic_ddp.ray_internals import check_ray_version
from elastic_ddp.rendezvous.actor import start_rendezvous
from elastic_ddp.rendezvous.messages import RendezvousOptions
from elastic_ddp.storage.lease import DriverLease
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import new_session, read_ledger, summarize
from elastic_ddp.worker.job import COMMITS, Job, has_commits

if TYPE_CHECKING:
    from elastic_ddp.data.source import Transform
    from elastic_ddp.worker.run import Run

SUMMARY = "summary.json"
_IDENTITY = "run.json"
_DATA_SET = "data_set"
"""In it, for people to read."""


@dataclass(frozen=True)
class RunResult:
    """The result of `ElasticTrainer.fit`. `summary.json` in the run's folder holds the same values and more."""

    status: str
    """`"finished"`, or `"stopped"` if the run was stopped before its last step. A failed run raises instead."""
    steps: int
    """Optimizer steps done since the run began, in all sessions."""
    samples: int
    """Rows that these steps trained on."""
    weights_sha256: str | None
    """SHA-256 over the names, dtypes, shapes and bytes of all parameters and buffers. None for a stopped run."""
    samples_sha256: str
    """SHA-256 over the row ids of each step, in order."""
    metrics: Mapping[str, float]
    """The last value of each logged metric and each evaluation, by name."""
    uri: str
    """The run's folder, `<storage>/<name>`. It holds the commits, the ledger and the summary."""
    summary: Mapping[str, Any] = field(repr=False)
    """The content of `summary.json`: generations, failures, goodput and more."""


class ElasticTrainer:
    """Runs a training function on a changing number of workers.

    Create it in the driver process, on a node of the Ray cluster. The constructor checks the settings, the functions
    and the storage; workers start in `fit`.

    Args:
        train: training function. Every worker calls it with a `Run`. It is sent to the workers, so it cannot hold
            locks, open files or connections.
        data: training set: Parquet at any fsspec URI (a file, a folder, a glob, or a list of them), or a
            `ray.data.Dataset`, which `fit` writes to the run's storage once.
        config: a `RunConfig`, a dict of its settings, or the path of a TOML file.
        transform: maps `(rows, rng)` to rows, for one chunk of rows at a time. `rows` is a dict of NumPy arrays of
            shape `(num_rows, ...)`. `rng` is a NumPy generator seeded from `seed`, the epoch and the chunk.

    Raises:
        ConfigError: a setting or an argument is invalid, the storage is not writable, or the installed Ray version is
            not supported.
    """

    def __init__(
        self,
        train: Callable[[Run], Any],
        data: str | PathLike[str] | list[str] | ray.data.Dataset,
        config: RunConfig | Mapping[str, Any] | str | PathLike[str],
        *,
        transform: Transform | None = None,
    ) -> None:
        check_ray_version()
        if not callable(train):
            raise ConfigError(f"train is a {type(train).__name__}; give the function that trains, taking a Run")
        if transform is not None and not callable(transform):
            raise ConfigError(
                f"transform is a {type(transform).__name__}; give a function that gets a dict of NumPy arrays and a "
                "generator, and returns such a dict"
            )
        if not _takes_a_run(train):
            raise ConfigError(f"{train!r} is called with a Run, which it does not take; define it as `def train(run)`")
        self.config = RunConfig.load(config)
        for thing in (train, transform):
            can_travel, culprits = inspect_serializability(thing, print_file=io.StringIO())
            if not can_travel:
                held = ", ".join(repr(each.obj) for each in culprits)
                raise ConfigError(
                    f"{thing!r} cannot be sent to workers because of {held}: it belongs to this process (a lock, an "
                    "open file, a connection); make it inside the function"
                )
        self._train = train
        self._data = data
        self._transform = transform
        if self.config.storage.startswith("memory:"):
            raise ConfigError(
                f"storage={self.config.storage!r} is the memory of one process, and every worker would have its own; "
                "use a path that all nodes share, or a URI such as s3://bucket/runs"
            )
        self._storage = Storage(self.config.storage).at(self.config.name)
        self._storage.check_writable()

    def fit(self) -> RunResult:
        """Trains until all steps are done, and returns the result.

        An unfinished run of this name resumes from its newest commit. A finished one starts no worker: its result is
        returned, unless the configuration asks for more steps. `fit` uses the Ray cluster at `RAY_ADDRESS` or on this
        machine, and starts one on this machine if there is none.

        Ctrl-C or SIGTERM commits and stops the run at the next step boundary. A second one stops it at once.

        Returns:
            The result, after `summary.json` is written.

        Raises:
            ConfigError: the run began with other settings, another driver of it is live, or Ray cannot be reached.
            DataError: the data cannot be read, or is not the data that the run began with.
            TrainFunctionError: the training function raised, and the message holds its traceback; or it hung on all
                workers for `hang_timeout_s`.
            WorkersFailedError: more workers failed than `max_restarts` allows, no worker could start, or the same step
                failed again and again.
            StorageError: more saves in a row failed than `checkpoint.max_failed_saves`, or the storage is unreachable.
            CheckpointError: none of the commits can be restored, or a worker's state cannot be saved.
            ReplicasDifferError: ranks hold different values of replicated state, such as weights.
            DriverReplacedError: another driver took over the run while this one was suspended.
            KeyboardInterrupt: a second Ctrl-C stopped the run.
        """
        began_at = time.time()
        with (
            DriverLease(self._storage, self.config.name, new_session(), _note) as lease,
            tempfile.TemporaryDirectory(prefix="elastic_ddp-") as memory,
        ):
            return self._fit(lease, memory, began_at)

    def _fit(self, lease: DriverLease, memory: str, began_at: float) -> RunResult:
        if self._finished(0) is None:  # else nothing is written, unless it is to make more steps
            lease.acquire()
        index = self._open_data()
        self._claim(index)
        job = Job(
            config=self.config,
            train=self._train,
            index=index,
            transform=self._transform,
            storage=self._storage,
            session=lease.session,
        )
        if (done := self._finished(job.total_steps)) is not None:
            _note(f"run {self.config.name!r} is finished already, after {done.steps} steps; more steps resume it")
            return done
        lease.acquire()
        commits = CommitCatalog(self._storage.at(COMMITS)).candidates()
        resumed = next((commit for commit in commits if job.difference_to(commit.record) is None), None)
        if resumed is not None and resumed.step > job.total_steps:
            raise ConfigError(
                f"run {self.config.name!r} has {resumed.step:,} steps behind it, and is to have {job.total_steps:,}: a "
                "run does not go back; give it as many or more, or another name"
            )
        may_grow = not connect_or_start(_note)
        lease.renew(ray_address=ray.get_runtime_context().gcs_address)
        self._check_resources(may_grow=may_grow)
        groups, lanes = len(index.group_rows), self.config.num_micro_batches
        if (times := (groups + lanes - 1) / groups) > 1.5:
            _note(
                f"the data set has {groups:,} row groups for the {lanes} micro-batches of a step, and what lies in "
                f"several lanes is read for each: {times:.1f} times the data set in an epoch. Write it with row groups "
                f"of {max(1, index.num_rows // (10 * lanes)):,} rows or fewer (row_group_size of pyarrow and Ray Data)"
            )
        if index.num_rows < self.config.global_batch_size:
            _note(
                f"the data set has {index.num_rows:,} rows, fewer than global_batch_size="
                f"{self.config.global_batch_size:,}: every step is an epoch, of those rows"
            )
        rendezvous = start_rendezvous(
            self.config.name,
            job.total_steps,
            RendezvousOptions(
                min_workers=self.config.min_workers,
                max_workers=self.config.max_workers,
                heartbeat_timeout_s=self.config.heartbeat_timeout_s,
                hang_timeout_s=self.config.hang_timeout_s,
                max_failed_saves=self.config.checkpoint.max_failed_saves,
                memory=memory,
                last_commit=resumed.step if resumed is not None else None,
                driver={"host": socket.gethostname(), "pid": os.getpid(), "uri": self._storage.uri},
            ),
        )
        session = Session(job, rendezvous, resumed, lease, began_at)
        try:
            outcome = session.run()
        finally:
            ray.kill(rendezvous)
            session.end_workers()
        return self._conclude(outcome, session, lease)

    def _open_data(self) -> DatasetIndex:
        source = self._data
        if isinstance(source, ray.data.Dataset):
            source = materialize(source, self._storage, may_replace=self._may_replace(), note=_note)
        index = open_index(source, self._storage, columns=self.config.data.columns, may_replace=self._may_replace)
        if self._transform is None:
            check_columns(index.schema)
        return index

    def _may_replace(self) -> bool:
        """Whether nothing was committed yet that other data or other settings could not go on from."""
        return not has_commits(self._storage)

    def _claim(self, index: DatasetIndex) -> None:
        """Writes down what defines the run, or compares it with what is written once something was trained."""
        mine = {**self.config.identity(), "data": index.fingerprint}
        written = json.dumps({**mine, _DATA_SET: str(index)}, indent=1).encode()
        try:
            self._storage.create(_IDENTITY, written)
        except FileExistsError:
            if self._may_replace():
                self._storage.write(_IDENTITY, written)
                return
            theirs = json.loads(self._storage.read(_IDENTITY))
            before = theirs.pop(_DATA_SET, "another data set")
            changed = [
                f"{key} was {theirs.get(key)!r} and is {mine.get(key)!r}"
                for key in {**theirs, **mine}
                if key != "data" and theirs.get(key) != mine.get(key)
            ]
            if theirs.get("data") != index.fingerprint:
                now = "is the same, with other contents" if before == str(index) else f"is {index}"
                changed.append(f"data was {before} and {now} (files are told by path, size and time of change or ETag)")
            if self.config.strategy == "fsdp" and theirs.get("reduction") == "canonical":
                changed.append(
                    'strategy is "fsdp", which goes on from runs that began with reduction="native" alone (a new run '
                    "may begin with the weights of this one: run.load_weights)"
                )
            if changed:
                raise ConfigError(
                    f"run {self.config.name!r} in {self.config.storage} began with other settings: "
                    f"{'; '.join(changed)}. A run cannot change them; set them back, or use another name"
                ) from None

    def _check_resources(self, *, may_grow: bool) -> None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        check_cpus(
            nodes,
            resources_per_worker=self.config.resources_per_worker,
            max_workers=self.config.max_workers,
            options=self.config.data,
            has_transform=self._transform is not None,
        )
        if (lack := explain_shortage(nodes, self.config.resources_per_worker, self.config.min_workers)) is None:
            return
        if not may_grow:
            raise ConfigError(f"{lack}. Ray was started for this run alone; on a cluster it would wait for nodes")
        _note(f"waiting for nodes: {lack}")

    def _finished(self, total_steps: int) -> RunResult | None:
        try:
            summary = json.loads(self._storage.read(SUMMARY))
        except FileNotFoundError:
            return None
        if summary["status"] != "finished":
            return None
        return None if total_steps > summary["total_steps"] else self._result(summary)

    def _conclude(self, outcome: dict[str, Any], session: Session, lease: DriverLease) -> RunResult:
        summary = {}
        try:
            session.close_ledger()
            lease.renew()  # else the summary is another driver's to write
            summary = summarize(read_ledger(self._storage), name=self.config.name, storage=self._storage.uri)
            self._storage.write(SUMMARY, json.dumps(summary, indent=1).encode())
        except StorageError as error:
            if outcome["status"] != "failed":
                raise
            _note(f"the ledger and the summary do not tell how the run ended: {error}")  # that may have been the reason
        if outcome["status"] == "failed":
            raise getattr(errors, outcome["kind"], TrainFunctionError)(outcome["error"])
        return self._result(summary)

    def _result(self, summary: dict[str, Any]) -> RunResult:
        return RunResult(
            status=summary["status"],
            steps=summary["steps"],
            samples=summary["samples"],
            weights_sha256=summary["weights_sha256"],
            samples_sha256=summary["samples_sha256"],
            metrics=summary["metrics"],
            uri=self._storage.uri,
            summary=summary,
        )


def _takes_a_run(train: Callable[..., object]) -> bool:
    try:
        inspect.signature(train).bind(None)
    except TypeError:
        return False
    except ValueError:  # one of C does not say
        pass
    return True


def _note(text: str) -> None:
    Console(stderr=True).print(Text(text), soft_wrap=True)
