"""A worker of a run: from the process that Ray Train started to the user's function and back."""

from __future__ import annotations

import gc
import os
import traceback
from typing import Any

import ray
import torch

from elastic_ddp import signals
from elastic_ddp.config.capacity import check_cpus
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.process_group import is_missing_group, is_peer_failure
from elastic_ddp.distributed.sockets import use_interface_of
from elastic_ddp.errors import ElasticDDPError, TrainFunctionError, WorkersFailedError, format_exception
from elastic_ddp.rendezvous.actor import RendezvousHandle
from elastic_ddp.rendezvous.client import RendezvousClient, RunStopped
from elastic_ddp.telemetry.account import RUN_FAILED
from elastic_ddp.worker.context import WorkerContext
from elastic_ddp.worker.job import Job
from elastic_ddp.worker.loop import Loop
from elastic_ddp.worker.membership import RestartTraining
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.seeding import seed_all

_RAY_FAILED = (
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
)

_NO_GROUP_YET = (
    "Before the first step there is no process group, and after it another one whenever membership changes. Use "
    "run.rank and run.world_size (for logging), and collectives of your own within `with step` only"
)


def work(job: Job, rendezvous: RendezvousHandle, context: WorkerContext) -> None:
    """What every Ray Train worker runs. It returns when the run is over for this worker, however it ended.

    An error of the user's function is told to the rendezvous and ends the run, rather than raised: Ray Train retries
    what is raised, and a wrong program does not get better by being tried again. A lost peer leads back to the
    rendezvous, as does everything that follows from one.

    Raises:
        WorkersFailedError: this worker cannot go on, and the others can. Either the training function let an error of a
            lost peer through, from a collective of its own, for example; or Ray fails on this node; or this worker
            failed before it ever trained. Ray Train replaces it.
    """
    try:
        _work(job, rendezvous, context)
    finally:
        signals.exit_on_sigterm()


def _work(job: Job, rendezvous: RendezvousHandle, context: WorkerContext) -> None:
    _make_deterministic(job.config)
    # Or every worker asks Prometheus for figures of the cluster every ten seconds, and tells an actor of each pipeline.
    os.environ.setdefault("RAY_DATA_USAGE_DISABLED", "1")
    use_interface_of(context.member.node)
    client = RendezvousClient(rendezvous, context.member, job.config.heartbeat_timeout_s)
    signals.on_sigterm(lambda: client.leave("SIGTERM", job.config.drain_deadline_s))
    loop = Loop(job, client, context.device)
    outcome: dict[str, Any] = {}
    failure: str | None = None
    try:
        check_cpus(
            [context.node_resources],
            resources_per_worker=job.config.resources_per_worker,
            max_workers=job.config.max_workers,
            options=job.config.data,
            has_transform=job.transform is not None,
        )
        while not outcome:
            seed_all(job.config.seed, "init")
            begins_again = False
            try:
                job.train(Run(loop))
                outcome = {"status": "finished", **loop.finish()}
            except RestartTraining:
                begins_again = True
            if begins_again:  # here the traceback is gone, which holds what the function has built
                loop = loop.restart()
                _forget_what_was_built()
    except RunStopped:
        # Outside a generation this worker has no say: it came too late, or the run stopped while it waited.
        outcome = {"status": "stopped", **loop.progress()} if loop.world_size else {}
    except BaseException as error:
        if is_missing_group(error) and not loop.membership.holds_state:
            outcome = _failure(error, _NO_GROUP_YET)
        elif loop.world_size != 1 and is_peer_failure(error):
            failure = f"the training function was left by an error of a lost peer: {format_exception(error)}"
        elif _is_rays(error):
            failure = f"Ray fails on this node: {format_exception(error)}"
        else:
            outcome = _failure(error)
    # From here on outside the except block: a traceback would keep the process group, and its connections, alive.
    if not outcome and failure is None:
        loop.shut_down()
        client.close()
        return
    if failure is not None:
        loop.close(intact=False)
    elif outcome["status"] == "failed":
        # First, so that peers whose collectives break now know why.
        if not client.end(**outcome):
            failure = f"this worker failed before it trained, and others train: {outcome['error']}"
        loop.close(intact=False, reason=RUN_FAILED)
    else:
        loop.close(intact=True)
        client.end(**outcome)  # every worker says so: the first may be lost before it does
    loop.shut_down()
    client.close()
    if failure is not None:
        raise WorkersFailedError(failure)


def _forget_what_was_built() -> None:
    """Before it is built again, or a model would be in memory twice."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _is_rays(error: BaseException) -> bool:
    """Whether Ray failed on this node, rather than code that it ran."""
    return isinstance(error, _RAY_FAILED)


def _failure(error: BaseException, remedy: str = "") -> dict[str, Any]:
    """Ours say all there is to say; the user's come with their traceback."""
    if isinstance(error, ElasticDDPError):
        return {"status": "failed", "kind": type(error).__name__, "error": str(error)}
    text = "".join(traceback.format_exception(error))
    return {"status": "failed", "kind": TrainFunctionError.__name__, "error": text + remedy}


def _make_deterministic(config: RunConfig) -> None:
    """Fixes what would make the bits depend on the machine's load or on the world size."""
    # The number of threads decides how sums inside an operation are split: it may not follow the world size.
    torch.set_num_threads(config.num_threads)
    if config.reduction == "canonical":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
