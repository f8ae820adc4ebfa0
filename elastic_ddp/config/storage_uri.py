"""Checks of a storage address that need no network."""

from __future__ import annotations

import os
import re
from pathlib import Path

import fsspec

from elastic_ddp.errors import ConfigError


def local_path(storage: str) -> Path | None:
    """Returns the absolute path of a local storage address, with `~` expanded; None for other file systems.

    Raises:
        ConfigError: the path names the home of an unknown user.
    """
    protocol, separator, rest = storage.partition("://")
    if separator and protocol not in ("file", "local"):
        return None
    path = Path(rest if separator else storage)
    try:
        return Path(os.path.abspath(path.expanduser()))
    except RuntimeError as error:
        raise ConfigError(
            f"storage={storage!r}: unknown user in path, {path.parts[0]}; give the absolute path"
        ) from error


def check_storage_uri(storage: str) -> None:
    """Checks the form of a storage address.

    Raises:
        ConfigError: the address is empty or malformed, or its protocol is unknown.
    """
    protocol, separator, rest = storage.partition("://")
    if not storage.strip() or (separator and protocol != "memory" and not rest.strip("/")):
        raise ConfigError(
            f"storage={storage!r} names no folder or bucket; give a path or a URI such as s3://bucket/runs"
        )
    if not separator and re.match(r"[a-z0-9]{2,}:/", storage):
        raise ConfigError(
            f"storage={storage!r} is neither a path nor a URI; did you mean {storage.replace(':/', '://')}?"
        )
    if protocol in ("http", "https"):
        raise ConfigError(
            f"storage={storage!r} is the address of a server; for an S3 server use s3://bucket/runs, and set "
            "AWS_ENDPOINT_URL to this address"
        )
    if separator and protocol not in {*fsspec.available_protocols(), *fsspec.registry}:
        raise ConfigError(
            f"storage={storage!r}: fsspec has no file system {protocol!r}; use a path, or a URI such as s3://bucket/runs"
        )


def check_run_storage(storage: str) -> str:
    """Returns the address of a run's storage if its form is right and a local folder is writable.

    Raises:
        ConfigError: it is not.
    """
    check_storage_uri(storage)
    if (path := local_path(storage)) is not None:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        if not existing.is_dir():
            raise ConfigError(f"storage={storage!r} cannot be written: {existing} is not a folder; choose another path")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(
                f"storage={storage!r} cannot be written: no write permission on {existing}, or it is mounted "
                "read-only; fix that or choose another path"
            )
    return storage
