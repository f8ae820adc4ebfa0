"""Addresses of a run's storage: which are refused before anything is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.errors import ConfigError
from elastic_ddp.storage.storage import Storage


def run_config(storage: str) -> RunConfig:
    return RunConfig(name="lm", storage=storage, steps=10, global_batch_size=64, micro_batch_size=16)


@pytest.mark.parametrize(
    ("storage", "fix"),
    [
        ("s3:/bucket/runs", "did you mean s3://bucket/runs?"),
        ("s3://", "such as s3://bucket/runs"),
        ("", "such as s3://bucket/runs"),
        (" ", "such as s3://bucket/runs"),
        ("http://localhost:9000/bucket", "AWS_ENDPOINT_URL"),
        ("s4://b/runs", "such as s3://bucket/runs"),
        ("~no-such-user/runs", "give the absolute path"),
    ],
)
def test_an_unusable_storage_address_is_refused_with_the_fix(storage: str, fix: str) -> None:
    for build in (run_config, Storage):
        with pytest.raises(ConfigError) as caught:
            build(storage)
        assert f"storage={storage!r}" in str(caught.value) and fix in str(caught.value)


def test_an_unwritable_folder_is_refused_and_not_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for storage in (str(tmp_path / "file" / "runs"), f"file://{tmp_path}/file/runs"):
        with pytest.raises(ConfigError, match=r"storage='.*' cannot be written: .*/file is not a folder"):
            run_config(storage)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))  # root may write anywhere
    with pytest.raises(ConfigError, match=rf"storage='.*' cannot be written: .*{tmp_path}.* read-only"):
        run_config(str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()
