"""Checks of what reaches workers from the configuration: variables, Ray's runtime environment. Finds credentials."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from elastic_ddp.errors import ConfigError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CREDENTIAL = re.compile(
    r"""(^|_) (SECRETS? | CREDENTIALS? | PASSPHRASE | AUTHORIZATION | CONNECTION_STRING) (_|$)
    | (PASSWORDS? | PASSWD | PWD | API_?KEY | ACCESSKEY | SECRETKEY | [^_]TOKEN) (_|$)
    | TOKEN (?!_(IDS? | COUNT | LENGTH | LIMIT | SIZE) (_|$)) (_|$)  # not the settings of a tokenizer
    | (^|_) (ACCESS | ACCOUNT | AUTH | ENCRYPTION | MASTER | PRIVATE | SIGNING | SSH | STORAGE) _KEY (_|$)
    | _PASS $""",
    re.VERBOSE,
)
"""A name of a variable, in capitals, that has a credential."""
_PLACES = ("FILE", "PATH", "DIR", "URI", "URL", "NAME", "ARN")
"""A name with this end says where a credential is kept."""
_SWITCHES = {"", "0", "1", "true", "false", "yes", "no", "on", "off"}
_IN_URI = re.compile(
    r"://[^/?#\s@]*:[^/?#\s@]+@|https?://[^/?#\s@]+@|[?&]([\w-]*[_-])?(sig|signature|token|api_?key)=",
    re.IGNORECASE,
)
"""A password or token before the host of a URI, or a signature or token after its path."""
_USE_INSTEAD = (
    "Give nodes credentials by a role of the machine, by files such as ~/.aws/credentials, or by the environment of "
    "`ray start`"
)


def has_credential(text: str) -> bool:
    """Returns whether a URI in this text has a password, a token or a signature in it."""
    return _IN_URI.search(text) is not None


def _is_credential(name: str, value: str) -> bool:
    """Returns whether the name of a variable says that its value is a credential, and not where one is kept."""
    name = name.upper()
    if name.endswith(_PLACES) or name in ("PWD", "OLDPWD") or value.lower() in _SWITCHES:
        return False
    if name.endswith("CREDENTIALS") and value.startswith("/"):  # the file of GOOGLE_APPLICATION_CREDENTIALS
        return False
    return _CREDENTIAL.search(name) is not None


def hide_credentials(text: str) -> str:
    """Returns text, such as an error message, without the user and password of URIs."""
    return re.sub(r"://[^/?#\s@]+@", "://…@", text)


def check_env(env: Any) -> Any:
    """Returns environment variables if Ray can set them and none is a credential; ValueError without values if not."""
    if not isinstance(env, Mapping):
        raise ValueError('env is not a table; give variables and their values, such as env = {NCCL_DEBUG = "INFO"}')
    for name, value in env.items():
        if not isinstance(name, str) or _VARIABLE.fullmatch(name) is None:
            raise ValueError(
                f"env.{name}: this is no name of an environment variable; use letters, digits and '_', beginning with "
                "a letter or '_'"
            )
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f'env.{name}: give text in quotes without NUL characters, such as {name} = "1"')
        if _is_credential(name, value) or has_credential(value):
            raise ValueError(f"env.{name} looks like a credential, and Ray writes env to its logs. {_USE_INSTEAD}")
    return dict(env)


def check_runtime_env(runtime_env: Any) -> Any:
    """Returns Ray's runtime environment; ValueError if it has a credential, or variables, which belong into `env`."""
    if not isinstance(runtime_env, Mapping):
        raise ValueError('runtime_env is not a table; give fields, such as runtime_env = {working_dir = "."}')
    if "env_vars" in runtime_env:
        raise ValueError("runtime_env.env_vars: give environment variables in env instead")
    for name, value in runtime_env.items():
        if has_credential(str(value)):
            raise ValueError(
                f"runtime_env.{name} has a credential in a URI, and Ray writes it to its logs. {_USE_INSTEAD}"
            )
    return dict(runtime_env)


def check_uri_is_public(uri: str, setting: str) -> None:
    """Raises ConfigError, without the URI, if it has a credential: addresses are in ledgers, logs and messages."""
    if has_credential(uri):
        protocol = uri.partition("://")[0]
        raise ConfigError(
            f"{setting}='{protocol}://…' has a credential in it, and the run would record it. {_USE_INSTEAD}; fsspec "
            f"also reads FSSPEC_{protocol.upper()}_PASSWORD and ~/.config/fsspec"
        )
