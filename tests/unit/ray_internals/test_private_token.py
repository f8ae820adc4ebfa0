"""Ray's token where the home folder cannot be written, as in many containers."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_ddp import ElasticTrainer
from elastic_ddp.errors import ConfigError
from elastic_ddp.ray_internals.private_token import init_ray

START = """
import os, ray
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._raylet import AuthenticationTokenLoader
from elastic_ddp.ray_internals.private_token import init_ray
ray.init = ensure_token_if_auth_enabled  # what fails in it
init_ray()
assert AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
print(os.environ.get("RAY_AUTH_TOKEN_PATH"))
"""
FIND = """
import os
import pwd
from elastic_ddp.ray_internals.private_token import enable_token
enable_token()
print(os.environ.get("RAY_AUTH_TOKEN_PATH"))
"""


def run(code: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env = {**clean, "PYTHONPATH": os.getcwd(), "RAY_AUTH_MODE": "token", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_ray_starts_without_a_home_folder_and_other_processes_find_its_token(tmp_path: Path) -> None:
    nowhere = {"HOME": "/dev/null", "TMPDIR": str(tmp_path)}
    assert run(FIND, **nowhere) == "None"
    path = run(START, **nowhere)
    assert Path(path).parents[1] == tmp_path and len(Path(path).read_text()) == 64
    assert (os.stat(path).st_mode & 0o777, os.stat(Path(path).parent).st_mode & 0o777) == (0o600, 0o700)
    assert run(FIND, **nowhere) == run(START, **nowhere) == path
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("a" * 64)
    assert run(FIND, HOME=str(tmp_path), TMPDIR=str(tmp_path)) == "None", "the home folder has a token"


def test_the_token_that_ray_creates_is_readable_by_its_user_alone(tmp_path: Path) -> None:
    assert run(START, HOME=str(tmp_path)) == "None"
    assert os.stat(tmp_path / ".ray/auth_token").st_mode & 0o777 == 0o600


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
