"""What a commit is, as bytes: pure functions of plain values.

commits/N.json                       the manifest of the commit at step N, written last and only once
set-aside/N-<hex>.json               the manifest of an attempt that did not verify, which is kept with its objects
set-aside/N-unknown-<hex>.json       the same, of one that does not say which attempt it is of
step=N/attempt=<hex>/state.json      the skeleton of the state
step=N/attempt=<hex>/<writer>-<k>.bin     blocks of tensors, their raw bytes, one after the other
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Annotated, Any, Final, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from zlib_ng import zlib_ng

from elastic_ddp.checkpoint.record import check_facts
from elastic_ddp.config.run_config import MAX_STEP
from elastic_ddp.errors import CheckpointError, format_validation_error
from elastic_ddp.tensors.state_tree import dtype_of

FORMAT: Final = 3
MAX_MANIFEST_BYTES, MAX_MANIFEST_VALUES = 2**27, 2**22
"""Enough for 400,000 blocks, and little enough to be read whole: a value, however short, takes up to 0.3 KB then."""
MAX_SKELETON_BYTES, MAX_SKELETON_VALUES = 2**25, 2**21
"""The same, of all that is no tensor in a state: enough for 50,000 parameters under AdamW, at 0.2 KB a value."""
MAX_OBJECT_BYTES = 2**48
MAX_BLOCK_BYTES = 2**24
"""What is read at once: a block has one checksum, and nothing of it counts before that was looked at. Writers cut
tensors into blocks of at most so many."""
ALIGNMENT = 64
"""Blocks begin at multiples of so many bytes, as tensors do in `host_memory`, so that several can be read into theirs
at once."""

SKELETON = "state.json"

_MANIFEST = re.compile(r"commits/(0|[1-9][0-9]{0,15})\.json")
_SET_ASIDE = re.compile(r"set-aside/(0|[1-9][0-9]{0,15})-(?:([0-9a-f]{32})|unknown-[0-9a-f]{32})\.json")
_ATTEMPT = re.compile(r"(step=(0|[1-9][0-9]{0,15})/attempt=[0-9a-f]{32})/.+")
_STORED_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|b?float\d+(_\w+)?|complex\d+")
_PRIME = 2**127 - 1
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Crc32 = Annotated[int, Field(ge=0, lt=2**32)]
Extent = Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_OBJECT_BYTES)], ...], Field(max_length=64)]


class StoredObject(BaseModel):
    """One object of a commit."""

    model_config = _STRICT

    key: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._=/-]+$", max_length=500)]
    size: Annotated[int, Field(ge=0, le=MAX_OBJECT_BYTES)]


class Skeleton(StoredObject):
    """The object with all of the state that is no tensor."""

    size: Annotated[int, Field(ge=0, le=MAX_SKELETON_BYTES)]
    crc32: Crc32

    def check(self, data: bytes) -> None:
        """CheckpointError unless these are the bytes that were committed, and can be read in little memory."""
        if len(data) != self.size:
            raise CheckpointError(f"{self.key} has {len(data)} bytes; {self.size} were committed")
        if (count := num_values(data)) > MAX_SKELETON_VALUES:
            raise CheckpointError(f"{self.key} has {count} values, and may have at most {MAX_SKELETON_VALUES}")
        if zlib_ng.crc32(data) != self.crc32:
            raise CheckpointError(f"{self.key} does not have the checksum it was committed with")


class StoredBlock(BaseModel):
    """A box of a tensor and where its bytes are, in row-major order, padded with zeros to `ALIGNMENT`."""

    model_config = _STRICT

    offsets: Extent
    """Where in the tensor it begins, by dimension."""
    sizes: Extent
    object: Annotated[int, Field(ge=0)]
    """Its place among the commit's objects."""
    start: Annotated[int, Field(ge=0, le=MAX_OBJECT_BYTES)]
    """Where in the object it begins, in bytes."""
    crc32: Crc32
    """Of its bytes, the padding included."""


class StoredTensor(BaseModel):
    """A tensor of the state, whole, however many ranks held or wrote it."""

    model_config = _STRICT

    dtype: Annotated[str, StringConstraints(max_length=40)]
    shape: Extent
    blocks: Annotated[tuple[StoredBlock, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        """They make up the tensor, each element once, and are small enough to be read whole."""
        itemsize = stored_dtype(self.dtype).itemsize
        for block in self.blocks:
            if len(block.offsets) != len(self.shape) or len(block.sizes) != len(self.shape):
                raise ValueError(f"a block of a tensor of shape {self.shape} has another number of dimensions")
            if any(a + n > length for a, n, length in zip(block.offsets, block.sizes, self.shape, strict=True)):
                raise ValueError(f"a block lies outside of a tensor of shape {self.shape}")
            if (num_bytes := math.prod(block.sizes) * itemsize) > MAX_BLOCK_BYTES:
                raise ValueError(f"a block has {num_bytes} bytes, and may have at most {MAX_BLOCK_BYTES}")
        if not _make_up(self.shape, self.blocks):
            raise ValueError(f"the blocks of a tensor of shape {self.shape} do not make it up")
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        return stored_dtype(self.dtype)

    def num_bytes(self, block: StoredBlock) -> int:
        """Of one of its blocks, without the padding."""
        return math.prod(block.sizes) * self.torch_dtype.itemsize


class Commit(BaseModel):
    """A complete checkpoint: the state before step `step`, and the facts recorded with it."""

    model_config = _STRICT

    format: Literal[3] = FORMAT
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    attempt: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    state: Skeleton
    objects: Annotated[tuple[StoredObject, ...], Field(max_length=1_000_000)]
    """Those with the bytes of tensors."""
    tensors: dict[str, StoredTensor]
    """By component and place in the state."""
    record: dict[str, Any]
    """Facts of the caller, such as the epoch, the generation and hashes; JSON. Free, but for the form of those that
    `record.Facts` has."""

    @model_validator(mode="after")
    def _check_record(self) -> Self:
        check_facts(_canonical(self.record))
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        """Everything lies in the attempt's own folder, so a manifest can neither read nor delete anything else."""
        names = [item.key.removeprefix(self.prefix + "/") for item in self.all_objects]
        for item, name in zip(self.all_objects, names, strict=True):
            if name == item.key or not name or "/" in name or name.startswith("."):
                raise ValueError(f"the object {item.key!r} is not in {self.prefix}")
        if len(set(names)) != len(names):
            raise ValueError("an object is listed twice")
        return self

    @model_validator(mode="after")
    def _check_ranges(self) -> Self:
        """Blocks fill their objects, one after the other: no byte is without a checksum, and none is used twice, so
        that tensors are no larger than what is stored for them."""
        for place, (item, blocks) in enumerate(zip(self.objects, self.blocks_by_object, strict=True)):
            end = 0
            for tensor, block in blocks:
                if block.start != end:
                    raise ValueError(f"the blocks in object {place} do not follow each other")
                end += padded(tensor.num_bytes(block))
            if end != item.size:
                raise ValueError(f"the blocks in object {place} have {end} bytes and it has {item.size}")
        return self

    @cached_property
    def blocks_by_object(self) -> list[list[tuple[StoredTensor, StoredBlock]]]:
        """What is in each object, in its order."""
        found: dict[int, list[tuple[StoredTensor, StoredBlock]]] = defaultdict(list)
        for tensor in self.tensors.values():
            for block in tensor.blocks:
                if block.object >= len(self.objects):
                    raise ValueError(f"there is no object {block.object}")
                found[block.object].append((tensor, block))
        # Blocks without elements have no bytes, and come before what begins at the same place.
        return [
            sorted(found[place], key=lambda each: (each[1].start, math.prod(each[1].sizes)))
            for place in range(len(self.objects))
        ]

    @property
    def key(self) -> str:
        return manifest_key(self.step)

    @property
    def prefix(self) -> str:
        """The folder of the objects."""
        return attempt_prefix(self.step, self.attempt)

    @property
    def all_objects(self) -> tuple[StoredObject, ...]:
        return (*self.objects, self.state)

    @property
    def num_bytes(self) -> int:
        """Of all objects."""
        return sum(item.size for item in self.all_objects)

    @property
    def num_blocks(self) -> int:
        """Of all tensors."""
        return sum(len(tensor.blocks) for tensor in self.tensors.values())

    def to_bytes(self) -> bytes:
        """The manifest: JSON with a checksum of itself; the record has passed `check_record`."""
        # Read again first: a record's keys may be in another order as text, and the checksum is of what a reader has.
        text = _canonical(json.loads(_canonical(self.model_dump())))
        return f'{text[:-1]},"sha256":"{_sha256(text)}"}}'.encode()

    @classmethod
    def from_bytes(cls, key: str, data: bytes) -> Commit:
        """The commit whose manifest is stored under `key`.

        Raises:
            CheckpointError: torn, changed, of another format or of another step.
        """
        try:
            if (count := num_values(data)) > MAX_MANIFEST_VALUES or len(data) > MAX_MANIFEST_BYTES:
                raise ValueError(
                    f"it has {len(data)} bytes and {count} values, and may have at most {MAX_MANIFEST_BYTES} and "
                    f"{MAX_MANIFEST_VALUES}"
                )
            body = json.loads(data)
            if not isinstance(body, dict):
                raise ValueError("it is not an object")
            version = body.get("format")
            if type(version) is not int or version != FORMAT:  # True would pass for 1
                raise ValueError(f"its format is {version!r:.20}, this version reads {FORMAT}")
            checksum = body.pop("sha256", None)
            if checksum != _sha256(text := _canonical(body)):
                raise ValueError("it does not have its own checksum")
            commit = cls.model_validate_json(text)
        except ValidationError as error:
            what = format_validation_error(error)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{key} is not the manifest of a commit: {error}") from error
        else:
            if commit.key != key:
                raise CheckpointError(f"{key} is the manifest of another step, {commit.step}")
            commit.__dict__["manifest"] = data
            return commit
        raise CheckpointError(f"{key} is not the manifest of a commit: {what}")

    @cached_property
    def manifest(self) -> bytes:
        """As it is stored, which `to_bytes` need not give of one that was read: JSON can be written in several ways."""
        return self.to_bytes()

    def __copy__(self) -> Self:
        """What follows from fields is not taken along: `model_copy` may change them."""
        copied = super().__copy__()
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    def check_present(self, sizes: Mapping[str, int]) -> None:
        """CheckpointError unless every object is among these, by key, with its size."""
        for item in self.all_objects:
            if item.key not in sizes:
                raise CheckpointError(f"{item.key} is missing")
            if sizes[item.key] != item.size:
                raise CheckpointError(f"{item.key} has {sizes[item.key]} bytes; {item.size} were committed")


def num_values(text: bytes) -> int:
    """How many values some JSON has at most, by what begins or parts them: they need not be read for that."""
    return 1 + sum(map(text.count, (b"[", b"{", b",")))


def padded(num_bytes: int) -> int:
    """What a block of so many bytes takes up in its object."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=64)
def stored_dtype(name: str) -> torch.dtype:
    """ValueError where a tensor of that dtype cannot be stored, as those of less than a byte and quantized ones."""
    if not _STORED_DTYPE.fullmatch(name):
        raise ValueError(f"{name!r:.40} is not a dtype that is kept")
    return dtype_of(name)


def check_record(record: dict[str, Any], *, step: int) -> None:
    """CheckpointError unless the record is a dict of values that JSON has, and can be read again."""
    try:
        text = _canonical(record)
    except (RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the record of step {step} cannot be kept as JSON: {error}; give str, int, finite float, bool, None, "
            "lists and dicts"
        ) from error
    try:
        check_facts(text)
    except ValueError as error:
        raise CheckpointError(f"the record of step {step} cannot be kept: {error}") from error


def manifest_key(step: int) -> str:
    return f"commits/{step}.json"


def set_aside_key(step: int, attempt: str | None, manifest: bytes) -> str:
    """Where the manifest of a bad commit goes, without an attempt if it does not say which one that is: no other goes
    there, and the same one does if it is set aside again."""
    return f"set-aside/{step}-{attempt or f'unknown-{hashlib.sha256(manifest).hexdigest()[:32]}'}.json"


def attempt_prefix(step: int, attempt: str) -> str:
    return f"step={step}/attempt={attempt}"


def step_of_attempt(prefix: str) -> int:
    """Of a folder that `attempt_prefix` or `attempt_of` gave."""
    return int(prefix.partition("/")[0].removeprefix("step="))


def committed_steps(keys: Iterable[str]) -> list[int]:
    """The steps that have a manifest, newest first."""
    return sorted((int(match[1]) for match in map(_MANIFEST.fullmatch, keys) if match), reverse=True)


def set_aside(key: str) -> tuple[int, str | None] | None:
    """The step and the attempt of a manifest that was set aside, without the attempt if it did not say which; None if
    the key is none of one."""
    match = _SET_ASIDE.fullmatch(key)
    return (int(match[1]), match[2]) if match else None


def attempt_of(key: str) -> tuple[int, str] | None:
    """The step and the folder of the attempt that an object belongs to; None if it belongs to none."""
    match = _ATTEMPT.fullmatch(key)
    return (int(match[2]), match[1]) if match else None


def _make_up(shape: tuple[int, ...], blocks: tuple[StoredBlock, ...]) -> bool:
    """Whether these boxes have every element of the whole once.

    Let the element at (i, j, ...) stand for x^i y^j ...; a box then stands for the product of
    (x^end - x^begin) / (x - 1) over its dimensions, and boxes make up the whole if and only if the sum of theirs is its
    polynomial. Both are compared at a random point modulo a prime; where they differ, that goes unseen once in 2^70
    times (Schwartz 1980, "Fast probabilistic algorithms for verification of polynomial identities"). So it takes time
    in proportion to the numbers in the manifest and hardly any memory, however a tensor was cut.
    """
    if not math.prod(shape):
        return True
    cut = [d for d, length in enumerate(shape) if any(block.sizes[d] != length for block in blocks)]
    if not cut:
        return len(blocks) == 1
    if len(cut) == 1:  # as nearly all are, which is told at once
        [d] = cut
        end = 0
        for start, length in sorted((block.offsets[d], block.sizes[d]) for block in blocks if block.sizes[d]):
            if start != end:
                return False
            end += length
        return end == shape[d]
    point = [(d, 2 + secrets.randbelow(_PRIME - 2)) for d in cut]

    def value(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        product = 1
        for d, x in point:
            product = product * (pow(x, offsets[d] + sizes[d], _PRIME) - pow(x, offsets[d], _PRIME)) % _PRIME
        return product

    found = sum(value(block.offsets, block.sizes) for block in blocks)
    return (found - value((0,) * len(shape), shape)) % _PRIME == 0


def _canonical(body: Any) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
