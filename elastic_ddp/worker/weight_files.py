"""Weights in plain files: safetensors, `torch.save`, and the folder of a Hugging Face model."""

from __future__ import annotations

import json
import platform
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_ddp.errors import CheckpointError, ConfigError, StorageError, format_exception, shorten
from elastic_ddp.storage.retry import RetryingStorage
from elastic_ddp.storage.storage import Storage
from elastic_ddp.temporary_folder import TemporaryFolder

KeyMapping = Mapping[str, str] | Callable[[str], str | None]
"""Renames tensors: replacements by regular expression, applied in order, or a function that returns the new name, or
None to leave the tensor out."""
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""The files of a Hugging Face model: one with all weights, or an index of several."""
_NESTED = ("state_dict", "model_state_dict", "model")
"""Where training programs put the weights in a checkpoint that holds more."""
_DOWNLOAD_BYTES = 16 << 20


@dataclass(frozen=True)
class WeightFiles:
    """Files that hold the weights of one model.

    Attributes:
        storage: the folder that they are in.
        names: their names in it.
    """

    storage: RetryingStorage
    names: Sequence[str]

    @classmethod
    def find(cls, uri: str) -> WeightFiles | None:
        """Returns the files at a URI: itself, or those in the folder of a Hugging Face model. None for other folders.

        Raises:
            ConfigError: there is no such file.
            CheckpointError: the index of the files cannot be read.
            StorageError: the storage failed.
        """
        folder, _, name = uri.rpartition("/")
        if name.endswith(SUFFIXES) and not Path(uri).is_dir():
            storage = RetryingStorage(Storage(folder or "/"))
            if not _exists(storage, name):
                raise ConfigError(
                    f"run.load_weights: {uri} does not exist on node {platform.node()}. All nodes must see the file: "
                    "use a shared folder or a bucket."
                )
            return cls(storage, [name])
        storage = RetryingStorage(Storage(uri))
        if _exists(storage, INDEX):
            return cls(storage, _indexed(storage))
        return cls(storage, [SINGLE]) if _exists(storage, SINGLE) else None

    def read(self, tick: Callable[[], None], load: Callable[[dict[str, Any]], None]) -> None:
        """Calls `load` with the weights by name, on the CPU. They are valid during the call.

        Raises:
            ConfigError: a file holds other objects than weights.
            CheckpointError: a file is missing, or cannot be read.
            StorageError: the storage failed.
        """
        weights: dict[str, Any] = {}
        with self._local_files(tick) as files, self.storage.operation_in_progress():
            for file, name in zip(files, self.names, strict=True):
                weights |= _read(file, f"{self.storage.uri}/{name}")
                tick()
            load(weights)

    @contextmanager
    def _local_files(self, tick: Callable[[], None]) -> Iterator[list[Path]]:
        with closing(TemporaryFolder("weights")) as temporary:
            yield [
                _download(self.storage, name, Path(temporary.path, str(number)), tick)
                if "://" in self.storage.uri
                else Path(self.storage.uri, name)
                for number, name in enumerate(self.names)
            ]


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


def _exists(storage: RetryingStorage, name: str) -> bool:
    if "://" not in storage.uri:
        return Path(storage.uri, name).is_file()
    try:
        storage.size(name)
    except FileNotFoundError:
        return False
    return True


def _indexed(storage: RetryingStorage) -> list[str]:
    """Returns the names of the files in an index."""
    try:
        names = sorted(set(json.loads(storage.read(INDEX))["weight_map"].values()))
        if not all(isinstance(name, str) and name.endswith(SUFFIXES) and "/" not in name for name in names):
            raise ValueError(f"it names {names!r:.200}")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{storage.uri}/{INDEX} is not an index of weights: {error}") from error
    return names


def _download(storage: RetryingStorage, name: str, file: Path, tick: Callable[[], None]) -> Path:
    try:
        size = storage.size(name)
        with file.open("wb") as target:
            for start in range(0, size, _DOWNLOAD_BYTES):
                buffer = memoryview(bytearray(min(_DOWNLOAD_BYTES, size - start)))
                target.write(buffer[: storage.read_into(name, start, buffer)])
                tick()
    except FileNotFoundError as error:
        raise CheckpointError(f"{storage.uri}/{name} is missing") from error
    except OSError as error:
        raise StorageError(
            f"cannot copy {storage.uri}/{name} to {file}: {error.strerror}. Set TMPDIR to a folder with more room."
        ) from error
    return file


def _read(file: Path, source: str) -> dict[str, Any]:
    """Returns the weights in a file, mapped into memory where its format allows that."""
    from safetensors.torch import load_file

    try:
        if source.endswith(".safetensors"):
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except FileNotFoundError as error:
        raise CheckpointError(f"{source} is missing") from error
    except Exception as error:  # of any kind, as the bytes may be any
        if (found := re.search(r"GLOBAL (\S+)", str(error))) is not None:
            raise ConfigError(
                f"run.load_weights: {source} holds an object of {found[1]}, and loading it could run code. Save "
                "model.state_dict() alone, or convert the file to safetensors."
            ) from None
        raise CheckpointError(f"{source} cannot be read: {format_exception(error).splitlines()[0]}") from error
    return _state_dict(content, source)


def _state_dict(content: Any, source: str) -> dict[str, Any]:
    nested = [content[key] for key in _NESTED if key in content] if isinstance(content, dict) else []
    for candidate in (*nested, content):  # beside the weights there may be other tensors, such as a generator's state
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
