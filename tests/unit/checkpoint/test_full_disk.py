"""Saves to a full disk."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_ddp.checkpoint import Commit
from elastic_ddp.errors import StorageError
from elastic_ddp.storage.storage import Storage
from tests.ranks import PROCESSES
from tests.saving import PART_BYTES, check_commits, large_state, save_on_ranks

ROOM_BYTES = PART_BYTES
"""Size of the disk: several small commits fit, two tensors of this size do not."""


def save_without_room(folder: str, words: str, remedy: str = "free space there") -> None:
    """Makes a save that does not fit between two that do."""
    storage = Storage(f"{folder}/runs")
    assert isinstance(save_on_ranks([storage] * 2, 1), Commit)
    outcome = save_on_ranks([storage] * 2, 2, state=large_state(2, 2))
    assert isinstance(outcome, StorageError)
    assert words in str(outcome) and remedy in str(outcome)
    check_commits(storage, 1)
    assert not list(Path(folder).rglob(".tmp-*"))
    assert isinstance(save_on_ranks([storage] * 2, 3), Commit)
    check_commits(storage, 1, 3)


def save_with_small_files(folder: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES // 2, ROOM_BYTES // 2))
    save_without_room(folder, "File too large", "ulimit -f")


def test_a_file_size_limit_fails_the_save_and_earlier_commits_stay(tmp_path: Path) -> None:
    process = PROCESSES.Process(target=save_with_small_files, args=[str(tmp_path)])
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_full_disk_fails_the_save_and_earlier_commits_stay(tmp_path: Path) -> None:
    # A file system in memory, visible to one process only.
    mount = f'mount -t tmpfs -o size={ROOM_BYTES} tmpfs "$0" && exec "$@"'
    on_it = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run([*on_it, "true"], capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    module = "tests.unit.checkpoint.test_full_disk"
    code = f"from {module} import *; save_without_room({str(tmp_path)!r}, 'No space left on device')"
    done = subprocess.run([*on_it, sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
