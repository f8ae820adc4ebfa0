"""`VerifiedSteps`: which steps of a run are verified, and what the run does with a verdict."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from elastic_ddp.errors import CorruptionError, PeerFailedError, WorkerAtFaultError
from elastic_ddp.telemetry.events import CorruptionFound, StepVerified
from elastic_ddp.worker.verdict import Verdict
from elastic_ddp.worker.verification import Dispute, Verification

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_ddp.distributed.strategy import Strategy
    from elastic_ddp.rendezvous.client import RendezvousClient
    from elastic_ddp.worker.checkpointing import Checkpointer
    from elastic_ddp.worker.generation import Generation
    from elastic_ddp.worker.job import Job
    from elastic_ddp.worker.step_plan import Outcome
    from elastic_ddp.worker.train_state import TrainState
    from elastic_ddp.worker.worker_membership import WorkerMembership

OF_COMMIT = -1
"""In place of a request's number: a commit has found that ranks differ, and a verified step finds the rank at fault."""


class _LastStep(NamedTuple):
    """The facts about the last step that decide whether the next one is verified.

    The facts hold no reference to the step, which would keep its process group alive.
    """

    generation: int = 0
    dispute: Dispute | None = None
    request: int = 0
    """Number of the request for a verified step that the next step answers; 0 for none."""


class VerifiedSteps:
    """One worker's part in verified steps. It lives as long as the worker."""

    def __init__(
        self,
        job: Job,
        client: RendezvousClient,
        state: TrainState,
        checkpointer: Checkpointer,
        membership: WorkerMembership,
    ) -> None:
        self._job = job
        self._client = client
        self._state = state
        self._checkpointer = checkpointer
        self._membership = membership
        self._last = _LastStep()
        self._answering = self._answered = 0  # requests for verified steps

    def restart(self, state: TrainState) -> None:
        """Forgets the last step, which belongs to another state."""
        self._state = state
        self._last = _LastStep()

    def begin_step(self, generation: Generation, index: int) -> Callable[[Strategy, int], Verification] | None:
        """Returns the function that begins to verify an update of the next step; None if the step is not verified.

        All ranks decide alike. The first step of each generation is verified, too: a device that has joined may compute
        other bits. The step after a vote of rank 0 for verification is verified as well.
        """
        config = self._job.config
        place = generation.group.assignment
        number = generation.number
        last = self._last
        self._last = _LastStep()
        every = config.verify.every_steps
        dispute = last.dispute if place.same_members else None
        request = last.request if dispute is not None or last.generation == number else 0
        # Of the same members, some may have a dispute, and others have failed before they knew of it.
        is_first = last.generation != number
        is_due = bool(every and ((index + 1) % every == 0 or is_first)) or dispute is not None or request
        # With fp16, the weights of the run's first micro-batch decide what all losses are divided by.
        if not is_due or not self._has_equal_bits or (self._state.loss_scale is not None and index == 0):
            self._answering = 0
            return None
        self._answering = request

        def begin(strategy: Strategy, update: int) -> Verification:
            return Verification(
                generation.group,
                strategy,
                node=self._client.member.node,
                number=(index + 1) // every if every else index,
                dispute=dispute if dispute is not None and dispute.update == update else None,
                verified=self._checkpointer.verified_step,
                update=update,
                act_on=partial(self._act_on, generation, index, request),
            )

        return begin

    def end_step(self, generation: Generation, outcome: Outcome) -> None:
        """Notes what the outcome of a step means for the next one."""
        request = self._answering if outcome.dispute is not None else 0
        if outcome.dispute is None and outcome.agreed is not None:
            request = outcome.agreed.votes["verify"]
        self._last = _LastStep(generation.number, outcome.dispute, request)

    @property
    def _has_equal_bits(self) -> bool:
        """Whether other ranks compute the same bits of a micro-batch, so that they can verify it."""
        config = self._job.config
        generation = self._membership.generation
        is_canonical = (config.strategy, config.reduction) == ("ddp", "canonical")
        return is_canonical and generation is not None and generation.group.world_size > 1

    @property
    def must_find_rank_at_fault(self) -> bool:
        """Whether a commit found that ranks differ, and the run is to continue without the rank at fault. On rank 0."""
        goes_on = self._job.config.verify.action in ("drain", "rollback") and self._has_equal_bits
        return goes_on and self._checkpointer.replicas_differ

    def vote(self) -> int:
        """Returns rank 0's vote: the number of the request that the next step is to answer, 0 for none."""
        requested = OF_COMMIT if self.must_find_rank_at_fault else self._client.signals.verify
        is_answered = requested == self._answering or 0 < requested <= self._answered
        return 0 if is_answered else requested

    def record(self, generation: Generation, step: int, num_checks: int, request: int | None = None) -> None:
        """Records that all ranks hold the same state after a number of steps, and computed the same bits from it."""
        self._checkpointer.verified_step = step
        done = StepVerified(generation=generation.number, step=step, micro_batches=num_checks, request=request)
        self._membership.agreed_events.record(done, is_rank_0=generation.group.rank == 0)

    def _act_on(
        self, generation: Generation, index: int, request: int, verdict: Verdict, verification: Verification
    ) -> None:
        """Reports the verdict on a step, before the step changes the state, and takes the action of `verify.action`."""
        answered = request if request > 0 else None
        self._answered = max(self._answered, request)
        action = self._job.config.verify.action
        rank = generation.group.rank
        self._checkpointer.verified_step = verification.verified
        if request == OF_COMMIT:
            self._checkpointer.forget_outcome()
        if verdict.is_clean:
            # All ranks hold the state with which the step began. Its optimizer may still go wrong on one.
            return self.record(generation, index, len(verification.checks), answered)
        found = CorruptionFound(
            generation=generation.number,
            step=index,
            text=verdict.text,
            rank=verdict.at_fault,
            node=None if verdict.at_fault is None else verification.nodes[verdict.at_fault],
            suspects=list(verdict.suspects),
            action=action,
            request=answered,
        )
        self._membership.agreed_events.record(found, is_rank_0=rank == 0)
        if action == "warn":
            return
        if action == "stop" or verdict.at_fault is None:
            raise CorruptionError(
                f"step {index}: {verdict.text}. The step was not applied, and verify.action = {action!r} ends the run"
                f"{'' if action == 'stop' else ', because no single worker is at fault'}. Test the devices, and run "
                'the same command again without a faulty node; verify.action = "warn" goes on.'
            )
        if verdict.at_fault == rank:
            self._client.exclude(self._job.config.drain_deadline_s)
            raise WorkerAtFaultError(verdict.text)
        if action == "rollback":
            self._state.is_torn = True  # so that the ranks restart from a commit
            self._checkpointer.roll_back_to = self._checkpointer.verified_step or 0
        raise PeerFailedError(f"{verdict.text}, and leaves")
