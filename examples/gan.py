"""Trains a GAN that draws digits, with two optimizers that take turns in each step: `python examples/gan.py`.

If a worker dies between the two updates, the others go on with the second one.
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn.functional import one_hot, relu

import elastic_ddp as ed

GLYPHS = [
    *("111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001"),
    *("111100111001111", "111100111101111", "111001001001001", "111101111101111", "111101111001111"),
]
"""The digits as 5 rows of 3 pixels."""
DIGITS = np.array([[int(pixel) for pixel in glyph] for glyph in GLYPHS], dtype=np.float32) * 2 - 1
NOISE = 0.3


def make_rows(num_rows: int) -> dict[str, np.ndarray]:
    """Returns noisy pictures of digits, and their labels."""
    random = np.random.default_rng(0)
    labels = random.integers(10, size=num_rows)
    return {
        "image": DIGITS[labels] + random.normal(scale=NOISE, size=(num_rows, 15)).astype(np.float32),
        "label": labels,
    }


class GAN(nn.Module):
    """Draws a digit of each label, and scores pictures for each label."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8 + 10, 64), nn.ReLU(), nn.Linear(64, 15), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(15, 64), nn.LeakyReLU(0.2), nn.Linear(64, 10))

    def draw(self, label: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(len(label), 8, device=label.device)
        return self.generator(torch.cat([noise, one_hot(label, 10).float()], dim=1))  # type: ignore[no-any-return]

    def score(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        noisy = image + NOISE * torch.randn_like(image)
        return self.critic(noisy).gather(1, label[:, None])  # type: ignore[no-any-return]


def train(run: ed.Run) -> None:
    gan = run.prepare(GAN())
    critic = run.prepare(torch.optim.Adam(gan.critic.parameters(), lr=3e-3, betas=(0.5, 0.9)))
    generator = run.prepare(torch.optim.Adam(gan.generator.parameters(), lr=3e-3, betas=(0.5, 0.9)))
    for step in run.steps():
        with step:
            with step.update(critic, name="critic"):
                for batch in step.micro_batches():
                    real, label = gan.score(batch["image"], batch["label"]), batch["label"]
                    drawn = gan.score(gan.draw(label).detach(), label)
                    step.backward(relu(1 - real).mean() + relu(1 + drawn).mean())
            with step.update(generator, name="generator"):
                for batch in step.micro_batches():
                    label = batch["label"]
                    step.backward(-gan.score(gan.draw(label), label).mean())
    run.evaluate(distance, {"label": np.arange(200) % 10}, name="distance")


def distance(gan: GAN, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the mean square of the distance between what the model draws and the digits."""
    digits = torch.tensor(DIGITS, device=batch["label"].device)
    return (gan.draw(batch["label"]) - digits[batch["label"]]).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default="runs", help="folder of all runs")
    parser.add_argument("--name", default="gan", help="name of the run; the same name resumes it")
    parser.add_argument("--steps", default=300, type=int)
    parser.add_argument("--workers", default=2, type=int)
    options = parser.parse_args()
    config = ed.RunConfig(
        name=options.name,
        storage=options.storage,
        steps=options.steps,
        global_batch_size=64,
        micro_batch_size=32,
        max_workers=options.workers,
    )
    result = ed.ElasticTrainer(train, make_rows(4000), config).fit()
    losses = ", ".join(f"{name} {result.metrics[name]:.3f}" for name in ("critic_loss", "generator_loss"))
    print(f"{result.steps} steps; {losses}; distance {result.metrics['distance']:.4f}")


if __name__ == "__main__":
    main()
