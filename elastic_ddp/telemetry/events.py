"""The events of the ledger, one class for each. `event.parse` reads them from JSON.

In the ledger an event is one JSON object: the fields of its class, the fields of `Event`, and its name in the field
`event`. Times are Unix times in seconds, and durations are in seconds. Floats that JSON cannot express are the strings
"NaN", "Infinity" and "-Infinity". Fields that do not apply are null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from elastic_ddp.telemetry.event import AgreedEvent, Event, GenerationEvent, PhaseSeconds, TrainingEvent


class SessionStarted(Event):
    """The driver has started, or resumed, the run. `at` is when `fit` was called."""

    resumed_from_step: int | None = None
    """Steps done in the newest commit; null for a new run."""
    total_steps: int | None = None
    """Steps that the configuration asks for."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The run's configuration; of `env` and `runtime_env` the names only."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of Python, elastic-ddp, torch, ray and pyarrow in the driver."""


class SessionEnded(Event):
    """All workers of the session have exited, and the driver closes the ledger."""


class RunFailed(Event):
    """The session ends with an error; a `run_finished` event follows."""

    error: str
    """The error message, with a traceback for errors of the training function."""
    kind: str | None = None
    """Class name of the error that `fit` raises, such as `TrainFunctionError`."""


class RunFinished(Event):
    """The session ends, whatever its outcome."""

    status: str
    """`finished`; `left` if the training function left its loop before the last step; `stopped` or `failed`."""
    steps: int | None = None
    """Steps done since the start of the run."""
    total_steps: int | None = None
    """Steps that the configuration asks for."""
    epochs: float | None = None
    """Epochs done since the start of the run."""
    samples: int | None = None
    """Samples used since the start of the run."""
    samples_sha256: str | None = None
    """Hash chain over the sample ids, in order."""
    weights_sha256: str | None = None
    """Hash of the final weights; null unless the status is `finished` or `left`."""
    metrics: Mapping[str, Any] | None = None
    """Last values of metrics, by name."""
    error: str | None = None
    """As in `run_failed`."""
    kind: str | None = None
    """As in `run_failed`."""


class GenerationFormed(GenerationEvent):
    """The rendezvous has formed a generation and assigned its ranks."""

    world_size: int
    """Number of workers."""
    reason: str
    """Why it was formed, such as `start`, `worker failed` or `workers joined`."""
    first_step: int | None = None
    """Steps done in the state it starts from; null if no member holds a state."""
    waited_s: float = 0.0
    """Seconds for which there had been too few workers."""
    members: list[dict[str, Any]] = field(default_factory=list)
    """Rank, node address, process id and worker id of each member; `standby` is true for one that was a standby."""
    recovered_s: float | None = None
    """Seconds from the failure of a worker to this generation, if it is the first with as many workers as before."""
    standing_by: int = 0
    """Number of ready workers that do not train: because of `even_micro_batches`, or they fill no group of hybrid
    sharding."""


class GenerationStarted(TrainingEvent):
    """All ranks have the state and the process group, and training starts. Rank 0 reports it."""

    world_size: int
    """Number of workers."""
    first_step: int
    """Steps done in the state it starts from."""
    reason: str
    """As in `generation_formed`, or `resume` when the state comes from a commit."""


class FirstStep(AgreedEvent):
    """The first step of a generation is done. Rank 0 reports it."""

    seconds: float = 0.0
    """Seconds from the start of training in the generation to the end of its first step."""


class GenerationEnded(TrainingEvent):
    """Rank 0 has left the generation."""

    last_step: int
    """Steps done at that time."""
    reason: str
    """Why the generation ended."""
    account: PhaseSeconds | None = None
    """Rank 0's account of the whole generation."""


class GenerationAccount(GenerationEvent):
    """Members of a generation have come to the rendezvous for the next one. The next `generation_formed` follows."""

    account: PhaseSeconds | None = None
    """The longest account among those members."""


class StepsCompleted(AgreedEvent):
    """`log_every_steps` more steps are done. Rank 0 reports it."""

    step: int
    """Steps done since the start of the run."""
    epoch: int
    """Epoch of the last step, from 0."""
    loss: float
    """Mean training loss of the last step over the global batch."""
    samples: int
    """Samples used since the start of the run."""
    world_size: int
    """Number of workers."""
    metrics: Mapping[str, float]
    """Values passed to `step.log` in the last step, by name, averaged over the rows of the global batch."""
    account: PhaseSeconds | None = None
    """Rank 0's account of the generation so far; null if rank 0 failed and another rank reports the step."""


class PhasesMeasured(AgreedEvent):
    """Where the time of steps since the last such event went. Rank 0 reports it. Lists are in the order of ranks."""

    step: int
    """Steps done since the start of the run, up to the last step measured."""
    num_steps: int
    """Number of steps measured."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase in one step, averaged over steps and ranks. Together they are the duration of a step. The
    phases are `data` (waiting for the next micro-batch), `forward`, `backward`, `communication` (waiting for other
    ranks, without what overlaps with the backward), `optimizer`, and `other`."""
    late_data_s: float = 0.0
    """Seconds of one step until data is there on all ranks: the longest wait of a rank, averaged over steps."""
    in_other: Mapping[str, float] = field(default_factory=dict)
    """Seconds of two parts of `other`: `evaluation`, and `commit` (waiting for one). The rest is code between steps."""
    work_s: list[float] = field(default_factory=list)
    """Seconds of one step that a rank did not spend on communication or waiting for a commit."""
    micro_batches: list[int] = field(default_factory=list)
    """Number of a rank's micro-batches in each step."""
    slowest_rank: int | None = None
    """The rank with the most work for each of its micro-batches."""
    slowest: Mapping[str, float] = field(default_factory=dict)
    """As `phases`, of that rank alone."""
    memory_bytes: list[int] | None = None
    """`torch.cuda.max_memory_allocated` of a rank since its process started; null on CPUs."""
    utilization: list[float | None] | None = None
    """Share of the time in which a rank's GPU was busy, from 0 to 1, as NVML has it; null without NVML."""

    @property
    def micro_batch_s(self) -> list[float]:
        """Seconds of each rank's work for one of its micro-batches: ranks may have different numbers of them."""
        return [work_s / count for work_s, count in zip(self.work_s, self.micro_batches, strict=False)]


class StepSkipped(AgreedEvent):
    """A step left model, optimizers and schedulers unchanged. Rank 0 reports it."""

    step: int
    """Steps done since the start of the run, this one included."""
    reason: str
    """Which loss or gradient was NaN or infinite."""
    loss_scale: float | None = None
    """The loss scale of the next step; null unless the precision is fp16."""


class EvaluationStarted(TrainingEvent):
    """Ranks start an evaluation. Rank 0 reports it."""

    name: str
    """Name of the metric."""


class EvaluationFinished(AgreedEvent):
    """An evaluation is done. Rank 0 reports it."""

    step: int
    """Steps done in the evaluated state."""
    name: str
    """Name of the metric."""
    value: float
    """Value of the metric."""


class CommitStarted(GenerationEvent):
    """Ranks start to write a checkpoint. Rank 0 reports it."""

    step: int
    """Steps done in the state that is written."""


class CommitSucceeded(GenerationEvent):
    """A commit is complete and visible. Rank 0 reports it; if rank 0 fails before it has, this event is missing."""

    step: int
    """Steps done in the committed state."""
    seconds: float
    """Seconds from the start of the save to the visible commit."""
    num_bytes: int
    """Size of the commit's objects in bytes."""
    request: int | None = None
    """Number of the newest request for a commit that it fulfills; null for none."""
    account: PhaseSeconds | None = None
    """Rank 0's account of the generation when the save started."""
    interval_s: float | None = None
    """Seconds until the next commit, as chosen with `checkpoint.interval = "auto"`."""


class CommitFailed(GenerationEvent):
    """A save has failed. Rank 0 reports it."""

    step: int
    """Steps done in the state that could not be committed."""
    seconds: float
    """Seconds from the start of the save to the error."""
    error: str
    """The error message."""
    counts: bool
    """Whether it counts towards `checkpoint.max_failed_saves`; a save that a failed worker interrupts does not."""
    of_storage: bool
    """Whether the storage caused the error."""


class CommitSkipped(Event):
    """A commit was due while the save before it was still running. Rank 0 reports it."""

    step: int
    """Steps done when it was due."""


class CommitRejected(Event):
    """A restore found a commit that it cannot use, and takes an older one. Rank 0 reports it."""

    key: str
    """Key of the commit's manifest in the storage."""
    reason: str
    """Why it cannot be used."""


class Resumed(Event):
    """Ranks have restored a commit. Rank 0 reports it."""

    step: int
    """Steps done in the restored state."""


class HyperparametersDiffer(Event):
    """A run has resumed, and its code sets other hyperparameters than when its commit was made. Rank 0 reports it."""

    step: int
    """Steps done in the restored state."""
    changes: list[dict[str, Any]]
    """For each its `name`, such as `AdamW.weight_decay`, the value `saved` in the commit, and the value `now`."""
    used: str
    """Which of the two the run uses: `saved` or `code`, as `checkpoint.hyperparameters` sets it."""


class WeightsLoaded(Event):
    """`run.load_weights` has loaded weights into the model. Rank 0 reports it."""

    uri: str
    """The run, file or folder that the weights come from."""
    step: int | None = None
    """Step of the commit that holds them; null for files."""
    missing: list[str] = field(default_factory=list)
    """Names of tensors that only the model has."""
    unexpected: list[str] = field(default_factory=list)
    """Names of tensors that only the saved weights have."""
    converted: list[str] = field(default_factory=list)
    """Tensors that were converted to another dtype, and both dtypes."""


class Warned(Event):
    """A worker expects a problem later in the run. Rank 0 reports it, most often before the first step."""

    text: str
    """The problem, and the setting that avoids it."""


class StepVerified(AgreedEvent):
    """In a verified step, all ranks computed the same bits. Rank 0 reports it."""

    step: int
    """Steps done in the verified state, which is the one before the step; with FSDP, the one after it."""
    micro_batches: int
    """Number of micro-batches that were computed again; 0 with FSDP, which compares shards with their mirrors."""
    request: int | None = None
    """Number of the request that it answers; null for none."""


class CorruptionFound(AgreedEvent):
    """In a verified step, ranks computed different bits. Rank 0 reports it."""

    step: int
    """Steps done before it."""
    text: str
    """What differs, and which rank is at fault."""
    rank: int | None = None
    """The rank at fault; null if nothing tells which of several ranks it is."""
    node: str | None = None
    """The address of its node."""
    suspects: list[int] = field(default_factory=list)
    """The ranks that may be at fault, if it is not known."""
    action: str = "warn"
    """What the run does about it: `warn`, `drain`, `stop` or `rollback`."""
    request: int | None = None
    """Number of the request that it answers; null for none."""


class WorkerFailed(GenerationEvent):
    """A worker of the current generation has failed, or a connection between two of its workers broke."""

    error: str
    """How it failed."""
    member: str | None = None
    """Id of the failed worker; null if it is not known."""
    reported_by: str | None = None
    """Id of the worker that reported a broken connection; null if the rendezvous noticed the failure."""


class NewcomerFailed(GenerationEvent):
    """A worker or a standby has failed before it was in a generation."""

    member: str
    """Id of the failed worker."""
    error: str
    """How it failed."""
    standby: str | None = None
    """Node and process id of the standby, such as `10.0.0.2 (pid 417)`; null for a worker."""


class WorkerLeft(GenerationEvent):
    """A worker has left the run because it was asked to."""

    member: str | None = None
    """Id of the worker."""
    kind: str
    """`drain` if its node or process is to stop, `resize` if the run has fewer workers from now on."""


class DrainNoticed(Event):
    """A worker, or all workers of a node, must leave."""

    within_s: float
    """Seconds until the deadline; 0 for none."""
    by: str
    """What gave the notice: `SIGTERM`, Ray or a person."""
    member: str | None = None
    """Id of the worker; null if the notice is for a node."""
    node: str | None = None
    """Address of the worker's node; null if the notice is for a node."""
    node_id: str | None = None
    """Ray's id of the node; null if the notice is for one worker."""


class DrainCancelled(Event):
    """A person lets the run use a drained node again."""

    node_id: str
    """Ray's id of the node."""


class DrainOverdue(GenerationEvent):
    """A worker's drain deadline is near, so the rendezvous interrupts the step in flight."""


class ResizeRequested(Event):
    """A person has asked for another number of workers."""

    num_workers: int
    """Number of workers asked for."""


class HangDetected(GenerationEvent):
    """No worker made progress for `hang_timeout_s`."""

    places: Mapping[str, str]
    """What each worker was doing (see `hang.Place`), by worker id."""
    culprits: list[str]
    """Ids of the workers that the others waited for; the rendezvous treats them as failed."""
    seconds: float
    """Seconds without progress."""


class StacksRecorded(Event):
    """A worker reports its stacks before the rendezvous decides about a hang."""

    member: str
    """Id of the worker."""
    place: str
    """What its training thread was doing, see `hang.Place`."""
    stacks: str
    """Python stacks of all its threads, the training thread first."""


class ReportIgnored(GenerationEvent):
    """A worker that was presumed dead reported something about a generation that had ended."""

    what: str
    """Name of the event that it reported."""


class RendezvousRestarted(GenerationEvent):
    """The rendezvous process died, and a new one has taken over its state."""

    pid: int
    """Process id of the new rendezvous."""


class StartFailed(Event):
    """A group of workers could not be started, and is started again."""

    error: str
    """The error message."""


class Profiled(GenerationEvent):
    """Ranks have recorded steps for `elastic-ddp profile`, which slowed the steps. The lowest of them reports it."""

    first_step: int
    """Index of the first recorded step, from 0."""
    num_steps: int
    """Number of recorded steps."""
    ranks: list[int]
    """The ranks that were asked for a trace."""
    folder: str
    """Folder of the traces, in the run's folder."""
