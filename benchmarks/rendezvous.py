"""Measures the rendezvous with many members: `python benchmarks/rendezvous.py`.

It forms a generation of up to 1,000 members, kills one, and forms the next one. The rendezvous is the real actor on a
local Ray; the members are calls and connections of this process. The time lasts until every member has its assignment.
Memory is the growth of the actor's process. Figures are medians. This process makes all calls, so with two cores most
of the time is Ray's.
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
from arguments import positive_int
from rich.console import Console
from rich.table import Table

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.rendezvous.actor import start_rendezvous
from elastic_ddp.rendezvous.members import JoinRequest, Member
from elastic_ddp.rendezvous.messages import RendezvousOptions

TARGET_S = 1.0


def make_member(number: int, of: int) -> Member:
    node = f"10.0.{number // 8 // 256}.{number // 8 % 256}"
    return Member(id=f"member-{number:05d}", group_size=of, rank_in_group=number, node=node, node_id=node, pid=number)


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


def form(rendezvous: Any, members: list[Member], after: int, failure: str | None) -> tuple[float, int]:
    """Returns the seconds until every member has its assignment, and the generation's number."""
    begun = time.monotonic()
    waiting, generation = list(members), 0
    step = None if after == 0 else 10
    while waiting:
        requests = [
            JoinRequest(member=member, step=step, between_steps=True, after=after, failure=failure)
            for member in waiting
        ]
        answers = ray.get([rendezvous.join.remote(request) for request in requests])
        placed = [answer for answer in answers if isinstance(answer, Assignment)]
        assert all(answer.world_size == len(members) for answer in placed)
        generation = max([generation, *(answer.generation for answer in placed)])
        pairs = zip(waiting, answers, strict=True)
        waiting = [member for member, answer in pairs if not isinstance(answer, Assignment)]
    return time.monotonic() - begun, generation


def measure(num_members: int) -> dict[str, float]:
    options = RendezvousOptions(min_workers=1, max_workers=num_members, heartbeat_timeout_s=60.0)
    rendezvous = start_rendezvous(f"of-{num_members}-{uuid.uuid4().hex[:8]}", 100, options)
    address = ray.get(rendezvous.heartbeat_address.remote())
    pid = ray.get(rendezvous.status.remote())["pid"]
    before = resident_mib(pid)
    members = [make_member(number, num_members) for number in range(num_members)]
    heartbeats = []
    for member in members:
        heartbeats.append(socket.create_connection(address))
        heartbeats[-1].sendall(member.id.encode() + b"\n")
    for _ in range(3):  # workers connect when they start, long before they join
        ray.get(rendezvous.status.remote())
    first_s, generation = form(rendezvous, members, 0, None)
    heartbeats.pop().close()  # a worker fails
    next_s, _ = form(rendezvous, members[:-1], generation, "a peer failed")
    grown = resident_mib(pid) - before
    ray.kill(rendezvous)
    for heartbeat in heartbeats:
        heartbeat.close()
    return {"first_s": first_s, "next_s": next_s, "mib": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=positive_int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--repeats", type=positive_int, default=5)
    options = parser.parse_args()
    ray.init("local", num_cpus=1, include_dashboard=False, logging_level="WARNING")
    table = Table(
        title=f"time to form a generation (target for 1,000 members: {TARGET_S:g} s)", box=None, padding=(0, 2)
    )
    for column in ("members", "first, s", "after a failure, s", "memory, MiB"):
        table.add_column(column, justify="right")
    for number in options.members:
        times = [measure(number) for _ in range(options.repeats)]
        median = {key: statistics.median(figures[key] for figures in times) for key in times[0]}
        table.add_row(f"{number:,}", f"{median['first_s']:.2f}", f"{median['next_s']:.2f}", f"{median['mib']:.1f}")
    Console().print(table)
    ray.shutdown()


if __name__ == "__main__":
    main()
