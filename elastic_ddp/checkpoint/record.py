"""What is read again of the record of a commit, and the form that it has there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic_ddp.errors import format_validation_error

_STRICT = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

Count = Annotated[int, Field(ge=0, le=2**62)]
Seconds = Annotated[float, Field(ge=0, le=2**37)]
"""As many as a date can have since 1970, and some."""


class RecordedMetric(BaseModel):
    """A value of a metric, and the steps that the state had behind it of which it is."""

    model_config = _STRICT

    value: float
    step: Count


class Facts(BaseModel):
    """The facts of a record that somebody goes by. Each may be missing: a record is its writer's, and so is whatever
    else it holds."""

    model_config = _STRICT

    time: Seconds = 0.0
    """When it was made, in seconds since 1970."""
    epoch: Count = 0
    samples: Count = 0
    samples_sha256: str = ""
    metrics: dict[str, RecordedMetric] = {}
    """The newest of each that was known."""
    losses: Count = 0
    """Of workers, in all of the run."""
    watched_s: Seconds = 0.0
    """For which they were counted."""


def check_facts(record: str) -> None:
    """ValueError unless a record, as JSON, has those that it has in their form."""
    try:
        Facts.model_validate_json(record)
    except ValidationError as error:
        what = format_validation_error(error, with_fields=True)
    else:
        return
    raise ValueError(f"its record cannot be one of a run: {what}")


def identity_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What defines the run of a commit, as far as its record tells: settings by name, and the fingerprint of its
    data."""
    settings = record.get("identity")
    known = dict(settings) if isinstance(settings, dict) else {}
    return known | ({"data": record["data"]} if "data" in record else {})


def different_runs(record: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names of what defines a run and is not the same in the runs of two commits. What only one of both records
    knows, of versions of this package, says nothing."""
    mine, theirs = identity_of(record), identity_of(other)
    return [name for name in mine if name in theirs and mine[name] != theirs[name]]
