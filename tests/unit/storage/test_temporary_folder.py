"""Temporary folders of processes that are killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elastic_ddp.storage.temporary_folder import TemporaryFolder

HOLD = """
import sys
from elastic_ddp.storage.temporary_folder import TemporaryFolder
folder = TemporaryFolder("calls")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one_alone(everywhere: Path) -> None:
    other = everywhere / f"elastic_ddp-{os.getuid()}"  # where a token is kept
    other.mkdir()
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        (theirs / "file").touch()
        mine = TemporaryFolder("run")
        assert {theirs, Path(mine.path), other} == {*everywhere.iterdir()}, "its process lives"
        process.kill()
        process.wait()
    next_one = TemporaryFolder("weights")
    assert {Path(mine.path), Path(next_one.path), other} == {*everywhere.iterdir()}
    mine.close()
    mine.close()
    next_one.close()
    assert [*everywhere.iterdir()] == [other]


def test_two_threads_may_close_a_folder_at_a_time(everywhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, closed = TemporaryFolder("calls"), list[int]()

    def close(descriptor: int) -> None:
        if not closed:
            closed.append(descriptor)
            folder.close()  # as another thread does meanwhile
        else:
            closed.append(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *arguments, **named: None)
        patched.setattr(os, "close", close)
        folder.close()
    assert len(closed) == 1
    os.close(closed[0])
