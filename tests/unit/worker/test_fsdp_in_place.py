"""With FSDP, processes keep their shards when ranks join, leave, or change: nothing is read from storage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from elastic_ddp.distributed.assignment import Resharding
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.tensors.state_tree import gather_full
from elastic_ddp.worker.clock import WorkerClock
from elastic_ddp.worker.generation import strategy_of
from elastic_ddp.worker.state_sharing import share_state
from elastic_ddp.worker.train_state import TrainState
from tests.ranks import run_ranks
from tests.unit.distributed.test_fsdp import SIZE, M, prepared, train_on

ROWS = np.full(M, SIZE)
OPTIMIZERS = ("AdamW", "Adagrad")


@dataclass(frozen=True)
class Change:
    """A generation of some of the processes. It trains for some steps, or hands the shards over to those that keep."""

    members: tuple[int, ...]
    steps: range = range(0)
    keepers: tuple[int, ...] = ()


def _through(group: ProcessGroup, optimizer: str, changes: list[Change], first: int) -> list[dict[str, Any]]:
    """Takes a process through generations, numbered from `first`. Returns its full state after each that trained."""
    process, states, called = group.assignment.rank, [], set[str]()
    parameters: list[torch.nn.Parameter] = []
    config, state = prepared("fsdp", optimizer)
    state.module.blocks[0].register_forward_hook(lambda *of: called.add("forward"))  # type: ignore[index]
    state.module.register_state_dict_pre_hook(lambda *of: called.add("state_dict"))
    holders: tuple[int, ...] = ()  # the process that holds each shard
    for number, change in enumerate(changes, start=first):
        members, before = change.members, holders
        holders = tuple(each for each in members if each in (change.keepers or members))
        if process not in members:
            continue
        ranks = [members.index(each) for each in before]
        held = tuple((ranks.index(rank),) if rank in ranks else () for rank in range(len(members)))
        place = replace(
            group.assignment,
            generation=number,
            rank=members.index(process),
            world_size=len(members),
            source=ranks[0] if ranks else None,
            receivers=tuple(rank for rank in range(len(members)) if ranks and rank not in ranks),
            first_step=change.steps.start,
            handover_only=bool(change.keepers),
            resharding=Resharding(len(ranks), held, tuple(map(members.index, holders))) if ranks else None,
        )
        formed = ProcessGroup.form(place, store=group.store, device=group.device, timeout_s=60)
        assert state.model is not None
        strategy = strategy_of(config)(state.model, config, formed)
        inputs: Any = SimpleNamespace(
            state=state, restore=lambda *of: None, clock=WorkerClock(), job=SimpleNamespace(config=config)
        )
        share_state(inputs, formed, strategy)
        if not change.keepers:
            train_on(strategy, formed, state, ROWS, change.steps, 0.5)
            now = list(state.module.parameters())
            assert all(isinstance(parameter, DTensor) for parameter in now)
            parameters = parameters or now
            assert all(one is other for one, other in zip(now, parameters, strict=True)), "references stay valid"
            states.append(_everything(state))
            state.hold()
        formed.barrier()
        strategy.close()
        formed.close(intact=True)
    assert called == {"forward", "state_dict"}, "the hooks of the user stay"
    return states


def _everything(state: TrainState) -> dict[str, Any]:
    tensors = dict(state.module.state_dict())
    for number, values in state.optimizers[0].state_dict()["state"].items():
        tensors |= {f"{number}.{key}": value for key, value in values.items()}
    full = {name: gather_full(tensor).numpy().tobytes() for name, tensor in tensors.items()}
    return {**full, "scheduler": state.schedulers[0].state_dict()}


CHANGES = [
    Change((0,), range(2)),
    Change((0, 1, 2), range(2, 3)),
    Change((0, 1, 2), keepers=(2, 1)),  # 0 leaves
    Change((1, 2), range(3, 4)),
    Change((2, 0, 1, 3), range(4, 6)),  # 0 comes back, and ranks change
    Change((2, 0, 1, 3), keepers=(3,)),
    Change((3,), range(6, 7)),
]
TRAINING = [change for change in CHANGES if change.steps]


def _with_each_optimizer(group: ProcessGroup, changes: list[Change]) -> dict[str, list[dict[str, Any]]]:
    group.barrier()
    group.close(intact=True)
    return {name: _through(group, name, changes, 10 * number) for number, name in enumerate(OPTIMIZERS, start=1)}


def test_shards_survive_changes_of_membership_without_storage() -> None:
    [expected] = run_ranks(1, _with_each_optimizer, [Change((0,), change.steps) for change in TRAINING])
    for process, states in enumerate(run_ranks(4, _with_each_optimizer, CHANGES)):
        trained = [number for number, change in enumerate(TRAINING) if process in change.members]
        for optimizer in OPTIMIZERS:
            assert states[optimizer] == [expected[optimizer][number] for number in trained], (optimizer, process)
