"""Faults at exact places of a run: in whom, from which step on, where, and how."""

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

import elastic_ddp as ed
from elastic_ddp.distributed import state_transfer
from tests.chaos import hosts
from tests.integration import jobs
from tests.integration.clusters import parent_of

DRAIN_S = 8.0
"""What a node has left when Ray is told to take it away."""


LINGERING = ("SIGTERM", "drain")
"""Faults whose victims work on for a while."""
END_STEPS = 5
"""So many steps before its end a run waits for the last of them to leave."""


@dataclass(frozen=True)
class Fault:
    """What happens to a worker when it enters a place of its loop, once in a run."""

    rank: int
    """The worker's in its generation. Between generations its last one; before the first, its place among those that
    were started."""
    step: int
    """The worker has done as many steps, or more."""
    place: str
    """As the worker's `Activity` names it; `build`, before it has anything; `transfer`, in the midst of a hand-over of
    state; `saving`, in a step while a save is written."""
    how: str
    """`SIGKILL`, `SIGSTOP` or `SIGTERM`; `SIGSEGV`, a real one; `gil`, a deadlock that holds Python's lock; `hang`, one
    that does not; `raise`, an error of the user's code; `rendezvous` or `driver`, whose process is killed; `node`,
    which dies with all its processes; `cut`, its network (see `hosts`); `drain`, by which Ray is told to take the node
    away."""
    later: bool = False
    """The worker is or was in a later generation than that of the fault before this one."""
    along: tuple[int, ...] = ()
    """Ranks that are killed in the same moment."""


@dataclass(frozen=True)
class Happened:
    """What is known of a fault that happened."""

    pid: int
    member: str
    """Of the worker."""
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
    """The training function of the integration tests, with faults.

    They happen in their order: none before the one before it, nor before its victim has left and the run has all its
    workers, for which it waits in the step before.

    Args:
        faults: what is to happen.
        markers: a folder, where there is a file for every fault that happened; so it never does again.
        num_workers: as many as the run may have.
        also: what else is called in the middle of every step, as by `jobs.make_train`.
        write_s: how long every write of a save takes, if the run is not to wait for saves.
    """

    def are_there(run: ed.Run, at: int) -> bool:
        near = (at >= each.step - 1 and not marker_of(markers, number).exists() for number, each in enumerate(faults))
        if any(near):
            return run.world_size == num_workers and not linger(faults, Path(markers))
        return at < run.config.steps - END_STEPS or not linger(faults, Path(markers))

    def in_a_step(run: ed.Run, at: int) -> None:
        hold(are_there)(run, at)
        if also is not None:
            also(run, at)

    def train(run: ed.Run) -> None:
        _install(run, faults, Path(markers))
        run._loop.membership.activity.enter("build")
        if write_s:
            _slow_down(run, write_s)
        jobs.make_train(in_a_step, waits_for_saves=not write_s)(run)

    return train


def happened(markers: Path) -> list[Happened]:
    """The faults that did, in their order."""
    return [_read(marker) for marker in sorted(markers.glob("*.json"), key=_number)]


def linger(faults: Sequence[Fault], markers: Path) -> bool:
    """Whether one works on of those who are to go."""
    in_order = zip(faults, happened(markers), strict=False)
    return any(fault.how in LINGERING and Path(f"/proc/{each.pid}").exists() for fault, each in in_order)


def marker_of(markers: str | os.PathLike[str], number: int) -> Path:
    """The file that exists once a fault has happened."""
    return Path(markers, f"{number}.json")


def _read(marker: Path) -> Happened:
    return Happened(**json.loads(marker.read_text()))


def _number(marker: Path) -> int:
    return int(marker.stem)


def hold(until: Callable[[ed.Run, int], bool]) -> Callable[[ed.Run, int], None]:
    """For `jobs.make_train`: the worker of rank 0 stays in a step until something is true, but to let others in or go,
    and because one is lost."""

    def wait(run: ed.Run, at: int) -> None:
        while run.rank == 0 and not until(run, at):
            client, generation = run._loop.client, run._loop.membership.generation
            if client.reconfigure_requested or client.stop_requested or generation is None:
                return
            if client._signals.failed_generation == generation.number:
                return
            time.sleep(0.01)

    return wait


def _install(run: ed.Run, faults: Sequence[Fault], markers: Path) -> None:
    enter = run._loop.membership.activity.enter
    rank, generation = run._loop.client.member.rank_in_group, 0

    def enter_and_fail(place: str, *worked_s: Callable[[], float]) -> None:
        enter(place, *worked_s)
        fail_in(place)

    def fail_in(place: str) -> None:
        if place == "backward" and run._loop.checkpointer.is_saving:
            fail_in("saving")
        nonlocal rank, generation
        if run._loop.membership.generation is not None:
            rank, generation = run.rank, run._loop.membership.generation.number
        for number, fault in enumerate(faults):
            is_here = (fault.rank, fault.place) == (rank, place)
            if not is_here or run.position.step < fault.step or marker_of(markers, number).exists():
                continue
            if number > 0:
                before = marker_of(markers, number - 1)
                if not before.exists() or (fault.later and generation <= _read(before).generation):
                    continue
            if linger(faults, markers):
                continue
            here = Happened(os.getpid(), run._loop.client.member.id, rank, run.position.step, generation)
            if _claim(marker_of(markers, number), here):
                _fail(fault, run)

    run._loop.membership.activity.enter = enter_and_fail  # type: ignore[method-assign]
    pieces = state_transfer._pieces

    def pieces_and_fail(tensors: Any) -> Iterator[Any]:
        for number, piece in enumerate(pieces(tensors)):
            if number == 3:  # neither the first nor the last one
                fail_in("transfer")
            yield piece

    state_transfer._pieces = pieces_and_fail


def _slow_down(run: ed.Run, write_s: float) -> None:
    storage = run._loop.checkpointer._storage._storage
    write = storage.write

    def write_slowly(key: str, data: bytes | memoryview) -> None:
        time.sleep(write_s)
        write(key, data)

    storage.write = write_slowly  # type: ignore[method-assign]


def _claim(marker: Path, here: Happened) -> bool:
    """Whether this process is the one in which the fault happens. The marker is complete as soon as it exists."""
    mine = marker.with_suffix(f".{here.pid}")
    mine.write_text(json.dumps(asdict(here)))
    try:
        os.link(mine, marker)
    except FileExistsError:
        return False
    finally:
        mine.unlink()
    return True


def _fail(fault: Fault, run: ed.Run) -> None:
    if fault.along:
        members = ed.get_run(run.config.name).status()["members"]
        for each in members:
            if each["rank"] in fault.along:
                os.kill(each["pid"], signal.SIGKILL)
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
        raise KeyError("a mistake of the user's")
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
    else:
        raise ValueError(fault.how)


def _kill_node(raylet: int) -> None:
    """This process's own node goes, as when its power is cut, and this process with it."""
    below = [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if parent_of(stat) == raylet]
    for pid in [raylet, *(each for each in below if each != os.getpid()), os.getpid()]:
        os.kill(pid, signal.SIGKILL)


def _drain_node(within_s: float) -> None:
    """What `ray drain-node` does."""
    context = ray.get_runtime_context()
    deadline_ms = int((time.time() + within_s) * 1000)
    preemption = ray.core.generated.autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    ray._raylet.GcsClient(address=context.gcs_address).drain_node(
        context.get_node_id(), preemption, "a spot notice", deadline_ms
    )


def drive(arguments: dict[str, Any], *, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """`main` in a process of its own, on the cluster of this one, to its end."""
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
    """A driver of its own, on the cluster at RAY_ADDRESS: `faults.py {"data": ..., "config": ..., "faults": ...,
    "markers": ...}`."""
    arguments = json.loads(sys.argv[1])
    faults = [Fault(**each) for each in arguments["faults"]]
    ray.init(logging_level="WARNING")
    config = arguments["config"]
    train = make_train(faults, arguments["markers"], num_workers=config["max_workers"])
    print(ed.ElasticTrainer(train, arguments["data"], config, transform=jobs.jitter).fit())


if __name__ == "__main__":
    main()
