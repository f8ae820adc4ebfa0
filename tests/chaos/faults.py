"""Faults at exact places of a run: the worker, the step, the place in its loop, and the kind."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

import elastic_ddp as ed
from elastic_ddp.distributed import state_transfer
from elastic_ddp.ray_internals.drain import drain
from tests.chaos import hosts
from tests.inside_run import activity_of, generation_of, is_saving, member_of, rendezvous_client_of, storage_of_commits
from tests.integration import jobs
from tests.integration.clusters import parent_of

DRAIN_S = 8.0
"""Deadline of a drained node in seconds."""

NOTICE_S = 20.0
"""Seconds from a spot interruption notice to its deadline."""

LINGERING = ("SIGTERM", "drain", "notice")
"""Faults whose victims continue for a while."""
END_STEPS = 5
"""Number of steps before its end at which a run waits for such victims to leave."""


@dataclass(frozen=True)
class Fault:
    """Happens to a worker once in a run, when it enters a place of its loop."""

    rank: int
    """The worker's rank in its generation; between generations the last one, and before the first its rank among the
    workers that started together."""
    step: int
    """The worker has done this many steps, or more."""
    place: str
    """A place of the worker's `Activity`, or `build`, before it builds the model; `transfer`, during a state transfer;
    `saving`, in a step while a save is written."""
    how: str
    """`SIGKILL`, `SIGSTOP` or `SIGTERM`; `SIGSEGV`, by an invalid access; `gil`, a deadlock that holds the interpreter
    lock; `hang`, one that does not; `raise`, an error of user code; `rendezvous` or `driver`: that process is killed;
    `node`: the node dies with all its processes; `cut`: its network is disconnected (see `hosts`); `drain`: Ray drains
    the node; `notice`: a fake metadata service announces a spot interruption to the node, which watches it."""
    later: bool = False
    """Whether it happens in a later generation than the previous fault."""
    along: tuple[int, ...] = ()
    """Ranks that are killed at the same time."""


@dataclass(frozen=True)
class Happened:
    """A fault that has happened, and its victim."""

    pid: int
    member: str
    rank: int
    step: int
    generation: int


def make_train(
    faults: Sequence[Fault],
    markers: str | os.PathLike[str],
    *,
    num_workers: int,
    also: Callable[[ed.Run, int], None] | None = None,
    write_s: float = 0.0,
) -> Callable[[ed.Run], None]:
    """Returns the training function of the integration tests, with faults.

    They happen in order. Each waits, in the step before, until the victim of the previous fault is gone and the run
    has all its workers.

    Args:
        faults: the faults.
        markers: a folder with a file for each fault that has happened, so that it happens once.
        num_workers: maximum number of workers.
        also: called in the middle of each step, see `jobs.make_train`.
        write_s: seconds that each write of a save takes. If not 0, steps do not wait for saves.
    """

    def is_ready(run: ed.Run, at: int) -> bool:
        near = (at >= fault.step - 1 and not marker_of(markers, number).exists() for number, fault in enumerate(faults))
        if any(near):
            return run.world_size == num_workers and not linger(faults, Path(markers))
        return at < run.config.steps - END_STEPS or not linger(faults, Path(markers))

    def in_a_step(run: ed.Run, at: int) -> None:
        hold(is_ready)(run, at)
        if also is not None:
            also(run, at)

    def train(run: ed.Run) -> None:
        _install(run, faults, Path(markers))
        activity_of(run).enter("build")
        if write_s:
            _slow_down(run, write_s)
        jobs.make_train(in_a_step, waits_for_saves=not write_s)(run)

    return train


def happened(markers: Path) -> list[Happened]:
    """Returns the faults that have happened, in order."""
    return [_read(marker) for marker in sorted(markers.glob("*.json"), key=_number)]


def linger(faults: Sequence[Fault], markers: Path) -> bool:
    """Whether a victim that must leave still runs."""
    in_order = zip(faults, happened(markers), strict=False)
    return any(fault.how in LINGERING and Path(f"/proc/{victim.pid}").exists() for fault, victim in in_order)


def marker_of(markers: str | os.PathLike[str], number: int) -> Path:
    """Returns the file that exists once a fault has happened."""
    return Path(markers, f"{number}.json")


def _read(marker: Path) -> Happened:
    return Happened(**json.loads(marker.read_text()))


def _number(marker: Path) -> int:
    return int(marker.stem)


def hold(until: Callable[[ed.Run, int], bool]) -> Callable[[ed.Run, int], None]:
    """Returns a function for `jobs.make_train` that blocks rank 0 in a step until a condition is true. A change of
    membership or a failure ends the wait."""

    def wait(run: ed.Run, at: int) -> None:
        while run.rank == 0 and not until(run, at):
            client, generation = rendezvous_client_of(run), generation_of(run)
            if client.signals.reconfigure or client.signals.stop or generation is None:
                return
            if client.signals.failed_generation == generation.number:
                return
            time.sleep(0.01)

    return wait


def _install(run: ed.Run, faults: Sequence[Fault], markers: Path) -> None:
    enter = activity_of(run).enter
    rank, generation = member_of(run).rank_in_group, 0

    def enter_and_fail(place: str, *worked_s: Callable[[], float]) -> None:
        enter(place, *worked_s)
        fail_in(place)

    def fail_in(place: str) -> None:
        if place == "backward" and is_saving(run):
            fail_in("saving")
        nonlocal rank, generation
        if generation_of(run) is not None:
            rank, generation = run.rank, generation_of(run).number
        for number, fault in enumerate(faults):
            if (fault.rank, fault.place) != (rank, place):
                continue
            if run.position.step < fault.step or marker_of(markers, number).exists():
                continue
            if number > 0:
                before = marker_of(markers, number - 1)
                if not before.exists() or (fault.later and generation <= _read(before).generation):
                    continue
            if linger(faults, markers):
                continue
            victim = Happened(os.getpid(), member_of(run).id, rank, run.position.step, generation)
            if _claim(marker_of(markers, number), victim):
                _fail(fault, run)

    activity_of(run).enter = enter_and_fail  # type: ignore[method-assign]
    pieces = state_transfer._pieces

    def pieces_and_fail(tensors: Any) -> Iterator[Any]:
        for number, piece in enumerate(pieces(tensors)):
            if number == 3:  # neither the first nor the last one
                fail_in("transfer")
            yield piece

    state_transfer._pieces = pieces_and_fail


def _slow_down(run: ed.Run, write_s: float) -> None:
    storage = storage_of_commits(run)
    write = storage.write

    def write_slowly(key: str, data: bytes | memoryview) -> None:
        time.sleep(write_s)
        write(key, data)

    storage.write = write_slowly  # type: ignore[method-assign]


def _claim(marker: Path, victim: Happened) -> bool:
    """Returns whether the fault happens in this process. The marker is complete as soon as it exists."""
    mine = marker.with_suffix(f".{victim.pid}")
    mine.write_text(json.dumps(asdict(victim)))
    try:
        os.link(mine, marker)
    except FileExistsError:
        return False
    finally:
        mine.unlink()
    return True


def _fail(fault: Fault, run: ed.Run) -> None:
    if fault.along:
        for member in ed.get_run(run.config.name).status()["members"]:
            if member["rank"] in fault.along:
                os.kill(member["pid"], signal.SIGKILL)
    if fault.how in ("SIGKILL", "SIGSTOP", "SIGTERM"):
        os.kill(os.getpid(), signal.Signals[fault.how])
    elif fault.how == "SIGSEGV":
        ctypes.string_at(0)
    elif fault.how == "gil":
        while True:
            ctypes.PyDLL(None).pause()
    elif fault.how == "hang":
        threading.Event().wait()
    elif fault.how == "raise":
        raise KeyError("a bug in the training function")
    elif fault.how == "rendezvous":
        os.kill(ed.get_run(run.config.name).status()["pid"], signal.SIGKILL)
    elif fault.how == "driver":
        os.kill(ed.get_run(run.config.name).status()["driver"]["pid"], signal.SIGKILL)
    elif fault.how == "node":
        _kill_node(os.getppid())
    elif fault.how == "cut":
        hosts.cut()
    elif fault.how == "drain":
        _drain_node(DRAIN_S)
    elif fault.how == "notice":
        _announce_interruption(NOTICE_S)
    else:
        raise ValueError(fault.how)


def _kill_node(raylet: int) -> None:
    """Kills all processes of this node, as a power cut does, and this process last."""
    below = [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if parent_of(stat) == raylet]
    for pid in [raylet, *(pid for pid in below if pid != os.getpid()), os.getpid()]:
        with suppress(ProcessLookupError):  # some of them end with the raylet
            os.kill(pid, signal.SIGKILL)


def _drain_node(within_s: float) -> None:
    """Does what `ray drain-node` does."""
    context = ray.get_runtime_context()
    client = ray._raylet.GcsClient(address=context.gcs_address)
    drain(client, [context.get_node_id()], "a spot notice", int((time.time() + within_s) * 1000))


def _announce_interruption(within_s: float) -> None:
    """Starts a metadata service with a notice, and `elastic-ddp watch-notices`."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "tests.metadata_server", str(within_s)]
    subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": address}, start_new_session=True)


def drive(arguments: dict[str, Any], *, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs `main` in another process, on the cluster of this one, and waits for its end."""
    line = [sys.executable, "-m", "tests.chaos.faults", json.dumps(arguments)]
    address = ray.get_runtime_context().gcs_address
    return subprocess.run(
        line,
        env={**os.environ, "RAY_ADDRESS": address},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def main() -> None:
    """Runs a driver on the cluster at RAY_ADDRESS: `faults.py {"data": ..., "config": ..., "faults": ...,
    "markers": ...}`."""
    arguments = json.loads(sys.argv[1])
    faults = [Fault(**fault) for fault in arguments["faults"]]
    ray.init(logging_level="WARNING")
    config = arguments["config"]
    train = make_train(faults, arguments["markers"], num_workers=config["max_workers"])
    print(ed.ElasticTrainer(train, arguments["data"], config, transform=jobs.jitter).fit())


if __name__ == "__main__":
    main()
