"""What README and docs promise: their code runs, their commands and settings exist, the reference is complete."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer

import elastic_ddp as ed
from elastic_ddp.cli.main import app
from elastic_ddp.telemetry.event import EVENTS, Event

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER_TEXTS = [ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", ROOT / "cluster/README.md"]
REQUIRED = {"name": "first", "storage": "runs", "steps": 2, "global_batch_size": 256, "micro_batch_size": 32}

_spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs/hooks.py")
assert _spec is not None and _spec.loader is not None
hooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hooks)


class Block(NamedTuple):
    page: Path
    language: str
    code: str


def blocks(page: Path, *languages: str) -> list[Block]:
    fences = re.findall(r"^ *```(\w+)[^\n]*\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(page, language, code) for language, code in fences if language in languages]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def command_lines(prefix: str) -> Iterator[tuple[Path, list[str]]]:
    """Yields the words of each command in the pages' shell blocks that starts with `prefix`."""
    for page in [*PAGES, *OTHER_TEXTS]:
        for block in blocks(page, "sh", "bash"):
            for line in block.code.replace("\\\n", " ").splitlines():
                if line.startswith(prefix):
                    yield page, shlex.split(line, comments=True)


def after(diff: str) -> str:
    """Returns the new side of a diff."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))


# The example that the README shows, and test_recipes.py.
TESTED_ELSEWHERE = {"README.md", *(page.name for page in PAGES if page.name.startswith("recipes"))}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python", "diff") and page.name not in TESTED_ELSEWHERE], ids=named
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ed, "ElasticTrainer", InProcessTrainer)
    monkeypatch.setattr(ed, "get_run", lambda run: mock.create_autospec(ed.RunHandle, instance=True))
    for block in blocks(page, "diff"):
        namespace = names_that_pages_use()
        exec(compile(after(block.code), named(page), "exec"), namespace)
    namespace = names_that_pages_use()
    for block in blocks(page, "python"):
        before = namespace["train"]
        exec(compile(block.code, named(page), "exec"), namespace)
        if namespace["train"] is not before and "ElasticTrainer(" not in block.code:
            InProcessTrainer(namespace["train"], "data", REQUIRED).fit()


def write_data(folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(512, 32)).astype(np.float32)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(x.reshape(-1), 32), "y": x.argmax(axis=1) % 4})
    (folder / "data").mkdir()
    pq.write_table(table, folder / "data/rows.parquet")
    (folder / "run.toml").write_text("\n".join(f"{key} = {value!r}" for key, value in REQUIRED.items()))


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(32, 4))


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def one_step(run: ed.Run) -> None:
    """A training function for blocks that only show how to start one."""


def names_that_pages_use() -> dict[str, Any]:
    """Returns what a reader has in their own program."""
    given = {
        "torch": torch,
        "ed": ed,
        "Net": Net,
        "GPT": Net,
        "Block": torch.nn.Linear,
        "add_lora": lambda model: model,
        "dataset": [{"x": torch.zeros(32), "y": 0}] * 8,
        "paths": ["a.png"] * 8,
        "labels": [0] * 8,
    }
    return {**given, "loss_fn": loss_fn, "train": one_step, "config": REQUIRED, "__name__": "__main__"}


class InProcessTrainer(ed.ElasticTrainer):
    """Checks its arguments as the real one does, and runs two steps in this process, without Ray."""

    def __init__(self, train: Callable[[ed.Run], Any], data: Any, config: Any, **options: Any) -> None:
        super().__init__(train, data, config, **options)
        self.function, self.transform, self.collate_fn = train, options.get("transform"), options.get("collate_fn")

    def fit(self) -> Any:
        if self.transform is not None:
            rows = {"x": np.zeros((8, 32), np.float32), "y": np.zeros(8, np.int64)}
            changed = self.transform(dict(rows), np.random.default_rng(0))
            assert {name: len(column) for name, column in changed.items()} == {"x": 8, "y": 8}
        if self.collate_fn is not None:
            rows = [{"tokens": np.arange(length), "text": "text"} for length in (2, 3)]
            assert self.collate_fn(rows)["tokens"].shape == (2, 3)
        self.function(in_process_run(self.config))
        return mock.create_autospec(ed.RunResult, instance=True, status="finished", steps=2, weights_sha256="0")

    def debug(self, *, resume: bool = False) -> Any:
        return self.fit()


def in_process_run(config: ed.RunConfig) -> Any:
    """Returns a `Run` with two steps of one micro-batch; it has the real one's methods and signatures."""
    values = {"config": config, "device": torch.device("cpu"), "rank": 0, "total_steps": 2, "steps_per_epoch": 2}
    run = mock.create_autospec(ed.Run, instance=True, **values)
    run.prepare.side_effect = lambda thing, **_: thing
    run.evaluate.side_effect = lambda loss, data, **_: loss(run.prepare.call_args_list[0].args[0], batch()).item()

    def steps() -> Iterator[Any]:
        for index in range(2):
            step = mock.create_autospec(ed.Step, instance=True, index=index, is_last_of_epoch=index == 1)
            step.__exit__.return_value = False
            step.micro_batches.side_effect = lambda: iter([batch()])
            step.backward.side_effect = lambda loss, weight=None: loss.backward()
            step.gathered = {}
            step.gather.side_effect = step.gathered.update
            step.update.side_effect = lambda by, name=None: nullcontext(SimpleNamespace(current=0))
            yield step
            assert step.optimize.called != step.update.called

    run.steps.side_effect = steps
    return run


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 32), "y": torch.arange(8) % 4}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=named)
def test_the_settings_of_a_page_are_valid(page: Path) -> None:
    for block in blocks(page, "toml"):
        settings = {key: value for key, value in tomllib.loads(block.code).items() if key != "job"}
        defaults = {key: value for key, value in REQUIRED.items() if key != "steps" or "epochs" not in settings}
        ed.RunConfig(**{**defaults, **settings})


def test_the_commands_of_the_pages_exist() -> None:
    lines = list(command_lines("elastic-ddp"))
    assert len(lines) > 10
    for page, (program, *words) in lines:
        command: Any = typer.main.get_command(app)
        while getattr(command, "commands", None):
            assert words[0] in command.commands, f"{named(page)}: {words}"
            command = command.commands[words.pop(0)]
        command.make_context(program, list(words))  # raises if an argument or option does not exist


def test_the_make_targets_of_the_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page, words in command_lines("make "):
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), f"{named(page)}: {words}"


def test_the_scripts_of_the_pages_exist_with_their_options() -> None:
    for page, words in command_lines("python "):
        if "/" not in words[1]:
            continue  # a program on the page itself
        folder = ROOT / Path(words[1]).parent
        assert (ROOT / words[1]).is_file(), f"{named(page)}: {words}"
        source = "".join(script.read_text() for script in folder.rglob("*.py"))
        for option in (word for word in words[2:] if word.startswith("--")):
            assert f'"{option}"' in source, f"{named(page)}: {option}"


CLUSTER_FILES = [
    "cluster/iam/storage.json",
    "cluster/cluster.yaml",
    "cluster/gcp.yaml",
    "cluster/kuberay/raycluster.yaml",
    "cluster/kuberay/rayjob.yaml",
]


@pytest.mark.parametrize("name", CLUSTER_FILES)
def test_the_guides_fill_in_the_names_of_cluster_files_with_the_same_placeholders(name: str, tmp_path: Path) -> None:
    """A reader puts own names in place of the words in capitals, also a second time after a change."""
    own = {"BUCKET": "my-bucket", "PROJECT": "my-project", "REGISTRY": "my.registry/team"}
    text = (ROOT / name).read_text()
    placeholders = {word for word in own if re.search(rf"^[^#\n]*{word}", text, re.MULTILINE)}
    pages = [page.read_text() for page in (ROOT / "docs/guides").glob("*.md")]
    [script] = {found for page in pages for found in re.findall(rf"sed (?:-i )?(['\"].*['\"]) {re.escape(name)}", page)}
    for word, value in own.items():
        script = script.replace(word, value)
    (tmp_path / "file").write_text(text)
    for _ in range(2):
        subprocess.run(f"sed -i {script} {tmp_path / 'file'}", shell=True, check=True)
        filled = (tmp_path / "file").read_text()
        assert placeholders and not re.search(rf"^[^#\n]*({'|'.join(own)})", filled, re.MULTILINE)
        for word in placeholders:
            assert filled.count(own[word]) >= text.count(word) - text.count("# Put") - text.count("# Replace")


def test_the_readme_fits_a_screen_and_names_the_setup_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []
    assert {"train", "test"} <= {words[1] for page, words in command_lines("make ") if page.name == "README.md"}


def test_the_diff_of_the_readme_is_that_of_two_examples() -> None:
    (diff,) = blocks(ROOT / "README.md", "diff")
    for sign, name in (("-", "plain_ddp.py"), ("+", "elastic.py")):
        code = (ROOT / "examples" / name).read_text().splitlines()
        lines = [line[1:] for line in diff.code.splitlines() if line[:1] in (sign, " ")]
        assert [line for line in lines if line not in code] == []


@pytest.mark.parametrize("page", [*PAGES, *OTHER_TEXTS], ids=named)
def test_relative_links_resolve(page: Path) -> None:
    # The strict build checks those of the docs and their anchors; here, that they work without a build.
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", prose)
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", ROOT / "docs/design.md"], ids=named)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    names = re.findall(r"`([\w./]+(?:\.py|/))`", page.read_text())
    found = [name for name in names if (ROOT / name).exists() or (ROOT / "elastic_ddp" / name).exists()]
    assert set(names) - {*found, "site/"} == set()


def test_the_reference_lists_every_setting() -> None:
    page = hooks.configuration()
    for name, field in ed.RunConfig.model_fields.items():
        if inspect.isclass(field.annotation) and hasattr(field.annotation, "model_fields"):
            names = [f"{name}.{inner}" for inner in field.annotation.model_fields]
        else:
            names = [name]
        for setting in names:
            entry = re.search(rf"^### `{re.escape(setting)}` .*\n\n\*(.+)\*\n\n(.+)", page, re.MULTILINE)
            assert entry is not None, f"{setting} has no description"


def test_the_reference_lists_every_command() -> None:
    page = hooks.command_line()
    groups = [("", app), *((f"{group.name} ", group.typer_instance) for group in app.registered_groups)]
    for prefix, group in groups:
        for command in group.registered_commands:
            assert f"## `elastic-ddp {prefix}{command.name or command.callback.__name__}`" in page


def test_the_reference_lists_every_event_and_field() -> None:
    sections = hooks.ledger_events().split("\n## ")
    for name, kind in EVENTS.items():
        section = next(section for section in sections if section.startswith(f"`{name}`"))
        own = {field.name for field in dataclasses.fields(kind)} - {field.name for field in dataclasses.fields(Event)}
        assert {field for field in own if f"`{field}`\n:   " not in section} == set()


def test_the_reference_lists_every_public_name() -> None:
    listed = re.findall(r"^::: elastic_ddp\.(\w+)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    assert set(listed) - {"errors"} == set(ed.__all__)
