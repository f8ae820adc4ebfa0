"""Contrastive learning with a momentum encoder and a queue of keys (MoCo): `python examples/contrastive.py`.

Half of each row depends on its class, the other half is noise. Two views of a row differ in the noise, so the encoder
learns the classes without labels. The queue and the momentum encoder change once per step, from the global batch.
"""

import argparse
import copy
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import nn

import elastic_ddp as ed


class MoCo(nn.Module):
    def __init__(self, num_keys: int = 512, width: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, width))
        self.momentum_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(num_keys, width)))
        self.register_buffer("labels", torch.full((num_keys,), -1))  # only for the evaluation
        self.register_buffer("end", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss of a batch and its keys, of shape (rows, width)."""
        queries = F.normalize(self.encoder(new_view(x)))
        keys = F.normalize(self.momentum_encoder(new_view(x)))
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.T], 1)
        return F.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long, device=x.device)), keys

    @torch.no_grad()
    def update(self, keys: torch.Tensor, labels: torch.Tensor, momentum: float = 0.99) -> None:
        """Appends the keys of a global batch to the queue, and moves the momentum encoder."""
        places = (self.end + torch.arange(len(keys), device=keys.device)) % len(self.queue)
        self.queue[places], self.labels[places] = keys, labels
        self.end.copy_((self.end + len(keys)) % len(self.queue))
        for average, newest in zip(self.momentum_encoder.parameters(), self.encoder.parameters(), strict=True):
            average.lerp_(newest, 1 - momentum)


def new_view(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:, :8], 5 * torch.randn_like(x[:, 8:])], 1)


def accuracy(model: MoCo, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the share of rows whose nearest key has their label."""
    nearest = (F.normalize(model.encoder(batch["x"])) @ model.queue.T).argmax(1)
    return (model.labels[nearest] == batch["y"]).float().mean()


def train(run: ed.Run) -> None:
    model = run.prepare(MoCo())
    run.prepare(torch.optim.Adam(model.encoder.parameters(), lr=1e-2))
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                loss, keys = model(batch["x"])
                step.gather(keys=keys, labels=batch["y"])
                step.backward(loss)
            step.optimize()
            model.update(**step.gathered)
    run.evaluate(accuracy, f"{run.config.storage}/classes/held-out", name="accuracy")


def write_classes(file: Path, num_rows: int, seed: int) -> None:
    """Writes rows of ten classes: `x` of shape (rows, 16), and `y`, the class of each."""
    random = np.random.default_rng(seed)
    y = random.integers(10, size=num_rows)
    of_class = np.random.default_rng(0).normal(size=(10, 8))[y] + 0.2 * random.normal(size=(num_rows, 8))
    x = np.concatenate([of_class, 5 * random.normal(size=(num_rows, 8))], axis=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    column = pa.FixedSizeListArray.from_arrays(pa.array(x.astype(np.float32).reshape(-1)), 16)
    pq.write_table(pa.table({"x": column, "y": y}), file, row_group_size=512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default="runs", type=Path, help="folder of all runs")
    parser.add_argument("--name", default="contrastive", help="name of the run; the same name resumes it")
    parser.add_argument("--workers", default=2, type=int)
    options = parser.parse_args()
    data = (storage := options.storage.absolute()) / "classes"
    if not data.exists():
        write_classes(data / "held-out/part.parquet", 1024, seed=2)
        write_classes(data / "train/part.parquet", 4096, seed=1)
    batches = {"steps": 200, "global_batch_size": 128, "micro_batch_size": 32, "max_workers": options.workers}
    config = ed.RunConfig(name=options.name, storage=str(storage), **batches)
    result = ed.ElasticTrainer(train, data=str(data / "train"), config=config).fit()
    print(f"accuracy of the nearest key {result.metrics['accuracy']:.3f}; weights {result.weights_sha256}")


if __name__ == "__main__":
    main()
