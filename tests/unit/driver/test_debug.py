"""`ElasticTrainer.debug` and `elastic-ddp run --debug`: a run on one worker in the driver's process, with pdb."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 300.0

JOB = """
import sys
import numpy as np, torch
import elastic_ddp as ed

PAUSES = set(sys.argv[1:])
rng = np.random.default_rng(0)
DATA = {"x": rng.normal(size=(64, 8)).astype(np.float32), "y": rng.integers(0, 3, 64)}
fails = False


def pauses(place):
    found = place in PAUSES
    PAUSES.discard(place)
    return found


class Rows:
    is_training = False

    def __len__(self):
        return 64

    def __getitem__(self, row):
        if self.is_training and pauses("__getitem__"):
            breakpoint()
        return {"x": DATA["x"][row], "y": DATA["y"][row]}


def transform(rows, rng):
    if pauses("transform"):
        breakpoint()
    return rows


def loss_fn(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def train(run):
    model = run.prepare(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 3)))
    run.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    Rows.is_training = True
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(loss_fn(model, batch))
            step.optimize()
        if step.index == 2 and pauses("train"):
            breakpoint()
        if fails:
            raise ValueError("bad luck")
    run.evaluate(loss_fn, Rows())


def trainer(name, data, **options):
    settings = {"name": name, "storage": "runs", "steps": 6, "global_batch_size": 16, "micro_batch_size": 4}
    return ed.ElasticTrainer(train, data, settings, **options)


if __name__ == "__main__":
    result = trainer("first", Rows()).fit()
    print("RESULT", result.status, result.steps, result.weights_sha256, sorted(result.metrics))
    fails = True
    trainer("second", DATA, transform=transform).fit()
"""


@pytest.mark.slow
def test_pdb_works_in_a_debugged_run_which_keeps_its_bits_raises_errors_as_they_are_and_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "debugged_job.py").write_text(JOB)
    terminal, of_process = os.openpty()
    command = [sys.executable, "-m", "elastic_ddp.cli.main", "run", "--debug", "debugged_job.py"]
    process = subprocess.Popen(
        [*command, "__getitem__", "train", "transform"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        stdin=of_process,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        os.write(terminal, b"p sorted(locals())\nc\np step.index\nc\np len(rows['x'])\nc\n")
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        os.close(of_process)
        os.close(terminal)
    for printed in ("['row', 'self']", "2", "4"):
        assert f"(Pdb) {printed}\n" in output, output
    assert output.rstrip().endswith("ValueError: bad luck") and "TrainFunctionError" not in output
    # With DETAIL, torch 2.13 crashes in DDP's logger on gloo.
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL acts as INFO" in output

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["job"])
    monkeypatch.syspath_prepend(tmp_path)
    job = importlib.import_module("debugged_job")
    calm = job.trainer("first", job.Rows()).debug()
    assert (calm.status, calm.steps, calm.uri) == ("finished", 6, "")
    assert f"RESULT finished 6 {calm.weights_sha256} ['validation_loss']" in output
    assert not [path for path in tmp_path.glob("runs/**/*") if path.is_file()]
