"""Plain DDP: `torchrun --nproc-per-node 2 examples/plain_ddp.py`. examples/elastic.py is the same job, elastic."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Rings(Dataset):
    """Points in the plane; the label is the ring around the origin that the point lies in."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        x = torch.randn(2, generator=torch.Generator().manual_seed(row))
        return {"x": x, "y": x.norm().long().clamp(max=3)}


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def train() -> None:
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(Rings())
    loader = DataLoader(Rings(), batch_size=32, sampler=sampler, num_workers=1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "rings.pt")
        print(f"loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
