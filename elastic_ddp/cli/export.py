"""Writes the weights of a commit to one file, for `elastic-ddp checkpoints export`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_ddp.errors import ConfigError, StorageError, format_exception, shorten
from elastic_ddp.storage import local

if TYPE_CHECKING:
    import torch

SUFFIXES = (".safetensors", ".pt", ".pth")


def check_target(file: Path) -> None:
    """Raises ConfigError if weights cannot be written to a file of this name."""
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{file}: unknown suffix. Use {', '.join(SUFFIXES)}; torch.load reads the last two.")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{file}: the folder {file.absolute().parent} does not exist. Create it, or use another one.")


def write_weights(weights: dict[str, Any], file: Path) -> str | None:
    """Writes weights atomically. Returns a note for the user about what the format cannot hold, or None."""
    with _atomic_write(file) as temporary:
        if file.suffix == ".safetensors":
            return _write_safetensors(weights, temporary)
        _write_torch(weights, temporary)
        return None


def _write_safetensors(weights: dict[str, Any], file: Path) -> str | None:
    import torch
    from safetensors.torch import save_file

    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    refused = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if not _is_supported(tensor.dtype)]
    if refused:
        raise ConfigError(f"safetensors does not support the dtype of {shorten(refused, 5)}. Export to a .pt file.")
    # Tied weights are one tensor with two names, which the format does not support.
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, file)
    left_out = [name for name in weights if name not in tensors]
    return f"left out because they are not tensors (a .pt file has them): {', '.join(left_out)}" if left_out else None


def _is_supported(dtype: torch.dtype) -> bool:
    """Whether the installed safetensors supports a dtype. It has no public list of them."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save

    try:
        save({"empty": torch.empty(0, dtype=dtype)})
    except (KeyError, SafetensorError):
        return False
    return True


def _write_torch(weights: dict[str, Any], file: Path) -> None:
    import torch

    with file.open("wb") as out:  # given a path, torch hides the OSError
        torch.save(weights, out)


@contextmanager
def _atomic_write(file: Path) -> Iterator[Path]:
    """Yields a temporary file that replaces `file` once it is written and synced. A symbolic link stays a link."""
    from safetensors import SafetensorError

    target = Path(os.path.realpath(file))
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        temporary.touch()
        # safetensors writes files that only their owner can read.
        mode = (target if target.exists() else temporary).stat().st_mode
        yield temporary
        local.sync(temporary)
        temporary.chmod(mode)
        os.replace(temporary, target)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors wrap the error of a full disk
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise StorageError(
            f"cannot write {file}: {format_exception(cause).splitlines()[0]}. The previous file is unchanged. "
            f"Check the free space and the permissions of {target.parent}."
        ) from error
    finally:
        with suppress(OSError):  # the first error is more useful
            temporary.unlink(missing_ok=True)
    local.sync_directory(target.parent)
