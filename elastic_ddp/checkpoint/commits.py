"""What a commit is, as bytes, and which commits are kept: pure functions of plain values.

commits/N.json                       the manifest of the commit at step N, written last and only once
step=N/attempt=<hex>/state.json      the skeleton of the state
step=N/attempt=<hex>/<name>.safetensors   the tensors of one top-level component
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from elastic_ddp.errors import CheckpointError

FORMAT: Final = 1
MAX_OBJECT_BYTES = 2**48
MAX_STEP = 10**15

_MANIFEST = re.compile(r"commits/(0|[1-9][0-9]{0,15})\.json")
_ATTEMPT = re.compile(r"(step=(0|[1-9][0-9]{0,15})/attempt=[0-9a-f]{32})/.+")
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class StoredObject(BaseModel):
    """One object of a commit and what has to be found in it."""

    model_config = _STRICT

    key: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._=/-]+$", max_length=500)]
    size: Annotated[int, Field(ge=0, le=MAX_OBJECT_BYTES)]
    sha256: Sha256

    def check(self, data: bytes) -> None:
        """CheckpointError unless these are the bytes that were committed."""
        if len(data) != self.size:
            raise CheckpointError(f"{self.key} has {len(data)} bytes; {self.size} were committed")
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise CheckpointError(f"{self.key} does not have the checksum it was committed with")


class Commit(BaseModel):
    """A complete checkpoint: the state before step `step`, and the facts recorded with it."""

    model_config = _STRICT

    format: Literal[1] = FORMAT
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    attempt: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    objects: Annotated[tuple[StoredObject, ...], Field(min_length=1, max_length=1_000_000)]
    record: dict[str, Any]
    """Free facts of the caller, such as the epoch, the generation and hashes; JSON."""

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        """Everything lies in the attempt's own folder, so a manifest can neither read nor delete anything else."""
        names = [item.key.removeprefix(self.prefix + "/") for item in self.objects]
        for item, name in zip(self.objects, names, strict=True):
            if name == item.key or not name or "/" in name or name.startswith("."):
                raise ValueError(f"the object {item.key!r} is not in {self.prefix}")
        if len(set(names)) != len(names):
            raise ValueError("an object is listed twice")
        return self

    @property
    def key(self) -> str:
        return manifest_key(self.step)

    @property
    def prefix(self) -> str:
        """The folder of the objects."""
        return attempt_prefix(self.step, self.attempt)

    def to_bytes(self) -> bytes:
        """The manifest: JSON with a checksum of itself; the record has passed `check_record`."""
        body = json.loads(_canonical(self.model_dump()))
        return json.dumps({**body, "sha256": _sha256(body)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, key: str, data: bytes) -> Commit:
        """The commit whose manifest is stored under `key`.

        Raises:
            CheckpointError: torn, changed, of another format or of another step.
        """
        try:
            body = json.loads(data)
            if not isinstance(body, dict):
                raise ValueError("it is not an object")
            version = body.get("format")
            if type(version) is not int or version != FORMAT:  # True would pass for 1
                raise ValueError(f"its format is {version!r:.20}, this version reads {FORMAT}")
            if body.pop("sha256", None) != _sha256(body):
                raise ValueError("it does not have its own checksum")
            commit = cls.model_validate_json(_canonical(body))
        except ValidationError as error:
            what = "; ".join(mistake["msg"] for mistake in error.errors(include_url=False, include_input=False))
            raise CheckpointError(f"{key} is not the manifest of a commit: {what}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{key} is not the manifest of a commit: {error}") from error
        if commit.key != key:
            raise CheckpointError(f"{key} is the manifest of another step, {commit.step}")
        return commit

    def check_present(self, sizes: Mapping[str, int]) -> None:
        """CheckpointError unless every object is among these, by key, with its size."""
        for item in self.objects:
            if item.key not in sizes:
                raise CheckpointError(f"{item.key} is missing")
            if sizes[item.key] != item.size:
                raise CheckpointError(f"{item.key} has {sizes[item.key]} bytes; {item.size} were committed")


def check_record(record: dict[str, Any], *, step: int) -> None:
    """CheckpointError unless the record is a dict of values that JSON has."""
    try:
        _canonical(record)
    except (RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the record of step {step} cannot be kept as JSON: {error}; give str, int, finite float, bool, None, "
            "lists and dicts"
        ) from error


def manifest_key(step: int) -> str:
    return f"commits/{step}.json"


def attempt_prefix(step: int, attempt: str) -> str:
    return f"step={step}/attempt={attempt}"


def committed_steps(keys: Iterable[str]) -> list[int]:
    """The steps that have a manifest, newest first."""
    return sorted((int(match[1]) for match in map(_MANIFEST.fullmatch, keys) if match), reverse=True)


def superseded(keys: Iterable[str], kept: Iterable[Commit], *, step: int) -> tuple[list[str], list[str]]:
    """What can go once step `step` is committed: manifests, and then folders of attempts.

    Those are manifests older than every kept commit, and attempts up to this step that no kept commit and no
    remaining manifest stands for: older commits, and what dead savers left. Nothing of a later step is touched:
    another saver may be at work there.
    """
    keys, kept = list(keys), list(kept)
    oldest = min(commit.step for commit in kept)
    steps = committed_steps(keys)
    manifests = [manifest_key(old) for old in steps if old < oldest]
    # A manifest that cannot be read does not say which attempt is its own: its step is left alone until it is old.
    unreadable = {newer for newer in steps if newer >= oldest} - {commit.step for commit in kept}
    live = {commit.prefix for commit in kept}
    attempts = {
        match[1]
        for match in map(_ATTEMPT.fullmatch, keys)
        if match and int(match[2]) <= step and int(match[2]) not in unreadable and match[1] not in live
    }
    return manifests, sorted(attempts)


def _canonical(body: Any) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _sha256(body: Any) -> str:
    return hashlib.sha256(_canonical(body).encode()).hexdigest()
