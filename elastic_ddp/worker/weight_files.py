"""Weights in plain files: safetensors, `torch.save`, and the folder of a Hugging Face model."""

from __future__ import annotations

import json
import math
import platform
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elastic_ddp.errors import CheckpointError, ConfigError, StorageError, format_exception, shorten
from elastic_ddp.storage.storage import Storage
from elastic_ddp.storage.temporary_folder import TemporaryFolder
from elastic_ddp.storage.watchdog import WatchedStorage
from elastic_ddp.tensors.state_tree import dtype_name

KeyMapping = Mapping[str, str] | Callable[[str], str | None]
"""Renames tensors: replacements by regular expression, applied in order, or a function that returns the new name, or
None to leave the tensor out."""
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""The files of a Hugging Face model: one with all weights, or an index of several."""
_NESTED = ("state_dict", "model_state_dict", "model")
"""Where training programs put the weights in a checkpoint that holds more."""
_DOWNLOAD_BYTES = 16 << 20
_SAFETENSORS = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The dtypes of safetensors, by their names in its header."""


@dataclass(frozen=True)
class WeightFiles:
    """Files that hold the weights of one model.

    Attributes:
        storage: the folder of the files.
        names: the names of the files in this folder.
    """

    storage: WatchedStorage
    names: Sequence[str]

    @classmethod
    def find(cls, uri: str) -> WeightFiles | None:
        """Returns the files at a URI: a single file, or the files of a Hugging Face model. None for other folders.

        Raises:
            ConfigError: there is no such file.
            CheckpointError: the index of the files cannot be read.
            StorageError: the storage failed.
        """
        folder, _, name = uri.rpartition("/")
        if name.endswith(SUFFIXES) and not Path(uri).is_dir():
            storage = WatchedStorage(Storage(folder or "/"))
            if not _exists(storage, name):
                raise ConfigError(
                    f"run.load_weights: {uri} does not exist on node {platform.node()}. All nodes must see the file: "
                    "use a shared folder or a bucket."
                )
            return cls(storage, [name])
        storage = WatchedStorage(Storage(uri))
        if _exists(storage, INDEX):
            return cls(storage, _indexed(storage))
        return cls(storage, [SINGLE]) if _exists(storage, SINGLE) else None

    @contextmanager
    def opened(self, tick: Callable[[], None]) -> Iterator[dict[str, Any]]:
        """Yields the files' contents by name: a `FileTensor` for each tensor, valid in the block, and other values.

        Only the requested rows of safetensors leave the storage; other files are copied here as a whole.

        Raises:
            ConfigError: a file holds other objects than weights.
            CheckpointError: a file is missing, or cannot be read.
            StorageError: the storage failed.
        """
        weights: dict[str, Any] = {}
        with closing(TemporaryFolder("weights")) as temporary, self.storage.operation_in_progress():
            for number, name in enumerate(self.names):
                source = f"{self.storage.uri}/{name}"
                if name.endswith(".safetensors"):
                    weights |= _safetensors(_bytes_of(self.storage, name, tick), source)
                else:
                    file = Path(self.storage.uri, name)
                    if "://" in source:
                        file = Path(temporary.path, str(number))
                        _download(_bytes_of(self.storage, name, tick), source, file)
                    weights |= _unpickled(file, source)
                tick()
            yield weights


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[range], torch.Tensor]
    """Returns rows of dimension 0, on the CPU."""

    def whole(self) -> torch.Tensor:
        return self.read(range(self.shape[0] if self.shape else 1)).view(self.shape)


def rename(weights: Mapping[str, Any], mapping: KeyMapping | None) -> dict[str, Any]:
    """Returns the weights under their new names. Raises ConfigError if two get the same name, or the mapping fails."""
    renamed: dict[str, Any] = {}
    for name, value in weights.items():
        new = name if mapping is None else _new_name(name, mapping)
        if new in renamed:
            raise ConfigError(
                f"run.load_weights: key_mapping gives the name {new!r} to two tensors, {name!r} and another."
            )
        if new is not None:
            renamed[new] = value
    return renamed


def check_mapping(mapping: KeyMapping | None) -> None:
    """Raises ConfigError unless the mapping is a function, or replacements by valid regular expressions."""
    if mapping is None or callable(mapping):
        return
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            f"run.load_weights got a {type(mapping).__name__} as key_mapping. Give a dict of replacements by regular "
            'expression, such as {"^": "base."}, or a function from a name to a name.'
        )
    for pattern, replacement in mapping.items():
        try:
            re.sub(pattern, replacement, "")
        except (TypeError, re.error) as error:
            raise ConfigError(f"run.load_weights got key_mapping with {pattern!r}: {replacement!r}: {error}.") from None


def _new_name(name: str, mapping: KeyMapping) -> str | None:
    if isinstance(mapping, Mapping):
        for pattern, replacement in mapping.items():
            try:
                name = re.sub(pattern, replacement, name)
            except re.error as error:  # a group that the pattern does not have
                raise ConfigError(f"run.load_weights: key_mapping[{pattern!r}]={replacement!r}: {error}.") from error
        return name
    new = mapping(name)
    if not isinstance(new, str | None):
        raise ConfigError(f"run.load_weights: key_mapping({name!r}) returned {new!r}. Return a name, or None.")
    return new


def _exists(storage: Storage, name: str) -> bool:
    if "://" not in storage.uri:
        return Path(storage.uri, name).is_file()
    try:
        storage.size(name)
    except FileNotFoundError:
        return False
    return True


def _indexed(storage: Storage) -> list[str]:
    """Returns the names of the files in an index."""
    try:
        names = sorted(set(json.loads(storage.read(INDEX))["weight_map"].values()))
        if not all(isinstance(name, str) and name.endswith(SUFFIXES) and "/" not in name for name in names):
            raise ValueError(f"it names {names!r:.200}")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{storage.uri}/{INDEX} is not an index of weights: {error}") from error
    return names


def _download(content: _Bytes, source: str, file: Path) -> None:
    try:
        with file.open("wb") as target:
            for start in range(0, content.size, _DOWNLOAD_BYTES):
                target.write(content.read(start, min(start + _DOWNLOAD_BYTES, content.size)).numpy().data)
    except OSError as error:
        raise StorageError(
            f"cannot copy {source} to {file}: {error.strerror}. Set TMPDIR to a folder with more room."
        ) from error


@dataclass(frozen=True)
class _Bytes:
    """The bytes of a file."""

    size: int
    read: Callable[[int, int], torch.Tensor]
    """Returns the bytes from the first number to the second."""


def _bytes_of(storage: Storage, name: str, tick: Callable[[], None]) -> _Bytes:
    """Returns the bytes of a file, mapped into memory if it is local."""
    try:
        if "://" not in storage.uri:
            file = Path(storage.uri, name)
            size = file.stat().st_size
            content = torch.from_file(str(file), size=size, dtype=torch.uint8)
            return _Bytes(size, lambda start, stop: content[start:stop])
        size = storage.size(name)
    except FileNotFoundError as error:
        raise CheckpointError(f"{storage.uri}/{name} is missing") from error

    def read(start: int, stop: int) -> torch.Tensor:
        read = bytearray(stop - start)
        for first in range(start, stop, _DOWNLOAD_BYTES):
            last = min(first + _DOWNLOAD_BYTES, stop)
            storage.read_into(name, first, memoryview(read)[first - start : last - start])
            tick()
        return torch.frombuffer(read, dtype=torch.uint8) if read else torch.empty(0, dtype=torch.uint8)

    return _Bytes(size, read)


def _safetensors(content: _Bytes, source: str) -> dict[str, FileTensor]:
    """Returns the tensors in a safetensors file: 8 bytes with the length of a JSON header, the header, the data."""

    def stored(dtype: torch.dtype, shape: tuple[int, ...], first: int) -> FileTensor:
        row_bytes = math.prod(shape[1:]) * dtype.itemsize

        def read(rows: range) -> torch.Tensor:
            part = content.read(first + rows.start * row_bytes, first + rows.stop * row_bytes)
            if part.storage_offset() % dtype.itemsize:
                part = part.clone()
            return part.view(dtype).view(len(rows), *shape[1:])

        return FileTensor(shape, dtype, read)

    try:
        length = int.from_bytes(content.read(0, 8).numpy().tobytes(), "little")
        if not 0 < length <= content.size - 8:
            raise ValueError(f"its header has {length} bytes, and the file {content.size}")
        header = json.loads(content.read(8, 8 + length).numpy().tobytes())
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            dtype = _SAFETENSORS[entry["dtype"]]
            shape = tuple(entry["shape"])
            first, last = entry["data_offsets"]
            if not 0 <= first <= last <= content.size - 8 - length:
                raise ValueError(f"the file has {content.size} bytes, and {name} ends after byte {8 + length + last}")
            if math.prod(shape) * dtype.itemsize != last - first or min(shape, default=0) < 0:
                raise ValueError(f"{name} of shape {shape} and {dtype_name(dtype)} has {last - first} bytes")
            tensors[name] = stored(dtype, shape, 8 + length + first)
        return tensors
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source} cannot be read: {format_exception(error).splitlines()[0]}") from error


def _unpickled(file: Path, source: str) -> dict[str, Any]:
    """Returns the weights in a file of `torch.save`, mapped into memory where its format allows that."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except FileNotFoundError as error:
        raise CheckpointError(f"{source} is missing") from error
    except Exception as error:  # of any kind, as the bytes may be any
        found = re.search(r"GLOBAL (\S+)", str(error))
        if found is not None:
            raise ConfigError(
                f"run.load_weights: {source} holds an object of {found[1]}, and loading it could run code. Save "
                "model.state_dict() alone, or convert the file to safetensors."
            ) from None
        raise CheckpointError(f"{source} cannot be read: {format_exception(error).splitlines()[0]}") from error
    return {
        name: FileTensor(tuple(value.shape), value.dtype, partial(_rows_of, value))
        if isinstance(value, torch.Tensor)
        else value
        for name, value in _state_dict(content, source).items()
    }


def _rows_of(tensor: torch.Tensor, rows: range) -> torch.Tensor:
    return tensor[rows.start : rows.stop] if tensor.dim() else tensor[None]


def _state_dict(content: Any, source: str) -> dict[str, Any]:
    nested = [content[key] for key in _NESTED if key in content] if isinstance(content, dict) else []
    for candidate in (*nested, content):  # other tensors, a generator's state for example, may be beside the weights
        if isinstance(candidate, dict) and any(isinstance(value, torch.Tensor) for value in candidate.values()):
            return {str(name): value for name, value in candidate.items()}
    found = (
        f"a dict of {shorten([str(key) for key in content], 5)}"
        if isinstance(content, dict)
        else type(content).__name__
    )
    raise ConfigError(
        f"run.load_weights: {source} holds no weights by name, but {found}. Save model.state_dict(), alone or under "
        f"one of the keys {', '.join(_NESTED)}."
    )
