"""The image has the tested versions, runs as a user without rights, and copies only files that the repository has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
