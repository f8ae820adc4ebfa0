"""Decides from digests which rank is at fault if ranks compute different bits. Without torch.

In a verified step each rank computes a micro-batch of another rank again. The gradient of a micro-batch has the same
bits on every rank, so one comparison detects a wrong value. If two ranks differ, the step is repeated, and all ranks
compute the micro-batch several times. The rank with which no other rank agrees is at fault. A rank whose state differs
from the state of all other ranks is at fault, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Digests = tuple[int, ...]
"""Digests of the gradient of each trained parameter, in the model's order, for one computation of a micro-batch."""
REPEATS = 3
"""How often each rank computes a disputed micro-batch."""
MAX_DISPUTED = 2
"""Disputed micro-batches that a repeated step computes. A rank at fault is in at most two pairs."""


@dataclass(frozen=True)
class Check:
    """A micro-batch that ranks compute besides its owner."""

    micro_batch: int
    owner: int
    checkers: tuple[int, ...]
    repeats: int = 1


@dataclass(frozen=True)
class Verdict:
    """The conclusion of a verified step, alike on all ranks. All fields are empty if all bits are equal."""

    disputed: tuple[Check, ...] = ()
    """Micro-batches that all ranks must compute again to find the rank at fault. The step is repeated."""
    at_fault: int | None = None
    suspects: tuple[int, ...] = ()
    """Ranks that may be at fault, if the digests do not show a single rank."""
    text: str = ""

    @property
    def is_clean(self) -> bool:
        return not (self.disputed or self.text)


@dataclass
class Report:
    """One rank's findings in a verified step."""

    digests: dict[int, list[Digests]] = field(default_factory=dict)
    """By micro-batch, the digests of each computation on the rank."""
    state: str = ""
    """The digest of parameters, buffers and optimizer state, as the step began."""
    node: str = ""
    """The address of the rank's node."""
    machine: str = ""
    """The device and the version of torch, which may differ between nodes."""
    verified: int | None = None
    """Steps done in the newest verified state that the rank knows."""


def plan_checks(number: int, owned: Sequence[Sequence[int]], offset: int) -> tuple[Check, ...]:
    """Returns the checks of a verified step: each rank computes one micro-batch of another one.

    Args:
        number: how many verified steps there were before; it decides the pairs and micro-batches.
        owned: the micro-batches with rows of each rank.
        offset: the distance in ranks from a rank to a rank on another node.
    """
    world_size = len(owned)
    if world_size < 2:
        return ()
    shift = 1 + (offset - 1 + number) % (world_size - 1)
    return tuple(
        Check(own[number // max(1, world_size - 1) % len(own)], owner, ((owner + shift) % world_size,))
        for owner, own in enumerate(owned)
        if own
    )


def judge(
    checks: Sequence[Check],
    reports: Sequence[Report],
    former: Mapping[int, Mapping[int, Digests]],
    names: Sequence[str],
) -> Verdict:
    """Returns the verdict on a step from the reports of all ranks.

    Args:
        checks: the checks of the step.
        reports: the reports of each rank.
        former: if the step is repeated because of disputed micro-batches, the digests that ranks had then.
        names: the names of the parameters, in the order of `Digests`.
    """
    verdict = _judge_states([report.state for report in reports])
    if verdict.text or not former:
        disputed = tuple(check for check in checks if len(_values(check, reports)) > 1)[:MAX_DISPUTED]
        if verdict.text or not disputed:
            return verdict
        everyone = tuple(range(len(reports)))
        return Verdict(tuple(Check(check.micro_batch, check.owner, everyone, REPEATS) for check in disputed))
    verdicts = [_judge_dispute(check, reports, former[check.micro_batch], names) for check in checks]
    return next((each for each in verdicts if each.at_fault is not None), verdicts[0])


def _values(check: Check, reports: Sequence[Report]) -> set[Digests]:
    return {value for report in reports for value in report.digests.get(check.micro_batch, ())}


def _judge_states(states: Sequence[str]) -> Verdict:
    counts = Counter(states)
    if len(counts) == 1:
        return Verdict()
    common, most = counts.most_common(1)[0]
    others = tuple(rank for rank, state in enumerate(states) if state != common)
    if most == len(states) - 1 > 1:
        text = f"rank {others[0]} has different parameters, buffers or optimizer state than all other ranks"
        return Verdict(at_fault=others[0], text=text)
    suspects = tuple(range(len(states)))
    text = f"ranks {list(suspects)} hold different parameters, buffers or optimizer state"
    return Verdict(suspects=suspects, text=text)


def _judge_dispute(
    check: Check, reports: Sequence[Report], former: Mapping[int, Digests], names: Sequence[str]
) -> Verdict:
    """Judges a micro-batch that all ranks have computed again."""
    what = f"the gradient of micro-batch {check.micro_batch}"
    found = [report.digests[check.micro_batch] for report in reports]
    unsteady = tuple(rank for rank, values in enumerate(found) if len(set(values)) > 1)
    steady = Counter(values[0] for values in found if len(set(values)) == 1)
    common, most = steady.most_common(1)[0] if steady else ((), 0)
    wrong = tuple(rank for rank, values in enumerate(found) if set(values) != {common})
    differing = next((value for values in found for value in values if value != common), common)
    if not wrong:  # it went away, but the ranks remember who had which bits
        differing = next(value for value in former.values() if value != common)
        where = _first_difference(common, differing, names)
        once = tuple(rank for rank, value in former.items() if value != common)
        if len(once) == 1:
            return Verdict(at_fault=once[0], text=f"rank {once[0]} computed wrong bits once, in {what}, {where}")
        return Verdict(suspects=once, text=f"ranks {list(once)} computed other bits, in {what}, {where}, and only once")
    where = _first_difference(common, differing, names)
    if len(wrong) == 1 and most == len(found) - 1 and (most > 1 or unsteady == wrong):
        times = "each time another" if unsteady else "each time"
        return Verdict(at_fault=wrong[0], text=f"rank {wrong[0]} computes wrong bits, {times}, in {what}, {where}")
    if len(found) == 2 and not unsteady:
        return Verdict(suspects=(0, 1), text=f"ranks 0 and 1 compute different bits in {what}, {where}")
    return Verdict(
        suspects=wrong,
        text=f"most ranks compute different bits in {what}, {where}. The job may be nondeterministic: an operation "
        "with warn_only, a kernel of your own, or code that depends on the rank or the time",
    )


def _first_difference(one: Digests, other: Digests, names: Sequence[str]) -> str:
    """Returns which parameter differs first in the backward, which runs from the last parameter to the first."""
    differing = [name for name, a, b in zip(names, one, other, strict=True) if a != b] if one and other else []
    if not differing:
        return "in all parameters"
    others = f", and in {len(differing) - 1} more parameters" if differing[1:] else ""
    return f"in parameter {differing[-1]}{others}"
