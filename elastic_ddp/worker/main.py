"""`work`: the function that a worker process runs, from Ray Train's call to the end of the run."""

from __future__ import annotations

import gc
import os
import traceback
from bdb import BdbQuit
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any

import ray
import torch
import torch.distributed as dist

from elastic_ddp import signals
from elastic_ddp.config.capacity import check_cpus
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.data.access import check_access, files_to_check
from elastic_ddp.data.user_code import environment, refuse_breakpoints
from elastic_ddp.distributed import cublas
from elastic_ddp.distributed.process_group import is_missing_group, is_peer_failure
from elastic_ddp.distributed.sockets import use_interface_of
from elastic_ddp.errors import (
    ConfigError,
    DataError,
    ElasticDDPError,
    TrainFunctionError,
    WorkerAtFaultError,
    WorkersFailedError,
    format_exception,
    text_of,
)
from elastic_ddp.rendezvous import standby_process
from elastic_ddp.rendezvous.actor import RendezvousHandle
from elastic_ddp.rendezvous.client import RendezvousClient, RunStopped
from elastic_ddp.rendezvous.hang import STANDBY
from elastic_ddp.seeding import seed_all
from elastic_ddp.telemetry.event import RUN_FAILED
from elastic_ddp.worker.job import Job, WorkerContext
from elastic_ddp.worker.loop import Loop
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.worker_membership import RestartTraining

Ending = dict[str, Any]
"""How the run ended, for the rendezvous."""
_RAY_ERRORS = (ray.exceptions.LocalRayletDiedError, ray.exceptions.NodeDiedError, ray.exceptions.ObjectLostError)
_NO_GROUP_YET = (
    "There is no process group before the first step, and a new one whenever membership changes. Use run.rank and "
    "run.world_size for logging, and run collectives only inside `with step`."
)

_MIXED = "got mixed torch.Tensor and DTensor"
"""torch's message for an operation on a shard and a plain tensor."""
_USE_IN_UNIT = (
    "The line above uses a sharded parameter outside of the forward of its FSDP unit, which gathers it. Call the "
    "module that has the parameter. Or leave its class out of run.prepare(model, shard=...) and fsdp.shard_classes: "
    "then it is gathered while the whole model runs."
)
_NONDETERMINISTIC = "does not have a deterministic implementation"
"""Part of torch's error for an operation that can return other bits each time."""
_USE_ANOTHER_OPERATION = (
    'reduction = "canonical" promises the same bits for every run. Use another operation. Or give up the promise by '
    "torch.use_deterministic_algorithms(True, warn_only=True) at the beginning of the training function. Attention on "
    "a GPU then has other bits each time, too."
)

_OF_DDP = {
    "module": "Write `model` instead of `model.module`.",
    "no_sync": "Leave out `no_sync`: step.backward synchronizes in the last micro-batch of a step only.",
    "join": "Leave out `join`: all ranks run the same steps.",
}
"""Advice on attributes that DistributedDataParallel has."""

_OF_THREAD = {
    "signal only works in main thread": "The training function runs in a thread of its worker, and only the main "
    "thread can handle signals. Leave the handler out: SIGTERM makes a worker leave at a step boundary, and makes the "
    "driver commit and stop the run.",
    "There is no current event loop": "The training function runs in a thread of its worker, which has no event loop. "
    "Use asyncio.run(...), or asyncio.new_event_loop().",
}
"""Advice on Python's errors in another thread than the main one, by a part of their text."""


def work(job: Job, rendezvous: RendezvousHandle, context: WorkerContext) -> None:
    """Runs the training function in this worker, and returns when the run is over for it.

    An error of the training function ends the run: the worker reports it to the rendezvous and returns. Ray Train would
    retry an error that is raised. After a failure of a peer the worker joins the next generation.

    Raises:
        WorkersFailedError: this worker failed and the others can continue. The training function raised a peer's
            failure, for example from a collective of its own; or Ray failed on this node; or this worker failed before
            it trained. Ray Train replaces the worker.
    """
    try:
        _set_up_process(job.config, context)
        client = RendezvousClient(rendezvous, context.member, job.config.heartbeat_timeout_s)
        client.heartbeat.report_crashes()
        standby_process.show_wait(lambda: client.activity.within(STANDBY))
        signals.on_sigterm(lambda: _leave(client, job.config.drain_deadline_s))
        loop = Loop(job, client, context.device)
        client.heartbeat.report_exits(lambda: f"called by rank {loop.rank} at step {loop.state.position.step}")
        failure = _close(loop, *_train(loop, context))
        client.close()
        if failure is not None:
            raise WorkersFailedError(failure)
    finally:
        signals.exit_on_sigterm()


def _leave(client: RendezvousClient, within_s: float) -> None:
    """Leaves the run after SIGTERM. A standby exits."""
    if not standby_process.has_place():
        signals.end_process()
    client.leave("SIGTERM", within_s)


def _train(loop: Loop, context: WorkerContext) -> tuple[Ending | None, str | None]:
    """Calls the training function until it need not restart.

    Returns the outcome, which ends the run for all workers, and why Ray Train should replace this worker. Both are None
    for a worker that the run does not need any more.
    """
    job = loop.job
    config = loop.job.config
    try:
        check_cpus([context.node_resources], config, job.num_data_tasks)
        if job.session:
            check_access(job.storage, job.session, files_to_check(job.index, job.storage))
        loop.membership.read_ahead()
        while True:
            seed_all(config.seed, "init")
            try:
                return _finish(loop, job.train(Run(loop))), None
            except RestartTraining:
                pass  # the restart is outside of this block: the traceback keeps the function's objects alive
            loop.restart()
            # Frees the function's objects before the next call builds new ones.
            gc.unfreeze()
            gc.collect()
            gc.freeze()
    except RunStopped:
        # Without a generation there is nothing to report: the run ended before this worker joined it.
        return {"status": "stopped", **loop.progress()} if loop.world_size else None, None
    except BaseException as error:
        return _end_of(error, loop)


def debug(job: Job, client: RendezvousClient, device: torch.device) -> Ending:
    """Runs the training function as the only worker of a run, in this thread, and returns the outcome.

    Raises errors of the function unchanged, for a debugger. Advice is added as a note.
    """
    _set_up_numerics(job.config)
    loop = Loop(job, client, device)
    is_finished = False
    try:
        seed_all(job.config.seed, "init")
        outcome = _finish(loop, job.train(Run(loop)))
        is_finished = True
        return outcome
    except Exception as error:
        advice = _advice(error, loop) or environment().advise(error)
        if advice and not isinstance(error, BdbQuit):  # quitting pdb is no error of the program
            error.add_note(advice)
        raise
    finally:
        loop.membership.leave(intact=is_finished)
        loop.membership.shut_down(save_within_s=0.0)
        loop.profiler.close()


def _finish(loop: Loop, result: object) -> Ending:
    """Ends the run after the training function has returned `result`. Raises ConfigError if its code has not run."""
    if isinstance(result, Generator | Coroutine | AsyncGenerator):
        raise ConfigError(
            f"train returned a {type(result).__name__}, whose code has not run. Define the function and its decorators "
            "with `def`, and without `yield`."
        )
    done = loop.finish()
    return {"status": "left" if done["steps"] < done["total_steps"] else "finished", **done}


def _end_of(error: BaseException, loop: Loop) -> tuple[Ending | None, str | None]:
    """Decides whether an error that the training function raised ends the run, or only this worker."""
    advice = _advice(error, loop)
    if not advice and loop.world_size != 1 and is_peer_failure(error):
        return None, f"the training function raised the failure of another worker: {format_exception(error)}"
    if isinstance(error, WorkerAtFaultError):
        return None, f"this worker computes wrong values: {error}"
    if not advice and isinstance(error, _RAY_ERRORS):
        return None, f"Ray failed on this node: {format_exception(error)}"
    outcome = {"status": "failed", **(loop.progress() if loop.membership.holds_state else {})}
    if isinstance(error, ElasticDDPError):
        rank = f"rank {loop.rank}: " if isinstance(error, DataError) and loop.world_size else ""
        return {**outcome, "kind": type(error).__name__, "error": f"{rank}{error}"}, None
    text = "".join(traceback.format_exception(error)) + (advice or environment().advise(error))
    return {**outcome, "kind": TrainFunctionError.__name__, "error": text}, None


def _advice(error: BaseException, loop: Loop) -> str:
    """Returns advice about an error that the training function raised, or ""."""
    if is_missing_group(error) and not loop.membership.holds_state:
        return _NO_GROUP_YET
    if isinstance(error, RuntimeError) and _NONDETERMINISTIC in text_of(error):
        return _USE_ANOTHER_OPERATION
    if isinstance(error, AttributeError) and error.name in _OF_DDP and loop.state.is_model(error.obj):
        return f"run.prepare returned your own model, without a wrapper. {_OF_DDP[error.name]}"
    if _MIXED in text_of(error):
        return _USE_IN_UNIT
    return next((advice for text, advice in _OF_THREAD.items() if text in text_of(error)), "")


def _close(loop: Loop, outcome: Ending | None, failure: str | None) -> str | None:
    """Leaves the generation and reports the outcome. Returns why Ray Train should replace this worker, if it should."""
    if failure is not None:
        loop.membership.leave(intact=False)
    elif outcome is not None and outcome["status"] == "failed":
        # Reported before leaving, so that peers whose collectives fail know the cause.
        if not loop.client.end(**outcome):
            failure = f"this worker failed before it trained, and others train: {outcome['error']}"
        loop.membership.leave(intact=False, reason=RUN_FAILED)
    elif outcome is not None:
        loop.membership.leave(intact=True)
        loop.client.end(**outcome)  # every worker reports, because rank 0 may fail before it does
    loop.membership.shut_down(save_within_s=loop.job.config.drain_deadline_s)
    loop.profiler.close()
    return failure


def _set_up_process(config: RunConfig, context: WorkerContext) -> None:
    """Applies the settings that must be equal on all workers for equal bits, and sets environment variables of Ray and
    torch."""
    _set_up_numerics(config)
    # Otherwise each worker polls Prometheus every ten seconds, and reports to an actor for each pipeline.
    os.environ.setdefault("RAY_DATA_USAGE_DISABLED", "1")
    use_interface_of(context.member.node)
    refuse_breakpoints()
    gc.freeze()  # collections skip what the imports have created
    gc.enable()  # `ElasticWorker` disables it for the imports


def _set_up_numerics(config: RunConfig) -> None:
    # The number of threads decides in which order sums are added inside an operation.
    torch.set_num_threads(config.num_threads)
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:  # `Loop` warns
        dist.set_debug_level(dist.DebugLevel.INFO)
    if config.reduction == "canonical":
        os.environ.setdefault(cublas.VARIABLE, cublas.VALUE)  # until `cublas.settle`
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
