"""Operations on S3 objects that fsspec lacks, or that take more memory with fsspec. The client libraries retry failed
requests."""

from __future__ import annotations

import errno
import os
import uuid
from contextlib import suppress
from typing import Any

import fsspec.config
from fsspec.asyn import sync

from elastic_ddp.storage.client_errors import s3_answer
from elastic_ddp.storage.folder import Upload
from elastic_ddp.storage.remote import RemoteFolder

RETRIES = {"mode": "standard", "total_max_attempts": 6}
"""botocore pauses for 15 s on average between these. After a broken connection, s3fs starts over up to 4 times."""
PART_BYTES = 8 << 20
"""Size of one part of a large object."""
PARALLEL_PARTS = 2
"""Number of parts of one object that are sent at once."""
RESPONSE_CHUNK_BYTES = 256 << 10
"""Largest piece of a response that is copied at once."""


class S3Folder(RemoteFolder):
    """A folder in a bucket of AWS S3 or a compatible server."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Copies the response into `buffer` as it arrives. fsspec would hold it twice in memory."""
        fs, path = self._locate(key)
        from s3fs.core import _error_wrapper

        count: int = sync(fs.loop, _error_wrapper, _read_into, args=(fs, path, start, buffer), retries=fs.retries)
        return count

    def write(self, key: str, data: bytes | memoryview) -> None:
        if len(data) < 2 * PART_BYTES:
            super().write(key, data)
            return
        fs, path = self._locate(key)
        try:
            fs.pipe_file(path, _Parts(data), chunksize=PART_BYTES, max_concurrency=PARALLEL_PARTS)
        except Exception as error:
            # The answer to the completion of the upload was lost, and the client's second request found no upload.
            if s3_answer(error)[0] != "NoSuchUpload" or self.size(key) != len(data):
                raise

    def create(self, key: str, data: bytes) -> None:
        """Sends one conditional PUT with a unique mark, so that this writer recognizes its own object.

        s3fs repeats a request whose connection broke, so a refusal may be the result of its own first try. Ceph 16
        refuses with EINVAL instead of "exists". In both cases the mark of the stored object decides. AWS refuses with a
        conflict while another writer creates or deletes the object.
        """
        fs, path = self._locate(key)
        mark = uuid.uuid4().hex
        try:
            # A chunk larger than the data keeps it one PUT; some servers do not refuse multipart uploads.
            fs.pipe_file(path, data, mode="create", chunksize=len(data) + 1, Metadata={"created-by": mark})
        except Exception as error:
            stored = None
            with suppress(Exception):  # there is no object, or the server does not answer
                stored = fs.metadata(path)
            if stored is None and s3_answer(error)[0] != "ConditionalRequestConflict":
                raise
            if stored is None or stored.get("created-by") != mark:
                raise FileExistsError(errno.EEXIST, "the object exists already", path) from error

    def _options(self) -> dict[str, Any]:
        """Returns the retries, unless the user has configured other ones."""
        config = {} if "AWS_MAX_ATTEMPTS" in os.environ else {"retries": RETRIES}
        config |= fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
        # With a larger concurrency, s3fs requests the size of an object before it reads it.
        return {"config_kwargs": config, "max_concurrency": 1}

    def uploads(self) -> list[Upload]:
        """Returns at most 1000 uploads, one answer of S3. Later calls return the rest when these have been aborted."""
        fs, path = self._open()
        bucket, base, _ = fs.split_path(f"{path}/")
        answer = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=base)
        return [
            Upload(upload["Key"].removeprefix(base), upload["UploadId"], upload["Initiated"].timestamp())
            for upload in answer.get("Uploads", [])
        ]

    def abort(self, upload: Upload) -> None:
        fs, path = self._locate(upload.key)
        bucket, key, _ = fs.split_path(path)
        with suppress(FileNotFoundError):
            fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload.id)


async def _read_into(fs: Any, path: str, start: int, buffer: memoryview) -> int:
    bucket, key, _ = fs.split_path(path)
    wanted = f"bytes={start}-{start + len(buffer) - 1}"
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=wanted)
    body = answer["Body"]
    count = 0
    try:
        async for chunk in body.iter_chunks(RESPONSE_CHUNK_BYTES):
            buffer[count : count + len(chunk)] = chunk  # an error if the response is longer than requested
            count += len(chunk)
    finally:
        body.close()
    return count


class _Parts:
    """An object that s3fs sends in parts. This class copies each part when it is sent, and not all parts at first."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, part: slice) -> bytes:
        return bytes(self._data[part])
