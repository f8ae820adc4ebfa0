"""Addresses of a run's storage: which are refused before anything is started."""

from __future__ import annotations

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
    ],
)
def test_an_unusable_storage_address_is_refused_with_the_fix(storage: str, fix: str) -> None:
    for build in (run_config, Storage):
        with pytest.raises(ConfigError) as caught:
            build(storage)
        assert f"storage={storage!r}" in str(caught.value) and fix in str(caught.value)
