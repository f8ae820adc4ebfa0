"""The systemd service of a worker machine, cluster/systemd/ray-node.service."""

from __future__ import annotations

import re
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

CLUSTER = Path(__file__).parents[3] / "cluster"
SERVICE = CLUSTER / "systemd" / "ray-node.service"


def load() -> dict[str, str]:
    parser = ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(SERVICE)
    return dict(parser["Service"])


def test_user_address_and_token_are_those_of_the_launchers_configuration() -> None:
    config, service = yaml.safe_load((CLUSTER / "onprem.yaml").read_text()), load()
    assert service["User"] == config["auth"]["ssh_user"]
    assert service["ExecStart"].endswith(f"ray start --block --address={config['provider']['head_ip']}:6379")
    assert "RAY_AUTH_MODE=token" in service["Environment"].split()


def test_ray_starts_again_however_often_it_fails() -> None:
    assert load()["Restart"] == "always" and "StartLimitIntervalSec=0" in SERVICE.read_text()


def test_only_ray_start_receives_sigterm_and_it_has_time_to_drain() -> None:
    service = load()
    assert service["KillMode"] == "mixed"
    drain_s = re.search(r"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=(\d+)", service["Environment"])
    assert drain_s is not None and int(drain_s[1]) < int(service["TimeoutStopSec"])


def test_the_launcher_does_not_start_ray_on_a_machine_with_the_service(tmp_path: Path) -> None:
    (command,) = yaml.safe_load((CLUSTER / "onprem.yaml").read_text())["worker_start_ray_commands"]
    for name, script in {"ray": "echo $* >> started", "systemctl": "test -e enabled"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_HEAD_IP": "10.0.0.1"}

    def launch() -> None:
        subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, check=True, stderr=subprocess.DEVNULL)

    launch()
    assert (tmp_path / "started").read_text() == "stop\nstart --address=10.0.0.1:6379\n"
    (tmp_path / "started").unlink()
    (tmp_path / "enabled").touch()
    launch()
    assert not (tmp_path / "started").exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd_accepts_the_service(tmp_path: Path) -> None:
    service = tmp_path / SERVICE.name
    service.write_text(SERVICE.read_text().replace("/home/ubuntu/venv/bin/ray", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", service], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
