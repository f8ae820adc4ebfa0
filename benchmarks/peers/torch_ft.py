"""torchft: replicas that continue while others fail, each under its own torchrun, and a lighthouse.

As in torchft's torchx component, each replica is one worker under torchrun, which restarts it when it dies. If its
torchrun dies too, nothing replaces the replica.
"""

# No `from __future__ import annotations`: DDP compares annotations of a communication hook with types.

import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from peers.system import About, System, free_port, tree
from peers.workload import GLOBAL_BATCH_SIZE, StepLog, loss_fn, make_model, make_rows, wait

_START_WORKERS = 2
_MAX_REPLICAS = 16
"""torchft's sampler shards the data by the maximum number of replicas."""

NOT_KEPT = (
    "the samples in flight, and those of a missing replica's shard; the batch size, which follows the number of "
    "workers; the bits of an undisturbed run. It starts no replacements: here torchrun restarts processes, but not "
    "machines"
)


class TorchFT(System):
    about = About(
        name="torchft",
        settings=(
            "0.2.0 with a fix of its DDP hook on gloo; --min_replicas 1 --quorum_tick_ms 50 --join_timeout_ms 1000 "
            "--heartbeat_timeout_ms 1000; torchrun --max-restarts=10 for each replica; gloo collectives time out "
            "after 5 s, which ends the wait for a frozen machine; everything else after 30 s"
        ),
        not_kept=NOT_KEPT,
        remarks={"kill": "the killed replica's torchrun restarts it"},
    )
    heartbeat_timeout_ms = 1000

    def start(self, num_workers: int) -> None:
        port = free_port()
        self._lighthouse = f"http://localhost:{port}"
        command = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"0.0.0.0:{port}"]
        command += ["--min_replicas", "1", "--quorum_tick_ms", "50", "--join_timeout_ms", "1000"]
        self.spawn([*command, "--heartbeat_timeout_ms", str(self.heartbeat_timeout_ms)], RUST_BACKTRACE="1")
        self._replicas: list[subprocess.Popen[bytes]] = []
        self._started = 0
        for _ in range(num_workers):
            self.add_worker()

    def add_worker(self) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
        command += ["--max-restarts=10", f"--master-port={free_port()}", "-m", "peers.torch_ft"]
        environment = {"TORCHFT_LIGHTHOUSE": self._lighthouse, "REPLICA_GROUP_ID": str(self._started)}
        self._replicas.append(self.spawn(command, **environment))
        self._started += 1

    def drain_worker(self) -> None:
        """torchrun forwards the signal, and the worker leaves after its step."""
        self._replicas.pop().send_signal(signal.SIGTERM)

    def newest_machine(self) -> set[int]:
        return tree(self._replicas.pop().pid)

    def ended(self) -> bool:
        return all(replica.poll() is not None for replica in self._replicas)


class TorchFTTuned(TorchFT):
    about = replace(TorchFT.about, name="torchft-tuned", settings="the same with --heartbeat_timeout_ms 300")
    heartbeat_timeout_ms = 300


def _comm_hook(manager: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replaces torchft 0.2.0's hook, which fails on gloo: it returns an inner future that does not exist after an
    error, so that survivors of a failed replica die of an assertion. This hook waits and returns a finished future."""
    manager.allreduce(bucket.buffer()).wait()
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def prepare(replica: int, **options: Any) -> tuple[Any, torch.nn.Module, Any]:
    """Returns the manager of a replica, with further options of it, and its model and optimizer."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    DistributedDataParallel._comm_hook = staticmethod(_comm_hook)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"elasticity_{replica}",
        timeout=timedelta(seconds=30),
        **options,
    )
    model = DistributedDataParallel(manager, make_model())
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return manager, model, optimizer


def make_loader(replica: int) -> torch.utils.data.DataLoader[Any]:
    from torchft import DistributedSampler

    rows = torch.utils.data.TensorDataset(make_rows())
    sampler = DistributedSampler(
        rows, replica_rank=replica % _MAX_REPLICAS, num_replica_groups=_MAX_REPLICAS, group_rank=0, num_replicas=1
    )
    return torch.utils.data.DataLoader(rows, batch_size=GLOBAL_BATCH_SIZE // _START_WORKERS, sampler=sampler)


def step_ended(log: StepLog, manager: Any, steps_done: int) -> int:
    """Logs a completed step. Returns how many steps are done, of which `steps_done` were before."""
    # A failed step does not count, nor does a newcomer's first one, which only receives the state.
    step: int = manager.current_step()
    if step > steps_done and manager.is_participating():
        log.step_ended(step - 1, rank=manager.participating_rank(), world_size=manager.num_participants())
    return step


def train(folder: str, replica: int) -> None:
    leaving: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: leaving.append(True))
    manager, model, optimizer = prepare(replica)
    loader = make_loader(replica)
    log, steps_done = StepLog(folder), 0
    while True:
        for (x,) in loader:
            optimizer.zero_grad()
            wait()
            loss_fn(model, x).backward()
            optimizer.step()
            steps_done = step_ended(log, manager, steps_done)
            if leaving:
                manager.shutdown()
                return


if __name__ == "__main__":
    train(os.environ["FOLDER"], int(os.environ["REPLICA_GROUP_ID"]))
