"""`Verification`: a verified step on one rank. It computes micro-batches of other ranks again, and compares bits."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import TypeAdapter

from elastic_ddp.data.micro_batches import map_tensors
from elastic_ddp.data.packing import dump, load
from elastic_ddp.distributed.state_transfer import begin_transfer
from elastic_ddp.errors import PeerFailedError
from elastic_ddp.tensors.digest import digest_tensors
from elastic_ddp.worker.verdict import Check, Digests, Report, Verdict, judge, plan_checks

if TYPE_CHECKING:
    from elastic_ddp.distributed.process_group import ProcessGroup
    from elastic_ddp.distributed.strategy import Strategy

_FIRST_TAG = 1 << 20
"""The tag of a message is this number plus the number of the micro-batch."""
_REPORT = TypeAdapter(Report)


@dataclass(frozen=True)
class Dispute:
    """The micro-batches that a repeated step computes to find the rank at fault."""

    checks: tuple[Check, ...]
    former: Mapping[int, Mapping[int, Digests]]
    """The digests of each disputed micro-batch, by rank."""
    update: int = 0
    """The number of the update, if the step has several."""


class StepDisputedError(PeerFailedError):
    """Ranks computed different bits in a verified step, which is repeated. Internal."""

    def __init__(self, dispute: Dispute) -> None:
        super().__init__(f"ranks computed different bits in micro-batches {sorted(dispute.former)}")
        self.dispute = dispute


@dataclass
class Verification:
    """One rank's part of a verified step. Needs `reduction = "canonical"` and several ranks.

    Create it after `Strategy.begin_step`. Call `keep` for each micro-batch of this rank, `exchange` before the last
    one, `record` for each micro-batch of another rank, and `conclude` after the reduction and before any change of the
    state.

    Attributes:
        number: how many steps were verified before.
        checks: the micro-batches that several ranks compute.
        nodes: the nodes of all ranks, after `conclude`.
        verified: steps done in the newest verified state that this rank knows; after `conclude`, that any rank knows.
        dispute: set if the step is repeated to find the rank at fault.
        update: the number of the update, if the step has several.
        act_on: called by `conclude` with the verdict. May raise.
    """

    group: ProcessGroup
    strategy: Strategy
    node: str
    number: int
    dispute: Dispute | None = None
    verified: int | None = None
    update: int = 0
    act_on: Callable[[Verdict, Verification], None] = lambda verdict, verification: None
    checks: tuple[Check, ...] = field(init=False)
    nodes: tuple[str, ...] = ()
    _digests: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    _kept: dict[int, tuple[list[int], np.ndarray]] = field(default_factory=dict)
    """By micro-batch that other ranks compute again: the sizes of the parts of `packing.dump`, and the joined parts."""

    def __post_init__(self) -> None:
        owned = [[m for m in owned if m < self.strategy.num_leaves] for owned in self.strategy.ranges]
        planned = plan_checks(self.number, owned, self.group.assignment.mirror_offset)
        self.checks = planned if self.dispute is None else self.dispute.checks
        own = [check.micro_batch for check in self.checks if check.owner == self.group.rank]
        self.strategy.watch(own, self.record)

    def keep(self, micro_batch: int, rows: Any) -> None:
        """Copies the rows of a micro-batch of this rank, before the training function can change them."""
        if any(check.micro_batch == micro_batch and check.owner == self.group.rank for check in self.checks):
            parts = dump(map_tensors(torch.Tensor.cpu, rows, lambda value: value.to("cpu")))
            self._kept[micro_batch] = [len(part) for part in parts], np.concatenate(parts)

    def exchange(self) -> Iterator[tuple[int, Any]]:
        """Yields the micro-batches of other ranks that this rank computes, and their rows. Collective."""
        group = self.group
        rank = group.rank
        sizes = {micro_batch: sizes for micro_batch, (sizes, _) in self._kept.items()}
        own = json.dumps([self.dispute is not None, sizes]).encode()
        told = [json.loads(each) for each in group.all_gather_bytes(own)]
        if len({has_dispute for has_dispute, _ in told}) > 1:  # a rank failed before it knew of the dispute
            self.checks = ()
            self.dispute = None
        sizes_of = {int(m): sizes for _, each in told for m, sizes in each.items()}
        contents = {micro_batch: content for micro_batch, (_, content) in self._kept.items()}
        messages = []
        for check in self.checks:
            if rank in check.checkers and rank != check.owner:
                contents[check.micro_batch] = np.empty(sum(sizes_of[check.micro_batch]), np.uint8)
            if rank in (check.owner, *check.checkers):
                data = contents[check.micro_batch].data
                tag = _FIRST_TAG + check.micro_batch
                messages += begin_transfer(data, group, tag=tag, source=check.owner, ranks=check.checkers)
        group.finish(messages)
        self._kept.clear()
        for check in self.checks:
            for _ in range(check.repeats if rank in check.checkers else 0):
                ends = np.cumsum(sizes_of[check.micro_batch])[:-1]
                # Each in memory of its own: the training function may change it, and on a CPU the bits of a matrix
                # product depend on how the memory is aligned.
                parts = np.split(contents[check.micro_batch], ends)
                rows = load([torch.from_numpy(part).clone().numpy() for part in parts])
                to_device = methodcaller("to", group.device)
                yield check.micro_batch, map_tensors(to_device, rows, to_device)

    def record(self, micro_batch: int, digests: torch.Tensor) -> None:
        """Records the digests of a micro-batch's gradient, of each trained parameter."""
        self._digests.setdefault(micro_batch, []).append(digests)

    def conclude(self, state: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
        """Acts on the verdict, which is the same on all ranks. Collective.

        Raises:
            StepDisputedError: ranks computed different bits. The step must be repeated to find the rank at fault.
        """
        digests = {m: [tuple(each.tolist()) for each in found] for m, found in self._digests.items()}
        summed = digest_tensors([tensor for _, tensor in sorted(state.items())])
        of_state = hashlib.sha256(summed.cpu().numpy().tobytes()).hexdigest()
        own = Report(digests, of_state, self.node, _machine(self.group.device), self.verified)
        reports = [_REPORT.validate_json(each) for each in self.group.all_gather_bytes(_REPORT.dump_json(own))]
        self.nodes = tuple(each.node for each in reports)
        self.verified = max((each.verified for each in reports if each.verified is not None), default=None)
        former = {} if self.dispute is None else self.dispute.former
        verdict = judge(self.checks, reports, former, names)
        if verdict.disputed:
            found = {
                check.micro_batch: {
                    rank: report.digests[check.micro_batch][0]
                    for rank, report in enumerate(reports)
                    if check.micro_batch in report.digests
                }
                for check in verdict.disputed
            }
            raise StepDisputedError(Dispute(verdict.disputed, found, self.update))
        self.act_on(replace(verdict, text=verdict.text + _places(verdict, reports)), self)


def _places(verdict: Verdict, reports: Sequence[Report]) -> str:
    """Returns the nodes of the suspected ranks, and descriptions of their machines if these differ."""
    ranks = verdict.suspects if verdict.at_fault is None else (verdict.at_fault,)
    places = [f"rank {rank} on {reports[rank].node}" for rank in ranks]
    others = sorted({report.machine for report in reports})
    if len(others) > 1:
        places = [f"{place}, {reports[rank].machine}" for place, rank in zip(places, ranks, strict=True)]
        places.append(f"all machines: {'; '.join(others)}")
    return f" ({'; '.join(places)})" if ranks else ""


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{name}, torch {torch.__version__}"
