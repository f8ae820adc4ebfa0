"""Sends the user's functions to other processes, which import modules and resolve relative paths as the driver does."""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray

from elastic_ddp.errors import ConfigError, DataError, format_exception, shorten, text_of

_FIX = (
    "Put the code on a file system that all nodes share, install it on all nodes, or let Ray copy it: "
    'runtime_env = {working_dir = "."} in the configuration, or pip or py_modules there.'
)
_DEBUG = (
    "Call trainer.debug() instead of trainer.fit(), or use `elastic-ddp run --debug`: one worker then runs in your own "
    "process. PYTHONBREAKPOINT=0 ignores calls of breakpoint()."
)
_OWN_DEBUGGER = re.compile(rb"(?:^|\0)PYTHONBREAKPOINT=(?!ray\.)([^\0]*)")
"""The variable as this process has begun with it, if Ray has not set it."""
_NOT_ON_PATH = (
    "The driver is on this node, too, and no folder of its sys.path has the module: the driver has loaded it by its "
    "file, as pytest does with --import-mode=importlib. Add the folder to sys.path (in pytest's settings: pythonpath)."
)
_PYTHONS_OWN = re.compile(r"(site|dist)-packages|python\d+\.zip$")
"""Folders of `sys.path` that belong to an installation of Python, which every node has for itself."""


T = TypeVar("T")


@dataclass(frozen=True)
class DriverEnvironment:
    """The driver's working directory and import path, which the user's code expects in other processes."""

    working_directory: str
    first: tuple[str, ...]
    """Entries of `sys.path` before the Python installation: the script's folder, for example."""
    last: tuple[str, ...]
    """Entries of `sys.path` after the Python installation."""
    node: str = ""
    """Address of the driver's node."""

    @classmethod
    def capture(cls) -> DriverEnvironment:
        """Returns the environment of this process."""
        stdlib = os.path.abspath(sysconfig.get_path("stdlib"))
        paths = [os.path.abspath(path) for path in sys.path]
        begin = paths.index(stdlib) if stdlib in paths else len(paths)

        def of_user(paths: list[str]) -> tuple[str, ...]:
            return tuple(dict.fromkeys(p for p in paths if not (_PYTHONS_OWN.search(p) or p.startswith(stdlib))))

        return cls(os.getcwd(), first=of_user(paths[:begin]), last=of_user(paths[begin:]), node=this_node())

    def enter(self) -> None:
        """Extends `sys.path`, and changes the working directory, by what exists on this node.

        If the `runtime_env` has a `working_dir`, Ray has set the working directory. This directory stays, and its
        modules come first.
        """
        global _entered
        if _entered == self:
            return
        _entered = self
        first, last = ([path for path in paths if os.path.exists(path)] for paths in (self.first, self.last))
        is_rays = ray.is_initialized() and bool(ray.get_runtime_context().runtime_env.get("working_dir"))
        sys.path[:] = dict.fromkeys([*([] if is_rays else first), *sys.path, *first, *last])
        importlib.invalidate_caches()
        if not is_rays and os.access(self.working_directory, os.X_OK):
            os.chdir(self.working_directory)

    def resolve(self, path: str) -> str:
        """Returns a path or URI, relative paths as absolute ones: they start at the driver's working directory."""
        protocol, separator, rest = path.rpartition("://")
        if (separator and protocol not in ("file", "local")) or rest.startswith("~") or "::" in path:
            return path
        return f"{protocol}{separator}{os.path.join(self.working_directory, rest)}"

    def _fix_of(self, error: BaseException) -> str:
        """Returns the fix for code that this node cannot load."""
        return _NOT_ON_PATH if isinstance(error, ModuleNotFoundError) and self.node == this_node() else _FIX

    def advise(self, error: BaseException) -> str:
        """Returns a sentence about an error of the user's code that a difference to the driver explains, or ""."""
        if type(error).__name__ == "BdbQuit" and not sys.stdin.isatty():
            return f"The debugger of this process cannot read from a terminal. {_DEBUG}"
        node = this_node()
        if isinstance(error, ModuleNotFoundError):
            return f"{node} has no module {error.name!r}. {self._fix_of(error)}"
        path = error.filename if isinstance(error, FileNotFoundError) else None
        here = os.getcwd()
        if not isinstance(path, str) or os.path.isabs(path) or here == self.working_directory:
            return ""
        return (
            f"The relative path {path!r} starts at {here} on {node}, and not at the driver's working directory "
            f"{self.working_directory}, which is missing there or replaced by Ray's working_dir. Use an absolute path "
            "that all nodes can read."
        )


_entered: DriverEnvironment | None = None
"""The environment that this process has taken over from the driver."""


def environment() -> DriverEnvironment:
    """Returns the driver's environment: the one that this process has entered, or its own."""
    return _entered or DriverEnvironment.capture()


def user_error(what: str, error: BaseException, place: str = "", fix: str = "") -> DataError:
    """Returns the error for an exception that the user's code raised, with its traceback. Call it in `except`.

    `what` is the code, and `place` its place in the run, for example " in micro-batch 0 of step 1".
    """
    stack = traceback.format_exc().rstrip()
    text = f"{what} raised {text_of(error, repr)}{place}:\n{stack}{fix}\n{environment().advise(error)}"
    return DataError(text.rstrip())


def this_node() -> str:
    """Returns the address of this process's Ray node."""
    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "this node"


def refuse_breakpoints() -> None:
    """Makes `breakpoint()` an error in this process, unless the user has set PYTHONBREAKPOINT.

    Ray sets the variable to its own debugger, which waits for a client or does nothing.
    """
    own = _OWN_DEBUGGER.search(Path("/proc/self/environ").read_bytes())
    if own is not None:
        os.environ["PYTHONBREAKPOINT"] = own[1].decode()
    else:
        sys.breakpointhook = _refuse_breakpoint


def _refuse_breakpoint(*arguments: Any, **options: Any) -> None:
    caller = sys._getframe(1)
    place = f"{caller.f_code.co_filename}:{caller.f_lineno} in {caller.f_code.co_name}"
    raise ConfigError(f"breakpoint() at {place}: this process has no terminal for a debugger. {_DEBUG}")


def uninterrupted(function: Callable[[], T]) -> T:
    """Returns `function()`, which a thread runs to its end even if this one is interrupted.

    Ray cancels a task by interrupting its main thread. After an interrupted import, torch cannot be imported again.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="imports")
    try:
        return pool.submit(function).result()
    finally:
        pool.shutdown(wait=False)


class Shipped:
    """A function of the user, or another value, that a process loads once it has entered the driver's environment.

    Calling it loads and calls the function.
    """

    def __init__(self, reference: ray.ObjectRef[Any], name: str, driver: DriverEnvironment) -> None:
        self._reference = reference
        self._name = name
        self._driver = driver
        self._loaded: Any = None

    def load(self) -> Any:
        """Returns the value. Raises ConfigError if this node cannot import what it needs."""
        if self._loaded is None:
            self._driver.enter()
            try:
                with _silenced("ray._private.serialization"):  # it logs the traceback, too
                    self._loaded = uninterrupted(lambda: ray.get(self._reference))
            except ray.exceptions.RaySystemError as error:
                raise self._explain(error.client_exc) from error
        return self._loaded

    def __call__(self, *arguments: Any) -> Any:
        return self.load()(*arguments)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shipped) and other._reference == self._reference

    def __hash__(self) -> int:
        return hash(self._reference)

    def __reduce__(self) -> tuple[type[Shipped], tuple[Any, ...]]:
        return Shipped, (self._reference, self._name, self._driver)

    def _explain(self, cause: BaseException) -> ConfigError:
        missing = [path for path in (*self._driver.first, *self._driver.last) if not os.path.exists(path)]
        where = f" Of the driver's sys.path, it lacks {shorten(missing, 3)}." if missing else ""
        return ConfigError(
            f"{self._name} cannot be loaded on node {this_node()}: {format_exception(cause)}.{where} "
            f"{self._driver._fix_of(cause)}"
        )


def ship(value: Any, name: str) -> Shipped:
    """Sends a value to Ray's object store, from which all processes of this Ray job can load it.

    Keep the result while others may load it. `name` is the argument that the user passed the value as.
    """
    return Shipped(ray.put(value), name, environment())


def import_failure(error: BaseException | None) -> ConfigError | None:
    """Returns the error to raise if a process of Ray did not start because of its node; otherwise None.

    The node lacks a module, or Ray cannot set up the runtime environment there.
    """
    if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
        node = re.search(r"\[Node (\S+)\]", str(error))
        reason = str(error).strip().rpartition("\n")[2].strip()
        return ConfigError(
            f"Ray cannot set up runtime_env on node {node[1] if node else 'unknown'} ({reason}). "
            "/tmp/ray/session_latest/logs/runtime_env_setup-*.log there has more."
        )
    found = re.search(r"No module named '[^']+'", str(error))
    return ConfigError(f"a process of this run cannot start on some node: {found[0]}. {_FIX}") if found else None


@contextmanager
def _silenced(logger: str) -> Iterator[None]:
    log = logging.getLogger(logger)
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before
