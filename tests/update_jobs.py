"""Jobs whose steps have several updates, and plain PyTorch loops that do the same on one worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import mse_loss

from tests.fsdp_workers import Fault, Striker
from tests.inside_run import member_of

STEPS = 6
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "global_batch_size": 12,
    "micro_batch_size": 2,
    "max_workers": 3,
    "checkpoint": {"every_steps": 1000},
    "log_every_steps": 1,
}


def noise_of(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(100 * x)


class Job:
    """Models, optimizers by name, and the updates of a step: names of optimizers, or of methods, with their losses."""

    def __init__(self) -> None:
        self.model: Any = None
        self.optimizers: dict[str, torch.optim.Optimizer] = {}

    def updates(self, step: int) -> list[tuple[str, str]]:
        """Returns the name of each update of a step, and of its loss."""
        raise NotImplementedError


class GAN(Job):
    """Generator and critic take turns; both have a normalization, and the critic has dropout."""

    norm, dropout = nn.BatchNorm1d, 0.2
    critic_updates = 1

    def __init__(self) -> None:
        super().__init__()
        generator = nn.Sequential(nn.Linear(3, 5), self.norm(5), nn.Tanh(), nn.Linear(5, 3))
        critic = nn.Sequential(nn.Linear(3, 6), self.norm(6), nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(6, 1))
        self.model = nn.ModuleDict({"generator": generator, "critic": critic})

    def make_optimizers(self) -> None:
        model = self.model
        self.optimizers = {
            "critic": torch.optim.Adam(model["critic"].parameters(), lr=0.02),
            "generator": torch.optim.AdamW(model["generator"].parameters(), lr=0.01),
        }

    def updates(self, step: int) -> list[tuple[str, str]]:
        return [("critic", "critic_loss")] * self.critic_updates + [("generator", "generator_loss")]

    def critic_loss(self, x: torch.Tensor) -> torch.Tensor:
        model, fake = self.model, self.model["generator"](noise_of(x)).detach()
        real, made = model["critic"](x), model["critic"](fake)
        return bce(real, torch.ones_like(real)) + bce(made, torch.zeros_like(made))

    def generator_loss(self, x: torch.Tensor) -> torch.Tensor:
        made = self.model["critic"](self.model["generator"](noise_of(x)))
        return bce(made, torch.ones_like(made))


class FiveCriticUpdates(GAN):
    critic_updates = 5


class BrokenGAN(GAN):
    """One worker computes a wrong gradient of the generator from step 3 on."""

    def make_optimizers(self) -> None:
        super().make_optimizers()
        self.model["generator"][0].weight.register_hook(self._flip)

    @staticmethod
    def _flip(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.001 if strike.run.position.step >= 3 and _is_worker(1) else gradient


class ActorCritic(Job):
    """A shared body belongs to the critic; the actor's loss does not reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"body": nn.Linear(3, 6), "critic": nn.Linear(6, 1), "actor": nn.Linear(6, 2)})

    def make_optimizers(self) -> None:
        critic = [*self.model["body"].parameters(), *self.model["critic"].parameters()]
        self.optimizers = {
            "critic": torch.optim.SGD(critic, lr=0.05, momentum=0.9),
            "actor": torch.optim.Adam(self.model["actor"].parameters(), lr=0.02),
        }

    def updates(self, step: int) -> list[tuple[str, str]]:
        return [("critic", "critic_loss"), ("actor", "actor_loss")]

    def critic_loss(self, x: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.model["critic"](self.model["body"](x).tanh())[:, 0], x.sum(1))

    def actor_loss(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.model["body"](x).tanh()
        advantage = (x.sum(1) - self.model["critic"](hidden)[:, 0]).detach()
        chosen = self.model["actor"](hidden).log_softmax(1)[:, 0]
        return -(chosen * advantage).mean()


class SAM(Job):
    """Sharpness-aware minimization: the gradient is taken where the loss is larger."""

    norm = nn.BatchNorm1d

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 6), self.norm(6), nn.Tanh(), nn.Linear(6, 1))

    def make_optimizers(self) -> None:
        self.optimizers = {"descent": torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)}

    def updates(self, step: int) -> list[tuple[str, str]]:
        return [("ascent", "loss"), ("descent", "loss")]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.model(x)[:, 0], x.sum(1).sin())

    def ascent(self) -> None:
        parameters = list(self.model.parameters())
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=0.05 / (float(norm) + 1e-12))


class Twins(Job):
    """Two parts of equal size, which one worker trains in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})

    def make_optimizers(self) -> None:
        self.optimizers = {name: torch.optim.SGD(self.model[name].parameters(), lr=0.1) for name in "ab"}

    def updates(self, step: int) -> list[tuple[str, str]]:
        return [(name, f"{name}_loss") for name in ("ba" if _is_worker(1) else "ab")]

    def a_loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.model["a"](x).mean()  # type: ignore[no-any-return]

    def b_loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.model["b"](x).mean()  # type: ignore[no-any-return]


JOBS: dict[str, type[Any]] = {"gan": GAN, "five": FiveCriticUpdates, "actor-critic": ActorCritic, "sam": SAM}


class PlainGAN(GAN):
    norm, dropout = nn.Identity, 0.0


class PlainFive(FiveCriticUpdates):
    norm, dropout = nn.Identity, 0.0


class PlainSAM(SAM):
    norm = nn.Identity


PLAIN: dict[str, type[Any]] = {"gan": PlainGAN, "five": PlainFive, "actor-critic": ActorCritic, "sam": PlainSAM}
"""Without dropout, whose seeds are those of a run, and without statistics, which a run adds up over micro-batches."""


@dataclass(frozen=True)
class Plan:
    """A run of a job."""

    job: type[Any]
    faults: tuple[Fault, ...] = ()
    schedules: bool = False
    is_weighted: bool = False
    evaluates: bool = False
    """Whether each block ends with an evaluation, in which workers strike at the place `evaluation`."""
    gathers: bool = False
    """Whether the first update gathers rows, which the others use."""
    nan_in: str = ""
    """The update of step 2 in which one micro-batch has a loss that is NaN."""
    changes: dict[str, Any] = field(default_factory=dict)
    metrics: Path | None = None
    """Where rank 0 writes the metrics of each step."""


strike = Striker([])


def set_up(plan: Plan, worker: int) -> None:
    import elastic_ddp.worker.evaluation as evaluation

    global strike
    evaluation.evaluate = _evaluate
    strike = Striker([fault for fault in plan.faults if fault.worker == worker])
    torch.manual_seed(0)


def train(run: Any, plan: Plan) -> None:
    """The training function."""
    strike.run = run
    job = plan.job()
    job.model = run.prepare(job.model)
    job.make_optimizers()
    for name, optimizer in job.optimizers.items():
        optimizer.register_step_pre_hook(partial(_strike, f"before {name} steps"))
        optimizer.register_step_post_hook(partial(_strike, f"after {name} has stepped"))
        run.prepare(optimizer)
        if plan.schedules:
            run.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7))
            run.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), every="epoch")
    for step in run.steps():
        with step:
            for number, (name, loss) in enumerate(job.updates(step.index)):
                with step.update(job.optimizers.get(name) or getattr(job, name), name=name) as update:
                    for batch in step.micro_batches():
                        if plan.gathers and number == 0:
                            step.gather(x=batch["x"].clone())
                        elif plan.gathers:
                            assert torch.equal(step.gathered["x"][2 * update.current :][:2], batch["x"])
                        value = getattr(job, loss)(batch["x"])
                        if plan.nan_in == name and step.index == 2 and batch["x"][0, 0] > 0:
                            value = value * torch.nan
                        strike(f"in update {number}")
                        step.backward(value, weight=batch["x"].square().sum() if plan.is_weighted else None)
                        batch["x"].zero_()  # a batch is the training function's own
                strike(f"after update {number}")
            if plan.evaluates:
                run.evaluate(lambda *_: torch.zeros(()), "held-out")
        if plan.metrics is not None and run.rank == 0 and step.outcome.failure is None:
            with plan.metrics.open("a") as file:
                print(step.index, step.skipped, step.loss, sorted(step.metrics.items()), file=file)


def _evaluate(generation: Any, *_: Any) -> float:
    """Stands for an evaluation, which is one collective."""
    strike("evaluation")
    generation.group.vote()
    return 1.0


def _is_worker(number: int) -> bool:
    return bool(member_of(strike.run).id == f"worker-{number}")


def _strike(place: str, *_: Any) -> None:
    strike(place)


def train_plainly(job: Any, batches: list[torch.Tensor]) -> None:
    """Trains on one micro-batch in each step with PyTorch alone."""
    job.make_optimizers()
    for index, x in enumerate(batches):
        saved: list[torch.Tensor] = []
        for name, loss in job.updates(index):
            job.model.zero_grad()
            getattr(job, loss)(x).backward()
            if name not in job.optimizers:
                saved = [parameter.detach().clone() for parameter in job.model.parameters()]
                with torch.no_grad():
                    getattr(job, name)()
                continue
            with torch.no_grad():
                for parameter, value in zip(job.model.parameters(), saved, strict=False):
                    parameter.copy_(value)
            job.optimizers[name].step()
