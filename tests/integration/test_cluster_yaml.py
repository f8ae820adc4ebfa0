"""Ray itself accepts the configurations under cluster/, and they are as the guides describe them."""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[2]
FILES = ["cluster.yaml", "gcp.yaml", "onprem.yaml"]
WITH_SPOT_WORKERS = ["cluster.yaml", "gcp.yaml"]
TOKEN = "~/.ray/auth_token"


def load(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "cluster" / name).read_text())
    return config


@pytest.fixture(params=FILES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(request.param)


def test_ray_accepts_the_configuration(config: dict[str, Any]) -> None:
    # `ray up` does the same before it contacts the provider: it fills in defaults, then checks the schema.
    validate_config(prepare_config(copy.deepcopy(config)))


def test_ray_rejects_a_misspelled_setting(config: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="max_wrokers"):
        validate_config(prepare_config({**copy.deepcopy(config), "max_wrokers": 3}))


def test_the_head_runs_no_training_worker_and_its_dashboard_is_on_localhost(config: dict[str, Any]) -> None:
    start = config["head_start_ray_commands"][-1]
    assert "--dashboard-host=127.0.0.1" in start
    assert "--num-cpus=0 --num-gpus=0" in start
    if head := config.get("head_node_type"):
        assert config["available_node_types"][head]["resources"] == {"CPU": 0, "GPU": 0}
        # Ray counts the head in `max_workers` unless its type has `max_workers: 0`.
        assert prepare_config(copy.deepcopy(config))["available_node_types"][head]["max_workers"] == 0


def test_every_node_has_the_same_token_and_requires_it(config: dict[str, Any]) -> None:
    assert config["file_mounts"][TOKEN] == TOKEN
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        starts = [command for command in commands if "ray start" in command]
        assert len(starts) == 1
        assert re.search(r"RAY_AUTH_MODE=token (\w+=\S+ )*ray start", starts[0])


def test_the_project_is_installed_on_every_node_with_the_tested_versions(config: dict[str, Any]) -> None:
    assert config["file_mounts"]["~/examples"] == "examples", "where the commands of `ray exec` start"
    mounted = {local for local in config["file_mounts"].values() if not local.startswith("~")}
    assert all((ROOT / local).exists() for local in mounted)
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "elastic_ddp", "examples"} <= mounted
    prepared = prepare_config(copy.deepcopy(config))
    for commands in (prepared["head_setup_commands"], prepared["worker_setup_commands"]):
        [install] = [command for command in commands if "pip install" in command]
        extra = "gcp" if config["provider"]["type"] == "gcp" else "cluster"
        assert f"--constraint constraints.txt '.[{extra}]'" in install


def test_shells_of_a_node_have_the_storage_of_the_newest_ray_up(config: dict[str, Any], tmp_path: Path) -> None:
    commands = [command for command in config["setup_commands"] if ".elastic_ddp" in command]
    changed = [re.sub(r"(ELASTIC_DDP_STORAGE=)\S+", r"\1s3://changed/runs", command) for command in commands]
    variables = 'echo "$ELASTIC_DDP_STORAGE $RAY_AUTH_MODE ${PATH%%:*}"'
    shell = ["bash", "--norc", "-c"]
    lines = "\n".join([*commands, *commands, *changed, "source ~/.bashrc", variables, "cat ~/.bashrc"])
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    run = subprocess.run([*shell, lines], env=environment, check=True, capture_output=True, text=True)
    assert run.stdout == f"s3://changed/runs token {tmp_path}/venv/bin\n. ~/.elastic_ddp\n"


def test_every_command_is_valid_shell(config: dict[str, Any]) -> None:
    # In YAML " #" starts a comment, also inside shell quotes; the rest of the command does not parse.
    for key in ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        for command in config[key]:
            subprocess.run(["bash", "-n", "-c", command], check=True)


def test_the_autoscaler_waits_for_a_machine_until_it_is_repaired() -> None:
    assignments = re.findall(r"(\w+=\S+) (?=.*ray start)", load("onprem.yaml")["head_start_ray_commands"][-1])
    environment = {**os.environ, **dict(each.split("=") for each in assignments)}
    waits_s = "from ray.autoscaler._private import updater; print(updater.AUTOSCALER_NODE_START_WAIT_S)"
    run = subprocess.run([sys.executable, "-c", waits_s], env=environment, check=True, capture_output=True, text=True)
    assert int(run.stdout) > 30 * 24 * 3600


def test_aws_workers_are_spot_and_nodes_use_the_configured_group_and_profile() -> None:
    config = load("cluster.yaml")
    types = config["available_node_types"]
    assert types["gpu-spot"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert types["gpu-spot"]["resources"]["GPU"] >= 1
    assert 0 <= types["gpu-spot"]["min_workers"] < types["gpu-spot"]["max_workers"]
    assert "InstanceMarketOptions" not in types["head"]["node_config"]
    assert "security_group" not in config["provider"]
    for node_type in types.values():
        # Without SecurityGroupIds, Ray creates a group that opens ssh to the internet.
        assert node_type["node_config"]["SecurityGroupIds"]
        assert node_type["node_config"]["IamInstanceProfile"]["Name"], "for the bucket"


def test_gcp_workers_are_spot_and_nodes_use_the_configured_network_and_account() -> None:
    types = load("gcp.yaml")["available_node_types"]
    assert types["gpu-spot"]["node_config"]["scheduling"]["provisioningModel"] == "SPOT"
    assert types["gpu-spot"]["resources"]["GPU"] >= 1
    assert "scheduling" not in types["head"]["node_config"]
    # Without networkInterfaces, Ray takes a network whose firewall opens ssh to the internet.
    assert all(node_type["node_config"]["networkInterfaces"] for node_type in types.values())
    assert types["gpu-spot"]["node_config"]["serviceAccounts"], "for the bucket"


@pytest.mark.parametrize("name", WITH_SPOT_WORKERS)
def test_spot_workers_watch_for_the_notice_that_takes_their_machine(name: str, tmp_path: Path) -> None:
    *_, watch = load(name)["worker_start_ray_commands"]
    watcher = tmp_path / "elastic-ddp"
    watcher.write_text("#!/bin/sh\necho $$ $* $RAY_ADDRESS $RAY_AUTH_MODE\nexec sleep 60\n")
    watcher.chmod(0o755)
    os.mkfifo(tmp_path / "watch-notices.log")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "RAY_HEAD_IP": "10.0.0.1"}
    subprocess.run(["bash", "-c", f"({watch})"], check=True, env=environment, timeout=60)
    with open(tmp_path / "watch-notices.log") as log:
        pid, *words = log.readline().split()
    os.kill(int(pid), signal.SIGTERM)  # it has outlived the shell
    assert words == ["watch-notices", "10.0.0.1:6379", "token"]


@pytest.mark.parametrize("name", WITH_SPOT_WORKERS)
def test_a_second_ray_up_replaces_the_watch_of_a_spot_worker(name: str) -> None:
    stop, *_ = load(name)["worker_start_ray_commands"]
    (pattern,) = re.findall(r"pkill -f '(.*?)'", stop)
    assert re.search(pattern, "/home/ubuntu/venv/bin/python /home/ubuntu/venv/bin/elastic-ddp watch-notices")
    assert not re.search(pattern, stop), "it would end its own shell"
