"""Operations whose bits on a GPU depend on more than their input, unless the package prevents it."""

from __future__ import annotations

import pytest
import torch

from elastic_ddp import torch_internals

pytestmark = pytest.mark.gpu


def test_the_norm_of_gradients_does_not_depend_on_where_they_lie() -> None:
    torch.manual_seed(0)
    values = torch.randn(1_000_003, device="cuda")
    norms = set()
    for offset in range(8):
        moved = torch.empty(values.numel() + offset, device="cuda")[offset:].copy_(values)
        norms.add(float(torch_internals.total_norm([moved, moved[:65]])))
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(
        float(values.double().square().sum().add(values[:65].double().square().sum()).sqrt())
    )


def test_the_backward_of_attention_has_the_same_bits_each_time() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 8, 12, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.use_deterministic_algorithms(True)  # as in a worker
    try:
        gradients = []
        for _ in range(5):
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
            gradients += torch.autograd.grad(out, inputs, torch.ones_like(out))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
