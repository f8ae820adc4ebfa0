"""Helpers of the tests of housekeeping."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from elastic_ddp.checkpoint import Commit
from elastic_ddp.checkpoint.manifest import attempt_prefix
from elastic_ddp.storage.folder import Entry
from elastic_ddp.storage.storage import Storage
from tests.single_rank_store import SingleRankStore


class ClockedStorage(Storage):
    """A storage whose clock is wrong by years. It records what is read.

    Manifests are written `later_s` seconds after all else.
    """

    def __init__(self, uri: str | Path) -> None:
        super().__init__(uri)
        self.later_s = 0.0
        self.read_keys: list[str] = []

    def listing(self, prefix: str = "") -> dict[str, Entry]:
        entries = super().listing(prefix)
        for key, entry in entries.items():
            assert entry.written_at is not None
            later_s = self.later_s if key.startswith("commits/") else 0.0
            entries[key] = entry._replace(written_at=entry.written_at - 1e9 + later_s)
        return entries

    def read(self, key: str) -> bytes:
        data = super().read(key)
        self.read_keys.append(key)
        return data


def open_storage(request: pytest.FixtureRequest, tmp_path: Path) -> ClockedStorage:
    """Returns a folder of the kind that the fixture's parameter names: local or s3."""
    if request.param == "s3":
        return ClockedStorage(f"{request.getfixturevalue('s3')}/runs/one")
    return ClockedStorage(tmp_path / "run")


def save(store: SingleRankStore, step: int, value: float | None = None, measured_at: int | None = None) -> Commit:
    at = step if measured_at is None else measured_at
    metrics = {} if value is None else {"loss": {"value": value, "step": at}}
    return store.save({"user": {"step": step}}, step=step, record={"metrics": metrics})


def steps_in(storage: Storage) -> list[int]:
    return sorted(int(key.split("/")[1].removesuffix(".json")) for key in storage.list("commits"))


def write_orphan(storage: Storage, step: int) -> str:
    prefix = attempt_prefix(step, uuid.uuid4().hex)
    storage.write(f"{prefix}/0-0.bin", b"half")
    return prefix
