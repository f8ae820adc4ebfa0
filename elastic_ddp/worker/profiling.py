"""`StepProfiler`: traces of a few steps of a live run, on request, without disturbing the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_ddp.checkpoint.background_thread import BackgroundThread
from elastic_ddp.errors import StorageError, format_exception
from elastic_ddp.telemetry.events import Profiled, Warned
from elastic_ddp.worker.trace_recording import TraceRecording

if TYPE_CHECKING:
    import torch

    from elastic_ddp.rendezvous.client import RendezvousClient
    from elastic_ddp.rendezvous.messages import ProfileRequest
    from elastic_ddp.storage.storage import Storage

_log = logging.getLogger(__name__)

START_WITHIN_S = 60.0
"""How long a rank waits until all ranks of a request can start, and at least for two steps."""
MEMBERSHIP_CHANGES = "workers joined, left or failed"
"""Why a profile ends with its generation."""
STORE_WITHIN_S = 30.0
"""How long a worker that leaves the run waits until its traces are stored."""


@dataclass
class _Profile:
    """A request that this rank has received, and its progress."""

    number: int
    request: ProfileRequest
    rank: int
    since: float
    num_votes: int = 0
    is_agreed: bool = False
    """Whether all ranks of the request can start."""
    recording: TraceRecording | None = None
    """Prepared once the ranks agree, and started one step later: the first step after the preparation is slower."""
    first_step: int | None = None
    """The first recorded step; None before."""
    next_step: int = 0

    @property
    def num_done(self) -> int:
        """The number of recorded steps."""
        return 0 if self.first_step is None else self.next_step - self.first_step


class StepProfiler:
    """Profiles steps of this worker on request, and answers with figures and the keys of the traces.

    The ranks of a request vote in the control all-reduce of each step, so they start at the same step. If a profile
    fails, the answer is the reason, and training continues. The training thread calls all methods.
    """

    def __init__(self, storage: Storage, client: RendezvousClient, device: torch.device) -> None:
        self._storage = storage
        self._client = client
        self._device = device
        self._profile: _Profile | None = None
        self._thread: BackgroundThread | None = None

    def vote(self, generation: int, rank: int) -> int:
        """Returns the number of the request that this rank can start to profile for; 0 for none."""
        self._receive(rank)
        profile = self._profile
        if profile is None or profile.is_agreed or profile.request.generation != generation:
            return 0
        profile.num_votes += 1
        return profile.number

    def _receive(self, rank: int) -> None:
        while not self._client.profile_requests.empty():
            new = self._client.profile_requests.get_nowait()
            assert new.profile is not None
            if self._profile is not None and self._profile.is_agreed:
                self._answer(new.number, {"error": "this rank is being profiled for another request"})
            else:
                self._drop("another request has replaced it")
                self._profile = _Profile(new.number, new.profile, rank, time.monotonic())

    def step_done(self, step: int, generation: int, votes: int) -> None:
        """Prepares, starts or ends the recording, between two steps. Call it before the next step begins in the trace.

        Args:
            step: the number of steps done, which is the index of the next step.
            generation: the number of the generation of the step.
            votes: the sum of the votes of all ranks in the step.
        """
        profile = self._profile
        if profile is None or profile.request.generation > generation:
            return
        if profile.request.generation < generation:
            self.interrupt(MEMBERSHIP_CHANGES)
            return
        profile.next_step = step
        with self._undisturbed(profile):
            if not profile.is_agreed:
                self._decide(profile, votes)
            elif profile.first_step is None:
                assert profile.recording is not None
                profile.recording.start()
                profile.first_step = step
            elif profile.num_done >= profile.request.num_steps:
                self._end(profile)

    def _decide(self, profile: _Profile, votes: int) -> None:
        """Prepares the recording if all ranks of the request can start."""
        if votes == profile.number * len(profile.request.ranks):
            profile.is_agreed = True
            profile.recording = TraceRecording(self._device, memory=profile.request.memory)
        elif profile.num_votes > 1 and time.monotonic() - profile.since >= START_WITHIN_S:
            self._drop(f"not all {len(profile.request.ranks)} ranks could start within {START_WITHIN_S:g} s")

    def interrupt(self, reason: str) -> None:
        """Ends a profile with the steps that are done, or drops it if there are none."""
        if self._profile is not None and self._profile.num_done:
            with self._undisturbed(self._profile):
                self._end(self._profile, ended_early=reason)
        else:
            self._drop(reason)

    def close(self) -> None:
        """Ends a profile, and waits until its trace is stored. The run is over for this worker."""
        self._receive(-1)
        self.interrupt("the run ended")
        if self._thread is not None and not self._thread.wait(STORE_WITHIN_S):
            _log.warning("the trace of a profile was not stored within %g s", STORE_WITHIN_S)

    # One profile.

    def _end(self, profile: _Profile, ended_early: str | None = None) -> None:
        recording = profile.recording
        request = profile.request
        first_step = profile.first_step
        assert recording is not None and first_step is not None
        self._profile = None
        with self._client.heartbeat.paused():  # torch holds Python's lock for about 3 µs for each operator
            recording.stop()
        if profile.rank == min(request.ranks):
            event = Profiled(
                generation=request.generation,
                first_step=first_step,
                num_steps=profile.num_done,
                ranks=[*request.ranks],
                folder=request.folder,
            )
            self._client.record(event)
        steps = {"first_step": first_step, "num_steps": profile.num_done, "ended_early": ended_early}
        self._in_background(partial(self._store, profile, recording, steps))

    def _store(self, profile: _Profile, recording: TraceRecording, steps: dict[str, Any]) -> None:
        """Stores the trace and answers. Runs in the background."""
        try:
            with self._client.heartbeat.paused():
                recording.export()
            figures = recording.store(self._storage, f"{profile.request.folder}/rank-{profile.rank}", steps)
        except Exception as error:  # whatever fails must not disturb the run
            self._report_failure(profile, error)
        else:
            self._client.answer(profile.number, **figures)
        finally:
            recording.close()

    def _drop(self, reason: str) -> None:
        """Ends a profile without a trace, and answers with the reason."""
        profile = self._profile
        self._profile = None
        if profile is not None:
            self._answer(profile.number, {"error": reason})
            self._cancel(profile)

    def _cancel(self, profile: _Profile) -> None:
        if profile.recording is not None:
            try:
                with self._client.heartbeat.paused():
                    profile.recording.cancel()
            except Exception:
                _log.warning("the recording of a profile could not be cancelled", exc_info=True)
            profile.recording.close()

    @contextmanager
    def _undisturbed(self, profile: _Profile) -> Iterator[None]:
        """A block of work for a profile. An error in the block ends the profile, and training continues."""
        try:
            yield
        except Exception as error:
            self._profile = None
            self._cancel(profile)
            self._in_background(partial(self._report_failure, profile, error))

    def _report_failure(self, profile: _Profile, error: Exception) -> None:
        """Answers with an error, and records it in the ledger. Runs in the background."""
        reason = str(error) if isinstance(error, RuntimeError | StorageError) else format_exception(error)
        self._client.record(Warned(text=f"rank {profile.rank} was not profiled, and training continues: {reason}"))
        self._client.answer(profile.number, error=reason)

    def _answer(self, number: int, answer: dict[str, Any]) -> None:
        self._in_background(partial(self._client.answer, number, **answer))

    def _in_background(self, task: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = BackgroundThread("profiler")
        self._thread.submit(task)
