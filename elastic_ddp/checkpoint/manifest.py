"""The format of a commit: its manifest, and the keys of its objects. Pure functions of plain values.

commits/N.json                            manifest of the commit at step N, written last and only once
set-aside/N-<hex>.json                    manifest of an attempt that failed verification; its objects stay
set-aside/N-unknown-<hex>.json            the same, for a manifest that does not name its attempt
step=N/attempt=<hex>/state.json           skeleton: all of the state but its tensors
step=N/attempt=<hex>/<rank>-<k>.bin       blocks of tensors, as raw bytes
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, StringConstraints, model_validator
from zlib_ng import zlib_ng

from elastic_ddp.errors import CheckpointError
from elastic_ddp.storage.folder import Entry
from elastic_ddp.tensors.state_tree import dtype_of

FORMAT: Final = 3
ALIGNMENT = 64
"""Blocks begin at multiples of this many bytes, as tensors do in `host_memory`: one read can fill several tensors."""

SKELETON = "state.json"

_MANIFEST = re.compile(r"commits/(0|[1-9][0-9]{0,15})\.json")
_SET_ASIDE = re.compile(r"set-aside/(0|[1-9][0-9]{0,15})-(?:([0-9a-f]{32})|unknown-[0-9a-f]{32})\.json")
_OBJECT = re.compile(r"/[A-Za-z0-9_-][A-Za-z0-9._-]*")
_ATTEMPT = re.compile(r"(step=(0|[1-9][0-9]{0,15})/attempt=[0-9a-f]{32})/.+")


class StoredObject(BaseModel, frozen=True):
    """One object of a commit."""

    key: str
    size: int


class Skeleton(StoredObject):
    """The object that holds all of the state but its tensors."""

    crc32: int

    def check(self, data: bytes) -> None:
        """Raises CheckpointError unless these are the committed bytes."""
        if len(data) != self.size or zlib_ng.crc32(data) != self.crc32:
            raise CheckpointError(f"{self.key}: its {len(data)} bytes do not match the committed size and checksum")


class StoredBlock(BaseModel, frozen=True):
    """A box of a tensor and the place of its bytes: row-major order, padded with zeros to `ALIGNMENT`."""

    offsets: tuple[int, ...]
    """First index in each dimension of the tensor."""
    sizes: tuple[int, ...]
    object: int
    """Index into the commit's `objects`."""
    start: int
    """Offset in the object, in bytes."""
    crc32: int
    """Checksum of the block's bytes, including the padding."""


class StoredTensor(BaseModel, frozen=True):
    """A full tensor of the state, however many ranks held or wrote it."""

    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[StoredBlock, ...]

    def num_bytes(self, block: StoredBlock) -> int:
        """Returns the size of one of the tensor's blocks, without the padding."""
        return math.prod(block.sizes) * dtype_of(self.dtype).itemsize


class Commit(BaseModel, frozen=True):
    """A complete checkpoint: the state before step `step`, and the facts recorded with it."""

    format: Literal[3] = FORMAT
    step: int
    attempt: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    state: Skeleton
    objects: tuple[StoredObject, ...]
    """The objects that hold the bytes of tensors."""
    tensors: dict[str, StoredTensor]
    """By component and path in the state, for example `model.head.weight`."""
    record: dict[str, Any]
    """JSON facts, among them epoch, generation and hashes."""

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        """All objects lie in the attempt's own folder: a manipulated manifest can neither read nor delete others."""
        for item in self.all_objects:
            if not _OBJECT.fullmatch(item.key.removeprefix(self.prefix)):
                raise ValueError(f"the object {item.key!r:.200} is not in {self.prefix}")
        return self

    @property
    def key(self) -> str:
        return manifest_key(self.step)

    @property
    def prefix(self) -> str:
        """The folder of the commit's objects."""
        return attempt_prefix(self.step, self.attempt)

    @property
    def all_objects(self) -> tuple[StoredObject, ...]:
        return (*self.objects, self.state)

    @property
    def num_bytes(self) -> int:
        return sum(item.size for item in self.all_objects)

    def to_bytes(self) -> bytes:
        """Returns the manifest: JSON with a checksum of itself.

        Raises:
            CheckpointError: the record is not JSON.
        """
        try:
            # Parsed in between: keys that are not text become text, and may then sort differently.
            text = _canonical(json.loads(_canonical(self.model_dump())))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the record of step {self.step} is not JSON: {error}; use str, int, finite float, bool, None, lists "
                "and dicts"
            ) from error
        return f'{text[:-1]},"sha256":"{_sha256(text)}"}}'.encode()

    @classmethod
    def from_bytes(cls, key: str, data: bytes) -> Commit:
        """Returns the commit whose manifest is stored under `key`.

        Raises:
            CheckpointError: the manifest is torn, changed, of another format, or of another step.
        """
        try:
            body = json.loads(data)
            if not isinstance(body, dict):
                raise ValueError("it is not a JSON object")
            version = body.get("format")
            if version != FORMAT:
                raise ValueError(f"its format is {version!r:.20}; this version reads {FORMAT}")
            checksum = body.pop("sha256", None)
            text = _canonical(body)
            if checksum != _sha256(text):
                raise ValueError("its checksum does not match")
            commit = cls.model_validate_json(text)
        except ValueError as error:
            raise CheckpointError(f"{key} is not a valid manifest: {error}") from error
        if commit.key != key:
            raise CheckpointError(f"{key} is the manifest of another step, {commit.step}")
        return commit

    def check_present(self, listing: Mapping[str, Entry]) -> None:
        """Raises CheckpointError unless a listing, by key, has every object with its size."""
        for item in self.all_objects:
            entry = listing.get(item.key)
            if entry is None:
                raise CheckpointError(f"{item.key} is missing")
            if entry.size != item.size:
                raise CheckpointError(f"{item.key} has {entry.size} bytes; {item.size} were committed")


def padded(num_bytes: int) -> int:
    """Returns the size of a block in its object: `num_bytes`, rounded up to `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def manifest_key(step: int) -> str:
    return f"commits/{step}.json"


def set_aside_key(step: int, attempt: str | None, manifest: bytes) -> str:
    """Returns the key under which a bad manifest is set aside; `attempt` is None if the manifest does not name it."""
    return f"set-aside/{step}-{attempt or f'unknown-{hashlib.sha256(manifest).hexdigest()[:32]}'}.json"


def attempt_prefix(step: int, attempt: str) -> str:
    return f"step={step}/attempt={attempt}"


def committed_steps(keys: Iterable[str]) -> list[int]:
    """Returns the steps that have a manifest among these keys, newest first."""
    return sorted((int(match[1]) for match in map(_MANIFEST.fullmatch, keys) if match), reverse=True)


def parse_set_aside(key: str) -> tuple[int, str | None] | None:
    """Returns step and attempt from the key of a manifest that was set aside; None for any other key."""
    match = _SET_ASIDE.fullmatch(key)
    return (int(match[1]), match[2]) if match else None


def attempt_of(key: str) -> tuple[int, str] | None:
    """Returns step and folder of the attempt that an object belongs to; None for any other key."""
    match = _ATTEMPT.fullmatch(key)
    return (int(match[2]), match[1]) if match else None


def _canonical(body: Any) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
