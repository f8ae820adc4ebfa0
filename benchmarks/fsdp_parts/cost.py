"""Part `cost`: what mirrors add to a step, and for how long ranks wait for the vote at its end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from gpu_parts.host import timed

from elastic_ddp import RunConfig
from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.process_group import ProcessGroup
from fsdp_parts.model import GLOBAL_BATCH_SIZE, make_blocks, width_of
from fsdp_parts.ranks import Ranks, run_ranks

WORLD_SIZE = 2
WARMUP_STEPS = 3
TURN_STEPS = 10
VOTE = [(ProcessGroup, "vote")]


def measure_cost(parameters: int, turns: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns seconds per step with and without mirrors, in turns, and of the vote in it.

    The vote counts on the rank that waits less: the other one also waits for its peer to arrive.
    """
    ranks = run_ranks(WORLD_SIZE, _measure_rank, parameters, turns)
    figures: dict[str, Any] = {"steps_per_turn": TURN_STEPS}
    for mirror in (True, False):
        name = "on" if mirror else "off"
        own = [[turn for turn in rank if turn["mirror"] == mirror] for rank in ranks]
        vote_s = [
            list(map(min, zip(*votes, strict=True)))
            for votes in zip(*([turn["vote_s"] for turn in rank] for rank in own), strict=True)
        ]
        figures[name] = {
            "step_s": statistics.median(second for turn in own[0] for second in turn["step_s"]),
            "step_s_by_turn": [statistics.median(turn["step_s"]) for turn in own[0]],
            "vote_s": statistics.median(second for turn in vote_s for second in turn),
            "vote_and_peer_s": statistics.median(second for rank in own for turn in rank for second in turn["vote_s"]),
        }
        step_ms, vote_ms = (1000 * figures[name][key] for key in ("step_s", "vote_s"))
        say(f"cost, mirrors {name}: a step takes {step_ms:.1f} ms, of which the vote {vote_ms:.2f} ms")
    figures["ratio"] = figures["on"]["step_s"] / figures["off"]["step_s"]
    by_turn = zip(figures["on"]["step_s_by_turn"], figures["off"]["step_s_by_turn"], strict=True)
    figures["ratios_by_turn"] = [on / off for on, off in by_turn]
    return figures


def _measure_rank(place: Callable[[int], Assignment], parameters: int, turns: int) -> list[dict[str, Any]]:
    """Returns the seconds of each step, and of the vote in it, for each turn."""
    figures = []
    for number in range(2 * turns):
        mirror = number % 4 in (0, 3)  # on, off, off, on: neither side is always the first
        fsdp: Any = {"mirror": mirror}
        config = RunConfig(
            name="cost",
            storage="memory://cost",
            steps=WARMUP_STEPS + TURN_STEPS,
            global_batch_size=GLOBAL_BATCH_SIZE,
            micro_batch_size=GLOBAL_BATCH_SIZE // WORLD_SIZE,
            max_workers=WORLD_SIZE,
            strategy="fsdp",
            fsdp=fsdp,
        )
        rank = Ranks(place(number + 1), config, make_blocks(parameters), width_of(parameters))
        step_s, vote_s = [], []
        with timed(VOTE) as seconds:
            for _ in range(WARMUP_STEPS + TURN_STEPS):
                seconds.clear()
                begin = time.perf_counter()
                rank.step()
                step_s.append(time.perf_counter() - begin)
                vote_s.append(sum(map(sum, seconds.values())))
        rank.close()
        figures.append({"mirror": mirror, "step_s": step_s[WARMUP_STEPS:], "vote_s": vote_s[WARMUP_STEPS:]})
    return figures
