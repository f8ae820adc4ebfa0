"""Which of torch's optimizers give the same bits wherever FSDP cuts the parameters.

The documentation lists them: keep `docs/guides/fsdp.md` in step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

ROWS = 37
ELEMENT_BY_ELEMENT: dict[str, Any] = {
    name: lambda parameters, name=name, options=options: getattr(torch.optim, name)(parameters, lr=0.01, **options)
    for name, options in {
        "ASGD": {},
        "Adadelta": {},
        "Adagrad": {},
        "Adam": {},
        "AdamW": {"amsgrad": True},
        "Adamax": {},
        "NAdam": {},
        "RAdam": {},
        "RMSprop": {"momentum": 0.9, "centered": True},
        "SGD": {"momentum": 0.9, "nesterov": True},
    }.items()
}


def _cut(tensor: torch.Tensor, num_ranks: int) -> list[torch.Tensor]:
    """Returns the shards of a tensor, each in memory of its own."""
    return [shard.clone() for shard in tensor.chunk(num_ranks)]


def _trained(make: Any, num_ranks: int, device: torch.device) -> torch.Tensor:
    """Returns parameters after five steps, of which each rank makes those of its shards."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, 27), (ROWS,), (1003, 1)]
    start = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator).to(device) for shape in shapes] for _ in range(5)]
    results: list[list[torch.Tensor]] = [[] for _ in shapes]
    for rank in range(num_ranks):
        cuts = [_cut(tensor, num_ranks) for tensor in start]
        held = [position for position, shards in enumerate(cuts) if rank < len(shards)]
        parameters = [torch.nn.Parameter(cuts[position][rank]) for position in held]
        optimizer = make(parameters)
        for step in gradients:
            for position, parameter in zip(held, parameters, strict=True):
                parameter.grad = _cut(step[position], num_ranks)[rank]
            optimizer.step()
        for position, parameter in zip(held, parameters, strict=True):
            results[position].append(parameter.detach())
    return torch.cat([torch.cat(shards).flatten() for shards in results])


def _options(name: str, foreach: bool) -> Any:
    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = ELEMENT_BY_ELEMENT[name](parameters)
        for group in optimizer.param_groups:
            group["foreach"] = foreach
        return optimizer

    return make


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
@pytest.mark.parametrize("name", ELEMENT_BY_ELEMENT)
def test_an_optimizer_that_works_element_by_element_gives_the_same_bits(name: str, foreach: bool, device: str) -> None:
    """Not in this list: `fused=True` on a CPU (its vector code rounds otherwise than its rest), Muon, LBFGS.

    They look at whole matrices, or at where the shard ends. Adafactor and Rprop do not work with shards in torch 2.13.
    """
    make, at = _options(name, foreach), torch.device(device)
    whole = _trained(make, 1, at)
    for num_ranks in (2, 3, 4, 5):
        assert torch.equal(_trained(make, num_ranks, at), whole), num_ranks


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_fused_optimizers_give_the_same_bits_on_a_gpu(name: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(parameters, lr=0.01, fused=True)  # type: ignore[no-any-return]

    at = torch.device("cuda")
    assert all(torch.equal(_trained(make, num_ranks, at), _trained(make, 1, at)) for num_ranks in (2, 3, 4, 5))
