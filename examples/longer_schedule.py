"""Resumes a finished run with more steps and another weight decay: `python examples/longer_schedule.py`.

The first session trains to the end of a cosine. The second has twice the steps. It keeps the weights and the moments,
and its learning rate is that of the longer cosine: half of the maximum at first, and zero again at the end.
"""

import argparse

import numpy as np
import torch

import elastic_ddp as ed


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"])


def make_rows(num_rows: int, seed: int) -> dict[str, np.ndarray]:
    """Returns `x` of shape (rows, 8), and `y`, a smooth function of it."""
    x = np.random.default_rng(seed).uniform(-1, 1, (num_rows, 8)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2]}


def fit(name: str, storage: str, steps: int, weight_decay: float, workers: int) -> ed.RunResult:
    def train(run: ed.Run) -> None:
        model = run.prepare(Net())
        optimizer = run.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay))
        run.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=run.total_steps))
        for step in run.steps():
            with step:
                if step.index == run.total_steps // 2:
                    step.log(middle_lr=optimizer.param_groups[0]["lr"])
                for batch in step.micro_batches():
                    step.backward(loss_fn(model, batch))
                step.optimize()
                step.log(train_loss=step.loss, lr=optimizer.param_groups[0]["lr"])

    config = ed.RunConfig(
        name=name,
        storage=storage,
        steps=steps,
        global_batch_size=64,
        micro_batch_size=16,
        max_workers=workers,
        log_every_steps=1,
        checkpoint=ed.CheckpointConfig(
            hyperparameters="code"
        ),  # a resumed run uses those in the code, not the saved ones
    )
    return ed.ElasticTrainer(train, data=make_rows(4096, seed=0), config=config).fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default="runs", help="folder of all runs")
    parser.add_argument("--name", default="longer-schedule", help="name of the run")
    parser.add_argument("--steps", default=100, type=int, help="steps of the first session")
    parser.add_argument("--workers", default=2, type=int)
    options = parser.parse_args()
    for steps, weight_decay in ((options.steps, 0.0), (2 * options.steps, 0.1)):
        result = fit(options.name, options.storage, steps, weight_decay, options.workers)
        loss, middle, last = (result.metrics[name] for name in ("train_loss", "middle_lr", "lr"))
        print(f"{result.steps} steps: loss {loss:.4f}; learning rate {middle:.4f} in the middle, {last:.4f} at the end")


if __name__ == "__main__":
    main()
