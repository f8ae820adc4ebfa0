"""Checks of a storage address that need no network."""

from __future__ import annotations

import os
import re

import fsspec

from elastic_ddp.config.environment import check_uri_is_public
from elastic_ddp.errors import ConfigError

STORAGE = "ELASTIC_DDP_STORAGE"
"""The environment variable with the storage of runs that name none."""


def default_storage() -> str:
    """Returns the storage of a run that names none: the value of `ELASTIC_DDP_STORAGE` if it is valid, or `runs`."""
    try:
        return check_storage_uri(os.environ.get(STORAGE) or "runs")
    except ConfigError as error:
        raise ConfigError(f"{STORAGE}: {error}") from None


def mistyped_uri(path: str) -> str | None:
    """Returns the URI that a path such as `s3:/bucket/runs` was meant to be; None for any other path."""
    return path.replace(":/", "://", 1) if re.match(r"[a-z0-9]{2,}:/(?!/)", path) else None


def check_storage_uri(storage: str) -> str:
    """Returns a storage address; ConfigError if it is malformed, has a credential, or its protocol is unknown."""
    check_uri_is_public(storage, "storage")
    protocol, separator, rest = storage.partition("://")
    if not storage.strip() or (separator and protocol != "memory" and not rest.strip("/")):
        raise ConfigError(
            f"storage={storage!r} names no folder or bucket; give a path or a URI such as s3://bucket/runs"
        )
    uri = mistyped_uri(storage)
    if uri is not None:
        raise ConfigError(f"storage={storage!r} is neither a path nor a URI; did you mean {uri}?")
    known = {*fsspec.available_protocols(), *fsspec.registry} - {"http", "https"}
    if separator and protocol not in known:
        raise ConfigError(
            f"storage={storage!r}: fsspec has no file system {protocol!r} to write to; use a path or a URI such as "
            "s3://bucket/runs. AWS_ENDPOINT_URL sets the address of an S3 server"
        )
    return storage
