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
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from zlib_ng import zlib_ng

from elastic_ddp.checkpoint.record import check_facts
from elastic_ddp.config.settings import MAX_STEP
from elastic_ddp.errors import CheckpointError, format_validation_error
from elastic_ddp.storage.folder import Entry
from elastic_ddp.tensors.state_tree import dtype_of

FORMAT: Final = 3
MAX_MANIFEST_BYTES = 2**27
"""Room for 400,000 blocks."""
MAX_SKELETON_BYTES = 2**25
"""Room for 50,000 parameters under AdamW."""
MAX_OBJECT_BYTES = 2**48
MAX_BLOCK_BYTES = 2**24
"""Largest block. A block has one checksum, so it is read as a whole before any of it is used."""
ALIGNMENT = 64
"""Blocks begin at multiples of this many bytes, as tensors do in `host_memory`: one read can fill several tensors."""

SKELETON = "state.json"

_MANIFEST = re.compile(r"commits/(0|[1-9][0-9]{0,15})\.json")
_SET_ASIDE = re.compile(r"set-aside/(0|[1-9][0-9]{0,15})-(?:([0-9a-f]{32})|unknown-[0-9a-f]{32})\.json")
_ATTEMPT = re.compile(r"(step=(0|[1-9][0-9]{0,15})/attempt=[0-9a-f]{32})/.+")
_OBJECT = re.compile(r"/[A-Za-z0-9_-][A-Za-z0-9._-]*")
_STORED_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|b?float\d+(_\w+)?|complex\d+")
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)

Crc32 = Annotated[int, Field(ge=0, lt=2**32)]
Extent = Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_OBJECT_BYTES)], ...], Field(max_length=64)]


class StoredObject(BaseModel):
    """One object of a commit."""

    model_config = _STRICT

    key: str
    size: Annotated[int, Field(ge=0, le=MAX_OBJECT_BYTES)]


class Skeleton(StoredObject):
    """The object that holds all of the state but its tensors."""

    size: Annotated[int, Field(ge=0, le=MAX_SKELETON_BYTES)]
    crc32: Crc32

    def check(self, data: bytes) -> None:
        """Raises CheckpointError unless these are the committed bytes."""
        if len(data) != self.size or zlib_ng.crc32(data) != self.crc32:
            raise CheckpointError(f"{self.key}: its {len(data)} bytes do not match the committed size and checksum")


class StoredBlock(BaseModel):
    """A box of a tensor and the place of its bytes: row-major order, padded with zeros to `ALIGNMENT`."""

    model_config = _STRICT

    offsets: Extent
    """First index in each dimension of the tensor."""
    sizes: Extent
    object: Annotated[int, Field(ge=0)]
    """Index into the commit's `objects`."""
    start: Annotated[int, Field(ge=0, le=MAX_OBJECT_BYTES)]
    """Offset in the object, in bytes."""
    crc32: Crc32
    """Checksum of its bytes, including the padding."""


class StoredTensor(BaseModel):
    """A full tensor of the state, however many ranks held or wrote it."""

    model_config = _STRICT

    dtype: Annotated[str, StringConstraints(max_length=40)]
    shape: Extent
    blocks: Annotated[tuple[StoredBlock, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        """Every block lies in the tensor, and their sizes add up to it: none is missing or listed twice."""
        itemsize = stored_dtype(self.dtype).itemsize
        for block in self.blocks:
            if len(block.offsets) != len(self.shape) or len(block.sizes) != len(self.shape):
                raise ValueError(f"a block of a tensor of shape {self.shape} has a different number of dimensions")
            if any(a + n > length for a, n, length in zip(block.offsets, block.sizes, self.shape, strict=True)):
                raise ValueError(f"a block lies outside its tensor of shape {self.shape}")
            if (num_bytes := math.prod(block.sizes) * itemsize) > MAX_BLOCK_BYTES:
                raise ValueError(f"a block has {num_bytes} bytes; the limit is {MAX_BLOCK_BYTES}")
        filled = [block for block in self.blocks if math.prod(block.sizes)]
        num_elements = sum(math.prod(block.sizes) for block in filled)
        if num_elements != math.prod(self.shape) or len({block.offsets for block in filled}) != len(filled):
            raise ValueError(f"the blocks do not add up to a tensor of shape {self.shape}")
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        return stored_dtype(self.dtype)

    def num_bytes(self, block: StoredBlock) -> int:
        """Returns the size of one of its blocks, without the padding."""
        return math.prod(block.sizes) * self.torch_dtype.itemsize


class Commit(BaseModel):
    """A complete checkpoint: the state before step `step`, and the facts recorded with it.

    Validation bounds the memory that a restore takes, and keeps all keys in the attempt's own folder.
    """

    model_config = _STRICT

    format: Literal[3] = FORMAT
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    attempt: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    state: Skeleton
    objects: tuple[StoredObject, ...]
    """The objects that hold the bytes of tensors."""
    tensors: dict[str, StoredTensor]
    """By component and path in the state, such as `model.head.weight`."""
    record: dict[str, Any]
    """JSON facts such as epoch, generation and hashes. Those in `record.Facts` have that form."""

    @model_validator(mode="after")
    def _check_keys_and_record(self) -> Self:
        """All keys lie in the attempt's own folder: a manifest can neither read nor delete anything else."""
        keys = [item.key for item in self.all_objects]
        for key in keys:
            if not _OBJECT.fullmatch(key.removeprefix(self.prefix)):
                raise ValueError(f"the object {key!r:.200} is not in {self.prefix}")
        if len(set(keys)) != len(keys):
            raise ValueError("an object is listed twice")
        check_facts(_canonical(self.record))
        return self

    @model_validator(mode="after")
    def _check_ranges(self) -> Self:
        """Blocks fill their objects without gaps: every byte has a checksum, and tensors are no larger than it."""
        ranges: list[list[tuple[int, int]]] = [[] for _ in self.objects]
        for tensor in self.tensors.values():
            for block in tensor.blocks:
                if block.object >= len(ranges):
                    raise ValueError(f"there is no object {block.object}")
                ranges[block.object].append((block.start, padded(tensor.num_bytes(block))))
        for number, item in enumerate(self.objects):
            end = 0
            for start, size in sorted(ranges[number]):  # those without bytes come first
                if start != end:
                    raise ValueError(f"the blocks in object {number} are not contiguous")
                end += size
            if end != item.size:
                raise ValueError(f"the blocks in object {number} have {end} bytes, the object has {item.size}")
        return self

    @property
    def key(self) -> str:
        return manifest_key(self.step)

    @property
    def prefix(self) -> str:
        """The folder of its objects."""
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
        except (RecursionError, TypeError, ValueError) as error:
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
            if len(data) > MAX_MANIFEST_BYTES:
                raise ValueError(f"it has {len(data)} bytes; the limit is {MAX_MANIFEST_BYTES}")
            body = json.loads(data)
            if not isinstance(body, dict):
                raise ValueError("it is not a JSON object")
            version = body.get("format")
            if type(version) is not int or version != FORMAT:  # True would pass for 1
                raise ValueError(f"its format is {version!r:.20}; this version reads {FORMAT}")
            checksum = body.pop("sha256", None)
            if checksum != _sha256(text := _canonical(body)):
                raise ValueError("its checksum does not match")
            commit = cls.model_validate_json(text)
        except ValidationError as error:
            reason = format_validation_error(error)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{key} is not a valid manifest: {error}") from error
        else:
            if commit.key != key:
                raise CheckpointError(f"{key} is the manifest of another step, {commit.step}")
            return commit
        # Raised here, without the ValidationError as its cause: that holds the whole manifest in memory.
        raise CheckpointError(f"{key} is not a valid manifest: {reason}")

    def check_present(self, listing: Mapping[str, Entry]) -> None:
        """Raises CheckpointError unless a listing, by key, has every object with its size."""
        for item in self.all_objects:
            if (entry := listing.get(item.key)) is None:
                raise CheckpointError(f"{item.key} is missing")
            if entry.size != item.size:
                raise CheckpointError(f"{item.key} has {entry.size} bytes; {item.size} were committed")


def padded(num_bytes: int) -> int:
    """Returns the size of a block in its object: `num_bytes`, rounded up to `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=64)
def stored_dtype(name: str) -> torch.dtype:
    """Returns a dtype by name. Raises ValueError for those without whole-byte elements, and for quantized ones."""
    if not _STORED_DTYPE.fullmatch(name):
        raise ValueError(f"{name!r:.40} is not a dtype that checkpoints support")
    return dtype_of(name)


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
