"""Whether every node reads the data and uses the storage, and what is said about nodes that do not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ddp import RunConfig
from elastic_ddp.data.access import announce, check_access, check_data, check_storage, files_to_check
from elastic_ddp.data.files import DataFile, list_files
from elastic_ddp.data.index import build_index
from elastic_ddp.data.map_style import index_in_memory
from elastic_ddp.driver import node_access
from elastic_ddp.driver.node_access import check_nodes, probe_nodes
from elastic_ddp.errors import ConfigError, DataError
from elastic_ddp.storage.storage import Storage

HEAD, OTHER, THIRD = "203.0.113.1", "203.0.113.2", "203.0.113.3"


def node(address: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": f"id of {address}", "NodeManagerAddress": address, "Alive": alive, "Resources": resources}


@pytest.fixture
def files(tmp_path: Path) -> list[DataFile]:
    """Two listed files in one folder."""
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        pq.write_table(pa.table({"x": range(4)}), tmp_path / f"data/{name}.parquet")
    return list_files(str(tmp_path / "data"))


def test_a_node_without_the_drivers_storage_is_told_to_share_it(tmp_path: Path) -> None:
    drivers, others = Storage(tmp_path / "drivers"), Storage(tmp_path / "others")
    announce(drivers, "today")
    check_storage(drivers, "today")
    with pytest.raises(ConfigError, match=r"does not see storage='.*/others'.* a folder that they share, or a bucket"):
        check_storage(others, "today")
    announce(others, "yesterday")  # a run of the same name was started on that node
    with pytest.raises(ConfigError, match="does not see storage"):
        check_storage(others, "today")


def test_a_session_is_announced_under_a_name_that_no_node_has_read_before(tmp_path: Path) -> None:
    """A mounted bucket shows the old content of a replaced object for a while."""
    storage = Storage(tmp_path)
    for session in ("yesterday", "today"):
        announce(storage, session)
        assert storage.list() == [f"sessions/{session}"]


def test_a_node_whose_copy_of_the_data_differs_or_is_missing_names_the_file(
    files: list[DataFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ddp.data.files.ray.is_initialized", lambda: True)
    monkeypatch.setattr("elastic_ddp.data.files.this_node", lambda: OTHER)
    check_data(files)
    os.utime(files[0].path, ns=(0, 0))
    with pytest.raises(DataError, match=rf"a\.parquet changed .* on {OTHER}.* rsync -t"):
        check_data(files)
    os.unlink(files[0].path)
    with pytest.raises(DataError, match=rf"node {OTHER} cannot read {files[0].path}: .* All nodes must see the data"):
        check_data(files)


def test_a_worker_ignores_an_error_of_its_storage_that_may_be_temporary(
    tmp_path: Path, files: list[DataFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(tmp_path / "run")
    announce(storage, "today")

    def fail(*_: Any) -> None:
        raise TimeoutError("the server does not answer")

    monkeypatch.setattr("elastic_ddp.data.access.check_version", fail)
    check_access(storage, "today", files)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ConfigError, match="does not see storage"):
        check_access(storage, "today", files)


def test_one_file_of_each_folder_is_checked_unless_the_storage_holds_it(tmp_path: Path, files: list[DataFile]) -> None:
    (tmp_path / "more").mkdir()
    shutil.copy(files[0].path, tmp_path / "more/c.parquet")
    index = build_index([str(tmp_path / "data"), str(tmp_path / "more")])
    chosen = files_to_check(index, Storage(tmp_path / "runs/run"))
    assert [Path(file.path).name for file in chosen] == ["a.parquet", "c.parquet"]
    assert [Path(file.path).name for file in files_to_check(index, Storage(tmp_path / "data/run"))] == ["c.parquet"]
    assert files_to_check(index_in_memory([1, 2]), Storage(tmp_path / "runs/run")) == ()


Check = Callable[..., list[str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Checks nodes for a driver on `HEAD`. The other nodes have these problems. Returns what the driver prints."""
    config = RunConfig(name="a", storage=str(tmp_path), steps=1, global_batch_size=1, micro_batch_size=1)
    monkeypatch.setattr(node_access.ray.util, "get_node_ip_address", lambda: HEAD)
    monkeypatch.setattr(node_access.ray, "get_runtime_context", lambda: SimpleNamespace(runtime_env={}))

    def check(
        *nodes: dict[str, Any],
        problems: Mapping[str, Exception] = MappingProxyType({}),
        late: Sequence[str] = (),
        files: Sequence[DataFile] = (),
    ) -> list[str]:
        def probe(nodes: dict[str, str], *_: Any, **__: Any) -> Any:
            assert set(nodes.values()) == {*problems, *late}
            return problems, late

        monkeypatch.setattr(node_access, "probe_nodes", probe)
        printed: list[str] = []
        check_nodes(Storage(tmp_path), "today", files, printed.append, nodes=nodes, config=config)
        return printed

    return check


def test_the_drivers_machine_dead_nodes_and_nodes_without_room_are_not_checked(check: Check, tmp_path: Path) -> None:
    dead = node("203.0.113.4", alive=False, CPU=4.0)
    assert check(node(HEAD, CPU=1.0), node(HEAD, CPU=2.0), node(OTHER, CPU=0.0), dead) == []
    check_storage(Storage(tmp_path), "today")  # by workers on nodes that join later


def test_a_run_does_not_start_with_a_node_that_lacks_storage_or_data(check: Check) -> None:
    nodes = [node(each, CPU=1.0) for each in (HEAD, OTHER, THIRD)]
    with pytest.raises(ConfigError, match=rf"^node 2 does not see it\. The same holds for {THIRD}\.$"):
        check(*nodes, problems={OTHER: ConfigError("node 2 does not see it."), THIRD: ConfigError("nor does node 3.")})
    with pytest.raises(DataError, match="no data"):
        check(*nodes[:2], problems={OTHER: DataError("no data")})


def test_data_in_rays_copy_of_the_working_directory_is_refused_on_several_nodes(check: Check) -> None:
    """Each node extracts the copy at another time, so its files would count as changed."""
    copied = DataFile(
        "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/data/a.parquet", 1, "mtime_ns=1"
    )
    assert check(node(HEAD, CPU=1.0), files=[copied]) == []
    with pytest.raises(DataError, match=r"a\.parquet is in a copy of the working directory"):
        check(node(HEAD, CPU=1.0), node(OTHER, CPU=1.0), files=[copied])


def test_a_silent_node_is_noted_and_is_an_error_if_there_is_no_other(check: Check) -> None:
    (line,) = check(node(HEAD, CPU=1.0), node(OTHER, CPU=1.0), late=[OTHER])
    assert f"Ray started no process within 120 s on {OTHER}" in line
    with pytest.raises(ConfigError, match=f"no process .* {OTHER}.* Repair the node"):
        check(node(HEAD, CPU=0.0), node(OTHER, CPU=1.0), late=[OTHER])


def test_a_driver_that_waits_for_nodes_prints_which_and_collects_their_problems(
    tmp_path: Path, files: list[DataFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    tasks: dict[str, tuple[Any, ...]] = {}

    def wait(references: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        waits.append(timeout)
        return ([], references) if len(waits) == 1 else (references, [])

    def remote(task: Any) -> Any:
        def start(address: str, *arguments: Any) -> str:
            tasks[address] = (task, address, *arguments)
            return address

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))

    def get(reference: str) -> Any:
        task, *arguments = tasks[reference]
        return task(*arguments)

    for name, fake in (("remote", remote), ("wait", wait), ("get", get)):
        monkeypatch.setattr(node_access.ray, name, fake)
    printed: list[str] = []
    storage = Storage(tmp_path / "run")
    announce(storage, "today")
    gone = [replace(files[0], path=f"{files[0].path}.gone")]
    for session, known, kind in (("today", files, None), ("another", files, ConfigError), ("today", gone, DataError)):
        waits.clear()
        problems, late = probe_nodes({"0" * 56: OTHER}, storage, session, known, timeout_s=120.0, note=printed.append)
        assert [type(problem) for problem in problems.values()] == ([kind] if kind else []) and late == []
        assert sum(waits) == 120.0
    assert printed[0] == f"waiting up to 120 s for {OTHER} to check the access to data and storage"
