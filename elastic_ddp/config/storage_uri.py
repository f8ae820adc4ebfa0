"""Checks of a run's storage address that need no network."""

from __future__ import annotations

import os
import re
from pathlib import Path

import fsspec

from elastic_ddp.errors import ConfigError


def local_path(text: str) -> Path:
    """Returns a local folder as an absolute path, with `~` expanded.

    Raises:
        ConfigError: the path names the home of an unknown user.
    """
    try:
        return Path(os.path.abspath(Path(text).expanduser()))
    except RuntimeError as error:
        user = Path(text).parts[0]
        raise ConfigError(f"storage={text!r}: unknown user in path, {user}; give the absolute path") from error


def check_storage_uri(storage: str) -> str:
    """Returns `storage` if a run could be stored there, as far as this machine alone can tell.

    Raises:
        ValueError: the address is malformed, has an unknown protocol, or is a folder that cannot be written.
    """
    protocol, separator, rest = storage.partition("://")
    if not storage.strip() or (separator and protocol != "memory" and not rest.strip("/")):
        raise ValueError(f"storage={storage!r} is empty; give a path or a URI such as s3://bucket/runs")
    if not separator and re.match(r"[a-z0-9]{2,}:/", storage):
        raise ValueError(
            f"storage={storage!r} is neither a path nor a URI; did you mean {storage.replace(':/', '://')}?"
        )
    if protocol in ("http", "https"):
        raise ValueError(
            f"storage={storage!r} is the address of a server; for an S3 server use s3://bucket/runs, and set "
            "AWS_ENDPOINT_URL to this address"
        )
    if not separator or protocol in ("file", "local"):
        _check_folder(storage, local_path(rest if separator else storage))
    elif protocol not in fsspec.available_protocols():
        raise ValueError(
            f"storage={storage!r}: fsspec has no file system {protocol!r}; use a path, or a URI such as s3://bucket/runs"
        )
    return storage


def _check_folder(storage: str, path: Path) -> None:
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not existing.is_dir():
        raise ValueError(f"storage={storage!r} cannot be written: {existing} is not a folder; choose another path")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(
            f"storage={storage!r} cannot be written: no write permission on {existing}, or it is mounted read-only; "
            "fix that or choose another path"
        )
