"""What S3 does, and fsspec has no words for."""

from __future__ import annotations

import asyncio
import errno
import io
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fsspec.asyn import sync

from elastic_ddp.storage.errors import is_permanent, is_refused_as_changed, is_unsupported

_CREATE_TRIES, _CREATE_PAUSE_S = 6, 0.2
CHUNK_BYTES = 256 << 10
"""Of an answer that is read as it comes, at most."""


@dataclass(frozen=True)
class Upload:
    """A multipart upload that was neither completed nor aborted, or a file that is no object yet."""

    key: str
    id: str
    begun: float
    """In seconds since 1970, by the server's clock."""
    num_bytes: int = 0
    """That are there of it; S3 does not say."""


def uploads_on_s3(fs: Any, base: str, folder: str) -> list[Upload]:
    """Those of objects below a folder of `base`, to which their keys are relative."""
    bucket, any_key, _ = fs.split_path(f"{base}/x")
    inside = any_key.removesuffix("x")
    found: list[Upload] = []
    marker: dict[str, str] = {}
    while True:
        answer = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{inside}{folder}", **marker)
        found += [
            Upload(each["Key"].removeprefix(inside), each["UploadId"], each["Initiated"].timestamp())
            for each in answer.get("Uploads", [])
        ]
        if not answer.get("IsTruncated"):
            return found
        marker = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def abort_on_s3(fs: Any, base: str, upload: Upload) -> None:
    """Has what was sent of it removed; it may be gone."""
    bucket, key, _ = fs.split_path(f"{base}/{upload.key}")
    with suppress(FileNotFoundError):
        fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload.id)


def read_on_s3(fs: Any, path: str, start: int, buffer: memoryview) -> int:
    """Fills a buffer from an object's bytes as they come: fsspec would have them twice, in pieces and then as a whole.
    Returns how many there were."""
    bucket, key, _ = fs.split_path(path)

    async def read() -> int:
        end = start + len(buffer)
        answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
        body, at = answer["Body"], 0
        try:
            async for chunk in body.iter_chunks(CHUNK_BYTES):
                if at + len(chunk) > len(buffer):
                    raise OSError(errno.EIO, f"more came than was asked for, which are {len(buffer)} bytes", path)
                buffer[at : at + len(chunk)] = chunk
                at += len(chunk)
        finally:
            body.close()
        return at

    count: int = sync(fs.loop, read)
    return count


def write_on_s3(fs: Any, path: str, data: memoryview, part_bytes: int, num_parallel: int) -> None:
    """An object in parts, `num_parallel` of which are on their way, that are read from where they lie.

    fsspec takes parts as `bytes`, a copy each, of which a connection's buffer is another. It would take files, but
    nothing of its own has s3fs begin a file anew when it repeats a request, which might send what the first try left
    of a part. botocore, which repeats requests too, begins anew (`reset_stream`). So parts go to botocore.
    """
    bucket, key, _ = fs.split_path(path)

    async def write() -> None:
        upload = {"Bucket": bucket, "Key": key}
        upload["UploadId"] = (await fs._call_s3("create_multipart_upload", **upload))["UploadId"]
        client = await fs.get_s3(bucket)  # there is none before s3fs' first request
        may_send = asyncio.Semaphore(num_parallel)

        async def send(number: int) -> dict[str, Any]:
            part = data[(number - 1) * part_bytes : number * part_bytes]
            async with may_send:
                request = {**upload, "PartNumber": number, "Body": _File(part)}
                answer = await client.upload_part(**fs._get_s3_method_kwargs(client.upload_part, **request))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            async with asyncio.TaskGroup() as group:
                sent = [group.create_task(send(1 + each)) for each in range(-(-len(data) // part_bytes))]
            parts = {"Parts": [each.result() for each in sent]}
            await fs._call_s3("complete_multipart_upload", **upload, MultipartUpload=parts)
        except BaseException as error:
            with suppress(Exception):  # otherwise it is collected later, with those of workers that were killed
                await fs._call_s3("abort_multipart_upload", **upload)
            said = _as_s3fs_says(error)
            raise said from said.__cause__  # which holds S3's answer

    sync(fs.loop, write)


def _as_s3fs_says(error: BaseException) -> BaseException:
    """The first of a group's errors, as s3fs makes one of Python's out of botocore's."""
    from s3fs.errors import translate_boto_error

    first = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
    translated: BaseException = translate_boto_error(first)
    return translated


class _File(io.RawIOBase):
    """Memory as a file that is read, without a copy of it: what is read are views, which botocore and aiohttp take as
    they take bytes. Copies would be gone as soon as they are sent, but the memory for them would not: threads of
    aiohttp's would have made them, each of which keeps some of what it has had."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def __len__(self) -> int:
        return len(self._data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> memoryview:
        """As much as is asked for, or left."""
        end = len(self._data) if size is None or size < 0 else self._at + size
        data = self._data[self._at : end]
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._data[self._at : self._at + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def create_on_s3(fs: Any, path: str, data: bytes, before_retry: Callable[[], None]) -> None:
    """One conditional PUT, marked so that our own success is known even if its answer was lost.

    s3fs repeats a request whose connection broke, so the refusal that comes back may have been caused by our own
    first try. RGW refuses with EINVAL rather than "exists" (seen with version 16), AWS with a conflict (409) while
    another create is under way. After each of these the object itself tells who won.

    Args:
        before_retry: called before every try but the first; what it raises ends them.
    """
    mark = uuid.uuid4().hex
    for number in range(_CREATE_TRIES):
        if number:
            before_retry()
        try:
            # A chunk larger than the data keeps it one PUT: multipart uploads are not refused everywhere.
            fs.pipe_file(path, data, mode="create", chunksize=len(data) + 1, Metadata={"created-by": mark})
            return
        except Exception as error:
            if is_permanent(error):
                raise
            try:
                winner = fs.metadata(path).get("created-by")
            except Exception as unknown:  # nothing is there, or nothing can be seen of it
                if is_permanent(unknown) and not isinstance(unknown, FileNotFoundError):
                    raise
                if number == _CREATE_TRIES - 1:
                    raise error from None
                time.sleep(_CREATE_PAUSE_S * 2**number)
                continue
            if winner == mark:
                return
            raise FileExistsError(errno.EEXIST, "the object exists already", path) from error


def delete_on_s3_if(fs: Any, path: str, data: bytes) -> bool:
    """Removes an object if these are its bytes, and returns whether they were: what is stored under its name meanwhile
    has another ETag, and stays. Servers that do not heed that remove whatever is there, and those that refuse it are
    asked for no more than a removal."""
    etag = fs.info(path)["ETag"]
    if fs.cat_file(path) != data:
        return False
    bucket, key, _ = fs.split_path(path)
    try:
        fs.call_s3("delete_object", Bucket=bucket, Key=key, IfMatch=etag)
    except Exception as error:
        if is_refused_as_changed(error):
            return False
        if not is_unsupported(error):
            raise
        fs.rm_file(path)
    return True
