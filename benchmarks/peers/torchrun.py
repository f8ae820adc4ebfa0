"""torchrun's elastic launch: one agent and worker for each machine, and snapshots on a shared disk."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from peers.system import About, System, free_port, tree
from peers.workload import StepLog, loss_fn, make_model, make_rows, share_of, wait

NOT_KEPT = (
    "the steps since the last snapshot, from which all processes restart; the position in the data, which user code "
    "must restore; the bits of an undisturbed run"
)
RESTARTS = "all processes restart"


class Torchrun(System):
    about = About(
        name="torchrun",
        settings=(
            "--nnodes=1:3 --max-restarts=100 --rdzv-backend=c10d, else defaults; a snapshot on local disk every 20 "
            "steps"
        ),
        not_kept=NOT_KEPT,
        remarks={
            "add": "torch 2.13 publishes rank 0's address in the first round only, so a new agent keeps waiting for it",
            "kill": RESTARTS,
            "drain": f"{RESTARTS} once the agent has sent no heartbeat for 15 s and no other has joined for 30 s",
            "node": RESTARTS,
        },
    )
    program: ClassVar[str] = "peers.torchrun"
    arguments: tuple[str, ...] = ()
    environment: ClassVar[dict[str, str]] = {"SNAPSHOT_STEPS": "20"}

    def start(self, num_workers: int) -> None:
        port = free_port()
        self._endpoint = f"localhost:{port}"
        self._agents = [self._start_agent()]  # the first agent hosts the rendezvous
        while not _listens(port) and not self.ended():
            time.sleep(0.1)
        self._agents += [self._start_agent() for _ in range(num_workers - 1)]

    def _start_agent(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{self.max_workers}"]
        command += ["--nproc-per-node=1", "--max-restarts=100", "--rdzv-backend=c10d", "--rdzv-id=elasticity"]
        command += [f"--rdzv-endpoint={self._endpoint}", *self.arguments, "-m", self.program]
        return self.spawn(command, **self.environment)

    def add_worker(self) -> None:
        self._agents.append(self._start_agent())

    def drain_worker(self) -> None:
        """Sends SIGTERM as a shutdown does; the agent forwards it to its worker."""
        self._agents.pop().send_signal(signal.SIGTERM)

    def newest_machine(self) -> set[int]:
        return tree(self._agents.pop().pid)


class TorchrunTuned(Torchrun):
    about = About(
        name="torchrun-tuned",
        settings=(
            "a snapshot on local disk every 5 steps; a separate TCPStore, not shared with the workers; "
            "--monitor-interval=0.1; last_call_timeout=1, keep_alive_interval=1, keep_alive_max_attempt=3, "
            "close_timeout=5, heartbeat_timeout=3"
        ),
        not_kept=NOT_KEPT,
        remarks=dict.fromkeys(("add", "kill", "drain", "node"), RESTARTS),
    )
    arguments = (
        "--monitor-interval=0.1",
        "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,close_timeout=5,"
        "heartbeat_timeout=3,is_host=0",
    )
    environment: ClassVar[dict[str, str]] = {"SNAPSHOT_STEPS": "5", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def start(self, num_workers: int) -> None:
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._endpoint = f"localhost:{self._store.port}"
        self._agents = [self._start_agent() for _ in range(num_workers)]

    def stop(self) -> None:
        super().stop()
        del self._store


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("localhost", port)) == 0


def train(folder: str, snapshot_steps: int) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    snapshot, first_step = f"{folder}/snapshot.pt", 0
    if os.path.exists(snapshot):  # no process of an earlier round runs, so all ranks read the same one
        state = torch.load(snapshot)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"]
    rows, log = make_rows(), StepLog(folder)
    for step in itertools.count(first_step):
        wait()
        loss_fn(model, share_of(rows, step=step, rank=rank, world_size=world_size)).backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step_ended(step, rank=rank, world_size=world_size)
        if rank == 0 and (step + 1) % snapshot_steps == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, f"{snapshot}.new")
            os.replace(f"{snapshot}.new", snapshot)


if __name__ == "__main__":
    train(os.environ["FOLDER"], int(os.environ["SNAPSHOT_STEPS"]))
