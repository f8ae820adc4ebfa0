"""What a worker knows of itself when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from elastic_ddp.rendezvous.members import Member


@dataclass(frozen=True)
class WorkerContext:
    """Who a worker is and where it runs."""

    member: Member
    device: torch.device
    node_resources: dict[str, float]
    """Of the node it runs on, all together."""
    actor: Any = None
    """Its own, where workers are not resized in place: the rendezvous kills it if it presumes it dead, and Ray Train
    starts the group again."""
