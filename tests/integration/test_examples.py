"""The programs in `examples/` that end in seconds do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    """One Ray for all examples: each would take five seconds to start its own."""
    cluster = Cluster(
        True, head_node_args={"num_cpus": 4, "include_dashboard": False, "object_store_memory": 2 * 10**8}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield
    cluster.shutdown()


def run_example(name: str, folder: Path, *options: str) -> str:
    """Runs an example in a folder of its own. Returns what it prints to standard output."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_contrastive_example_learns_the_classes_without_labels(tmp_path: Path) -> None:
    output = run_example("contrastive.py", tmp_path)
    found = re.search(r"accuracy of the nearest key ([\d.]+)", output)
    assert found and float(found[1]) > 0.9, output


def test_the_fp16_example_skips_overflowing_steps_and_learns(tmp_path: Path) -> None:
    output = run_example("fp16.py", tmp_path)
    found = re.search(r"error rate ([\d.]+); (\d+) steps skipped; loss scale (\d+)", output)
    assert found, output
    error, skipped, scale = (float(text) for text in found.groups())
    assert error < 0.1 and skipped >= 1 and scale == 65536 / 2**skipped


def test_the_example_of_image_classification_recognizes_digits_and_keeps_the_best_checkpoint(tmp_path: Path) -> None:
    output = run_example("image_classification.py", tmp_path, "--epochs", "2")
    found = re.search(r"top-1 accuracy ([\d.]+), top-3 accuracy ([\d.]+)\n", output)
    assert found, output
    assert float(found.group(1)) > 0.6 and float(found.group(2)) > 0.85
    assert 1 <= len(list((tmp_path / "runs/digits/checkpoints/commits").iterdir())) <= 3


def test_the_example_of_a_longer_schedule_continues_at_half_its_learning_rate(tmp_path: Path) -> None:
    output = run_example("longer_schedule.py", tmp_path, "--workers", "1")
    found = re.findall(r"(\d+) steps: loss [\d.]+; learning rate ([\d.]+) in the middle, ([\d.]+) at the end", output)
    assert found == [("100", "0.0050", "0.0000"), ("200", "0.0050", "0.0000")], output


def test_the_elastic_form_of_the_plain_ddp_example_learns(tmp_path: Path) -> None:
    output = run_example("elastic.py", tmp_path)
    found = re.search(r"loss ([\d.]+)", output)
    assert found and float(found[1]) < 0.5, output


def test_the_text_example_fine_tunes_a_model_of_transformers(tmp_path: Path) -> None:
    output = run_example("finetune_text.py", tmp_path, "--workers", "1")
    found = re.search(r"(\d+) texts; error rate ([\d.]+)", output)
    assert found and int(found[1]) > 300 and float(found[2]) < 0.1, output
