"""The FSDP strategy trains like DDP, with sharded parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.buffer_sync import StepBuffers
from elastic_ddp.distributed.prepared_model import PreparedModel, unit_predicate
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.strategy import Strategy
from elastic_ddp.errors import ConfigError
from elastic_ddp.tensors.state_tree import gather_full
from elastic_ddp.worker.generation import strategy_of
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.train_state import TrainState
from tests.ranks import run_ranks
from tests.unit import rank_steps

M, SIZE = 4, 3
CPU = torch.device("cpu")


class Block(torch.nn.Module):
    """Has a dimension that no number of ranks divides, and a parameter with one element."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(5, 7), torch.nn.Linear(7, 5)
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Model(torch.nn.Module):
    """Has tied weights, frozen weights and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(5, 5, bias=False)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.norm = torch.nn.BatchNorm1d(5)
        self.head = torch.nn.Linear(5, 5)
        self.head.weight = self.embed.weight
        self.blocks[0].up.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda model: torch.optim.AdamW(
        [
            {"params": list(model.blocks.parameters()), "lr": 0.02},
            {"params": [*model.norm.parameters(), model.head.weight]},
        ]
    ),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05),  # has state before its first step
}


def config_of(strategy: str, **settings: Any) -> RunConfig:
    return RunConfig(
        name="x",
        storage="/tmp",
        steps=1,
        global_batch_size=M * SIZE,
        micro_batch_size=SIZE,
        max_workers=M,
        strategy=strategy,
        **{"fsdp": {"mirror": False}, **settings},  # `Step` and `TrainState` step the mirrors
    )


def prepared(
    strategy: str,
    optimizer: str | Callable[[Any], Any] = "AdamW",
    model: torch.nn.Module | None = None,
    **settings: Any,
) -> tuple[RunConfig, TrainState]:
    torch.manual_seed(0)
    config, model = config_of(strategy, **settings), model or Model()
    bf16 = config.precision == "bf16" and strategy == "ddp"
    state = TrainState(PreparedModel(model, device=CPU, bf16=bf16, is_unit=_is_block))
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    state.add_optimizer(make(state.module))
    state.add_scheduler(torch.optim.lr_scheduler.StepLR(state.optimizers[0], 1, gamma=0.9))
    return config, state


def data(step: int, m: int) -> torch.Tensor:
    return torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(100 * step + m))


def trained(
    group: ProcessGroup, config: RunConfig, state: TrainState, rows: np.ndarray, steps: range, clip: float = 0.5
) -> list[float]:
    """Trains with a new strategy. Returns the gradient norm of each step."""
    assert state.model is not None
    strategy = strategy_of(config)(state.model, config, group)
    strategy.shard(state.optimizers)
    norms = train_on(strategy, group, state, rows, steps, clip)
    strategy.close()
    return norms


def train_on(
    strategy: Strategy, group: ProcessGroup, state: TrainState, rows: np.ndarray, steps: range, clip: float = 0.5
) -> list[float]:
    """Makes steps as `Step` does. Returns the gradient norm of each."""
    assert state.model is not None
    norms, buffers = [], StepBuffers(state.module)
    for step in steps:
        state.module.zero_grad(set_to_none=True)
        strategy.begin_step(rows)
        buffers.begin()
        for m in strategy.to_compute:
            strategy.prepare_forward(m)
            strategy.backward(state.module(data(step, m)[: rows[m] or SIZE]).square().mean(), m)
            buffers.end_micro_batch(m, strategy.weight(m) if rows[m] else None)
        num_dummies = max(0, strategy.min_forwards(rows) - len(strategy.to_compute))
        for m in strategy.to_compute[-1:] * num_dummies:
            strategy.prepare_forward(m)
            strategy.dummy_backward(state.module(data(step, m)).square().mean())
            buffers.end_micro_batch(m, None)
        norm = strategy.gradient_norm()
        strategy.clip_gradients(clip, norm)
        norms.append(float(norm))
        buffers.combine(ranges=strategy.ranges, num_leaves=strategy.num_leaves, divisor=strategy.divisor, group=group)
        for stepped in [*state.optimizers, *state.schedulers]:
            stepped.step()
    return norms


def full_state(state: TrainState) -> dict[str, torch.Tensor]:
    tensors = {**state.module.state_dict()}
    for number, values in state.optimizers[0].state_dict()["state"].items():
        tensors |= {f"{number}.{key}": value for key, value in values.items()}
    return {name: gather_full(value).clone() for name, value in tensors.items()}


def as_numpy(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


FULL, SHORT = [3, 3, 3, 3], [3, 2, 0, 0]
"""The rows of each micro-batch of a step. With three ranks, the last has none in the short one."""


def _train_each(group: ProcessGroup, strategy: str) -> dict[Any, Any]:
    """Returns for each optimizer and kind of step: gradient norms, state, number of shards, and hash."""
    results = {}
    for name in OPTIMIZERS:
        for rows in (FULL, SHORT):
            config, state = prepared(strategy, name)
            norms = trained(group, config, state, np.array(rows), range(3))
            sharded = sum(isinstance(parameter, DTensor) for parameter in state.module.parameters())
            results[name, len(set(rows))] = norms, as_numpy(full_state(state)), sharded, state.weights_sha256()
    return results


@pytest.mark.parametrize("world_size", [1, 3])
def test_sharded_training_equals_replicated_training(world_size: int) -> None:
    [replicated] = run_ranks(1, _train_each, "ddp")
    by_rank = run_ranks(world_size, _train_each, "fsdp")
    for case, (norms, expected, _, _) in replicated.items():
        for found_norms, found, sharded, digest in [result[case] for result in by_rank]:
            assert sharded > 0 and found_norms == pytest.approx(norms, rel=1e-5), case
            assert found.keys() == expected.keys()
            for name in expected:
                title = f"{name} with {case}"
                np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, atol=2e-6, err_msg=title)
            assert digest == by_rank[0][case][3]


def sharded(
    group: ProcessGroup, optimizer: str = "AdamW", model: torch.nn.Module | None = None, **settings: Any
) -> tuple[Strategy, TrainState]:
    """Returns a strategy that has sharded a model, and the state."""
    config, state = prepared("fsdp", optimizer, model, **settings)
    assert state.model is not None
    strategy = strategy_of(config)(state.model, config, group)
    strategy.shard(state.optimizers)
    return strategy, state


def _leaves_early(group: ProcessGroup) -> str:
    """The last rank has one micro-batch and one dummy. Each rank leaves its loop after the first micro-batch."""

    def body(step: Step, model: torch.nn.Module) -> None:
        for batch in step.micro_batches():
            step.backward(model(batch["x"]).square().mean())
            break
        step.optimize()

    config = rank_steps.config_of(strategy="fsdp", global_batch_size=8, max_workers=4)
    with pytest.raises(ConfigError) as caught:
        rank_steps.run_steps(group, config, torch.nn.Linear(3, 1), body, num_rows=3)
    return str(caught.value)


def test_a_dummy_forward_does_not_count_as_a_micro_batch_of_the_loop() -> None:
    first, last = run_ranks(2, _leaves_early)
    assert "before micro-batches [2] were computed" in first
    assert "before micro-batches [1] were computed" in last, "its copy is missing"


class Collectives(TorchDispatchMode):
    """Counts the collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def _communicated(group: ProcessGroup, reduction: str, sharding: str) -> dict[str, int]:
    """Returns the collectives of a step with two micro-batches on each rank, without those of clipping."""
    strategy, state = sharded(group, reduction=reduction, fsdp={"sharding": sharding})
    strategy.begin_step(np.array([3, 3, 3, 3]))
    with Collectives() as communication:
        for m in strategy.to_compute:
            strategy.prepare_forward(m)
            strategy.backward(state.module(data(0, m)).square().mean(), m)
    return dict(communication.counts)


@pytest.mark.parametrize(
    ("reduction", "collective", "sharding"),
    [("canonical", "c10d::alltoall_base_", "full"), ("native", "c10d::_reduce_scatter_base_", "grad_op")],
    ids=["canonical", "native"],
)
def test_each_round_exchanges_the_gradients_of_each_unit_once(reduction: str, collective: str, sharding: str) -> None:
    """There are three units, two blocks and the rest of the model, and two rounds."""
    for counts in run_ranks(2, _communicated, reduction, sharding):
        assert counts[collective] == 2 * 3
        # The rest of the model stays gathered from forward to backward.
        assert counts["c10d::_allgather_base_"] == 2 * (3 + 2 if sharding == "full" else 3)


STEPS_IN_BF16 = 3
NO_CLIPPING = 1e9
"""Clipping would hide a wrong scale of the gradients. So would AdamW, so these steps use SGD."""


def _by_hand(dtype: torch.dtype) -> tuple[list[float], dict[str, np.ndarray]]:
    """Returns gradient norms and state of steps that compute all but the normalization in `dtype`. Gradients are
    accumulated and weights stored in float32."""
    _, state = prepared("ddp", "SGD")
    module, norms = state.module, []
    for step in range(STEPS_IN_BF16):
        module.zero_grad(set_to_none=True)
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        after = {name: torch.zeros_like(buffer) for name, buffer in before.items()}
        for m in range(M):
            cast = {
                name: parameter.detach().to(torch.float32 if name.startswith("norm.") else dtype).requires_grad_()
                for name, parameter in module.named_parameters()
            }
            buffers = {name: buffer.clone() for name, buffer in before.items()}
            output = torch.func.functional_call(module, {**cast, **buffers}, (data(step, m).to(dtype),))
            loss = output.float().square().mean() / M
            for (name, parameter), gradient in zip(
                module.named_parameters(), torch.autograd.grad(loss, [*cast.values()]), strict=True
            ):
                assert gradient.dtype == cast[name].dtype
                if parameter.requires_grad:
                    so_far = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad = so_far + gradient.float()
            for name, buffer in buffers.items():
                after[name] = after[name] + buffer / M if buffer.is_floating_point() else buffer
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), NO_CLIPPING)))
        for name, buffer in module.named_buffers():
            buffer.copy_(after[name])
        for stepped in [*state.optimizers, *state.schedulers]:
            stepped.step()
    return norms, as_numpy(full_state(state))


def _train_in_bf16(group: ProcessGroup) -> tuple[list[float], dict[str, np.ndarray], set[Any], torch.dtype]:
    """Also returns the dtypes of a layer's outputs, and of the model's."""
    strategy, state = sharded(group, "SGD", precision="bf16")
    seen: set[torch.dtype] = set()
    block: Any = state.module.blocks[0]  # type: ignore[index]
    block.up.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    norms = train_on(strategy, group, state, np.full(M, SIZE), range(STEPS_IN_BF16), NO_CLIPPING)
    values = as_numpy(full_state(state))
    return norms, values, seen, state.module(data(0, 0)).dtype


def _distances(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, float]:
    assert one.keys() == other.keys()
    return {name: float(np.abs(one[name] - other[name]).max()) for name in one}


def test_bf16_agrees_with_a_loop_that_casts_explicitly_and_stores_in_float32() -> None:
    """To 1e-6, which is far less than the difference to a loop in float32.

    Torch 2.15 adds the gradients of tied weights in float32 in the first micro-batch of a rank, and in bfloat16 later.
    """
    tolerance = 1e-6 if torch.__version__ < (2, 15) else 1e-3
    norms, expected = _by_hand(torch.bfloat16)
    norms_in_fp32, in_fp32 = _by_hand(torch.float32)
    for found_norms, found, seen, output in run_ranks(2, _train_in_bf16):
        assert (seen, output) == ({torch.bfloat16}, torch.float32)
        assert {value.dtype for value in found.values()} == {np.dtype(np.float32), np.dtype(np.int64)}
        assert found_norms == pytest.approx(norms, rel=tolerance) != norms_in_fp32
        assert max(_distances(found, expected).values()) < tolerance
        to_fp32 = _distances(found, in_fp32)
        assert to_fp32.pop("blocks.0.up.bias") == to_fp32.pop("norm.num_batches_tracked") == 0
        assert min(to_fp32.values()) > 1e-5


@pytest.mark.parametrize(
    ("settings", "shard", "message"),
    [
        ({"fsdp": {"shard_classes": ("Layer",)}}, None, "shard_classes names Layer.*Block"),
        ({}, torch.nn.Conv2d, "got shard=.*Conv2d"),
    ],
)
def test_a_unit_that_the_model_does_not_have_raises(settings: dict[str, Any], shard: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        unit_predicate(Model(), config_of("fsdp", **settings).fsdp.shard_classes, shard)


def test_units_are_selected_by_class_name_class_or_predicate() -> None:
    model = Model()
    selections: list[Any] = [(["Block"], None), ([], Block), ([], (Block, torch.nn.Conv2d)), ([], _is_block)]
    for names, shard in selections:
        is_unit = unit_predicate(model, names, shard)
        assert [module for module in model.modules() if is_unit(module)] == list(model.blocks)


def _hashes_after_forwards(group: ProcessGroup) -> list[str]:
    strategy, state = sharded(group)
    state.module.eval()  # statistics do not change
    hashes = [state.weights_sha256()]
    for _ in range(2):
        with torch.no_grad():
            state.module(data(0, 0))
        strategy.reshard()
        hashes.append(state.weights_sha256())
    with torch.no_grad():
        state.module(data(0, 0))  # as a user may do
    strategy.begin_step(np.array([3, 3, 3, 3]))
    state.state_dict()
    return [*hashes, state.weights_sha256()]


def test_a_forward_without_a_backward_is_resharded() -> None:
    for hashes in run_ranks(2, _hashes_after_forwards):
        assert len(hashes) == 4 and len(set(hashes)) == 1


def _outputs_after_the_optimizer(group: ProcessGroup) -> list[list[float]]:
    """Returns what forwards after `optimize` return, without and with one before it."""
    x, found = torch.arange(24.0).reshape(8, 3), []
    for is_called_before in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

        def body(step: Step, model: torch.nn.Module, is_called_before: bool = is_called_before) -> float:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())
            with torch.no_grad():
                if is_called_before:
                    model(x)
                step.optimize()
                return float(model(x).sum())

        found.append(rank_steps.run_steps(group, rank_steps.config_of(strategy="fsdp"), model, body)["returned"])
    return found


def test_a_forward_after_the_optimizer_uses_new_weights_if_one_came_before() -> None:
    for without, with_one in run_ranks(2, _outputs_after_the_optimizer):
        assert without == with_one and len(set(without)) == 5


def _is_block(module: torch.nn.Module) -> bool:
    return isinstance(module, Block)
