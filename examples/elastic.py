"""The job of examples/plain_ddp.py on one or two workers, which may come and go: `python examples/elastic.py`."""

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

import elastic_ddp as ed


class Rings(Dataset):
    """Points in the plane; the label is the ring around the origin that the point lies in."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        x = torch.randn(2, generator=torch.Generator().manual_seed(row))
        return {"x": x, "y": x.norm().long().clamp(max=3)}


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def train(run: ed.Run) -> None:
    model = run.prepare(torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)))
    run.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(loss_fn(model, batch))
            step.optimize()
    if run.rank == 0:
        print(f"loss {step.loss:.3f}")


if __name__ == "__main__":
    config = {"name": "rings", "epochs": 3, "max_workers": 2}
    config |= {"global_batch_size": 64, "micro_batch_size": 32}
    result = ed.ElasticTrainer(train, data=Rings(), config=config).fit()
    print(f"weights {result.weights_sha256}; {result.uri} has the commits")
