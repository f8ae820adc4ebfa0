"""States saved at one world size are restored bit for bit at another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from elastic_ddp.checkpoint import CheckpointStore, Commit
from elastic_ddp.checkpoint.saver import Save, Saver
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.torch_store import StoreConnection, StoreMailbox
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors.state_tree import flatten
from elastic_ddp.worker.checkpointing import OF_RANK_0
from elastic_ddp.worker.restore import restore
from elastic_ddp.worker.train_state import Position, TrainState
from tests.ranks import run_ranks

WORLD_SIZES = (1, 2, 3)
STEPS = 3


class Everything(nn.Module):
    """A model of hard cases: tied and frozen weights, statistics, many dtypes, odd shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.bf16 = nn.Parameter(torch.randn(5, 3).to(torch.bfloat16))
        assert not self.turned.is_contiguous()
        self.register_buffer("seen", torch.zeros(11, dtype=torch.bool))
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("fp16", torch.randn(9).to(torch.float16))
        self.register_buffer("strided", torch.arange(20)[::3])
        self.register_buffer("column", torch.randn(4, 4)[:, 1])
        self.register_buffer("column_of_one", torch.randn(1, 4)[:, 1])
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("passing", torch.randn(4), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen[tokens] = True
        self.count += 1
        x = self.frozen(self.body(self.embedding(tokens))) * self.scale
        return self.head(x) + (x @ self.turned.t()).sum() + self.bf16.float().sum()


class Counter:
    """Registered state."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"rng": torch.Generator().manual_seed(5).get_state(), "names": ["a"], "best": None}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = copy.deepcopy(state)


def replicated(seed: int) -> TrainState:
    """The state of each rank of a DDP run."""
    torch.manual_seed(seed)
    model = PreparedModel(Everything(), device=torch.device("cpu"), bf16=False)
    state = TrainState(model=model)
    body, rest = list(model.module.body.parameters()), [*model.module.head.parameters(), model.module.bf16]
    adamw = torch.optim.AdamW([{"params": body, "lr": 0.01}, {"params": rest, "weight_decay": 0.2}], lr=0.001)
    sgd = torch.optim.SGD([model.module.scale, model.module.turned], lr=1e-5, momentum=0.9, nesterov=True)
    for optimizer in (adamw, sgd):
        state.add_optimizer(optimizer)
    state.add_scheduler(StepLR(adamw, 2, 0.5))
    state.add_scheduler(CosineAnnealingLR(sgd, 10))
    state.registered["counter"] = Counter()
    return state


def train(state: TrainState) -> None:
    """Trains for a few steps, the same on every rank."""
    torch.manual_seed(1)
    for _ in range(STEPS):
        state.module(torch.randint(11, (8,))).square().mean().backward()
        for optimizer in state.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in state.schedulers:
            scheduler.step()
    state.registered["counter"].state_dict()["names"].append("b")
    state.position = Position(step=STEPS, samples=8 * STEPS)


def whole(tree: Any) -> tuple[Any, dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Returns all bits of a state: its skeleton, and the bytes of its tensors."""
    skeleton, tensors = flatten(tree)
    return skeleton, {name: _bits(tensor) for name, tensor in tensors.items()}


def _bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    raw = (
        tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
    )
    return str(tensor.dtype), tuple(tensor.shape), raw


def save_on(group: ProcessGroup, folder: str) -> str:
    """Saves as a run does. Returns failures, on rank 0."""
    state = replicated(0)
    train(state)
    storage = Storage(f"{folder}/{group.world_size}")
    saver = Saver(storage, CheckpointStore(storage, keep=1), of_rank_0=OF_RANK_0)
    address = group.assignment.store_host, group.assignment.store_port
    ended: list[Commit | Exception] = []
    save = Save(
        step=STEPS,
        attempt="0" * 32,
        world_size=group.world_size,
        rank=group.rank,
        mailbox=StoreMailbox(StoreConnection(), address, lambda: address, "saves") if group.world_size > 1 else None,
        record={},
        fence=lambda: None,
        on_end=ended.append,
    )
    saver.begin(state.state_dict(), save)
    saver.wait()
    return repr([outcome for outcome in ended if not isinstance(outcome, Commit)])


def restore_on(group: ProcessGroup, folder: str) -> list[bool]:
    """Checks what each world size saved: as restored, loaded into a state of another seed, and after more steps."""
    reference = replicated(0)
    train(reference)
    expected = whole(reference.state_dict())
    train(reference)
    further = whole(reference.state_dict())
    same = []
    for world_size in WORLD_SIZES:
        storage = Storage(f"{folder}/{world_size}")
        restored = restore(CheckpointStore(storage, keep=1), storage, group)
        assert restored is not None
        same.append(whole(restored[1]) == expected)
        state = replicated(100 + group.rank)
        assert whole(state.state_dict()) != expected
        state.load_state_dict(restored[1])
        same.append(whole(state.state_dict()) == expected)
        same.append(state.module.head.weight is state.module.embedding.weight)
        train(state)
        same.append(whole(state.state_dict()) == further)
    return same


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the states saved at each world size."""
    folder = str(tmp_path_factory.mktemp("saved"))
    for world_size in WORLD_SIZES:
        assert run_ranks(world_size, save_on, folder) == ["[]"] * world_size
    return folder


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_state_saved_at_any_world_size_is_restored_at_any_other(saved: str, world_size: int) -> None:
    for rank, same in enumerate(run_ranks(world_size, restore_on, saved)):
        assert same == [True] * 4 * len(WORLD_SIZES), f"rank {rank}"
