"""The sides of the benchmark: the same training in plain PyTorch and with elastic_ddp, in a process of its own each."""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, Block, next_byte_loss
from torch.nn.parallel import DistributedDataParallel
from windows import endless_batches

from gpu_parts.gate import Command, Gate
from gpu_parts.host import Place, use_deterministic_algorithms

MANY_STEPS = 1_000_000
LOG_EVERY_STEPS = 10
LOADER_PROCESSES = 4
CLIP_NORM = 1.0
PLACES: list[Place] = [(GPT, "forward"), (torch.Tensor, "backward"), (torch.optim.AdamW, "step")]
"""Functions of every side that the part `host` times."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, and the batch of a step."""

    layers: int
    width: int
    heads: int
    context: int
    micro_batch_size: int
    micro_batches: int

    @property
    def model(self) -> dict[str, Any]:
        return {
            "context": self.context,
            "width": self.width,
            "layers": self.layers,
            "heads": self.heads,
            "dropout": 0.0,
        }

    @property
    def parameter_bytes(self) -> int:
        with torch.device("meta"):
            return sum(parameter.nbytes for parameter in GPT(**self.model).parameters())

    @property
    def bytes_per_step(self) -> int:
        return self.micro_batches * self.micro_batch_size * self.context

    def __str__(self) -> str:
        batch = f"{self.micro_batches} x {self.micro_batch_size}"
        return f"GPT of {self.layers} x {self.width}, context {self.context}, micro-batches {batch}"


PLAIN_SIDES = ("plain", "deterministic", "variable-kept")
"""`deterministic` is `plain` with the settings of torch and cuBLAS that `canonical` trains with, and `variable-kept` is
`deterministic` with `CUBLAS_WORKSPACE_CONFIG` all along."""
SIDES = (*PLAIN_SIDES, "native", "canonical", "fsdp")


@dataclass(frozen=True, kw_only=True)
class Side:
    """A way to train: one of `SIDES`. Folders are those of this side."""

    name: str
    is_compiled: bool
    setting: Setting
    device: str
    data: str
    held_out: str
    folder: str

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Side:
        return cls(**{**values, "setting": Setting(**values["setting"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def build(self) -> GPT:
        model = GPT(**self.setting.model)
        if self.is_compiled:
            model.compile()
        return model


def run(side: Side) -> None:
    """Trains until the process is killed, or until the benchmark has ended without that."""
    parent = os.getppid()

    def exit_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    if side.name in PLAIN_SIDES:
        run_plain(side)
    else:
        run_elastic(side)


# Plain PyTorch, as a careful user would write it.


def run_plain(side: Side) -> None:
    setting, device = side.setting, torch.device(side.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
    torch.manual_seed(0)
    replica = side.build().to(device)
    if side.name != "plain":
        use_deterministic_algorithms(device, replica, keeps_variable=side.name == "variable-kept")
    model = DistributedDataParallel(replica, device_ids=[0] if on_gpu else None, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = endless_batches(side.data, setting.micro_batch_size, num_workers=LOADER_PROCESSES, pin_memory=on_gpu)

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return next_byte_loss(model, batch)

    gate = Gate(side.folder, device, PLACES)
    gate.add({"repeat": repeat_backward(loss_of, replica, side)})
    for step in range(MANY_STEPS):
        gate()
        for micro_batch in range(setting.micro_batches):
            batch = {name: values.to(device, non_blocking=True) for name, values in next(batches).items()}
            with nullcontext() if micro_batch == setting.micro_batches - 1 else model.no_sync():
                loss = loss_of(batch) / setting.micro_batches
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY_STEPS == 0:
            print(f"step {step}: loss {setting.micro_batches * loss.item():.4f}", flush=True)


# elastic_ddp.


def run_elastic(side: Side) -> None:
    import ray

    import elastic_ddp as ed

    def train(run: ed.Run) -> None:
        model = run.prepare(side.build(), shard=Block if side.name == "fsdp" else None)
        run.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
        gate = Gate(side.folder, run.device, [*PLACES, *elastic_places()])
        gate.add(elastic_commands(run, model, gate, side))
        for step in run.steps():
            gate()
            with step:
                for batch in step.micro_batches():
                    step.backward(next_byte_loss(model, batch))
                step.optimize()

    setting = side.setting
    reduction: dict[str, Any] = {"strategy": "fsdp"} if side.name == "fsdp" else {"reduction": side.name}
    config = ed.RunConfig(
        name="gpu",
        storage=f"{side.folder}/runs",
        steps=MANY_STEPS,
        global_batch_size=setting.micro_batch_size * setting.micro_batches,
        micro_batch_size=setting.micro_batch_size,
        resources_per_worker={"CPU": 1.0, "GPU": 1.0} if side.device == "cuda" else {"CPU": 1.0},
        precision="bf16",
        clip_grad_norm=CLIP_NORM,
        log_every_steps=LOG_EVERY_STEPS,
        checkpoint=ed.CheckpointConfig(every_steps=MANY_STEPS),  # plain PyTorch writes none
        **reduction,
    )
    store_bytes = 512 << 20  # each side starts a Ray, and the default is a third of the memory
    ray.init(
        "local", num_cpus=2, include_dashboard=False, logging_level=logging.WARNING, object_store_memory=store_bytes
    )
    ed.ElasticTrainer(train, side.data, config).fit()


def elastic_places() -> list[Place]:
    from elastic_ddp.data.feed import MicroBatchFeed
    from elastic_ddp.distributed.canonical_reduction import CanonicalReduction
    from elastic_ddp.distributed.process_group import ProcessGroup
    from elastic_ddp.worker.loop import Loop
    from elastic_ddp.worker.step import Step
    from elastic_ddp.worker.update import Update

    return [
        (Step, "__enter__"),
        (MicroBatchFeed, "_take"),
        (Update, "_backward"),
        (CanonicalReduction, "fold"),
        (CanonicalReduction, "_bucket_sums"),
        (Update, "_optimize"),
        (ProcessGroup, "synchronize"),
        (Update, "_apply"),
        (Step, "__exit__"),
        (Loop, "_end_step"),
    ]


def elastic_commands(run: Any, model: torch.nn.Module, gate: Gate, side: Side) -> dict[str, Callable[..., Command]]:
    from elastic_ddp.checkpoint import CommitCatalog
    from elastic_ddp.storage.watchdog import WatchedStorage
    from elastic_ddp.worker.commit_schedule import CommitSchedule
    from elastic_ddp.worker.job import COMMITS
    from elastic_ddp.worker.restore import restore
    from tests.inside_run import generation_of, is_saving, job_of, state_of

    is_due = False

    def should_commit(self: CommitSchedule, steps_done: int) -> bool:
        nonlocal is_due
        now, is_due = is_due, False
        return now

    CommitSchedule.should_commit = should_commit  # type: ignore[method-assign]

    def commits(command: dict[str, Any]) -> Command:
        """Answers the seconds of steps without a commit, of those that begin one, and of those beside its writing."""
        nonlocal is_due
        alone: list[float] = []
        held: list[float] = []
        beside: list[float] = []
        write_s: list[float] = []
        for _ in range(command["rounds"]):
            for _ in range(2):
                yield
            for _ in range(command["steps"]):
                begin = time.perf_counter()
                yield
                alone.append(time.perf_counter() - begin)
            is_due = True
            begin = time.perf_counter()
            yield
            began_at = time.perf_counter()
            held.append(began_at - begin)
            while is_saving(run):
                begin = time.perf_counter()
                yield
                beside.append(time.perf_counter() - begin)
            write_s.append(time.perf_counter() - began_at)
        newest = CommitCatalog(WatchedStorage(job_of(run).storage.at(COMMITS))).latest()
        num_bytes = newest.num_bytes if newest is not None else 0
        return {"alone_s": alone, "held_s": held, "beside_s": beside, "write_s": write_s, "num_bytes": num_bytes}

    def restore_newest(command: dict[str, Any]) -> Command:
        """Restores the newest commit into the model and the optimizer, which then continue from their old position."""
        yield from ()
        storage, state, generation = WatchedStorage(job_of(run).storage.at(COMMITS)), state_of(run), generation_of(run)
        assert generation is not None
        read_s, load_s = [], []
        for _ in range(command["rounds"]):
            position, begin = state.position, time.perf_counter()
            restored = restore(CommitCatalog(storage), storage, generation.group)
            assert restored is not None, "there is a commit"
            read_s.append(time.perf_counter() - begin)
            state.load_state_dict(restored[1])
            gate.synchronize()
            load_s.append(time.perf_counter() - begin - read_s[-1])
            state.position = position
        return {"read_s": read_s, "load_s": load_s}

    def evaluations(command: dict[str, Any]) -> Command:
        """Answers the seconds of the same steps without and with an evaluation, in turns, and of each evaluation."""
        without: list[float] = []
        beside: list[float] = []
        seconds: list[float] = []
        for number in range(2 * command["rounds"]):
            for _ in range(2):
                yield
            gate.synchronize()
            begin = time.perf_counter()
            for _ in range(command["steps"]):
                yield
            if number % 2:
                began_at = time.perf_counter()
                run.evaluate(next_byte_loss, side.held_out)
                seconds.append(time.perf_counter() - began_at)
            gate.synchronize()
            (beside if number % 2 else without).append(time.perf_counter() - begin)
        batch, forward_s = random_batch(side), []
        for _ in range(5):
            begin = time.perf_counter()
            with torch.no_grad():
                float(next_byte_loss(model, batch))
            forward_s.append(time.perf_counter() - begin)
        forwards = command["rows"] / side.setting.micro_batch_size * statistics.median(forward_s)
        return {"without_s": without, "with_s": beside, "evaluation_s": seconds, "forwards_s": forwards}

    repeat = repeat_backward(partial(next_byte_loss, model), model, side)
    return {"commits": commits, "restore": restore_newest, "evaluations": evaluations, "repeat": repeat}


# Both.


def random_batch(side: Side) -> dict[str, torch.Tensor]:
    shape = side.setting.micro_batch_size, side.setting.context + 1
    return {"window": torch.randint(0, 256, shape, dtype=torch.uint8, device=side.device)}


def repeat_backward(
    loss_of: Callable[[dict[str, torch.Tensor]], torch.Tensor], model: torch.nn.Module, side: Side
) -> Callable[[dict[str, Any]], Command]:
    """Returns a command that computes the gradients of one micro-batch several times, and compares their bits."""

    def compute(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        loss_of(batch).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def repeat(command: dict[str, Any]) -> Command:
        yield from ()
        batch = random_batch(side)
        first = compute(batch)
        if side.device == "cuda":
            torch.cuda.synchronize()
        begin, differing = time.perf_counter(), set()
        for _ in range(command["rounds"]):
            for position, (one, other) in enumerate(zip(first, compute(batch), strict=True)):
                if not torch.equal(one, other):
                    differing.add(position)
        seconds = (time.perf_counter() - begin) / command["rounds"]
        model.zero_grad(set_to_none=True)
        return {"parameters": len(first), "differing": len(differing), "ms": 1000 * seconds}

    return repeat
