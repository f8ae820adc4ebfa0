"""The facts in a commit's record that are read again, and their form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic_ddp.errors import format_validation_error

Count = Annotated[int, Field(ge=0, le=2**62, strict=True)]
Seconds = Annotated[float, Field(ge=0, le=2**37)]
"""Up to the largest date that Python's `datetime` takes, in seconds since 1970."""


@dataclass(frozen=True)
class Measurement:
    """A value of a metric, and the number of steps done when it was measured."""

    value: Annotated[float, Field(strict=True, allow_inf_nan=False)]
    step: Count


class Facts(BaseModel):
    """The facts that this package reads from a record. Any of them may be missing; others are allowed."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    time: Seconds = 0.0
    """When the commit was made, in seconds since 1970."""
    epoch: Count = 0
    samples: Count = 0
    samples_sha256: str = ""
    verified_step: Count | None = None
    """Steps done in the newest state before it that all ranks were found to hold alike."""
    metrics: dict[str, Measurement] = {}
    """The newest value of each metric."""
    losses: Count = 0
    """Worker failures in the whole run."""
    watched_s: Seconds = 0.0
    """The time over which failures were counted."""


def check_facts(record: str) -> None:
    """Raises ValueError unless the facts in a record, given as JSON, have their form."""
    try:
        Facts.model_validate_json(record)
        return
    except ValidationError as error:
        reason = format_validation_error(error, with_fields=True)
    raise ValueError(f"its record is malformed: {reason}")


def identity_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what identifies the run of a commit: settings by name, and the fingerprint of its data."""
    settings = record.get("identity")
    data = {"data": record["data"]} if "data" in record else {}
    return {**settings, **data} if isinstance(settings, dict) else data


def different_runs(record: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the names of the settings in which the runs of two commits differ, if both records have them."""
    mine, theirs = identity_of(record), identity_of(other)
    return [name for name in mine if name in theirs and mine[name] != theirs[name]]
