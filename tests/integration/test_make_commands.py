"""`make train` and `make test` work on a clean checkout that has Python, pip and make."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUDGET_S = 480
PASSED_ON = re.compile(r"PIP_.*|.*_CA_BUNDLE|SSL_CERT_.*|(https?|no)_proxy", re.IGNORECASE)
"""Environment variables with which a machine reaches its package registry."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copies every file of the working tree that git does not ignore, as a clone would have it."""
    try:
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    target = tmp_path / "checkout"
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():  # deleted files may still be in the index
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture
def clean_environment() -> Iterator[dict[str, str]]:
    # The path must be short: Ray keeps sockets in it, whose names have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ed-", ignore_cleanup_errors=True) as home:
        yield {
            **{name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)},
            **_pip_of_this_user(),
            "PIP_NO_COMPILE": "1",  # half of an installation's time goes into modules that this test does not import
            "HOME": home,
            "PATH": os.environ["PATH"],
            # The interpreter that runs the tests; python3 may be another version.
            "PYTHON": getattr(sys, "_base_executable", sys.executable),
            # Separate from the Ray of other tests.
            "RAY_TMPDIR": home,
        }


def _pip_of_this_user() -> dict[str, str]:
    """Returns the settings and cache of pip in the user's home."""
    home = Path.home()
    settings = {}
    for file in (home / ".config/pip/pip.conf", home / ".pip/pip.conf"):
        if file.is_file() and "PIP_CONFIG_FILE" not in os.environ:
            settings["PIP_CONFIG_FILE"] = str(file)
            break
    if "PIP_CACHE_DIR" not in os.environ:
        settings["PIP_CACHE_DIR"] = str(home / ".cache/pip")
    return settings


def run(command: list[str], cwd: Path, env: dict[str, str]) -> str:
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=BUDGET_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(BUDGET_S + 60)
def test_make_train_on_a_clean_checkout(checkout: Path, clean_environment: dict[str, str]) -> None:
    trains(checkout, clean_environment)


@pytest.fixture
def installed(checkout: Path, clean_environment: dict[str, str]) -> dict[str, str]:
    """Returns the environment of a checkout whose .venv is the one that runs the tests."""
    (checkout / ".venv").symlink_to(sys.prefix)
    for stamp in ("made", "installed"):
        assert (checkout / f".venv/.{stamp}").exists(), "run the tests with `make test`"
        for name in ("pyproject.toml", "constraints.txt"):
            os.utime(checkout / name, (0, 0))
    return {**clean_environment, "PYTHONPATH": str(checkout)}


@pytest.mark.slow
@pytest.mark.timeout(BUDGET_S + 60)
def test_make_train_in_an_installed_checkout(checkout: Path, installed: dict[str, str]) -> None:
    trains(checkout, installed, "--steps 3 --global-batch-size 8 --micro-batch-size 4")


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(BUDGET_S + 60)
def test_the_example_job_trains_with_fsdp(checkout: Path, installed: dict[str, str]) -> None:
    trains(checkout, installed, "--steps 6 --strategy fsdp")


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(BUDGET_S + 60)
def test_the_survive_example_has_the_same_hashes_in_both_runs(checkout: Path, installed: dict[str, str]) -> None:
    run([str(checkout / ".venv/bin/python"), "examples/survive.py"], checkout, installed)  # it compares them


def trains(checkout: Path, environment: dict[str, str], arguments: str = "--steps 6") -> None:
    output = run(["make", "train", f"ARGS={arguments}"], checkout, environment)
    assert re.search(r"finished after \d+ steps; weights [0-9a-f]{64}\b", output), output
    again = run(["make", "--dry-run", "install"], checkout, environment)
    assert "pip install" not in again


def test_make_test_installs_lints_builds_docs_and_runs_all_tests(
    checkout: Path, clean_environment: dict[str, str]
) -> None:
    # A dry run: the command itself runs this test.
    plan = run(["make", "--dry-run", "test"], checkout, clean_environment)
    order = ["-m venv .venv", "pip install", "ruff check", "mypy", "mkdocs build --strict", "-m pytest"]
    places = [plan.index(part) for part in order]
    assert places == sorted(places)
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "tests").glob("*/__init__.py")]
    assert [str(folder) for folder in folders if f" {folder} " not in plan] == []


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
