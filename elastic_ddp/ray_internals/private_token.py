"""A token for clusters of this machine where the home folder, in which Ray keeps it, cannot be written.

Containers often have such a home folder. Every process of the same user on this machine (`elastic-ddp status`,
for example) finds the token again.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray._private.authentication import authentication_token_setup
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

from elastic_ddp.errors import ConfigError

_PATH = "RAY_AUTH_TOKEN_PATH"
_FIX = "Set RAY_AUTH_TOKEN_PATH to a file that can be written, or HOME to a folder that can."


def init_ray(**options: Any) -> None:
    """Calls `ray.init`, once more with a token in the folder for temporary files if Ray cannot write one to ~/.ray.

    A token in ~/.ray is then readable by this user alone. Ray creates it readable by all users.
    """
    try:
        ray.init(**options)
    except OSError as error:
        if _PATH in os.environ or ".ray" not in Path(str(error.filename)).parts:
            raise
        _set_token(_create_token())
        ray.init(**options)
    with suppress(OSError, RuntimeError):  # it is another user's, or there is no token or no home folder
        token = Path.home() / ".ray" / "auth_token"
        if token.stat().st_mode & 0o077:
            token.chmod(0o600)


def enable_token() -> bool:
    """Enables authentication with this machine's token. Returns whether there is one.

    If Ray's own place has no token, this enables the token that `init_ray` created in an earlier process.
    """
    token = _token_file()
    is_given = _PATH in os.environ or "RAY_AUTH_TOKEN" in os.environ
    if not is_given and token.exists() and not AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        _check_is_private(token.parent)
        _set_token(token)
    return authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _token_file() -> Path:
    return Path(tempfile.gettempdir(), f"elastic_ddp-{os.getuid()}", "auth_token")


def _create_token() -> Path:
    from ray._private.authentication.authentication_token_generator import generate_new_authentication_token

    file = _token_file()
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        _check_is_private(file.parent)
        if not file.exists():
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as out:
                out.write(generate_new_authentication_token())
    except OSError as error:
        raise ConfigError(f"Ray's token can be written neither to ~/.ray nor to {file}: {error}. {_FIX}") from error
    return file


def _check_is_private(folder: Path) -> None:
    """Raises ConfigError if other users could write to the folder."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is not a folder of this user alone, so Ray's token would not be safe there. {_FIX}"
        )


def _set_token(file: Path) -> None:
    """Makes Ray read the token from a file."""
    os.environ[_PATH] = str(file)
    AuthenticationTokenLoader.instance().reset_cache()
