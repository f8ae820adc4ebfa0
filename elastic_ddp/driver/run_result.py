"""`RunResult`: what `ElasticTrainer.fit` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class RunResult:
    """The result of `ElasticTrainer.fit` or `debug`. `summary.json` in the run's folder holds the same and more."""

    status: str
    """`"finished"` after the last step; `"left"` if the training function left its loop before it, and `"stopped"` if
    the run was stopped before it: the same command resumes such a run. A failed run raises instead."""
    steps: int
    """Optimizer steps done since the run began, in all sessions."""
    samples: int
    """Rows that these steps trained on."""
    weights_sha256: str | None
    """SHA-256 over the names, dtypes, shapes and bytes of all parameters and buffers. None for a stopped run."""
    samples_sha256: str
    """SHA-256 over the row ids of each step, in order."""
    metrics: Mapping[str, float]
    """The last value of each logged metric and each evaluation, by name."""
    best_step: int | None
    """Step of the commit with the best value of `checkpoint.best_metric`; None without that setting or a value."""
    best_metric: float | None
    """That value."""
    uri: str
    """The run's folder, `<storage>/<name>`. It holds the commits, the ledger and the summary. Empty from `debug`."""
    summary: Mapping[str, Any] = field(repr=False)
    """The content of `summary.json`: generations, failures, goodput and more."""

    @classmethod
    def from_summary(cls, summary: Mapping[str, Any], uri: str) -> RunResult:
        """Returns the result of a run with this summary and folder."""
        names = {field.name for field in fields(cls)} - {"uri", "summary"}
        values: dict[str, Any] = {name: summary.get(name) for name in names}
        return cls(uri=uri, summary=summary, **values)
