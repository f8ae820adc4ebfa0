"""What an exception of a storage's client library means: in words, whether time mends it, and what to change.

Libraries are optional, so their classes go by name. s3fs makes errors of Python's out of S3's, with neither S3's code
nor an errno; Ceph's gateway sends a code and not a word beside it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

from elastic_ddp.errors import format_exception

_FULL = {errno.ENOSPC, errno.EDQUOT}
_LASTING = {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EFBIG, errno.EROFS} | _FULL
_UNABLE = {errno.ENOSYS, errno.ENOTSUP}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}
_BAD_CREDENTIALS = {
    *("ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken"),
    *("SignatureDoesNotMatch", "TokenRefreshRequired"),
}
_FULL_CODES = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"}
_LASTING_STATUS = {401, 403, 404, 405, 501, 507}


def format_error(error: BaseException) -> str:
    """The error in words, with S3's code and status where it is one of S3's."""
    code, status, words = _s3_answer(error)
    if not code:
        return format_exception(error)
    return f"{type(error).__name__}: {code if code == str(status) else f'{code}, {status}'}{words and f': {words}'}"


def is_missing_bucket(error: BaseException) -> bool:
    """Whether an object is missing because its bucket is."""
    return _s3_answer(error)[0] == "NoSuchBucket"


def is_refused_as_changed(error: BaseException) -> bool:
    """Whether S3 refused what was asked under the condition that an object is as it was."""
    return _s3_answer(error)[1] == 412


def is_unsupported(error: BaseException) -> bool:
    """Whether a server, or the client's library, says that it does not know what was asked."""
    lacks = _names(error) & {"ParamValidationError"} or (isinstance(error, OSError) and error.errno in _UNABLE)
    return bool(lacks) or _s3_answer(error)[1] == 501


def is_permanent(error: BaseException | None) -> bool:
    """Whether a failure of a storage is one that time does not mend: no rights, no room, no such bucket."""
    code, status, _ = _s3_answer(error)
    if code:
        # An upload in parts is missing once it is complete: its answer was lost, and the library asked again.
        lasts = status in _LASTING_STATUS and code != "NoSuchUpload"
        return lasts or code in _BAD_CREDENTIALS | _FULL_CODES | {"InvalidBucketName"}
    for each in _causes(error):
        if isinstance(each, PermissionError | FileNotFoundError | NotADirectoryError | NotImplementedError):
            return True
        if _names(each) & _NO_CREDENTIALS:
            return True
        if isinstance(each, OSError) and each.errno in _LASTING:
            return True
    return False


def suggest_fix(error: BaseException) -> str:
    """What to change."""
    code, _, _ = _s3_answer(error)
    if _names(error) & _NO_CREDENTIALS:
        return (
            "give credentials, for S3 with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role of "
            "the machine"
        )
    if code in _BAD_CREDENTIALS:
        return (
            "renew or correct the credentials: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or "
            "the profile that they come from"
        )
    if code == "RequestTimeTooSkewed":
        return "set this machine's clock"
    if code in _FULL_CODES or (isinstance(error, OSError) and error.errno in _FULL):
        return "free space there or use another storage"
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return "mount it for writing or use another storage"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "raise the limit of a file's size (ulimit -f) or use another file system"
    if isinstance(error, NotImplementedError) or (isinstance(error, OSError) and error.errno in _UNABLE):
        return (
            "use one that creates an object only where there is none, as commits need it: a folder that all nodes "
            "mount, S3 of AWS or a server that heeds If-None-Match (a newer version of this one may)"
        )
    if isinstance(error, FileNotFoundError):
        return "create the bucket or the file system first, or correct its name"
    if isinstance(error, PermissionError):
        return "grant this user or role reading, writing, listing and deleting there, or use another storage"
    if isinstance(error, NotADirectoryError):
        return "remove that file or use another folder"
    return "check the address (AWS_ENDPOINT_URL for S3 servers other than AWS), the network and the permissions"


def _s3_answer(error: BaseException | None) -> tuple[str, int | None, str]:
    """Code, HTTP status and words of S3's answer that led to this; no code where there was none."""
    for each in _causes(error):
        response: Any = getattr(each, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return str(response["Error"].get("Code") or ""), status, response["Error"].get("Message") or ""
    return "", None, ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _names(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}
