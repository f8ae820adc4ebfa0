"""The place in the user's code where a thread of a worker is, for error messages."""

from __future__ import annotations

import itertools
import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

from elastic_ddp.signals import FATAL_SIGNALS

_PACKAGE = str(Path(__file__).parents[1])
_TORCH, _RAY = (str(Path(find_spec(name).origin or "").parent) for name in ("torch", "ray"))  # type: ignore[union-attr]
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_OURS = (_PACKAGE, _TORCH, _RAY, "<frozen")
_CALL_TRAINING_FUNCTION = [
    f"{_PACKAGE}/{file}" for file in ("data/user_code.py", "worker/main.py", "driver/ray_train.py")
]
_MESSAGES = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
"""Functions of torch.distributed that involve two ranks only."""
_DUMPED_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Frame(NamedTuple):
    """One frame of a Python stack."""

    file: str
    line: int
    function: str


def frames_of(frame: FrameType | None) -> list[Frame]:
    """Returns a thread's stack, the innermost frame first."""
    return [Frame(at.f_code.co_filename, line, at.f_code.co_name) for at, line in traceback.walk_stack(frame)]


def frames_of_error(trace: TracebackType | None) -> list[Frame]:
    """Returns the stack of an error, the innermost frame first."""
    frames = [Frame(at.f_code.co_filename, line, at.f_code.co_name) for at, line in traceback.walk_tb(trace)]
    return frames[::-1]


def user_place(frames: Sequence[Frame]) -> str:
    """Returns the innermost place in the user's own code as `file:line in function`; empty if there is none.

    A place in an installed package counts if there is no other.
    """
    others = [frame for frame in frames if not frame.file.startswith(_OURS)]
    installed = [frame for frame in others if frame.file.startswith(_INSTALLED)]
    own = [frame for frame in others if not frame.file.startswith((*_INSTALLED, *_STANDARD))]
    for frame in own or installed:
        return f"{frame.file}:{frame.line} in {frame.function}"
    return ""


def collective_of(frames: Iterable[Frame]) -> str | None:
    """Returns the function of torch.distributed in which a stack ends, if it is a collective; otherwise None."""
    called = None
    for frame in frames:
        if not frame.file.startswith(f"{_TORCH}/distributed/"):
            break
        if frame.function in _MESSAGES:
            return None
        called = frame.function if frame.function != "wrapper" else called
    return called


def describe_crash(dump: str) -> str:
    """Returns the signal and the place of a crash, and below it the Python stack, from the dump of `faulthandler`."""
    header, *blocks = dump.strip().split("\n\n")
    name = header.partition(": ")[2]
    signal = FATAL_SIGNALS.get(name, name)
    frames = [_DUMPED_FRAME.findall(block) for block in blocks]
    stacks = [[Frame(file, int(line), function) for file, line, function in each] for each in frames]
    current = [stack for block, stack in zip(blocks, stacks, strict=True) if block.startswith("Current") and stack]
    # A thread of native code has no Python stack. The training thread then shows what the process was doing.
    training = [stack for stack in stacks if any(frame.file in _CALL_TRAINING_FUNCTION for frame in stack)]
    stack = next(iter(current or training), [])
    own = list(itertools.takewhile(lambda frame: frame.file not in _CALL_TRAINING_FUNCTION, stack))
    place = user_place(own)
    lines = [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in own]
    return "\n".join([f"{signal} at {place}" if place else signal, *lines])
