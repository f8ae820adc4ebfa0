"""`WorkerContext`: a worker's identity and its place in the cluster."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elastic_ddp.rendezvous.members import Member


@dataclass(frozen=True)
class WorkerContext:
    """The identity of a worker and the resources of its node."""

    member: Member
    device: torch.device
    node_resources: dict[str, float]
    """All resources of the worker's node, by Ray's names."""
