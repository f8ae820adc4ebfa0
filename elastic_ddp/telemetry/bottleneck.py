"""The bottleneck of a run and a setting to try: a pure function of the newest measurements of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median_low
from typing import Literal

from elastic_ddp.telemetry.events import PhasesMeasured
from elastic_ddp.telemetry.phases import MIN_STEPS

SLOW = 1.2
"""Times the median: the work of a slow rank."""
_MIN_DELAY = 0.05
"""Share of a step that a slow rank must cost. Below it, twice as much of next to nothing is not worth a look."""
_DATA, _COMMUNICATION, _OTHER = 0.15, 0.25, 0.25
"""Shares of a step from which on they bound it. Data is read ahead, so to wait for it at all means that it is late."""

_IN_OTHER = {
    "code": (
        "your code between steps takes",
        "Do it less often, or in a thread; `elastic-ddp stacks RUN` shows where it is.",
    ),
    "evaluation": ("evaluations take", "Evaluate less often, or on fewer rows."),
    "commit": (
        "waiting for commits takes",
        "Commit less often (checkpoint.every_steps, checkpoint.every_seconds), or set checkpoint.max_overhead.",
    ),
}
"""The words for each part of the phase `other`, and the advice."""

Kind = Literal["data", "communication", "compute", "other", "slow rank", "slow node"]


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """What bounds a run."""

    kind: Kind
    reason: str
    """One sentence with the figures."""
    advice: str
    """One sentence with what to try."""
    ranks: list[int] = field(default_factory=list)
    """The slow ranks, or the ranks whose data is later than on other ranks."""
    node: str | None = None
    """The address of the slow node."""


def find_bottleneck(measured: PhasesMeasured, nodes: Sequence[str] = ()) -> Bottleneck | None:
    """Returns what bounds a run, or None if fewer than `MIN_STEPS` steps are measured.

    Args:
        measured: what `phases.newest` returns.
        nodes: the address of each rank's node, if they are known.
    """
    step_s = sum(measured.phases.values())
    if measured.num_steps < MIN_STEPS or not step_s:
        return None
    share = {phase: seconds / step_s for phase, seconds in measured.phases.items()}
    slow = _slow_ranks(measured, step_s)
    # While one rank waits for data, the others wait for it, and read ahead: the next one to wait is another.
    late = max(measured.late_data_s, measured.phases["data"]) / step_s
    communication = share["communication"] - (late - share["data"])
    is_data_late = bool(slow) and _slowest_phase(measured) == "data"
    if slow and not is_data_late:
        return _slowness(measured, slow, nodes if len(nodes) == len(measured.work_s) else [])
    if is_data_late or (late >= _DATA and 2 * late >= communication):
        return _late_data(late, slow)
    if communication >= _COMMUNICATION:
        return _communication(measured, communication)
    if share["other"] >= _OTHER:
        return _other(measured)
    compute = sum(share[phase] for phase in ("forward", "backward", "optimizer"))
    return Bottleneck(
        kind="compute",
        reason=f"forward, backward and optimizer take {_percent(compute)} of the time.",
        advice='Try more workers (max_workers), model.compile(), or, in a new run, precision = "bf16".',
    )


def _other(measured: PhasesMeasured) -> Bottleneck:
    """Names the largest part of the phase `other`."""
    parts = {"code": measured.phases["other"] - sum(measured.in_other.values()), **measured.in_other}
    largest = max(parts, key=lambda part: parts[part])
    what, advice = _IN_OTHER[largest]
    share = parts[largest] / sum(measured.phases.values())
    return Bottleneck(kind="other", reason=f"{what} {_percent(share)} of the time.", advice=advice)


def _late_data(share: float, slow: list[int]) -> Bottleneck:
    reason = f"ranks wait for data {_percent(share)} of the time."
    if slow:
        reason = f"waiting for data takes {_percent(share)} of the time on {_ranks(slow)}; other ranks wait meanwhile."
    return Bottleneck(
        kind="data",
        reason=reason,
        advice="Raise data.concurrency, or data.num_cpus_per_task if the nodes have spare CPUs; or make the "
        "transform cheaper.",
        ranks=slow,
    )


def _slow_ranks(measured: PhasesMeasured, step_s: float) -> list[int]:
    """Returns the ranks that are slow; none if communication costs more, even on the slowest rank."""
    work_s = measured.micro_batch_s
    usual_s = median_low(work_s)
    delays_s = [(own_s - usual_s) * count for own_s, count in zip(work_s, measured.micro_batches, strict=True)]
    if measured.slowest.get("communication", 0.0) >= max(_COMMUNICATION * step_s, *delays_s):
        return []
    return [
        rank
        for rank, (own_s, delay_s) in enumerate(zip(work_s, delays_s, strict=True))
        if own_s >= SLOW * usual_s and delay_s >= _MIN_DELAY * step_s
    ]


def _of_others(measured: PhasesMeasured, phase: str) -> float:
    """Returns the seconds of a phase, averaged over all ranks but the slowest."""
    num_ranks = len(measured.work_s)
    return (measured.phases[phase] * num_ranks - measured.slowest.get(phase, 0.0)) / max(1, num_ranks - 1)


def _slowest_phase(measured: PhasesMeasured) -> str:
    """Returns the phase in which the slowest rank differs most from the others."""
    work = [phase for phase in measured.phases if phase != "communication"]
    return max(work, key=lambda phase: measured.slowest.get(phase, 0.0) - _of_others(measured, phase))


def _slowness(measured: PhasesMeasured, slow: list[int], nodes: Sequence[str]) -> Bottleneck:
    work_s = measured.micro_batch_s
    factor = max(work_s[rank] for rank in slow) / median_low(work_s)
    figures = f"takes {factor:.1f} times the median, most of all in {_slowest_phase(measured)}"
    node = nodes[slow[0]] if nodes and len({nodes[rank] for rank in slow}) == 1 else None
    place = ""
    advice = "Look for code that does more on some ranks, and for other programs on the same cores."
    if node is not None and len(set(nodes)) > 1:
        advice = f"Look for other programs on the node; `elastic-ddp drain RUN {node}` moves its workers away."
        if len(slow) > 1 and slow == [rank for rank, other in enumerate(nodes) if other == node]:
            reason = f"node {node} is slow: the work of its ranks {figures}."
            return Bottleneck(kind="slow node", reason=reason, advice=advice, ranks=slow, node=node)
        place = f" (node {node})"
    reason = f"the work of {_ranks(slow)}{place} {figures}."
    return Bottleneck(kind="slow rank", reason=reason, advice=advice, ranks=slow, node=node)


def _communication(measured: PhasesMeasured, share: float) -> Bottleneck:
    counts = measured.micro_batches
    least = min(counts)
    most = max(counts)
    reason = f"communication that the backward does not hide takes {_percent(share)} of the time."
    advice = (
        "Try fewer workers (`elastic-ddp resize`); with DDP a larger ddp.bucket_cap_mb, with FSDP fsdp.sharding = "
        '"grad_op"; or, in a new run, a larger global_batch_size or micro_batch_size, or reduction = "native".'
    )
    if 1 - fmean(counts) / most >= share / 2:  # most of it is waiting for ranks with more micro-batches
        reason = f"ranks have {least} or {most} micro-batches, and wait for each other {_percent(share)} of the time."
        advice = (
            f"Use a number of workers that divides the {sum(counts)} micro-batches of a step (`elastic-ddp resize`)."
        )
    return Bottleneck(kind="communication", reason=reason, advice=advice)


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:5]))}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
