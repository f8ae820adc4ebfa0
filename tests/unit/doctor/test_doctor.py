"""How the doctor gathers facts on a node, tries process groups, and reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from elastic_ddp.cli.main import app
from elastic_ddp.distributed.hosted_store import HostedStore
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.doctor import probe
from elastic_ddp.doctor.checks import judge
from elastic_ddp.doctor.examination import node_names
from elastic_ddp.doctor.facts import Cluster, Reduced, Token
from elastic_ddp.doctor.probe import Probe, find_token, gather, list_gpus
from elastic_ddp.errors import ConfigError
from tests.ranks import run_ranks
from tests.unit.doctor.doctor_facts import BAD, NAMES, cluster, with_node

CPU = torch.device("cpu")


def all_reduce(group: ProcessGroup) -> Reduced:
    """Uses the store of a group that is closed first. One value of rank 1's sum is wrong."""
    group.barrier()
    group.close(intact=True)
    if group.rank == 1:
        right = dist.all_reduce
        dist.all_reduce = lambda tensor: (right(tensor), tensor[-1:].add_(1))
    node = Probe("127.0.0.1")
    node.connect(group.assignment.store_host, group.assignment.store_port)
    return node.all_reduce(CPU, group.rank, group.world_size, generation=2)


def test_nodes_form_a_group_and_a_wrong_value_of_one_rank_fails_there() -> None:
    results = run_ranks(2, all_reduce)
    assert results == [Reduced(smallest=3.0, largest=3.0), Reduced(smallest=3.0, largest=4.0)]
    gloo = dict(zip(NAMES, results, strict=False))
    found = judge(cluster(groups={"gloo": gloo, "nccl": cluster().groups["nccl"]}))
    assert [(each.check, each.node) for each in found if each.verdict == "fail"] == [("gloo", BAD)]


def test_a_group_that_a_node_does_not_join_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "FORM_S", 0.2)
    store = HostedStore("127.0.0.1")
    node = Probe("127.0.0.1")
    node.connect("127.0.0.1", store.port)
    with pytest.raises(dist.DistStoreError, match="timeout"):
        node.all_reduce(CPU, rank=0, world_size=2, generation=1)


def test_a_store_that_cannot_be_reached_is_an_error_at_once() -> None:
    with pytest.raises(dist.DistNetworkError, match=r"cannot connect to the store at 127\.0\.0\.1:1"):
        Probe("127.0.0.1").connect("127.0.0.1", 1)


def test_the_facts_of_this_node_are_found() -> None:
    facts = gather("127.0.0.1")
    assert facts.interface == "lo" and facts.interfaces
    assert facts.versions["torch"] == torch.__version__.partition("+")[0]
    assert re.fullmatch(r"\S+ \(source [0-9a-f]{8}\)", facts.versions["elastic_ddp"])
    assert facts.usable_cpus > 0 and facts.shm_bytes > 0
    assert gather("203.0.113.9").interface is None


def test_the_token_is_found_where_ray_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    mode, default = {"RAY_AUTH_MODE": "token"}, str(tmp_path / ".ray/auth_token")
    assert find_token(mode) == Token(auth_mode="token", path=default, permissions=None)
    (tmp_path / "elsewhere").touch(mode=0o640)
    named = {**mode, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "elsewhere")}
    assert find_token(named) == Token(auth_mode="token", path=named["RAY_AUTH_TOKEN_PATH"], permissions=0o640)
    assert find_token({**named, "RAY_AUTH_TOKEN": "secret"}) == Token(auth_mode="token", path="", permissions=None)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a program `nvidia-smi` of these lines."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    def install(*lines: str) -> None:
        (tmp_path / "nvidia-smi").write_text("\n".join(["#!/bin/sh", *lines, ""]))
        (tmp_path / "nvidia-smi").chmod(0o755)

    return install


def test_visible_gpus_are_listed_by_nvidia_smi(nvidia_smi: Any) -> None:
    nvidia_smi("echo 'NVIDIA L4, 4, 23034, 580.95.05'", "echo 'NVIDIA L4, [N/A], 23034, 580.95.05'", 'echo "$@" >&2')
    gpus, driver, error = list_gpus({})
    assert [(gpu.index, gpu.model, gpu.used_mib, gpu.total_mib) for gpu in gpus] == [
        (0, "NVIDIA L4", 4, 23034),
        (1, "NVIDIA L4", 0, 23034),
    ]
    assert (driver, error) == ("580.95.05", None)
    nvidia_smi('case "$*" in *--id=1*) echo "NVIDIA L4, 4, 23034, 580.95.05";; *) exit 1;; esac')
    assert len(list_gpus({"CUDA_VISIBLE_DEVICES": "1"})[0]) == 1
    assert list_gpus({})[0] == ()


def test_why_nvidia_smi_lists_no_gpu_is_kept(nvidia_smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert list_gpus({}) == ((), None, "nvidia-smi fails (Failed to initialize NVML: Driver/library version mismatch)")
    nvidia_smi("exit 0")
    assert list_gpus({}) == ((), None, "nvidia-smi lists no GPU")
    monkeypatch.setenv("PATH", "")
    assert "nvidia-smi does not run" in str(list_gpus({})[2])


def test_nodes_are_named_by_their_address_and_by_their_id_where_it_is_not_unique() -> None:
    names = node_names({"aaaaaaaa": "203.0.113.1", "bbbbbbbb": "203.0.113.2", "cccccccc": "203.0.113.2"})
    assert [*names.values()] == ["203.0.113.1", "203.0.113.2 (bbbbbb)", "203.0.113.2 (cccccc)"]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on a cluster with these facts."""

    def run(facts: Cluster, *arguments: str) -> Any:
        monkeypatch.setattr("elastic_ddp.driver.cluster.connect", lambda: None)
        monkeypatch.setattr("elastic_ddp.doctor.examination.examine", lambda **_: facts)
        return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200"})

    return run


def test_addresses_that_cannot_be_used_are_refused_and_a_password_is_not_printed(doctor: Any) -> None:
    done = doctor(cluster(), "--json", "--data", "sftp://user:hunter2@host/train/")
    assert done.exit_code == 1 and isinstance(done.exception, ConfigError)
    assert "hunter2" not in done.output + str(done.exception)
    assert "did you mean s3://bucket?" in str(doctor(cluster(), "--storage", "s3:/bucket").exception)


def test_the_command_prints_a_table_and_exits_with_1_if_a_check_fails_not_for_a_warning(doctor: Any) -> None:
    done = doctor(cluster())
    assert done.exit_code == 0
    assert re.search(r"^nodes +all +ok +3 in Ray", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("14 ok, 0 warnings, 0 failures\n")
    failed = doctor(with_node(data_problem="cannot read part-0.parquet"))
    assert failed.exit_code == 1
    assert re.search(rf"^data +{BAD} +fail +cannot read part-0", failed.stdout, re.MULTILINE)
    warned = doctor(cluster(groups={"gloo": cluster().groups["gloo"]}))
    assert warned.exit_code == 0 and "13 ok, 1 warning, 0 failures" in warned.stdout


def test_json_has_the_findings_and_the_facts(doctor: Any) -> None:
    done = doctor(with_node(facts=None, problem="died"), "--json")
    printed = json.loads(done.stdout)
    assert done.exit_code == 1
    [failed] = [each for each in printed["findings"] if each["verdict"] == "fail"]
    assert (failed["check"], failed["node"]) == ("nodes", BAD)
    assert printed["facts"]["nodes"][0]["facts"]["cuda"] == "13.0"
