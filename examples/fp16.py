"""Trains a classifier of two spirals in float16 with dynamic loss scaling: `python examples/fp16.py`.

The loss scale starts at 65,536. Steps whose gradients overflow float16 are skipped and halve it, so the first steps of
this run are skipped. On GPUs that have bfloat16, `precision = "bf16"` is simpler.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import elastic_ddp as ed


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        linear, act = torch.nn.Linear, torch.nn.GELU
        super().__init__(linear(2, 64), act(), linear(64, 64), act(), linear(64, 2))


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def error_rate(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]).argmax(1) != batch["y"]).float().mean()


def train(run: ed.Run) -> None:
    model = run.prepare(Net())
    run.prepare(torch.optim.AdamW(model.parameters(), lr=3e-3))
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                # A sum of losses, as some models have it: its gradients overflow float16 at the first loss scale.
                step.backward(1000 * loss_fn(model, batch))
            step.optimize()
    run.evaluate(error_rate, f"{run.config.storage}/spirals/held-out", name="error_rate")


def write_spirals(file: Path, num_rows: int, seed: int) -> None:
    """Writes points of two spirals: `x` of shape (rows, 2), and `y`, the spiral of each."""
    random = np.random.default_rng(seed)
    y = np.arange(num_rows) % 2
    turn = random.uniform(0.25, 1.5, num_rows)
    angle = 2 * np.pi * turn + np.pi * y
    x = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) + random.normal(scale=0.03, size=(num_rows, 2))
    file.parent.mkdir(parents=True, exist_ok=True)
    column = pa.FixedSizeListArray.from_arrays(pa.array(x.astype(np.float32).reshape(-1)), 2)
    pq.write_table(pa.table({"x": column, "y": y}), file, row_group_size=512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default="runs", type=Path, help="folder of all runs")
    parser.add_argument("--name", default="fp16", help="name of the run; the same name resumes it")
    parser.add_argument("--workers", default=2, type=int)
    parser.add_argument("--precision", default="fp16", choices=("fp32", "bf16", "fp16"))
    options = parser.parse_args()
    data = options.storage.absolute() / "spirals"
    if not data.exists():
        write_spirals(data / "held-out/part.parquet", 1024, seed=1)
        write_spirals(data / "train/part.parquet", 4096, seed=0)
    config = ed.RunConfig(
        name=options.name,
        storage=str(options.storage.absolute()),
        steps=200,
        global_batch_size=128,
        micro_batch_size=32,
        max_workers=options.workers,
        precision=options.precision,
        clip_grad_norm=1000.0,  # of the gradients without the loss scale
    )
    result = ed.ElasticTrainer(train, data=str(data / "train"), config=config).fit()
    error, scale = result.metrics["error_rate"], result.metrics.get("loss_scale", 1.0)
    print(f"error rate {error:.3f}; {result.summary['skipped_steps']} steps skipped; loss scale {scale:g}")


if __name__ == "__main__":
    main()
