"""Ranges in the traces of a training function's own profiler."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
from elastic_ddp.worker.trace_range import TraceRange

model, step, phase = torch.nn.Linear(64, 64), TraceRange(on_gpu=False), TraceRange(on_gpu=False)
names = []
options = {"schedule": torch.profiler.schedule(wait=0, warmup=0, active=1, repeat=6)}
with torch.profiler.profile(**options, on_trace_ready=lambda profile: names.append(profile.key_averages())) as profile:
    for index in range(6):
        step.switch(f"step {index}")
        phase.switch("forward")
        model(torch.randn(8, 64)).sum().backward()
        phase.switch("other")
        profile.step()  # ends a session, and begins the next one
step.switch(None), phase.switch(None)
assert all(f"step {index}" in {each.key for each in of_step} for index, of_step in enumerate(names)), names
print("done")
"""


def test_ranges_survive_a_profiler_that_begins_a_session_as_it_ends_one() -> None:
    """Filled with garbage, freed memory that torch still uses ends the process."""
    environment = {**os.environ, "MALLOC_PERTURB_": "165", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout[-5:]) == (0, "done\n"), done.stderr
