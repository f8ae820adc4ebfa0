"""What benchmarks/host.py and benchmarks/gpu_session.py rely on, without running them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import gpu
import gpu_session
import host


def test_parts_are_timed_without_the_parts_that_they_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Engine:
        def outer(self) -> None:
            work(2.0)
            self.inner()

        def inner(self) -> None:
            work(4.0)

        def items(self) -> Iterator[int]:
            work(1.0)
            yield 1

    inner = Engine.inner
    monkeypatch.setattr(host, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(host, "parts", lambda: {"a": [(Engine, "outer")], "b": [(Engine, "inner"), (Engine, "items")]})
    timer = host.PartTimer()
    with timer.installed():
        Engine().outer()
        assert list(Engine().items()) == [1]
    assert Engine.inner is inner
    assert timer.seconds == {"a": 2.0, "b": 5.0}


def test_the_functions_of_all_parts_exist_and_are_put_back() -> None:
    before = [getattr(owner, name) for listed in host.parts().values() for owner, name in listed]
    with host.PartTimer().installed():
        pass
    assert [getattr(owner, name) for listed in host.parts().values() for owner, name in listed] == before


@pytest.mark.parametrize("part", gpu_session.PARTS, ids=lambda part: part.name)
def test_a_gpu_session_has_commands_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: gpu_session.Part
) -> None:
    command = part.command(tmp_path, is_dry=False)
    if command[0] == "-m":
        assert all((gpu_session.ROOT / word).exists() for word in command if word.startswith("tests/"))
    else:
        monkeypatch.setattr(sys, "argv", command)
        assert gpu.parse().parts


def test_a_gpu_session_fits_a_lent_gpu_and_is_tried_without_one(tmp_path: Path) -> None:
    assert sum(part.limit_s for part in gpu_session.PARTS) <= gpu_session.LIMIT_S
    command = [sys.executable, gpu_session.__file__, "--dry-run", "--parts", "exactness", "--folder", str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "exactness" in output and "done" in output
    assert (tmp_path / "exactness.json").exists() and (tmp_path / "exactness.log").exists()
