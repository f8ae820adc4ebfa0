"""The programs in `examples/` do what they say. `test_make_commands.py` runs two more."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


OPTIONS = {
    "contrastive.py": ["--workers", "1"],
    "elastic.py": [],
    "finetune_text.py": ["--workers", "1"],
    "fp16.py": ["--workers", "1"],
    "fsdp.py": ["--steps", "20"],
    "gan.py": [],
    "image_classification.py": ["--workers", "1", "--epochs", "2"],
    "longer_schedule.py": ["--workers", "1", "--steps", "20"],
    "plain_ddp.py": [],
}
ELSEWHERE = {"train.py", "gpt.py", "text.py", "survive.py"}
"""The job of `make train` with its modules, and an example that takes a minute, so that only `make chaos` runs it."""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LONG = {"contrastive.py", "fp16.py", "gan.py"}
"""Examples that only `make chaos` runs."""
Outputs = Callable[[str], Future[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of all examples; their runs have different names."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def outputs(folder: Path) -> Iterator[Outputs]:
    """What each example prints. They run on one Ray, two at a time: most of their time is the start of a run."""
    node = {"num_cpus": 8, "include_dashboard": False, "object_store_memory": 4 * 10**8}
    cluster = Cluster(True, head_node_args=node)

    def run(name: str) -> str:
        launcher = TORCHRUN if name == "plain_ddp.py" else []
        done = subprocess.run(
            [sys.executable, *launcher, str(ROOT / "examples" / name), *OPTIONS[name]],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with ThreadPoolExecutor(max_workers=2) as pool:
        output_of = functools.cache(lambda name: pool.submit(run, name))
        for name in sorted(OPTIONS.keys() - LONG):
            output_of(name)
        yield output_of
    cluster.shutdown()


@pytest.mark.chaos
def test_the_contrastive_example_learns_the_classes_without_labels(outputs: Outputs) -> None:
    output = outputs("contrastive.py").result()
    found = re.search(r"accuracy of the nearest key ([\d.]+)", output)
    assert found and float(found[1]) > 0.9, output


@pytest.mark.chaos
def test_the_fp16_example_skips_overflowing_steps_and_learns(outputs: Outputs) -> None:
    output = outputs("fp16.py").result()
    found = re.search(r"error rate ([\d.]+); (\d+) steps skipped; loss scale (\d+)", output)
    assert found, output
    error, skipped, scale = (float(text) for text in found.groups())
    assert error < 0.1 and skipped >= 1 and scale == 65536 / 2**skipped


@pytest.mark.chaos
def test_the_gan_draws_digits(outputs: Outputs) -> None:
    output = outputs("gan.py").result()
    found = re.search(r"300 steps; critic_loss ([\d.]+), generator_loss (-?[\d.]+); distance ([\d.]+)", output)
    assert found and float(found[3]) < 0.1, output


def test_the_example_of_image_classification_recognizes_digits_and_keeps_the_best_checkpoint(
    folder: Path, outputs: Outputs
) -> None:
    output = outputs("image_classification.py").result()
    found = re.search(r"top-1 accuracy ([\d.]+), top-3 accuracy ([\d.]+)\n", output)
    assert found, output
    assert float(found.group(1)) > 0.6 and float(found.group(2)) > 0.85
    assert 1 <= len(list((folder / "runs/digits/checkpoints/commits").iterdir())) <= 3


def test_the_example_of_a_longer_schedule_continues_at_half_its_learning_rate(outputs: Outputs) -> None:
    output = outputs("longer_schedule.py").result()
    found = re.findall(r"(\d+) steps: loss [\d.]+; learning rate ([\d.]+) in the middle, ([\d.]+) at the end", output)
    assert found == [("20", "0.0050", "0.0000"), ("40", "0.0050", "0.0000")], output


@pytest.mark.parametrize("name", ["plain_ddp.py", "elastic.py"])
def test_the_plain_and_the_elastic_form_learn(outputs: Outputs, name: str) -> None:
    output = outputs(name).result()
    found = re.search(r"loss ([\d.]+)", output)
    assert found and float(found[1]) < 0.5, output


def test_the_text_example_fine_tunes_a_model_of_transformers(outputs: Outputs) -> None:
    output = outputs("finetune_text.py").result()
    found = re.search(r"(\d+) texts; error rate ([\d.]+)", output)
    assert found and int(found[1]) > 300 and float(found[2]) < 0.1, output


def test_the_sharded_example_makes_a_model_of_transformers_from_its_configuration(outputs: Outputs) -> None:
    output = outputs("fsdp.py").result()
    found = re.search(r"20 steps; held-out loss ([\d.]+); weights [0-9a-f]{64}\n", output)
    assert found and float(found[1]) < 4.0, output


def test_each_example_has_a_test() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {*OPTIONS, *ELSEWHERE}
