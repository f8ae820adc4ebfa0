"""The programs in `examples/` that end in seconds do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


OPTIONS = {
    "contrastive.py": ["--workers", "1"],
    "fp16.py": [],
    "image_classification.py": ["--workers", "1", "--epochs", "2"],
    "longer_schedule.py": ["--workers", "1"],
    "elastic.py": [],
    "finetune_text.py": ["--workers", "1"],
}
CHAOS = {"elastic.py", "fp16.py", "longer_schedule.py"}
"""Examples that `make test` has no time for."""
Outputs = dict[str, Future[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of all examples; their runs have different names."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def outputs(folder: Path, request: pytest.FixtureRequest) -> Iterator[Outputs]:
    """What each example prints. They run on one Ray, two at a time: most of their time is the start of a run."""
    tests = {item.name for item in request.session.items}  # those of `make test`, or of `make chaos`, too
    names = [name for name in OPTIONS if name not in CHAOS or test_the_elastic_form_learns.__name__ in tests]
    node = {"num_cpus": 8, "include_dashboard": False, "object_store_memory": 4 * 10**8}
    cluster = Cluster(True, head_node_args=node)

    def run(name: str) -> str:
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / name), *OPTIONS[name]],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {name: pool.submit(run, name) for name in names}
    cluster.shutdown()


def test_the_contrastive_example_learns_the_classes_without_labels(outputs: Outputs) -> None:
    output = outputs["contrastive.py"].result()
    found = re.search(r"accuracy of the nearest key ([\d.]+)", output)
    assert found and float(found[1]) > 0.9, output


@pytest.mark.chaos
def test_the_fp16_example_skips_overflowing_steps_and_learns(outputs: Outputs) -> None:
    output = outputs["fp16.py"].result()
    found = re.search(r"error rate ([\d.]+); (\d+) steps skipped; loss scale (\d+)", output)
    assert found, output
    error, skipped, scale = (float(text) for text in found.groups())
    assert error < 0.1 and skipped >= 1 and scale == 65536 / 2**skipped


def test_the_example_of_image_classification_recognizes_digits_and_keeps_the_best_checkpoint(
    folder: Path, outputs: Outputs
) -> None:
    output = outputs["image_classification.py"].result()
    found = re.search(r"top-1 accuracy ([\d.]+), top-3 accuracy ([\d.]+)\n", output)
    assert found, output
    assert float(found.group(1)) > 0.6 and float(found.group(2)) > 0.85
    assert 1 <= len(list((folder / "runs/digits/checkpoints/commits").iterdir())) <= 3


@pytest.mark.chaos
def test_the_example_of_a_longer_schedule_continues_at_half_its_learning_rate(outputs: Outputs) -> None:
    output = outputs["longer_schedule.py"].result()
    found = re.findall(r"(\d+) steps: loss [\d.]+; learning rate ([\d.]+) in the middle, ([\d.]+) at the end", output)
    assert found == [("100", "0.0050", "0.0000"), ("200", "0.0050", "0.0000")], output


@pytest.mark.chaos
def test_the_elastic_form_learns(outputs: Outputs) -> None:
    output = outputs["elastic.py"].result()
    found = re.search(r"loss ([\d.]+)", output)
    assert found and float(found[1]) < 0.5, output


def test_the_text_example_fine_tunes_a_model_of_transformers(outputs: Outputs) -> None:
    output = outputs["finetune_text.py"].result()
    found = re.search(r"(\d+) texts; error rate ([\d.]+)", output)
    assert found and int(found[1]) > 300 and float(found[2]) < 0.1, output
