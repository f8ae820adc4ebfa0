"""What an exception of a storage's client library means: its text, whether it is permanent, and the fix.

The client libraries are optional, so their classes are recognized by name. s3fs converts S3's errors to Python's,
without S3's code or an errno. Ceph's gateway sends a code without a message.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

from elastic_ddp.errors import format_exception

_FULL = {errno.ENOSPC, errno.EDQUOT}
_PERMANENT = {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EFBIG, errno.EROFS} | _FULL
_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}
_BAD_CREDENTIALS = {
    *("ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken"),
    *("SignatureDoesNotMatch", "TokenRefreshRequired"),
}
_FULL_CODES = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"}
_PERMANENT_STATUS = {401, 403, 404, 405, 501, 507}


def format_error(error: BaseException) -> str:
    """Returns the type and text of an error, with S3's code and status if S3 sent it."""
    code, status, message = _s3_answer(error)
    if not code:
        return format_exception(error)
    answer = code if code == str(status) else f"{code}, {status}"
    return f"{type(error).__name__}: {answer}{message and f': {message}'}"


def is_missing_bucket(error: BaseException) -> bool:
    """Returns whether the bucket itself does not exist."""
    return _s3_answer(error)[0] == "NoSuchBucket"


def is_refused_as_changed(error: BaseException) -> bool:
    """Returns whether S3 refused a conditional request because the object has changed."""
    return _s3_answer(error)[1] == 412


def is_unsupported(error: BaseException) -> bool:
    """Returns whether the server or the client library does not support the request."""
    by_client = _names(error) & {"ParamValidationError"} or (isinstance(error, OSError) and error.errno in _UNSUPPORTED)
    return bool(by_client) or _s3_answer(error)[1] == 501


def is_permanent(error: BaseException | None) -> bool:
    """Returns whether a retry cannot succeed, such as without permission, space or a bucket."""
    code, status, _ = _s3_answer(error)
    if code:
        # A completed multipart upload no longer exists: its answer was lost, and the client repeated the request.
        by_status = status in _PERMANENT_STATUS and code != "NoSuchUpload"
        return by_status or code in _BAD_CREDENTIALS | _FULL_CODES | {"InvalidBucketName"}
    return any(
        isinstance(cause, PermissionError | FileNotFoundError | NotADirectoryError | NotImplementedError)
        or (isinstance(cause, OSError) and cause.errno in _PERMANENT)
        or _names(cause) & _NO_CREDENTIALS
        for cause in _causes(error)
    )


def suggest_fix(error: BaseException) -> str:
    """Returns what the user can change."""
    code, _, _ = _s3_answer(error)
    number = error.errno if isinstance(error, OSError) else None
    if _names(error) & _NO_CREDENTIALS:
        return (
            "set credentials: for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role of the machine"
        )
    if code in _BAD_CREDENTIALS:
        return (
            "renew or correct the credentials: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or "
            "the profile that they come from"
        )
    if code == "RequestTimeTooSkewed":
        return "set this machine's clock"
    if code in _FULL_CODES or number in _FULL:
        return "free space there or use another storage"
    if number == errno.EROFS:
        return "mount it for writing or use another storage"
    if number == errno.EFBIG:
        return "raise the file size limit (ulimit -f) or use another file system"
    if isinstance(error, NotImplementedError) or number in _UNSUPPORTED:
        return (
            "use a storage that can create an object only if it does not exist: a folder that all nodes mount, AWS "
            "S3, or a server that supports If-None-Match (check for a newer version)"
        )
    if isinstance(error, FileNotFoundError):
        return "create the bucket or the file system first, or correct its name"
    if isinstance(error, PermissionError):
        return "allow this user or role to read, write, list and delete there, or use another storage"
    if isinstance(error, NotADirectoryError):
        return "remove that file or use another folder"
    return "check the address (AWS_ENDPOINT_URL for S3 servers other than AWS), the network and the permissions"


def _s3_answer(error: BaseException | None) -> tuple[str, int | None, str]:
    """Returns code, HTTP status and message of the S3 answer that caused an error; an empty code if none did."""
    for cause in _causes(error):
        response: Any = getattr(cause, "response", None)
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
