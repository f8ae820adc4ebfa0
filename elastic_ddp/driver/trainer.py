"""The user's entry point: `ElasticTrainer.fit` checks a run, starts its rendezvous, and runs one session of it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import ray

from elastic_ddp import errors
from elastic_ddp.checkpoint import Commit, CommitCatalog
from elastic_ddp.checkpoint.record import describe_unmeasured, measurements
from elastic_ddp.checkpoint.retention import best_commit
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.data.access import files_to_check
from elastic_ddp.data.columns import check_columns
from elastic_ddp.data.index import DatasetIndex, open_index
from elastic_ddp.data.ingest import materialize
from elastic_ddp.data.map_style import MapStyleIndex, check_data, index_in_memory, is_parquet, is_ray_dataset
from elastic_ddp.data.weights import weights_of
from elastic_ddp.driver.cluster import connect_or_start, tolerated_deprecations
from elastic_ddp.driver.cluster_watch import GcsWatch
from elastic_ddp.driver.display import print_note
from elastic_ddp.driver.node_access import check_nodes
from elastic_ddp.driver.start_checks import (
    check_capacity,
    check_functions,
    check_identity,
    check_is_kept,
    check_runtime_env,
    check_steps,
    warn_about_data,
)
from elastic_ddp.errors import ConfigError, DataError, NonFiniteError, StorageError, TrainFunctionError
from elastic_ddp.loggers.delivery import LoggedSession
from elastic_ddp.loggers.logger import Logger
from elastic_ddp.loggers.run_loggers import RunLoggers, open_loggers
from elastic_ddp.ray_internals import check_home_folder, check_ray_version
from elastic_ddp.ray_internals.nodes import draining_nodes
from elastic_ddp.ray_internals.this_job import record_run, this_job
from elastic_ddp.rendezvous.actor import RendezvousHandle, start_rendezvous
from elastic_ddp.rendezvous.messages import RendezvousOptions
from elastic_ddp.storage.lease import DriverLease
from elastic_ddp.storage.storage import Storage
from elastic_ddp.storage.temporary_folder import TemporaryFolder
from elastic_ddp.telemetry import new_session, newest_number, read_ledger, summarize
from elastic_ddp.telemetry.description import describe_status
from elastic_ddp.worker.job import COMMITS, Job, has_commits

if TYPE_CHECKING:
    from elastic_ddp.data.files import Source
    from elastic_ddp.data.map_style import InMemory
    from elastic_ddp.data.weights import Weights
    from elastic_ddp.data.work import CollateFn, Transform
    from elastic_ddp.driver.session import Session
    from elastic_ddp.worker.run import Run

P = ParamSpec("P")
R = TypeVar("R")

SUMMARY = "summary.json"
RAY_LOG = "ray.log"
VERBOSE = "ELASTIC_DDP_VERBOSE"
"""The environment variable that shows Ray's own messages on the console, too."""


def _without_frames(method: Callable[P, R]) -> Callable[P, R]:
    """Removes this package's frames from the traceback of an error with a self-explanatory message."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except (ConfigError, DataError, NonFiniteError, TrainFunctionError) as error:
            raise error.with_traceback(None) from None

    return call


def _import_session() -> None:
    """Imports modules that take a second. Errors are raised where the modules are imported again."""
    with suppress(Exception):
        import elastic_ddp.driver.session
        import elastic_ddp.ray_internals.torch_trainer  # noqa: F401


@dataclass(frozen=True)
class RunResult:
    """The result of `ElasticTrainer.fit` or `debug`. `summary.json` in the run's folder holds the same and more."""

    status: str
    """`"finished"` after the last step; `"left"` if the training function left its loop before it, and `"stopped"` if
    the run was stopped before it: the same command resumes such a run. A failed run raises instead."""
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
    best_step: int | None
    """Step of the commit with the best value of `checkpoint.best_metric`; None without that setting or a value."""
    best_metric: float | None
    """The value of `checkpoint.best_metric` in this commit."""
    uri: str
    """The run's folder, `<storage>/<name>`. It holds the commits, the ledger and the summary. Empty from `debug`."""
    summary: Mapping[str, Any] = field(repr=False)
    """The content of `summary.json`: generations, failures, goodput and more."""

    @classmethod
    def from_summary(cls, summary: Mapping[str, Any], uri: str) -> RunResult:
        """Returns the result of a run with this summary and folder."""
        names = {field.name for field in fields(cls)} - {"uri", "summary"}
        values: dict[str, Any] = {name: summary.get(name) for name in names}
        return cls(uri=uri, summary=summary, **values)


class ElasticTrainer:
    """Runs a training function on a changing number of workers.

    Create it in the driver process, on a node of the Ray cluster. The constructor checks the settings, the functions
    and the storage; workers start in `fit`.

    Args:
        train: training function. Every worker calls it with a `Run`. It is sent to the workers, so it cannot hold
            locks, open files or connections.
        data: training set: Parquet at any fsspec URI (a file, a folder, a glob, or a list of them); a map-style data
            set (with `__len__` and `__getitem__`); a dict of arrays or tensors; a pandas or pyarrow table; or a
            `ray.data.Dataset`, which `fit` writes to the run's storage once.
        config: a `RunConfig`, a dict of its settings, or the path of a TOML file.
        transform: maps `(rows, rng)` to rows, for one chunk of rows at a time. `rows` is a dict of NumPy arrays of
            shape `(num_rows, ...)`. `rng` is a NumPy generator seeded from `seed`, the epoch and the chunk.
        collate_fn: maps the rows of a micro-batch, a list, to what `Step.micro_batches` yields. Rows of columns are
            dicts. Default: a tensor of each column, or `torch.utils.data.default_collate` for a map-style data set.
        sample_weights: draws rows with replacement, in proportion to these weights: the name of a column, or one number
            for each row in stored order. An epoch draws as many rows as the data set has.
        loggers: objects of your own that receive the values of each logged step, in the driver; see `Logger`. The
            setting `loggers` names TensorBoard, Weights & Biases and MLflow.

    Raises:
        ConfigError: a setting or an argument is invalid, the storage is not writable, or the installed Ray version is
            not supported.
    """

    @_without_frames
    def __init__(
        self,
        train: Callable[[Run], Any],
        data: Source | InMemory | ray.data.Dataset,
        config: RunConfig | Mapping[str, Any] | str | PathLike[str],
        *,
        transform: Transform | None = None,
        collate_fn: CollateFn | None = None,
        sample_weights: Weights | None = None,
        loggers: Sequence[Logger] = (),
    ) -> None:
        check_ray_version()
        check_home_folder()
        check_functions(train, transform, collate_fn)
        self.config = RunConfig.load(config)
        check_runtime_env(self.config.runtime_env)
        check_data(data, transform, self.config.data.columns)
        self._loggers = open_loggers(self.config.loggers, loggers)
        self._train = train
        self._data = data
        self._transform = transform
        self._collate_fn = collate_fn
        self._sample_weights = sample_weights
        if self.config.storage.startswith("memory:"):
            raise ConfigError(
                f"storage={self.config.storage!r} is memory of one process, which workers cannot share. Use a folder "
                "that all nodes share, or a URI such as s3://bucket/runs."
            )
        self._storage = Storage(self.config.storage).at(self.config.name)
        check_is_kept(self.config.storage, self._storage.uri)
        self._storage.check_writable()

    @_without_frames
    def fit(self) -> RunResult:
        """Trains until all steps are done, and returns the result.

        An unfinished run of this name resumes from its newest commit, also if its training function left the loop
        before the last step: the function is called again. A finished run starts no worker unless the configuration has
        more steps: `fit` sends missing steps to the loggers and returns the result.

        `fit` uses the Ray cluster at `RAY_ADDRESS` or on this machine, and starts one on this machine if there is none.

        Ctrl-C, SIGTERM or SIGHUP commits and stops the run at the next step boundary. A second Ctrl-C stops it at once.

        Returns:
            The result, after `summary.json` is written.

        Raises:
            ConfigError: the run began with other settings, another driver of it is live, Ray cannot be reached, or a
                node does not see the storage.
            DataError: a node cannot read the data, or it is not the data that the run began with.
            TrainFunctionError: the training function raised, and the message holds its traceback; it hung on all
                workers for `hang_timeout_s`, or three times in a row at the same step; or ranks wait for each other at
                different places.
            WorkersFailedError: more workers failed than `max_restarts` allows, no worker could start, or processes
                failed three times in a row at the same step.
            StorageError: more saves in a row failed than `checkpoint.max_failed_saves`, or the storage is unreachable.
            CheckpointError: none of the commits can be restored, or a worker's state cannot be saved.
            ReplicasDifferError: ranks hold different values of replicated state, such as weights.
            DriverReplacedError: another driver took over the run while this one was suspended.
            KeyboardInterrupt: a second Ctrl-C stopped the run.
        """
        from elastic_ddp.ray_internals.ray_messages import RayMessages, default_file  # depends on the version of Ray

        started_at = time.time()
        after = newest_number(self._storage)
        with (
            DriverLease(self._storage, self.config.name, new_session, print_note, after=after) as lease,
            closing(TemporaryFolder("run")) as snapshot_folder,
            tolerated_deprecations(),
        ):
            if self._finished_result(0) is None:  # a finished run is not written to, unless it gets more steps
                lease.acquire()
            job = self._create_job(self._storage)
            result = self._finished_result(job.total_steps)
            if result is not None:
                unit = "steps" if self.config.epochs is None else "epochs"
                print_note(
                    f"run {self.config.name!r} has finished its {getattr(self.config, unit)} {unit}. To resume it, "
                    f"raise {unit}; without that, edited settings and code have no effect."
                )
                self._complete_loggers(lease)
                return result
            lease.acquire()
            job = replace(job, session=lease.session)
            resume_from = self._find_commit(job)
            self._connect(lease, job.num_data_tasks)
            warn_about_data(job.index, self.config, print_note)
            if isinstance(job.index, MapStyleIndex):
                job = replace(job, index=job.index.share())
            is_here = "://" not in self._storage.uri
            file = Path(self._storage.uri, RAY_LOG) if is_here else default_file(self.config.name)
            with RayMessages(file, print_note, verbose=os.environ.get(VERBOSE, "0") not in ("", "0")):
                files = files_to_check(job.index, self._storage)
                draining = draining_nodes()  # on which Ray starts no task and no worker
                nodes = [node for node in ray.nodes() if node["NodeID"] not in draining]
                check_nodes(self._storage, lease.session, files, print_note, nodes=nodes, config=self.config)
                return self._run_session(job, resume_from, lease, started_at, snapshot_folder.path)

    def debug(self, *, resume: bool = False) -> RunResult:
        """Trains on one worker in this process, so that `breakpoint()`, pdb and post-mortem debuggers work.

        The training function, the transform, `__getitem__` and the collate function run in the calling thread, without
        Ray. Nothing is saved or logged, and there is no hang detection. Weights and samples have the same bits as
        from `fit`; with `reduction = "native"`, as from `fit` on one worker.

        Args:
            resume: begins with the newest commit of the run, which is only read. Default: at step 0.

        Raises:
            ConfigError: with `resume`, the run has no commit with these settings and this data.
            Exception: as `fit`, but an error of the training function as it is.
        """
        from elastic_ddp.driver.debugging import train_here

        with closing(TemporaryFolder("debug")) as folder:
            scratch = Storage(folder.path)
            job = self._create_job(scratch)
            if resume and self._find_commit(job) is None:
                raise ConfigError(
                    f"run {self.config.name!r} has no commit with these settings and this data. Leave out "
                    "resume (--resume) to begin at step 0."
                )
            print_note(f"debugging run {self.config.name!r}: one worker in this process, and nothing is saved")
            summary = train_here(replace(job, debugged=self._storage if resume else scratch), print_note)
        return RunResult.from_summary(summary, "")

    def _run_session(
        self, job: Job, resume_from: Commit | None, lease: DriverLease, started_at: float, snapshot_folder: str
    ) -> RunResult:
        from elastic_ddp.driver.session import Session  # imported while Ray starts

        rendezvous = self._start_rendezvous(job, resume_from, snapshot_folder)
        gcs = GcsWatch(ray.get_runtime_context().gcs_address)
        session = Session(job, rendezvous, resume_from, lease, started_at, gcs, self._loggers)
        with session.stop_requests, session.loggers:
            try:
                outcome = session.run()
            finally:
                ray.kill(rendezvous)
                session.end_workers()
            try:
                return self._conclude(outcome, session, lease)
            finally:
                session.loggers.finish(outcome["status"], lambda: session.stop_requests.at_once)

    def _complete_loggers(self, lease: DriverLease) -> None:
        """Sends the steps of a finished run to loggers that lack some, because they were away or are new."""
        if self._loggers:
            lease.acquire()
            session = LoggedSession(
                self._storage, lease.session, self.config.recorded(), print_note, lease.replaced.is_set
            )
            with RunLoggers(self._loggers, session) as loggers:
                loggers.start()
                loggers.complete()

    def _create_job(self, storage: Storage) -> Job:
        """Reads or builds the index of the data, and checks it and the settings against the commits in the storage."""
        data = self._data
        copy = ""
        may_replace = not has_commits(storage)  # then the data may still change
        if is_ray_dataset(data):
            copies = self._storage if has_commits(self._storage) else storage
            data = materialize(data, copies, may_replace=not has_commits(copies), note=print_note)
            copy = data.removeprefix(f"{copies.uri}/")
        columns = self.config.data.columns
        index: DatasetIndex | MapStyleIndex
        if is_parquet(data):
            index = replace(open_index(data, storage, columns=columns, may_replace=lambda: may_replace), copy=copy)
            if self._transform is None and self._collate_fn is None:
                check_columns(index.schema)
        else:
            index = index_in_memory(data, columns)
            index.check_columns(is_converted=self._transform is not None or self._collate_fn is not None)
        check_steps(index, self.config)
        job = Job(
            config=self.config,
            train=self._train,
            index=index,
            transform=self._transform,
            collate_fn=self._collate_fn,
            weights=weights_of(index, self._sample_weights) if self._sample_weights is not None else None,
            storage=storage,
        )
        check_identity(job)
        return job

    def _find_commit(self, job: Job) -> Commit | None:
        """Returns the newest commit of this run, from which it resumes."""
        commits = CommitCatalog(self._storage.at(COMMITS)).candidates()
        commit = next((commit for commit in commits if job.difference_to(commit.record) is None), None)
        if commit is not None and commit.step > job.total_steps:
            raise ConfigError(
                f"run {self.config.name!r} has {commit.step:,} steps done, more than the {job.total_steps:,} of its "
                "configuration. Ask for at least as many, or use another name."
            )
        return commit

    def _connect(self, lease: DriverLease, num_data_tasks: int) -> None:
        """Connects to the Ray cluster, records its address for other processes, and checks its capacity."""
        imports = threading.Thread(target=_import_session, name="imports", daemon=True)
        imports.start()  # while Ray starts
        try:
            is_own_cluster = connect_or_start(print_note, self.config.runtime_env)
        finally:
            imports.join()
        lease.renew(ray_address=ray.get_runtime_context().gcs_address)
        record_run(self.config.name, self._storage.uri)
        check_capacity(
            [node["Resources"] for node in ray.nodes() if node["Alive"]],
            self.config,
            num_tasks=num_data_tasks,
            may_grow=not is_own_cluster,
        )

    def _start_rendezvous(self, job: Job, resume_from: Commit | None, snapshot_folder: str) -> RendezvousHandle:
        return start_rendezvous(
            self.config.name,
            job.total_steps,
            RendezvousOptions(
                min_workers=self.config.min_workers,
                max_workers=self.config.max_workers,
                heartbeat_timeout_s=self.config.heartbeat_timeout_s,
                hang_timeout_s=self.config.hang_timeout_s,
                num_micro_batches=self.config.num_micro_batches,
                even_micro_batches=self.config.even_micro_batches,
                shard_size=self.config.shard_size,
                can_verify=(self.config.strategy, self.config.reduction) == ("ddp", "canonical"),
                max_failed_saves=self.config.checkpoint.max_failed_saves,
                snapshot_folder=snapshot_folder,
                last_commit=resume_from.step if resume_from is not None else None,
                driver={"host": socket.gethostname(), "pid": os.getpid(), "uri": self._storage.uri, "job": this_job()},
            ),
        )

    def _finished_result(self, total_steps: int) -> RunResult | None:
        """Returns the result of the run if it has finished, with at least `total_steps` steps."""
        try:
            summary = json.loads(self._storage.read(SUMMARY))
        except FileNotFoundError:
            return None
        except ValueError:
            print_note(f"{self._storage.uri}/{SUMMARY} is damaged; its content is computed again from the ledger")
            summary = self._summarize()
            if summary["status"] == "finished":
                self._storage.write(SUMMARY, json.dumps(summary, indent=1).encode())
        if summary["status"] != "finished" or total_steps > summary["steps"]:
            return None
        return RunResult.from_summary(summary, self._storage.uri)

    def _conclude(self, outcome: dict[str, Any], session: Session, lease: DriverLease) -> RunResult:
        """Writes the summary, and returns the result or raises the run's error."""
        summary: dict[str, Any] = {}
        try:
            session.close_ledger()
            lease.renew()  # raises if another driver has the run, whose summary must not be replaced
            summary = self._summarize()
            self._storage.write(SUMMARY, json.dumps(summary, indent=1).encode())
        except StorageError as error:
            if outcome["status"] != "failed":
                raise
            # The same storage may be the reason why the run failed, which is raised below.
            print_note(f"the end of the ledger and the summary could not be written: {error}")
        if outcome["status"] == "failed":
            raise getattr(errors, outcome["kind"], TrainFunctionError)(outcome["error"])
        if outcome["status"] == "left":
            print_note(f"run {self.config.name!r} {describe_status(outcome)}. The same command resumes it.")
        return RunResult.from_summary(summary, self._storage.uri)

    def _summarize(self) -> dict[str, Any]:
        """Returns the summary of the ledger, with the step and the value of the best commit."""
        summary = summarize(read_ledger(self._storage), name=self.config.name, storage=self._storage.uri)
        settings = self.config.checkpoint
        best = None
        if settings.best_metric is not None:
            commits = [commit for _, commit in CommitCatalog(self._storage.at(COMMITS)).all_commits()]
            intact = [commit for commit in commits if isinstance(commit, Commit)]
            best = best_commit(intact, settings.best_metric, settings.best_mode)
            if best is None and intact:
                measured = {name for commit in intact for name in measurements(commit.record)}
                print_note(describe_unmeasured(settings.best_metric, measured))
        return {**summary, "best_step": best[0].step if best else None, "best_metric": best[1] if best else None}
