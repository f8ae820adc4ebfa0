"""The text of an exception of a storage's client library, and the fix.

The client libraries are optional, so their classes are recognized by name. s3fs converts S3's errors to Python's,
without S3's code or an errno. Ceph's gateway sends a code without a message.
"""

from __future__ import annotations

import errno
from typing import Any

from elastic_ddp.errors import format_exception

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}
_BAD_CREDENTIALS = {
    *("ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken"),
    *("SignatureDoesNotMatch", "TokenRefreshRequired"),
}
_FULL_CODES = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"}


def format_error(error: BaseException) -> str:
    """Returns the type and text of an error, with S3's code and status if S3 sent it."""
    code, status, message = s3_answer(error)
    if not code:
        return format_exception(error)
    answer = code if code == str(status) else f"{code}, {status}"
    return f"{type(error).__name__}: {answer}{message and f': {message}'}"


def is_missing_bucket(error: BaseException) -> bool:
    """Returns whether the bucket itself does not exist."""
    return s3_answer(error)[0] == "NoSuchBucket"


def suggest_fix(error: BaseException) -> str:
    """Returns what the user can change."""
    code, status, _ = s3_answer(error)
    if code in _BAD_CREDENTIALS or _names(error) & _NO_CREDENTIALS:
        return (
            "set or renew the credentials: for S3 AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, a "
            "profile, or a role of the machine"
        )
    if code in _FULL_CODES or getattr(error, "errno", None) in _FULL:
        return "free space there, raise the limit (quota or ulimit -f), or use another storage"
    by_client = isinstance(error, NotImplementedError) or "ParamValidationError" in _names(error)
    if by_client or getattr(error, "errno", None) in _UNSUPPORTED or status == 501:
        return (
            "use a storage that can create an object only if it does not exist: a folder that all nodes mount, AWS "
            "S3, or a server that supports If-None-Match (check for a newer version)"
        )
    if isinstance(error, FileNotFoundError):
        return "create the bucket or the file system first, or correct its name"
    if isinstance(error, PermissionError):
        return "allow this user or role to read, write, list and delete there, or use another storage"
    return "check the address (AWS_ENDPOINT_URL for S3 servers other than AWS), the network and the permissions"


def s3_answer(error: BaseException | None) -> tuple[str, int | None, str]:
    """Returns code, HTTP status and message of the S3 answer that caused an error; an empty code if none did."""
    while error is not None:
        response: Any = getattr(error, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return str(response["Error"].get("Code") or ""), status, response["Error"].get("Message") or ""
        error = error.__cause__
    return "", None, ""


def _names(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}
