"""The driver of a run: checks everything that can be checked, starts the workers, and keeps the record."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from os import PathLike
from typing import TYPE_CHECKING, Any

import ray
from ray.util import inspect_serializability
from rich.console import Console
from rich.text import Text

from elastic_ddp import errors
from elastic_ddp.checkpoint import CheckpointStore, Commit
from elastic_ddp.config import RunConfig
from elastic_ddp.data.index import DatasetIndex, open_index
from elastic_ddp.data.ingest import check_cpus, materialize
from elastic_ddp.elastic.rendezvous import News, RendezvousHandle, RendezvousOptions, start_rendezvous
from elastic_ddp.errors import ConfigError, TrainFunctionError, WorkersLostError
from elastic_ddp.job import COMMITS, Job
from elastic_ddp.parallel.control import EMPTY_CHAIN
from elastic_ddp.ray_train import run_workers
from elastic_ddp.storage import Storage
from elastic_ddp.telemetry import Ledger, Progress, new_session, read_ledger, summarize
from elastic_ddp.worker import work

if TYPE_CHECKING:
    from elastic_ddp.data.source import Transform
    from elastic_ddp.run import Run

SUMMARY = "summary.json"
_IDENTITY = "run.json"
WORKERS_LEAVE_S = 5.0
"""How long workers may take to leave when the run is over, before they are ended."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended. The same facts, and more, are in `summary.json` in its storage."""

    status: str
    """`finished`, or `stopped` when a person stopped it; a run that fails raises instead."""
    steps: int
    samples: int
    weights_sha256: str | None
    """Over names, dtypes, shapes and bytes of parameters and buffers, in order; None for a stopped run."""
    samples_sha256: str
    """Over the row ids that every step consumed, in order."""
    metrics: Mapping[str, float]
    """The last value of everything logged, and of every evaluation."""
    uri: str
    """The run's folder: commits, ledger and summary."""
    summary: Mapping[str, Any] = field(repr=False)


class ElasticTrainer:
    """Trains a function on workers that may come and go; `fit` starts or resumes it.

    Args:
        train: the training function, called with a `Run` in every worker.
        data: the training set: Parquet (a file, a folder, a glob or a list of them, at any fsspec URI), or a
            `ray.data.Dataset`, which is written to the run's storage once.
        config: a `RunConfig`, a dict of its settings, or the path of a TOML file with them.
        transform: applied to chunks of rows as they are read: `(rows, rng)` to rows, where rows are a dict of NumPy
            arrays and rng is a generator whose state depends on the seed, the epoch and the chunk alone.

    Raises:
        ConfigError: the configuration cannot work, or its storage cannot be written.
    """

    def __init__(
        self,
        train: Callable[[Run], Any],
        data: str | PathLike[str] | list[str] | ray.data.Dataset,
        config: RunConfig | Mapping[str, Any] | str | PathLike[str],
        *,
        transform: Transform | None = None,
    ) -> None:
        if not callable(train):
            raise ConfigError(f"train is a {type(train).__name__}; give the function that trains, taking a Run")
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
        self._storage = Storage(self.config.storage).at(self.config.name)
        self._storage.check_writable()

    def fit(self) -> RunResult:
        """Runs until all steps are done, and returns when `summary.json` is written.

        A run of this name that was interrupted goes on from its newest commit; one that is finished is left alone, and
        its result is returned. Ctrl-C commits and stops; a second one stops at once.

        Raises:
            ConfigError: the run exists with other settings, or is live already.
            DataError: the data set is not usable, or is not the one that the run began with.
            TrainFunctionError: the training function raised; carries the traceback.
            WorkersLostError: workers were lost more often than `max_restarts`.
        """
        index = self._open_data()
        self._claim(index)
        job = Job(
            config=self.config,
            train=self._train,
            index=index,
            transform=self._transform,
            storage=self._storage,
        )
        if (done := self._finished(job.total_steps)) is not None:
            _note(f"run {self.config.name!r} is finished already, after {done.steps} steps; more steps resume it")
            return done
        if not ray.is_initialized():
            # A running cluster if there is one (RAY_ADDRESS, `ray start`), otherwise this machine.
            ray.init(log_to_driver=True, logging_level=logging.WARNING)
            address = ray.get_runtime_context().gcs_address
            if os.environ.get("RAY_ADDRESS") == "local":
                _note(f"started Ray on this machine, at {address}")
            else:
                _note(f"using Ray at {address} (RAY_ADDRESS names another cluster, RAY_ADDRESS=local starts one here)")
        self._check_resources()
        resumed = CheckpointStore(self._storage.at(COMMITS), keep=self.config.checkpoint.keep).latest()
        rendezvous = start_rendezvous(
            self.config.name,
            job.total_steps,
            RendezvousOptions(
                min_workers=self.config.min_workers,
                max_workers=self.config.max_workers,
                heartbeat_timeout_s=self.config.heartbeat_timeout_s,
            ),
        )
        session = _Session(job, rendezvous, resumed)
        try:
            outcome = session.run()
        finally:
            ray.kill(rendezvous)
            session.end_workers()
        return self._conclude(outcome)

    def _open_data(self) -> DatasetIndex:
        source = self._data
        if isinstance(source, ray.data.Dataset):
            source = materialize(source, self._storage)
        if isinstance(source, PathLike):
            source = str(source)
        return open_index(source, self._storage, columns=self.config.data.columns)

    def _claim(self, index: DatasetIndex) -> None:
        """Writes down what defines the run, or compares it with what is written."""
        mine = {**self.config.identity(), "data": index.fingerprint}
        try:
            self._storage.create(_IDENTITY, json.dumps(mine, indent=1).encode())
        except FileExistsError:
            theirs = json.loads(self._storage.read(_IDENTITY))
            changed = [
                f"{key} was {theirs.get(key)!r} and is {mine.get(key)!r}"
                for key in {**theirs, **mine}
                if theirs.get(key) != mine.get(key)
            ]
            if changed:
                raise ConfigError(
                    f"run {self.config.name!r} in {self.config.storage} began with other settings: "
                    f"{'; '.join(changed)}. A run cannot change them; set them back, or use another name"
                ) from None

    def _check_resources(self) -> None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        check_cpus(
            nodes,
            resources_per_worker=self.config.resources_per_worker,
            max_workers=self.config.max_workers,
            options=self.config.data,
            has_transform=self._transform is not None,
        )
        needs = {name: amount for name, amount in self.config.resources_per_worker.items() if amount}
        room = sum(min(int(node.get(name, 0) // amount) for name, amount in needs.items()) for node in nodes)
        if room < self.config.min_workers:
            _note(
                f"the cluster has room for {room} workers of {needs}, and min_workers is {self.config.min_workers}: "
                "waiting for nodes; without an autoscaler, lower min_workers or resources_per_worker"
            )

    def _finished(self, total_steps: int) -> RunResult | None:
        try:
            summary = json.loads(self._storage.read(SUMMARY))
        except FileNotFoundError:
            return None
        if summary["status"] != "finished":
            return None
        return None if total_steps > summary["total_steps"] else self._result(summary)

    def _conclude(self, outcome: dict[str, Any]) -> RunResult:
        summary = summarize(read_ledger(self._storage), name=self.config.name, storage=self._storage.uri)
        self._storage.write(SUMMARY, json.dumps(summary, indent=1).encode())
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


def _note(text: str) -> None:
    Console(stderr=True).print(Text(text), soft_wrap=True)


class _Session:
    """One life of the driver: the workers in a thread of their own, the record and the display in this one."""

    def __init__(self, job: Job, rendezvous: RendezvousHandle, resumed: Commit | None) -> None:
        self._job = job
        resumed_from_step = resumed.step if resumed else None
        self._newest = {
            "step": resumed_from_step or 0,
            "samples": resumed.record.get("samples", 0) if resumed else 0,
            "world_size": 0,
        }
        self._rendezvous = rendezvous
        self._ledger = Ledger(job.storage, new_session())
        self._progress = Progress(job.total_steps)
        self._error: BaseException | None = None
        self._controllers: list[Any] = []
        self._thread = threading.Thread(target=self._run_workers, name="ray-train", daemon=True)
        self._ledger.append(
            "session_started",
            resumed_from_step=resumed_from_step,
            config=job.config.model_dump(),
            versions={name: version(name) for name in ("elastic-ddp", "torch", "ray", "pyarrow")},
        )
        self._ledger.flush()
        self._state = "starting" if resumed_from_step is None else f"resuming from step {resumed_from_step}"

    def run(self) -> dict[str, Any]:
        """The outcome: what the workers said last, or what became of them."""
        self._thread.start()
        with self._progress:
            outcome = self._follow()
        if outcome["status"] == "failed":
            self._ledger.append("failed", error=outcome["error"])
        self._ledger.append("finished", **outcome)
        self._ledger.close()
        return outcome

    def _run_workers(self) -> None:
        try:
            run_workers(
                work,
                self._job,
                self._rendezvous,
                config=self._job.config,
                storage=self._job.storage,
                on_controller=self._controllers.append,
            )
        except BaseException as error:
            self._error = error

    def _follow(self) -> dict[str, Any]:
        """Writes down and shows what happens until the workers are done."""
        seen, stopping = 0, False
        while True:
            try:
                running = self._thread.is_alive()
                news: News = ray.get(self._rendezvous.follow.remote(seen))
                for event in news.events:
                    self._record(dict(event))
                    seen += 1
                self._show(news.progress)
                if news.events:
                    self._ledger.flush()
                if not running:
                    return news.outcome or self._workers_gone(stopping)
                if news.outcome is not None:
                    self._thread.join(WORKERS_LEAVE_S)  # one that is stuck in a user's code is not waited for
                    last: News = ray.get(self._rendezvous.follow.remote(seen))  # what was said on leaving
                    for event in last.events:
                        self._record(dict(event))
                    return news.outcome
                if stopping and not news.num_alive:
                    return self._stopped()  # Ray Train may wait for room for workers for ever
            except KeyboardInterrupt:
                if stopping:
                    raise
                stopping = True
                self._state = "stopping"
                self._progress.note("stopping: committing at the next step boundary (Ctrl-C again to stop at once)")
                ray.get(self._rendezvous.stop.remote())

    def end_workers(self) -> None:
        """Ends what is left of them, and does not leave a thread in Ray behind: a process that exits then crashes."""
        self._thread.join(WORKERS_LEAVE_S)
        for controller in self._controllers:
            ray.kill(controller)
        self._thread.join(WORKERS_LEAVE_S)

    def _stopped(self) -> dict[str, Any]:
        """Stopped with no worker in a generation: the run stands where its newest commit does."""
        newest = CheckpointStore(self._job.storage.at(COMMITS), keep=1).latest()
        record = newest.record if newest else {}
        return {
            "status": "stopped",
            "steps": newest.step if newest else 0,
            "samples": record.get("samples", 0),
            "samples_sha256": record.get("samples_sha256", EMPTY_CHAIN),
            "epochs": newest.step / self._job.shape.steps_per_epoch if newest else 0.0,
        }

    def _workers_gone(self, stopping: bool) -> dict[str, Any]:
        """The workers are done and none said how it ended."""
        if stopping:
            return self._stopped()
        reason = str(self._error or "all workers returned without a word")
        return {
            "status": "failed",
            "kind": WorkersLostError.__name__,
            "error": f"workers were lost more often than max_restarts={self._job.config.max_restarts} allows, or could "
            f"not be started: {reason}",
        }

    def _record(self, event: dict[str, Any]) -> None:
        name, at = event.pop("event"), event.pop("time")
        self._ledger.append(name, at=at, **event)
        if name == "generation":
            self._state = "training"
            self._newest |= {"step": event["first_step"], "world_size": event["world_size"]}
            workers = "1 worker" if event["world_size"] == 1 else f"{event['world_size']} workers"
            self._progress.note(
                f"generation {event['generation']} ({event['reason']}): {workers} from step {event['first_step']}"
            )
        elif name == "commit":
            self._progress.note(f"committed step {event['step']} in {event['seconds']:.2f} s")
        elif name == "worker_lost":
            self._state = "a worker was lost, waiting for its replacement"
            self._progress.note(
                f"a worker was lost in generation {event['generation']}: {event['error'].splitlines()[0]}"
            )
        elif name == "newcomer_lost":
            self._progress.note(f"a worker was lost before it trained: {event['error']}")
        elif name == "evaluating":
            self._state = f"evaluating ({event['name']})"
        elif name == "evaluation":
            self._state = "training"
            self._progress.note(f"{event['name']} loss {event['loss']:.4f} at step {event['step']}")

    def _show(self, progress: dict[str, Any]) -> None:
        newest = self._newest | progress
        self._progress.update(
            newest["step"],
            metrics={"loss": newest["loss"]} if newest.get("loss") is not None else None,
            samples=newest["samples"],
            world_size=newest["world_size"],
            state=self._state,
        )
