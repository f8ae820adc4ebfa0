"""Trains a CNN with BatchNorm on images of digits, with augmentation: `python examples/image_classification.py`.

Measures top-1 and top-3 accuracy after every epoch, and keeps the checkpoint with the best top-1 accuracy.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

import elastic_ddp as ed

SIZE = 14
GLYPHS = [
    *("111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001"),
    *("111100111001111", "111100111101111", "111001001001001", "111101111101111", "111101111001111"),
]
"""The digits as 5 rows of 3 pixels."""


def make_digits(num_rows: int, seed: int) -> dict[str, np.ndarray]:
    """Returns noisy images of shape (rows, 1, 14, 14), with a digit of 10 by 6 pixels somewhere, and its label."""
    random = np.random.default_rng(seed)
    labels = random.integers(10, size=num_rows)
    images = random.normal(scale=0.3, size=(num_rows, 1, SIZE, SIZE)).astype(np.float32)
    for image, label in zip(images, labels, strict=True):
        glyph = np.array([*GLYPHS[label]], dtype=np.float32).reshape(5, 3)
        top, left = random.integers(SIZE - 10 + 1), random.integers(SIZE - 6 + 1)
        image[0, top : top + 10, left : left + 6] += np.kron(glyph, np.ones((2, 2), np.float32))
    return {"image": images, "label": labels}


def augment(rows: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Shifts every image by up to one pixel, and changes its contrast."""
    shifts = rng.integers(-1, 2, size=(len(rows["image"]), 2))
    shifted = [np.roll(image, shift, axis=(1, 2)) for image, shift in zip(rows["image"], shifts, strict=True)]
    contrast = rng.uniform(0.8, 1.25, size=(len(shifted), 1, 1, 1)).astype(np.float32)
    return {"image": np.stack(shifted) * contrast, "label": rows["label"]}


def block(channels: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2))


def accuracy(top: int) -> Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]:
    """Returns a function that measures how often the label is among the `top` largest outputs."""

    def measure(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        largest = model(batch["image"]).topk(top, dim=1).indices
        return (largest == batch["label"][:, None]).any(1).float().mean()

    return measure


def train(run: ed.Run) -> None:
    model = run.prepare(nn.Sequential(block(1, 16), block(16, 32), nn.Flatten(), nn.Linear(32 * 9, 10)))
    run.prepare(torch.optim.AdamW(model.parameters(), lr=3e-3))
    held_out = make_digits(500, seed=1)
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(nn.functional.cross_entropy(model(batch["image"]), batch["label"]))
            step.optimize()
        if step.is_last_of_epoch:
            run.evaluate(accuracy(1), held_out, name="top1")
            run.evaluate(accuracy(3), held_out, name="top3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default="runs", help="folder of all runs")
    parser.add_argument("--name", default="digits", help="name of the run; the same name resumes it")
    parser.add_argument("--epochs", default=4, type=int)
    parser.add_argument("--workers", default=2, type=int)
    options = parser.parse_args()
    config = ed.RunConfig(
        name=options.name,
        storage=options.storage,
        epochs=options.epochs,
        global_batch_size=64,
        micro_batch_size=16,
        max_workers=options.workers,
        data={"drop_last": True},  # BatchNorm gets full micro-batches only
        checkpoint={"every_epochs": 1, "keep_best": 1, "best_metric": "top1", "best_mode": "max"},
    )
    result = ed.ElasticTrainer(train, data=make_digits(2000, seed=0), config=config, transform=augment).fit()
    print(f"top-1 accuracy {result.metrics['top1']:.3f}, top-3 accuracy {result.metrics['top3']:.3f}")
    print(f"weights {result.weights_sha256}")


if __name__ == "__main__":
    main()
