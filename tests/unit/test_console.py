"""What a driver's console shows: users' prints and the run's own lines, in any encoding, and no messages of Ray."""

from __future__ import annotations

import io
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray._private.worker
from ray._private.log import PlainRayHandler
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

from elastic_ddp.console import Tolerant
from elastic_ddp.ray_internals.ray_messages import RayMessages, mark_messages

ray_worker: Any = ray._private.worker
NATIVE = [
    "[2026-11-27 01:24:02,570 E 11705 11705] core_worker.cc:609: Attempting to recover 1 lost objects",
    "*** StackTrace Information ***",
    "/site-packages/ray/_raylet.so(+0x15fb1aa) [0x7f1b2c3d4e5f] ray::operator<<()",
    "    a line of the same message",
    "ERROR: External init callback must run in same thread as registerClient (1751463616 != -1656280192)",
]

Prints = Callable[..., None]


@pytest.fixture
def prints(monkeypatch: pytest.MonkeyPatch) -> Prints:
    """Receives lines of a process as a driver of Ray does."""
    printed_by_ray = partial(ray_worker.print_to_stdstream, ignore_prefix=False)
    monkeypatch.setattr(dispatcher, "handlers", [("ray_print_logs", printed_by_ray)])
    monkeypatch.setenv("RAY_COLOR_PREFIX", "0")

    def prints(*lines: str, pid: Any = 7, is_err: bool = False) -> None:
        dispatcher.emit({"pid": pid, "actor_name": "Worker", "is_err": is_err, "lines": list(lines), "ip": "h"})

    return prints


def test_messages_of_ray_go_to_a_file_and_prints_to_the_console(
    prints: Prints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes: list[str] = []
    with RayMessages(tmp_path / "ray.log", notes.append, verbose=False):
        prints("step 1", "step 2")
        assert notes == [] and not list(tmp_path.iterdir()), "there is no message yet"
        prints("a warning", *NATIVE, "Traceback of the user", is_err=True)
        prints("the end of its log", "    [2026-11-27 01:24:02,570 I 1 1] (raylet) a line", pid="raylet")
        ray_worker.print_to_stdstream({"lines": ["a node died"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
        logging.getLogger("ray.data").warning("a message of the driver")
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["(Worker pid=7, ip=h) step 1", "(Worker pid=7, ip=h) step 2"]
    assert shown.err.splitlines() == ["(Worker pid=7, ip=h) a warning", "(Worker pid=7, ip=h) Traceback of the user"]
    text = (tmp_path / "ray.log").read_text()
    for line in (*NATIVE, "the end of its log", "a node died", "a message of the driver"):
        assert text.count(line) == 1
    assert len(notes) == 1 and str(tmp_path / "ray.log") in notes[0]
    prints("after the run", pid="raylet")
    assert "after the run" in capsys.readouterr().out


def test_verbose_shows_messages_of_ray_on_the_console_too(
    prints: Prints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RayMessages(tmp_path / "ray.log", print, verbose=True):
        prints("a node died", pid="raylet")
    assert "a node died" in capsys.readouterr().err
    assert "a node died" in (tmp_path / "ray.log").read_text()


def test_the_console_shows_messages_of_ray_that_cannot_be_written(
    prints: Prints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RayMessages(tmp_path / "no such folder" / "ray.log", print, verbose=False):
        prints("a node died", pid="raylet")
    assert "a node died" in capsys.readouterr().err


def test_what_ray_logs_in_a_worker_is_told_from_what_a_user_logs(
    prints: Prints, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainRayHandler, "emit", PlainRayHandler.emit)  # restored after the test
    mark_messages()
    for name in ("ray.data", "mine"):
        record = logging.LogRecord(name, logging.ERROR, "", 0, f"{name} failed\nTraceback:\nValueError: x", None, None)
        PlainRayHandler().emit(record)
    lines = capsys.readouterr().err.splitlines()
    with RayMessages(tmp_path / "ray.log", print, verbose=False):
        prints(*lines, is_err=True)
    assert [line.partition(") ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "mine failed",
        "Traceback:",
        "ValueError: x",
    ]
    assert "ray.data failed" in (tmp_path / "ray.log").read_text()


@pytest.mark.parametrize(("error", "is_shown"), [(KeyboardInterrupt, False), (SystemExit, False), (ValueError, True)])
def test_the_end_of_a_task_in_a_generator_is_not_printed(
    error: type[BaseException], is_shown: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainRayHandler, "emit", PlainRayHandler.emit)  # restored after the test
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    mark_messages()

    class Interrupted:
        def __del__(self) -> None:
            raise error

    Interrupted()
    assert (error.__name__ in capsys.readouterr().err) == is_shown


def test_prints_of_workers_that_differ_in_their_numbers_are_all_shown(
    prints: Prints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RayMessages(tmp_path / "ray.log", print, verbose=False):
        for rank in range(4):
            prints(f"rank {rank}", pid=rank)
    assert [line[-6:] for line in capsys.readouterr().out.splitlines()] == [f"rank {rank}" for rank in range(4)]


@pytest.mark.parametrize(
    ("encoding", "written"),
    [("ascii", b"\\xfc \\u2192 \\udcff"), ("latin-1", b"\xfc \\u2192 \\udcff"), ("utf-8", "ü → \\udcff".encode())],
)
def test_text_that_the_encoding_lacks_is_escaped(encoding: str, written: bytes) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    print("ü → \udcff", file=Tolerant(stream), end="", flush=True)
    assert stream.buffer.getvalue() == written  # type: ignore[attr-defined]


def test_writing_to_a_terminal_or_pipe_that_is_closed_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    print("lost", file=Tolerant(stream), flush=True)
    Tolerant(stream).write("x" * 100_000)
    Tolerant(stream).flush()
    with pytest.raises(BrokenPipeError):
        stream.close()
    print("it is closed", file=Tolerant(stream), flush=True)


def test_a_command_prints_names_that_the_encoding_lacks(tmp_path: Path) -> None:
    run = shutil.copytree(Path(__file__).parents[1] / "data" / "stored_runs" / "small", tmp_path / "größe")
    command = [sys.executable, "-m", "elastic_ddp.cli.main", "show", str(run)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "gr\\xf6\\xdfe" in done.stdout
