"""`ddp.comm_hook`: torch's own hooks compress the gradients of the native reduction."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.worker.step import Step
from tests.ranks import run_ranks
from tests.unit.rank_steps import config_of, run_steps

HOOKS = (None, "bf16", "fp16", "powersgd")
STEPS = 12


class WideModel(torch.nn.Sequential):
    """PowerSGD leaves small matrices as they are."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32), torch.nn.Linear(32, 4))


def train(group: ProcessGroup, config: RunConfig) -> dict[str, Any]:
    torch.manual_seed(7)

    def body(step: Step, model: Any) -> None:
        for batch in step.micro_batches():
            step.backward(model(batch["x"]).square().mean())
        step.optimize()

    return run_steps(group, config, WideModel(), body)


def with_each_hook(group: ProcessGroup) -> list[dict[str, Any]]:
    """One generation with each hook, and another with the last one."""
    return [
        train(group, config_of(reduction="native", steps=STEPS, ddp={"comm_hook": hook}))
        for hook in (*HOOKS, HOOKS[-1])
    ]


def test_each_hook_trains_as_without_compression_and_starts_anew_in_a_generation() -> None:
    by_rank = run_ranks(2, with_each_hook)
    assert by_rank[0] == by_rank[1]
    plain, *compressed, another_generation = by_rank[0]
    assert another_generation == compressed[-1]
    for hook, result in zip(HOOKS[1:], compressed, strict=True):
        assert result["losses"] == pytest.approx(plain["losses"], rel=0.1, abs=0.01), hook
        assert result["weights"] != plain["weights"], f"{hook} compresses"


@pytest.mark.parametrize("changes", [{"reduction": "canonical"}, {"strategy": "fsdp"}])
def test_a_hook_without_effect_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r'ddp.comm_hook=.bf16. has no effect.*use strategy="ddp" and reduction="nat'):
        config_of(ddp={"comm_hook": "bf16"}, **changes)


def test_an_unknown_hook_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"comm_hook.*'bf16', 'fp16' or 'powersgd'"):
        config_of(reduction="native", ddp={"comm_hook": "topk"})
