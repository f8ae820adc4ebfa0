"""Objects on S3: what fsspec cannot do there, or does with more memory or requests."""

from __future__ import annotations

import asyncio
import errno
import io
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fsspec.asyn import sync

from elastic_ddp.storage.errors import is_permanent, is_refused_as_changed, is_unsupported
from elastic_ddp.storage.folder import Upload
from elastic_ddp.storage.remote import RemoteFolder

PART_BYTES = 8 << 20
"""Size of one part of a large object."""
PARALLEL_PARTS = 2
"""Number of parts of one object that are sent at once."""
RESPONSE_CHUNK_BYTES = 256 << 10
"""Largest piece of a response that is copied at once."""
CREATE_ATTEMPTS, CREATE_BACKOFF_S = 6, 0.2


class S3Folder(RemoteFolder):
    """A folder in a bucket of AWS S3 or a compatible server."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Copies the response into `buffer` as it arrives. fsspec would hold it twice in memory."""
        fs, path = self._locate(key)
        count: int = sync(fs.loop, _read_into, fs, path, start, buffer)
        return count

    def write(self, key: str, data: bytes | memoryview) -> None:
        if len(data) <= PART_BYTES:
            super().write(key, data)
            return
        fs, path = self._locate(key)
        sync(fs.loop, _write_in_parts, fs, path, memoryview(data))

    def create(self, key: str, data: bytes, before_retry: Callable[[], None]) -> None:
        """Sends one conditional PUT with a unique mark, so that this writer recognizes its own object.

        s3fs repeats a request whose connection broke, so a refusal may be the result of its own first try. Ceph 16
        refuses with EINVAL instead of "exists". AWS answers 409 while another create is in progress. In all these
        cases the mark of the stored object decides.
        """
        fs, path = self._locate(key)
        mark = uuid.uuid4().hex
        for attempt in range(CREATE_ATTEMPTS):
            if attempt:
                before_retry()
            try:
                # A chunk larger than the data keeps it one PUT; some servers do not refuse multipart uploads.
                fs.pipe_file(path, data, mode="create", chunksize=len(data) + 1, Metadata={"created-by": mark})
                return
            except Exception as error:
                if is_permanent(error):
                    raise
                try:
                    winner = fs.metadata(path).get("created-by")
                except Exception as unknown:  # there is no object, or the server does not answer
                    if is_permanent(unknown) and not isinstance(unknown, FileNotFoundError):
                        raise
                    if attempt == CREATE_ATTEMPTS - 1:
                        raise error from None
                    time.sleep(CREATE_BACKOFF_S * 2**attempt)
                    continue
                if winner == mark:
                    return
                raise FileExistsError(errno.EEXIST, "the object exists already", path) from error

    def delete_if(self, key: str, data: bytes) -> bool:
        """Deletes the object on condition of its ETag. Some servers ignore or refuse the condition."""
        fs, path = self._locate(key)
        etag = fs.info(path)["ETag"]
        if fs.cat_file(path) != data:
            return False
        bucket, object_key, _ = fs.split_path(path)
        try:
            fs.call_s3("delete_object", Bucket=bucket, Key=object_key, IfMatch=etag)
        except Exception as error:
            if is_refused_as_changed(error):
                return False
            if not is_unsupported(error):
                raise
            fs.rm_file(path)
        return True

    def uploads(self, prefix: str) -> list[Upload]:
        fs, path = self._locate("x")
        bucket, key, _ = fs.split_path(path)
        base = key.removesuffix("x")
        uploads: list[Upload] = []
        marker: dict[str, str] = {}
        while True:
            answer = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{base}{prefix}", **marker)
            uploads += [
                Upload(upload["Key"].removeprefix(base), upload["UploadId"], upload["Initiated"].timestamp())
                for upload in answer.get("Uploads", [])
            ]
            if not answer.get("IsTruncated"):
                return uploads
            marker = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def abort(self, upload: Upload) -> None:
        fs, path = self._locate(upload.key)
        bucket, key, _ = fs.split_path(path)
        with suppress(FileNotFoundError):
            fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload.id)


async def _read_into(fs: Any, path: str, start: int, buffer: memoryview) -> int:
    bucket, key, _ = fs.split_path(path)
    wanted = f"bytes={start}-{start + len(buffer) - 1}"
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=wanted)
    body, count = answer["Body"], 0
    try:
        async for chunk in body.iter_chunks(RESPONSE_CHUNK_BYTES):
            if count + len(chunk) > len(buffer):
                raise OSError(errno.EIO, f"the response exceeds the {len(buffer)} bytes requested", path)
            buffer[count : count + len(chunk)] = chunk
            count += len(chunk)
    finally:
        body.close()
    return count


async def _write_in_parts(fs: Any, path: str, data: memoryview) -> None:
    """Sends an object in parallel parts without copying them.

    fsspec takes parts as `bytes`, which are copies. It also takes files, but s3fs does not rewind a file before it
    repeats a request; the server could get only the rest of a part. botocore rewinds it, so parts go to botocore.
    """
    bucket, key, _ = fs.split_path(path)
    upload = {"Bucket": bucket, "Key": key}
    upload["UploadId"] = (await fs._call_s3("create_multipart_upload", **upload))["UploadId"]
    client = await fs.get_s3(bucket)  # exists only after the first request of s3fs
    slots = asyncio.Semaphore(PARALLEL_PARTS)

    async def send(number: int) -> dict[str, Any]:
        part = data[(number - 1) * PART_BYTES : number * PART_BYTES]
        async with slots:
            request = {**upload, "PartNumber": number, "Body": _MemoryFile(part)}
            answer = await client.upload_part(**fs._get_s3_method_kwargs(client.upload_part, **request))
        return {"PartNumber": number, "ETag": answer["ETag"]}

    try:
        async with asyncio.TaskGroup() as group:
            num_parts = -(-len(data) // PART_BYTES)
            tasks = [group.create_task(send(number)) for number in range(1, num_parts + 1)]
        parts = {"Parts": [task.result() for task in tasks]}
        await fs._call_s3("complete_multipart_upload", **upload, MultipartUpload=parts)
    except BaseException as error:
        with suppress(Exception):  # housekeeping aborts it later, as it does after a killed worker
            await fs._call_s3("abort_multipart_upload", **upload)
        translated = _translate(error)
        raise translated from translated.__cause__  # the cause holds S3's answer


def _translate(error: BaseException) -> BaseException:
    """Returns the first error of a group, converted from botocore's to Python's as s3fs does it."""
    from s3fs.errors import translate_boto_error

    first = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
    translated: BaseException = translate_boto_error(first)
    return translated


class _MemoryFile(io.RawIOBase):
    """A read-only file over memory that returns views instead of copies, which botocore and aiohttp accept.

    Copies would be made in aiohttp's threads, whose allocators keep memory after it is freed.
    """

    def __init__(self, data: memoryview) -> None:
        self._data, self._position = data, 0

    def __len__(self) -> int:
        return len(self._data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> memoryview:
        end = len(self._data) if size is None or size < 0 else self._position + size
        data = self._data[self._position : end]
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
