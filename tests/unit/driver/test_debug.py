"""`ElasticTrainer.debug` and `elastic-ddp run --debug`: a run on one worker in the driver's process, with pdb."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 300.0

JOB = """
import os, sys
import numpy as np, torch
import elastic_ddp as ed

WHERE = sys.argv[1]
rng = np.random.default_rng(0)
DATA = {"x": rng.normal(size=(64, 8)).astype(np.float32), "y": rng.integers(0, 3, 64)}


class Rows:
    is_training = False

    def __len__(self):
        return 64

    def __getitem__(self, row):
        if WHERE == "__getitem__" and self.is_training:
            Rows.is_training = False
            breakpoint()
        return {"x": DATA["x"][row], "y": DATA["y"][row]}


def transform(rows, rng):
    if WHERE == "transform":
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
        if WHERE == "train" and step.index == 2:
            breakpoint()
        if WHERE == "raise" and step.index == 1:
            raise ValueError("bad luck")
    run.evaluate(loss_fn, Rows())


CONFIG = {"name": "job", "storage": "runs", "steps": 6, "global_batch_size": 16, "micro_batch_size": 4}


if __name__ == "__main__":
    data, options = (DATA, {"transform": transform}) if WHERE == "transform" else (Rows(), {})
    result = ed.ElasticTrainer(train, data, CONFIG, **options).fit()
    print("RESULT", result.status, result.steps, result.weights_sha256, sorted(result.metrics), result.uri == "")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("debug")
    (folder / "job.py").write_text(JOB)
    return folder


def run_debug(folder: Path, where: str, commands: str = "", **environment: str) -> str:
    """Runs the job with --debug, with its input at a terminal that types `commands`. Returns its output."""
    terminal, of_process = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "elastic_ddp.cli.main", "run", "--debug", "job.py", where],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **environment},
        stdin=of_process,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        os.write(terminal, commands.encode())
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        os.close(of_process)
        os.close(terminal)
    return output


def result_in(output: str) -> str:
    return next((line for line in output.splitlines() if "RESULT" in line), output).partition("RESULT ")[2]


@pytest.fixture(scope="module")
def calm(folder: Path) -> str:
    """The output of a run without a breakpoint."""
    return run_debug(folder, "nowhere", TORCH_DISTRIBUTED_DEBUG="DETAIL")


@pytest.mark.slow
def test_a_debugged_run_finishes_with_its_metrics_and_saves_nothing(folder: Path, calm: str) -> None:
    result = result_in(calm)
    assert result.startswith("finished 6 ") and result.endswith(" ['validation_loss'] True"), calm
    assert not [path for path in folder.glob("runs/**/*") if path.is_file()]


@pytest.mark.slow
def test_torch_s_debug_level_detail_acts_as_info_with_a_warning(calm: str) -> None:
    """With DETAIL, torch 2.13 crashes in DDP's logger on gloo."""
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL acts as INFO" in calm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "value", "printed"),
    [("train", "step.index", "2"), ("__getitem__", "sorted(locals())", "['row', 'self']")],
)
def test_pdb_prints_a_variable_at_a_breakpoint_and_the_run_keeps_its_bits(
    folder: Path, calm: str, where: str, value: str, printed: str
) -> None:
    output = run_debug(folder, where, f"p {value}\nc\n")
    assert f"(Pdb) {printed}\n" in output
    assert result_in(output) == result_in(calm)


@pytest.mark.slow
def test_pdb_works_in_a_transform_and_an_error_of_the_training_function_is_raised_as_it_is(folder: Path) -> None:
    output = run_debug(folder, "transform", "p len(rows['x'])\n!globals().update(WHERE='raise')\nc\n")
    assert "(Pdb) 4\n" in output
    assert output.rstrip().endswith("ValueError: bad luck") and "TrainFunctionError" not in output
