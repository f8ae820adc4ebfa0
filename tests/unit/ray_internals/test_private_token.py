"""Ray's token where the home folder cannot be written, as in many containers."""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._raylet import AuthenticationTokenLoader, Config

from elastic_ddp import ElasticTrainer
from elastic_ddp.errors import ConfigError
from elastic_ddp.ray_internals.private_token import enable_token, init_ray

PATH = "RAY_AUTH_TOKEN_PATH"


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Acts as a new process with a home folder: it knows no token. `ray.init` stops after it has prepared its token."""
    loader = AuthenticationTokenLoader.instance()
    monkeypatch.setattr(ray, "init", ensure_token_if_auth_enabled)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def begin(home: str) -> None:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", home)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        Config.initialize("")
        loader.reset_cache()

    yield begin
    os.environ.pop(PATH, None)
    monkeypatch.undo()
    Config.initialize("")
    loader.reset_cache()


def test_ray_starts_without_a_home_folder_and_other_processes_find_its_token(
    tmp_path: Path, process: Callable[[str], None]
) -> None:
    process("/dev/null")
    enable_token()
    assert PATH not in os.environ, "there is no token"
    init_ray()
    token = Path(os.environ[PATH])
    assert token.parents[1] == tmp_path and len(token.read_text()) == 64
    assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    for find in (enable_token, init_ray):
        process("/dev/null")
        find()
        assert os.environ[PATH] == str(token) and AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("a" * 64)
    process(str(tmp_path))
    enable_token()
    assert PATH not in os.environ, "the home folder has a token"


def test_the_token_that_ray_creates_is_readable_by_its_user_alone(
    tmp_path: Path, process: Callable[[str], None]
) -> None:
    process(str(tmp_path))
    init_ray()
    assert PATH not in os.environ
    assert (tmp_path / ".ray/auth_token").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_others_can_write_gets_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise PermissionError(13, "Permission denied", "/home/x/.ray")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    folder = tmp_path / f"elastic_ddp-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=rf"{folder} is not a folder of this user alone.*RAY_AUTH_TOKEN_PATH"):
        init_ray()
    assert not [*folder.iterdir()]


def test_a_user_without_a_home_folder_is_told_to_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", fail)
    with pytest.raises(ConfigError, match="Set HOME to a folder"):
        ElasticTrainer(print, data="data", config={})
