"""What the user's functions find in other processes: the driver's modules, working directory and relative paths."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_ddp.data import user_code
from elastic_ddp.data.user_code import DriverEnvironment, import_failure, ship, uninterrupted
from elastic_ddp.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has an import path and a working directory of its own."""
    monkeypatch.setattr(user_code, "_entered", None)
    monkeypatch.setattr(sys, "path", list(dict.fromkeys(sys.path)))
    before = os.getcwd()
    yield
    os.chdir(before)


def driver_in(folder: Path, first: tuple[Path, ...] = (), last: tuple[Path, ...] = ()) -> DriverEnvironment:
    return DriverEnvironment(str(folder), tuple(map(str, first)), tuple(map(str, last)))


def test_the_script_s_folders_are_sent_and_those_of_python_are_not(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:] = ['', 'lib', *sys.path[1:], '/opt/other/lib/python3.12/site-packages', '../late']\n"
        "from elastic_ddp.data.user_code import DriverEnvironment\n"
        "driver = DriverEnvironment.capture(); print(driver.first[:2]); print(driver.last[-1:])\n"
        "print([path for path in driver.first + driver.last if 'python3' in path])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(user_code.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    first, last = (str(tmp_path), f"{tmp_path}/lib"), (f"{tmp_path.parent}/late",)
    assert done.stdout.splitlines() == [repr(first), repr(last), "[]"], done.stderr


def test_a_worker_searches_the_driver_s_folders_that_exist_on_its_node(tmp_path: Path) -> None:
    for name in ("script", "lib", "late"):
        (tmp_path / name).mkdir()
    own = list(sys.path)
    driver_in(
        tmp_path, (tmp_path / "lib", tmp_path / "missing", tmp_path / "script"), (Path(own[-1]), tmp_path / "late")
    ).enter()
    assert sys.path == [f"{tmp_path}/lib", f"{tmp_path}/script", *own, f"{tmp_path}/late"]
    assert Path.cwd() == tmp_path


def test_a_worker_keeps_its_folder_if_the_node_lacks_the_driver_s(tmp_path: Path) -> None:
    before = os.getcwd()
    driver = driver_in(tmp_path / "missing")
    driver.enter()
    assert os.getcwd() == before
    with pytest.raises(FileNotFoundError) as caught:
        Path("labels.txt").read_text()
    advice = driver.advise(caught.value)
    assert f"'labels.txt' starts at {before}" in advice and f"{tmp_path}/missing" in advice
    with pytest.raises(FileNotFoundError) as caught:
        Path("/labels.txt").read_text()
    assert driver.advise(caught.value) == ""


def test_a_worker_keeps_the_folder_and_modules_that_ray_s_working_dir_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Context:
        runtime_env = {"working_dir": "gcs://package.zip"}  # noqa: RUF012

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    before, own = os.getcwd(), list(sys.path)
    driver_in(tmp_path, (tmp_path,)).enter()
    assert (os.getcwd(), sys.path) == (before, [*own, str(tmp_path)])


@pytest.mark.parametrize(
    ("path", "resolved"),
    [
        ("data/valid", "/project/data/valid"),
        ("../valid/*.parquet", "/project/../valid/*.parquet"),
        ("file://data/valid", "file:///project/data/valid"),
        ("local://valid", "local:///project/valid"),
        ("/data", "/data"),
        ("file:///data", "file:///data"),
        ("~/data", "~/data"),
        ("s3://bucket/data", "s3://bucket/data"),
        ("simplecache::s3://bucket/data", "simplecache::s3://bucket/data"),
    ],
)
def test_relative_paths_start_at_the_driver_s_working_directory(path: str, resolved: str) -> None:
    assert driver_in(Path("/project")).resolve(path) == resolved


def test_a_function_that_a_node_cannot_import_is_one_sentence_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def get(_: Any) -> None:
        logging.getLogger("ray._private.serialization").error("a traceback")
        raise ray.exceptions.RaySystemError(ModuleNotFoundError("No module named 'our_training'"), "a traceback")

    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(user_code, "this_node", lambda: "10.0.0.3")
    monkeypatch.setattr(user_code, "environment", lambda: driver_in(tmp_path, (tmp_path / "lib",)))
    message = rf"^train cannot be loaded on node 10\.0\.0\.3: .*'our_training'.* lacks {tmp_path}/lib\. .*runtime_env"
    with pytest.raises(ConfigError, match=message):
        ship(print, "train").load()
    assert not caplog.records


def test_a_module_that_a_node_lacks_is_named_with_the_fix() -> None:
    advice = driver_in(Path.cwd()).advise(ModuleNotFoundError("No module named 'sentencepiece'", name="sentencepiece"))
    assert "has no module 'sentencepiece'" in advice and "runtime_env" in advice


def test_a_runtime_env_that_a_node_cannot_set_up_is_one_sentence_with_the_reason() -> None:
    text = "Could not create the actor.\n[Node 10.0.0.3] Traceback\n  File\n    ERROR: no such package\n"
    error = import_failure(ray.exceptions.RuntimeEnvSetupError(text))
    assert str(error).startswith("Ray cannot set up runtime_env on node 10.0.0.3 (ERROR: no such package). ")
    assert import_failure(ValueError("another error")) is None


@pytest.mark.parametrize(("own", "printed"), [({}, "refused"), ({"PYTHONBREAKPOINT": "0"}, "ignored")])
def test_a_breakpoint_in_a_process_of_the_run_is_an_error_unless_the_user_has_set_it(
    tmp_path: Path, own: dict[str, str], printed: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom elastic_ddp.data.user_code import refuse_breakpoints\n"
        "os.environ['PYTHONBREAKPOINT'] = 'ray.util.rpdb.set_trace'  # as Ray does\n"
        "refuse_breakpoints()\n"
        "try:\n    breakpoint()\n    print('ignored')\n"
        "except Exception as error:\n    print('refused', error)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONBREAKPOINT"}
    environment |= {"PYTHONPATH": str(Path(user_code.__file__).parents[2])} | own
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(printed), done.stderr
    if printed == "refused":
        assert f"breakpoint() at {script}:6 in <module>" in done.stdout and "trainer.debug()" in done.stdout


def test_an_interrupt_does_not_stop_an_import_half_way() -> None:
    """Ray cancels a task by interrupting its main thread."""
    begun, interrupted, ended = threading.Event(), threading.Event(), threading.Event()

    def load() -> None:
        begun.set()
        interrupted.wait(10)
        ended.set()

    def interrupt() -> None:
        begun.wait(10)
        _thread.interrupt_main()
        interrupted.set()

    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(load)
    signal.signal(signal.SIGINT, inherited)
    assert ended.wait(10)
