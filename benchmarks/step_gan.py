"""A convolutional GAN for `steps.py --job gan`: two optimizers take turns, and plain DDP wraps two modules."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.functional import interpolate, relu
from torch.nn.parallel import DistributedDataParallel

NOISE = 64


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NOISE, 256 * 16)
        self.rest = nn.Sequential(
            *_up(256, 256), *_up(256, 128), *_up(128, 64), nn.Conv2d(64, 1, 3, padding=1), nn.Tanh()
        )

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(noise).view(-1, 256, 4, 4))  # type: ignore[no-any-return]


class Critic(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*_down(1, 64), *_down(64, 128), *_down(128, 256), nn.Flatten(), nn.Linear(256 * 16, 1))


def _up(channels: int, out: int) -> list[nn.Module]:
    return [nn.Upsample(scale_factor=2), nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(8, out), nn.ReLU()]


def _down(channels: int, out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, 4, stride=2, padding=1), nn.GroupNorm(8, out), nn.LeakyReLU(0.2)]


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Generator(), Critic()


def images_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns a picture of 32 by 32 pixels for each window of 64 bytes."""
    pixels = batch["window"][:, :64].float().view(-1, 1, 8, 8) / 128 - 1
    return interpolate(pixels, size=(32, 32))


def critic_loss(generator: Any, critic: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    real = images_of(batch)
    with torch.no_grad():
        fake = generator(torch.randn(len(real), NOISE))
    return relu(1 - critic(real)).mean() + relu(1 + critic(fake)).mean()


def generator_loss(generator: Any, critic: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return -critic(generator(torch.randn(len(batch["window"]), NOISE))).mean()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=2e-4, betas=(0.5, 0.999))


class PlainGAN:
    """The steps of a careful user of plain DDP: each module is wrapped, and the other one is called past DDP."""

    def __init__(self) -> None:
        gan = GAN()
        self._generator, self._critic = (DistributedDataParallel(each) for each in (gan.generator, gan.critic))
        self._optimizers = [optimizer_of(gan.critic), optimizer_of(gan.generator)]

    def step(self, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Makes a step of two updates. Returns the last loss."""
        generator, critic = self._generator, self._critic
        for number, optimizer in enumerate(self._optimizers):
            trained = generator if number else critic
            critic.module.requires_grad_(not number)
            for batch in batches:
                with trained.no_sync() if batch is not batches[-1] else nullcontext():
                    if number:
                        loss = generator_loss(generator, critic.module, batch)
                    else:
                        loss = critic_loss(generator.module, critic, batch)
                    (loss / len(batches)).backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss
