"""The doctor examines a cluster whose nodes fail in one part or another. The nodes are objects in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ddp.distributed.hosted_store import HostedStore
from elastic_ddp.doctor.checks import judge
from elastic_ddp.doctor.examination import Examination
from elastic_ddp.doctor.facts import ALL, Cluster, Finding, Node, Reduced
from elastic_ddp.doctor.probe import Probe
from elastic_ddp.errors import ElasticDDPError, format_exception
from elastic_ddp.storage.storage import Storage

HEAD, WORKER, BAD = "203.0.113.1", "203.0.113.2", "203.0.113.3"
ALONE = Reduced(smallest=1.0, largest=1.0)
RESOURCES = {HEAD: {"CPU": 0.0}, WORKER: {"CPU": 2.0}, BAD: {"CPU": 2.0}}


class LocalProbes:
    """Calls the methods in this process, one node after the other, unless `faults` has the node and the method."""

    def __init__(self, faults: Mapping[tuple[str, str], Any]) -> None:
        self._probes = {name: Probe("127.0.0.1") for name in RESOURCES}
        self._faults = faults

    def call(self, method: str, arguments: Mapping[str, tuple[Any, ...]], timeout_s: float) -> Any:
        return {name: self._call(name, method, *each) for name, each in arguments.items()}

    def _call(self, name: str, method: str, *arguments: Any) -> Any:
        fault = self._faults.get((name, method))
        if fault is not None and not callable(fault):
            return fault
        try:
            if fault is not None:
                arguments = fault(*arguments)
            return getattr(self._probes[name], method)(*arguments)
        except Exception as error:
            return str(error) if isinstance(error, ElasticDDPError) else format_exception(error)


@pytest.fixture
def examine(tmp_path: Path) -> Callable[[Mapping[tuple[str, str], Any]], Cluster]:
    """Examines a cluster with these faults. Node `BAD` never joins the process group, which has one rank."""
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"x": range(4)}), tmp_path / "data/a.parquet")

    def examine(faults: Mapping[tuple[str, str], Any]) -> Cluster:
        nodes = {name: Node(name=name, resources=each, free=each) for name, each in RESOURCES.items()}
        store = HostedStore("127.0.0.1")
        usual = {(BAD, "connect"): "cannot connect to the store", (WORKER, "all_reduce"): ALONE}
        probes: Any = LocalProbes({**usual, **faults})
        examination = Examination(nodes, probes, ("127.0.0.1", store.port))
        storage = Storage(tmp_path / "runs")
        facts = examination.run(data=str(tmp_path / "data"), storage=storage, note=lambda line: None)
        assert not [*tmp_path.glob("runs/*")], "nothing is left behind"
        return facts

    return examine


def failures(facts: Cluster) -> dict[str, Finding]:
    """The failures by check, without the one of the process group that `BAD` does not join."""
    found = {each.check: each for each in judge(facts) if each.verdict == "fail"}
    assert found.pop("gloo").node == BAD
    return found


def test_a_cluster_is_examined_and_the_other_nodes_form_a_group(examine: Any) -> None:
    facts = examine({(WORKER, "all_reduce"): None})
    assert failures(facts) == {}
    assert facts.groups == {"gloo": {WORKER: ALONE}}, "a head without resources is left out"
    for node in facts.nodes:
        assert node.facts is not None and node.clock is not None
        assert abs(node.clock.offset_s) < 1


def test_a_node_on_which_no_process_starts_is_left_out_of_the_other_parts(examine: Any) -> None:
    facts = examine({(BAD, "gather"): "No module named 'elastic_ddp'.", (BAD, "connect"): None})
    found = {each.check: each for each in judge(facts) if each.verdict == "fail"}
    assert [(each.check, each.node) for each in found.values()] == [("nodes", BAD)]


def test_a_node_with_another_disk_does_not_see_the_storage(examine: Any, tmp_path: Path) -> None:
    def on_its_own_disk(storage: Storage, session: str) -> tuple[Storage, str]:
        return Storage(tmp_path / "other-runs"), session

    found = failures(examine({(BAD, "check_storage"): on_its_own_disk}))["storage"]
    assert found.node == BAD and "does not see storage=" in found.text and "/other-runs':" in found.text


def test_a_node_without_the_data_is_named(examine: Any) -> None:
    def without(files: list[Any]) -> tuple[list[Any]]:
        return ([type(files[0])(f"{files[0].path}.gone", 1, "mtime_ns=0")],)

    found = failures(examine({(BAD, "check_data"): without}))["data"]
    assert found.node == BAD and "a.parquet.gone" in found.text


@pytest.mark.parametrize(("method", "check"), [("check_storage", "storage"), ("check_data", "data"), ("now", "clock")])
def test_a_node_that_does_not_answer_in_a_part_is_named(examine: Any, method: str, check: str) -> None:
    found = failures(examine({(BAD, method): "no answer within 10 s"}))
    assert {name: each.node for name, each in found.items()} == {check: BAD}


def test_a_few_data_files_stand_for_all(examine: Any, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"data/{number}.parquet").write_bytes((tmp_path / "data/a.parquet").read_bytes())
    assert examine({}).num_files == 7


def test_data_or_storage_that_the_checking_machine_cannot_use_is_a_failure(tmp_path: Path, examine: Any) -> None:
    (tmp_path / "runs").touch()  # not a folder
    (tmp_path / "data/a.parquet").unlink()
    found = failures(examine({}))
    assert {name: each.node for name, each in found.items()} == {"storage": ALL, "data": ALL}
    assert "contains no Parquet file" in found["data"].text and "cannot be used" in found["storage"].text
