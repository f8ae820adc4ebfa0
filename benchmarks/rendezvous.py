"""A rendezvous of many: `python benchmarks/rendezvous.py` has 1,000 members meet, lose one, and meet again.

The rendezvous is the real actor, on a local Ray; the members are calls and connections of this process. A generation is
formed when every member has its place in it. Memory is what the actor's process grew by. Figures are medians; all
calls are made by this one process, so on a machine of two cores nearly all of the time is Ray's.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
import uuid
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from elastic_ddp.distributed.process_group import Assignment
from elastic_ddp.rendezvous.actor import start_rendezvous
from elastic_ddp.rendezvous.members import JoinRequest, Member
from elastic_ddp.rendezvous.messages import RendezvousOptions

TARGET_S = 1.0


def member(number: int, of: int) -> Member:
    node = f"10.0.{number // 8 // 256}.{number // 8 % 256}"
    return Member(
        id=f"member-{number:05d}", group="g", group_size=of, rank_in_group=number, node=node, node_id=node, pid=number
    )


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


def meet(rendezvous: Any, members: list[Member], after: int, lost: str | None) -> tuple[float, int]:
    """Seconds until every member has its place in a generation, and its number."""
    begun = time.monotonic()
    waiting, generation = list(members), 0
    step = None if after == 0 else 10
    while waiting:
        arrivals = [JoinRequest(member=each, step=step, between_steps=True) for each in waiting]
        answers = ray.get([rendezvous.join.remote(each, after, lost) for each in arrivals])
        placed = [answer for answer in answers if isinstance(answer, Assignment)]
        assert all(answer.world_size == len(members) for answer in placed)
        generation = max([generation, *(answer.generation for answer in placed)])
        waiting = [each for each, answer in zip(waiting, answers, strict=True) if not isinstance(answer, Assignment)]
    return time.monotonic() - begun, generation


def measure(num_members: int) -> dict[str, float]:
    options = RendezvousOptions(min_workers=1, max_workers=num_members, heartbeat_timeout_s=60.0)
    rendezvous = start_rendezvous(f"of-{num_members}-{uuid.uuid4().hex[:8]}", 100, options)
    address = ray.get(rendezvous.heartbeat_address.remote())
    pid = ray.get(rendezvous.status.remote())["pid"]
    before = resident_mib(pid)
    members = [member(number, num_members) for number in range(num_members)]
    pulses = []
    for each in members:
        pulses.append(socket.create_connection(address))
        pulses[-1].sendall(each.id.encode() + b"\n")
    for _ in range(3):  # workers connect when they start, long before they join
        ray.get(rendezvous.status.remote())
    first_s, generation = meet(rendezvous, members, 0, None)
    pulses.pop().close()  # a death
    again_s, _ = meet(rendezvous, members[:-1], generation, "a peer was lost")
    grown = resident_mib(pid) - before
    ray.kill(rendezvous)
    for pulse in pulses:
        pulse.close()
    return {"first_s": first_s, "again_s": again_s, "mib": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    ray.init("local", num_cpus=1, include_dashboard=False, logging_level="WARNING")
    table = Table(title=f"a generation is formed (target for 1,000: {TARGET_S:g} s)", box=None, padding=(0, 2))
    for column in ("members", "the first, s", "after a loss, s", "grown by, MiB"):
        table.add_column(column, justify="right")
    for number in options.members:
        times = [measure(number) for _ in range(options.repeats)]
        median = {key: statistics.median(each[key] for each in times) for key in times[0]}
        table.add_row(f"{number:,}", f"{median['first_s']:.2f}", f"{median['again_s']:.2f}", f"{median['mib']:.1f}")
    Console().print(table)
    ray.shutdown()


if __name__ == "__main__":
    main()
