"""The same tests on two S3 servers: moto, an emulation that every test run uses, and Ceph's gateway, a real one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import boto3
import fsspec
import pytest

from elastic_ddp.storage.storage import Storage
from tests.s3 import ceph
from tests.s3.ceph import Ceph, Keys
from tests.s3.proxy import Proxy


@pytest.fixture(scope="session")
def real_server() -> Iterator[Ceph]:
    if why := ceph.missing():
        pytest.fail(why)
    with ceph.running() as server:
        yield server


@dataclass(frozen=True)
class Bucket:
    """An empty bucket and the endpoint of its server."""

    endpoint: str
    uri: str

    def storage(self, *, endpoint: str = "", keys: Keys = ceph.USER, client_retries: bool = False) -> Storage:
        """Returns a folder in it, opened at an endpoint with a user's keys.

        Args:
            client_retries: whether the client libraries retry failed requests.
        """
        options = {
            "endpoint_url": endpoint or self.endpoint,
            "key": keys.access,
            "secret": keys.secret,
            "config_kwargs": {} if client_retries else {"retries": {"total_max_attempts": 1}},
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(fsspec.config.conf, "s3", options)
            storage = Storage(f"{self.uri}/runs")
            fs = storage.filesystem_and_path()[0].handler.fs  # opens it with these options
        if not client_retries:
            fs.retries = 1
        return storage


@pytest.fixture(params=["moto", pytest.param("ceph", marks=pytest.mark.s3)])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    if request.param == "moto":
        endpoint = request.getfixturevalue("_s3_endpoint")
    else:
        endpoint = request.getfixturevalue("real_server").endpoint
    return create_bucket(endpoint)


@pytest.fixture
def real_bucket(real_server: Ceph) -> Bucket:
    return create_bucket(real_server.endpoint)


def create_bucket(endpoint: str, keys: Keys = ceph.USER) -> Bucket:
    name = f"bucket-{uuid.uuid4().hex}"
    client = boto3.client("s3", endpoint_url=endpoint, aws_access_key_id=keys.access, aws_secret_access_key=keys.secret)
    client.create_bucket(Bucket=name)
    return Bucket(endpoint, f"s3://{name}")


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[Proxy]:
    with Proxy(bucket.endpoint) as proxy:
        yield proxy
