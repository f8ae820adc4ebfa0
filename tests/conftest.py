"""Fixtures that every test may use."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# torch queries the name server for every connection to a store, and a lost answer costs five seconds by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
# A busy machine is not a failure, and CI does not depend on chance.
settings.register_profile("any machine", deadline=None, derandomize=True)
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    # TEST_DEVICE=cpu runs tests of several ranks on a GPU over gloo instead.
    if not torch.cuda.is_available() and "TEST_DEVICE" not in os.environ:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session")
def calm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data sets `data` and `held-out`, and in `runs` a run of one worker without faults, `calm`.

    The run is the job of `tests.integration.jobs`. Its driver starts its own Ray, so request this fixture before
    the test starts one.
    """
    from tests.integration import jobs

    folder = tmp_path_factory.mktemp("calm")
    for name, rows, seed in (("data", jobs.ROWS, 0), ("held-out", 131, 1)):
        (folder / name).mkdir()
        jobs.write_rows(str(folder / name), rows=rows, seed=seed)
    done = jobs.drive(str(folder / "data"), str(folder / "runs"), "calm", "1", "evaluate", str(folder / "held-out"))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def undisturbed(calm_folder: Path) -> Mapping[str, Any]:
    """The summary of the run without faults."""
    from tests.integration import jobs

    return jobs.summary(calm_folder, "calm")


@pytest.fixture(scope="session")
def _s3_endpoint() -> Iterator[str]:
    from tests.s3 import moto

    with moto.running() as endpoint:
        yield endpoint


@pytest.fixture
def s3(_s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty bucket on an S3 server on this machine.

    Its address and credentials are in the environment, which subprocesses and Ray workers inherit.
    """
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", _s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret-key-of-the-tests")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    import boto3

    bucket = f"bucket-{uuid.uuid4().hex}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}"
