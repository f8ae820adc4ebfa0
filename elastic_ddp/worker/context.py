"""What a worker knows of itself when it starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elastic_ddp.rendezvous.members import Member


@dataclass(frozen=True)
class WorkerContext:
    """Who a worker is and where it runs."""

    member: Member
    device: torch.device
    node_resources: dict[str, float]
    """Of the node it runs on, all together."""
