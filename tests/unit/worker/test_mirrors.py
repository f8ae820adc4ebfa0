"""What mirrors refuse: state that they cannot follow, before a worker dies. And where they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.seeding import seed_all
from elastic_ddp.tensors.digest import digest_tensors
from elastic_ddp.worker.generation import strategy_of
from elastic_ddp.worker.mirror import Mirror
from elastic_ddp.worker.state_checks import warn_about_mirrors
from tests.fsdp_workers import LIMIT_S, Model, Plan, hashes, workers
from tests.ranks import run_ranks
from tests.unit.distributed.test_fsdp import prepared
from tests.unit.worker.test_optimizer_cuts import ELEMENT_BY_ELEMENT


class Normalized(torch.optim.SGD):
    """Looks at all rows of a parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = parameter.grad / parameter.grad.norm()
        super().step()


class ByRank(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            with torch.no_grad():
                parameter.to_local().add_(0.001 * dist.get_rank())


class Forgetful(torch.optim.AdamW):
    """Its state can be cleared."""

    newest: Any = None

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        Forgetful.newest = self

    @staticmethod
    def forget(_: torch.nn.Module) -> None:
        for state in Forgetful.newest.state.values():
            state["exp_avg"].zero_()


class Counting(torch.optim.SGD):
    """Counts its steps in a tensor of its param_group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["seen"] = torch.zeros(())

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["seen"] += 1
        self.param_groups[0]["lr"] = 0.1 / float(self.param_groups[0]["seen"])
        super().step()


class Locked(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.values = (value for value in [1])


class Copying(Model):
    """Its state_dict() has doubled weights."""

    def state_dict(self, *args: Any, **named: Any) -> Any:
        state = super().state_dict(*args, **named)
        return {name: 2 * value if name == "first.weight" else value for name, value in state.items()}


class Average:
    """A moving average of a parameter, as a shard or gathered."""

    def __init__(self, module: torch.nn.Module, *, gathers: bool) -> None:
        self._module, self._gathers = module, gathers

    def state_dict(self) -> dict[str, Any]:
        parameter: Any = next(self._module.parameters())
        value = parameter.detach().clone()
        return {"value": value.full_tensor() if self._gathers and isinstance(value, DTensor) else value}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def halve(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model.get_submodule("first").weight.mul_(0.5)  # type: ignore[operator]


def read(model: torch.nn.Module) -> None:
    """Uses the weights without changing them."""
    assert sum(float(parameter.detach().sum()) for parameter in model.parameters()) < 1e9
    model.eval()(torch.ones(2, 3))
    model.train()


class Gathered(Average):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module, gathers=True)


class Sharded(Average):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module, gathers=False)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"make_optimizer": Normalized}, ("a step of Normalized", "ran collectives", "fsdp.mirror = false")),
        (
            {"make_optimizer": ByRank},
            ("differs from its mirror in first.bias, blocks.0.inner.weight", "fsdp.mirror = false"),
        ),
        ({"make_optimizer": Locked}, ("the Locked cannot be copied", "generator", "fsdp.mirror = false")),
        ({"make_model": Copying}, ("a copy of a parameter as first.weight", "fsdp.mirror = false")),
        ({"register": Gathered}, ("the registered 'more' runs collectives", "fsdp.mirror = false")),
        ({"register": Sharded}, ("user.more.value", "full_tensor")),
        ({"after_optimize": halve}, ("first.weight changed after step.optimize", "fsdp.mirror = false")),
        ({"make_optimizer": Forgetful, "after_optimize": Forgetful.forget}, ("exp_avg of blocks.0", "step.optimize")),
    ],
    ids=[
        "collectives",
        "rank",
        "no copy",
        "copied weights",
        "gathered state",
        "sharded state",
        "change",
        "state",
    ],
)
def test_what_a_mirror_cannot_follow_is_refused_in_the_first_step(
    tmp_path: Path, changes: dict[str, Callable[..., Any]], names: tuple[str, ...]
) -> None:
    with workers(Plan(tmp_path, {}, **changes)) as run:
        run.start(2)
        outcome = run.finish(LIMIT_S, status="failed")
        error = f"{outcome['kind']}: {outcome['error']}"
        assert [name for name in ("ConfigError", *names) if name not in error] == [], error


def test_a_mirror_does_not_share_the_param_groups_of_its_shard(tmp_path: Path) -> None:
    outcomes = []
    for size in (1, 2):
        with workers(Plan(tmp_path / str(size), {}, make_optimizer=Counting)) as run:
            run.start(size)
            outcomes.append(hashes(run))
    assert outcomes[0] == outcomes[1]


def test_a_mirror_allows_what_only_reads_the_weights(tmp_path: Path) -> None:
    with workers(Plan(tmp_path, {}, after_optimize=read)) as run:
        run.start(2)
        assert hashes(run)["steps"] == 8


def _step(group: ProcessGroup) -> list[str]:
    """Steps a shard and its mirror with each of torch's optimizers. Returns the errors of comparisons."""
    errors = []
    for name, make in {**ELEMENT_BY_ELEMENT, "fused AdamW": partial(torch.optim.AdamW, fused=True)}.items():
        config, state = prepared("fsdp", lambda module, make=make: make(module.parameters()))
        assert state.model is not None
        strategy = strategy_of(config)(state.model, config, group)
        strategy.shard(state.optimizers)
        state.mirror = Mirror(state.module, state.optimizers, group, 1)
        for number in range(3):
            for parameter in state.module.parameters():
                parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
            state.mirror.receive_gradients()
            state.step_optimizers(partial(seed_all, 0, number))
            state.step_schedulers(is_skipped=False)
        try:
            state.mirror.compare()
        except ConfigError as error:
            errors.append(f"{name}: {error}")
        strategy.close()
    return errors


def test_a_mirror_follows_all_optimizers_of_torch_that_work_element_by_element() -> None:
    assert run_ranks(3, _step) == [[]] * 3


@pytest.mark.parametrize(
    ("nodes", "offset"),
    [
        ("aa", 1),
        ("ab", 1),
        ("aabb", 2),
        ("aaabbb", 3),
        ("aabbc", 2),
        ("abc", 1),
        ("aaab", 1),
        ("aaaabb", 2),
        ("aaaa", 1),
    ],
)
def test_a_mirror_is_on_another_node_if_no_node_has_more_than_half_of_the_ranks(nodes: str, offset: int) -> None:
    largest = max(map(nodes.count, nodes))
    place = Assignment(
        generation=1,
        rank=0,
        world_size=len(nodes),
        store_host="",
        store_port=0,
        largest_node=largest,
        num_nodes=len(set(nodes)),
        reason="",
    )
    assert place.mirror_offset == offset
    apart = [nodes[rank] != nodes[(rank + offset) % len(nodes)] for rank in range(len(nodes))]
    assert all(apart) == place.mirrors_outlive_nodes
    warning = warn_about_mirrors(place)
    assert (warning is None) == (all(apart) or set(nodes) == {"a"})
    assert warning is None or f"one node has {largest} of {len(nodes)} workers" in warning


def digest(tensor: torch.Tensor) -> int:
    return int(digest_tensors([tensor]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_digest_changes_with_every_element_and_with_their_order(dtype: torch.dtype) -> None:
    values = torch.arange(300).to(dtype)
    digests = {digest(values)}
    for place in (0, 1, 150, 299):
        changed = values.clone()
        changed[place] = 0 if values[place] else 1
        digests.add(digest(changed))
    assert len(digests) == 5
    assert digest(values.flip(0)) != digest(values)
    large = torch.zeros(3 << 20, dtype=torch.uint8)
    first, second = large.clone(), large.clone()
    first[5], second[5 + (1 << 20)] = 1, 1
    assert len({digest(each) for each in (large, first, second)}) == 3
    assert digest(torch.empty(0)) == 0
