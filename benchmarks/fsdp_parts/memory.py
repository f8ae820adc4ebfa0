"""Part `memory`: the live bytes of a rank in a step, next to a formula."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_ddp import RunConfig
from elastic_ddp.distributed.assignment import Assignment
from fsdp_parts.live_bytes import LiveBytes
from fsdp_parts.model import BLOCKS, make_blocks, width_of
from fsdp_parts.ranks import Ranks, run_ranks

WORLD_SIZES = (2, 4)
ROUNDS = 4
"""Micro-batches of a rank in a step: three rounds leave two shards pending, which is the most."""
ADAMW_TENSORS = 2
WARMUP_STEPS = 2
TARGET = 0.05
"""Largest difference between measured and expected, relative to expected."""
BETWEEN, EXCHANGE, BACKWARD, OPTIMIZER = "between rounds", "in a unit's exchange", "in a backward", "at the optimizer"


@dataclass(frozen=True, kw_only=True)
class Setting:
    world_size: int
    mirror: bool
    parameters: int
    """About how many the model has."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of the whole model, of units of equal size."""

    units: int
    unit: int
    matrix: int
    """Of the largest parameter."""


def expected(sizes: Sizes, world_size: int, *, mirror: bool, rounds: int = ROUNDS) -> dict[str, int]:
    """Returns the bytes on a rank at each point.

    With P bytes of parameters in n units of U bytes on W ranks, each point has

        state       P/W, and AdamW's two tensors of P/W, twice with a mirror

    and, at its largest,

        between rounds        pending sums: P/W for each
        in a unit's exchange  what is sent and received, 2 U; the next unit, gathered ahead, U; the gradients of units
                              exchanged before in this backward, and of this one, U/W each; pending sums
        in a backward         this unit and the next one, gathered, 2 U; the gradient, U; what the last exchange sent,
                              which torch keeps, U; gradients of units exchanged before and pending sums, as above
        at the optimizer      gradients of P/W, twice with a mirror; two temporary tensors of the largest parameter's
                              shard

    The sums of n micro-batches are pending in as many shards as n has binary digits that are 1.
    """
    unit_shard = sizes.unit // world_size
    shard = sizes.units * unit_shard
    copies = 2 if mirror else 1
    state = copies * shard * (1 + ADAMW_TENSORS)
    between, exchange, backward = 0, 0, 0
    for number in range(rounds):
        before = (number * world_size).bit_count()
        after = ((number + 1) * world_size).bit_count() if number < rounds - 1 else 0
        between = max(between, after * shard)
        for done in range(sizes.units):  # units exchanged in this backward
            pending = (done * after + (sizes.units - done) * before) * unit_shard
            ahead = 1 if done < sizes.units - 1 else 0
            kept = 1 if done else 0
            exchange = max(exchange, (2 + ahead) * sizes.unit + (done + 1) * unit_shard + pending)
            backward = max(backward, (2 + ahead + kept) * sizes.unit + done * unit_shard + pending)
    return {
        BETWEEN: state + between,
        EXCHANGE: state + exchange,
        BACKWARD: state + backward,
        OPTIMIZER: state + copies * shard + 2 * sizes.matrix // world_size,
    }


def measure_memory(parameters: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns the figures of each world size, with and without mirrors."""
    figures = []
    for world_size in WORLD_SIZES:
        for mirror in (True, False):
            setting = Setting(world_size=world_size, mirror=mirror, parameters=parameters)
            ranks = run_ranks(world_size, _measure_rank, setting)
            sizes = _sizes_of(parameters, world_size)
            points = [
                {"point": point, "measured": max(rank[point] for rank in ranks), "expected": num_bytes}
                for point, num_bytes in expected(sizes, world_size, mirror=mirror).items()
            ]
            shard = sizes.units * sizes.unit / world_size
            figures.append({"world_size": world_size, "mirror": mirror, "shard": shard, "points": points})
            ratios = ", ".join(f"{each['point']} {each['measured'] / each['expected']:.3f}" for each in points)
            say(f"memory, {world_size} ranks, mirrors {'on' if mirror else 'off'}, of the formula: {ratios}")
    return figures


def _sizes_of(parameters: int, world_size: int) -> Sizes:
    block = make_blocks(parameters)[0]
    padded = [-(-len(each) // world_size) * world_size * each[0].numel() * each.itemsize for each in block.parameters()]
    return Sizes(units=BLOCKS, unit=sum(padded), matrix=max(padded))


def _measure_rank(place: Callable[[int], Assignment], setting: Setting) -> dict[str, int]:
    """Returns the peak at each point of a step."""
    fsdp: Any = {"mirror": setting.mirror}
    config = RunConfig(
        name="memory",
        storage="memory://memory",
        steps=WARMUP_STEPS + 1,
        global_batch_size=ROUNDS * setting.world_size,
        micro_batch_size=1,  # activations are small next to parameters
        max_workers=setting.world_size,
        strategy="fsdp",
        fsdp=fsdp,
    )
    rank = Ranks(place(1), config, make_blocks(setting.parameters), width_of(setting.parameters))
    for _ in range(WARMUP_STEPS):  # the first creates the state of the optimizer
        rank.step()
    gc.collect()
    with LiveBytes({"c10d.alltoall": EXCHANGE}) as live:

        def after_backward(number: int) -> None:
            if number < ROUNDS - 1:
                live.note(BETWEEN)
            else:
                live.point = OPTIMIZER

        live.point = BACKWARD
        rank.step(after_backward)
    rank.close()
    return dict(live.peaks)
