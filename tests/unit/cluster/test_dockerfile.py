"""The image has the tested versions, runs as a user without rights, and copies only files that the repository has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import torch

from elastic_ddp.doctor.checks import MINIMUM_DRIVER

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTRUCTIONS = [
    (match[1], " ".join(match[2].split()))
    for match in re.finditer(r"^([A-Z]+) (.*)$", re.sub(r"\\\n|^#.*\n", "", TEXT, flags=re.MULTILINE), re.MULTILINE)
]


def values(instruction: str) -> list[str]:
    return [value for name, value in INSTRUCTIONS if name == instruction]


def test_the_image_installs_the_versions_of_the_constraints() -> None:
    installs = re.findall(r"pip install ([^&]*)", " ".join(values("RUN")))
    assert installs
    for arguments in installs:
        # Without dependencies, only the package itself is installed.
        assert "--constraint constraints.txt" in arguments or "--no-deps" in arguments.split()
    extras = re.search(r"'\.\[(.*)\]'", installs[0])
    assert extras and set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_the_images_python_is_one_that_the_package_supports() -> None:
    python = values("ARG")[0].removeprefix("PYTHON=")
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    assert [image.split()[0] for image in values("FROM")] == ["python:${PYTHON}-slim-bookworm"] * 2


def test_the_image_runs_as_a_numbered_user_who_is_not_root() -> None:
    last_stage = INSTRUCTIONS[max(index for index, (name, _) in enumerate(INSTRUCTIONS) if name == "FROM") :]
    [user] = [value for name, value in last_stage if name == "USER"]
    assert int(user) > 0


def test_the_image_copies_files_that_the_repository_has_and_docker_may_read() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    for value in values("COPY"):
        sources = [] if value.startswith("--from=") else value.split()[:-1]
        for source in sources:
            assert (ROOT / source).exists()
            assert f"!{source}" in ignored


def test_the_comment_names_the_version_of_the_package() -> None:
    assert set(re.findall(r"elastic-ddp:(\S+)", TEXT)) == {PROJECT["version"]}


CUDA_OF_TORCH = {"2.13.0": 13}
"""The major version of CUDA in torch's wheels on PyPI: `cuda-toolkit` in their metadata. Look it up for a new torch."""
GUIDES = ["cluster-check.md", "cluster-machines.md", "kubernetes.md"]
"""The pages that name NVIDIA's driver."""


def test_image_cluster_files_and_docs_name_the_driver_that_the_torch_of_the_constraints_needs() -> None:
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    cuda = CUDA_OF_TORCH[pinned[1]]
    if torch.version.cuda and torch.__version__.startswith(pinned[1]):
        assert torch.version.cuda.startswith(f"{cuda}.")
    files = [
        ROOT / "Dockerfile",
        *(ROOT / "cluster").glob("*.*"),
        *(ROOT / "docs/guides" / name for name in GUIDES),
    ]
    named = {file.name: set(re.findall(r"\bR(\d{3})\b|-nvidia-(\d{3})\b", file.read_text())) for file in files}
    drivers = {name: {"".join(each) for each in found} for name, found in named.items() if found}
    assert drivers.keys() >= {"Dockerfile", "cluster.yaml", "gcp.yaml", "onprem.yaml", *GUIDES}
    assert set.union(*drivers.values()) == {str(MINIMUM_DRIVER[cuda])}
    assert {each for file in files for each in re.findall(r"\bCUDA (\d+)", file.read_text())} == {str(cuda)}
