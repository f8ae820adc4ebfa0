"""`CUBLAS_WORKSPACE_CONFIG` may be removed after the first call of cuBLAS: bits stay the same."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu

TRAIN = """
import hashlib, os, sys, torch
from elastic_ddp.distributed import cublas
device = torch.device(sys.argv[1])
os.environ[cublas.VARIABLE] = cublas.VALUE
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).to(device)
removed = sys.argv[2] == "removed" and cublas.settle(device, model)
optimizer = torch.optim.AdamW(model.parameters())
streams = [torch.cuda.Stream() for _ in range(2)] if device.type == "cuda" else [None, None]
wait = torch.cuda.synchronize if device.type == "cuda" else int
for step in range(20):
    x = torch.randn(64, 512, device=device)
    wait()
    with torch.cuda.stream(streams[step % 2]), torch.autocast(device.type, torch.bfloat16, enabled=step % 3 > 0):
        model(x).square().mean().backward()
    wait()
    optimizer.step()
    optimizer.zero_grad()
weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
print(removed, hashlib.sha256(weights).hexdigest())
"""


def trained(device: str, mode: str) -> tuple[str, str]:
    """Returns whether the variable was removed, and the hash of the weights, of a process of its own."""
    output = subprocess.run([sys.executable, "-c", TRAIN, device, mode], capture_output=True, text=True, check=True)
    removed, weights = output.stdout.split()
    return removed, weights


@pytest.mark.skipif(hasattr(torch.backends.cuda, "cublas_workspace_size"), reason="this torch keeps the size")
def test_bits_are_the_same_with_the_variable_and_after_its_removal() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("it is removed on Hopper only")
    kept, removed, again = trained("cuda", "kept"), trained("cuda", "removed"), trained("cuda", "removed")
    assert kept[1] == removed[1] == again[1]
    assert (kept[0], removed[0], again[0]) == ("False", "True", "True")
