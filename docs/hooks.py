"""Generates the reference pages for settings, commands and ledger events from the code, when MkDocs builds the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.core import TyperArgument, TyperOption

from elastic_ddp.cli.main import app
from elastic_ddp.config import run_config
from elastic_ddp.telemetry.event import EVENTS, Event

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Puts the generated pages in place of their stand-ins; MkDocs calls this before it reads any page.

    Links to a stand-in also work where the site is not built, such as on GitHub.
    """
    for name, page in (("configuration", configuration), ("cli", command_line), ("events", ledger_events)):
        path = f"reference/{name}.md"
        if (stand_in := files.get_file_from_path(path)) is not None:
            files.remove(stand_in)
        files.append(File.generated(config, path, content=page()))
    return files


def configuration() -> str:
    """Returns the page of settings: one heading for each, with its type, default and description."""
    schema = run_config.RunConfig.model_json_schema()
    documented = griffe.load("elastic_ddp.config.run_config", search_paths=[ROOT])
    lines = [
        "# Configuration",
        "",
        "`ElasticTrainer` takes a [`RunConfig`](api.md#elastic_ddp.RunConfig), a dict, or the path of a TOML file. "
        "`elastic_ddp` checks all settings before it starts any process. "
        "An error names the setting, its value and the rule.",
        "",
        "A resumed run must keep the settings that determine its weights: see "
        "[what a resumed run cannot change](../guarantees.md#what-a-resumed-run-cannot-change).",
        "",
    ]
    for section, model in _sections(schema):
        lines += [f"## `[{section}]`" if section else "## Run", ""]
        if section:
            lines += [_text(documented[model["title"]].docstring), ""]
        required = model.get("required", ())
        for name, field in model["properties"].items():
            if "$ref" in field:  # a section of its own
                continue
            key = f"{section}.{name}" if section else name
            default = "required" if name in required else _default(model["title"], name)
            description = _text(documented[model["title"]][name].docstring)
            lines += [f"### `{key}` {{#{key}}}", "", f"*{_type(field)}, {default}*", "", description, ""]
    return "\n".join(lines)


def _sections(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the JSON schema of the run's own settings (no name) and of each table below them."""
    yield "", schema
    for name, field in schema["properties"].items():
        if "$ref" in field:
            yield name, schema["$defs"][field["$ref"].rpartition("/")[2]]


def _type(field: dict[str, Any]) -> str:
    """Returns a setting's type and bounds in words, such as `integer, at least 1`."""
    choices = [_type(choice) for choice in field.get("anyOf", ()) if choice.get("type") != "null"]
    if choices:
        return " or ".join(choices)
    if "enum" in field or "const" in field:
        return " or ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    values = field.get("additionalProperties", True)
    table = f"table of {values['type']}s" if isinstance(values, dict) else "table"
    name = {"array": "list of strings", "object": table, "boolean": "true or false"}.get(field["type"], field["type"])
    if "minimum" in field:
        name += f", at least {field['minimum']:g}"
    elif "exclusiveMinimum" in field:
        name += f", above {field['exclusiveMinimum']:g}"
    # Larger limits only keep numbers within what timers and JSON can represent.
    if (below := field.get("exclusiveMaximum", 1e9)) < 1e6:
        name += f", below {below:g}"
    return name


def _default(model: str, name: str) -> str:
    """Returns a setting's default as TOML has it, or `optional` if it has none."""
    value = getattr(run_config, model).model_fields[name].get_default(call_default_factory=True)
    if value in (None, (), {}):
        return "optional"
    if isinstance(value, dict):
        value = f"{{{', '.join(f'{key} = {number:g}' for key, number in value.items())}}}"
    return f"default `{str(value).lower() if isinstance(value, bool) else value}`"


def command_line() -> str:
    """Returns the page of commands: usage, help, arguments and options of each."""
    lines = [
        "# Command line",
        "",
        "`RUN` is a run's name, or its folder `<storage>/<name>`. "
        "With the folder, a command also finds the run's cluster. "
        "[`get_run`](api.md#elastic_ddp.get_run) offers the same from Python.",
        "",
    ]
    for words, command in _commands("elastic-ddp", typer.main.get_command(app)):
        arguments = [parameter for parameter in command.params if isinstance(parameter, TyperArgument)]
        options = [parameter for parameter in command.params if isinstance(parameter, TyperOption)]
        places = [argument.metavar if argument.required else f"[{argument.metavar}]" for argument in arguments]
        usage = " ".join([words, *places, *(["[OPTIONS]"] if options else [])])
        lines += [f"## `{words}`", "", "```text", usage, "```", "", _text(command.help), ""]
        for argument in arguments:
            lines += [f"`{argument.metavar}`", f":   {_text(argument.help)}", ""]
        for option in options:
            default = f" Default: {option.default:g}." if type(option.default) in (int, float) else ""
            lines += [", ".join(f"`{name}`" for name in option.opts), f":   {_text(option.help)}{default}", ""]
    return "\n".join(lines)


def _commands(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yields each command without subcommands, with the words that call it."""
    for name, child in getattr(command, "commands", {}).items():
        yield from _commands(f"{words} {name}", child)
    if not getattr(command, "commands", None):
        yield words, command


def ledger_events() -> str:
    """Returns the page of ledger events: one heading for each, with its description and fields."""
    package = griffe.load("elastic_ddp.telemetry", search_paths=[ROOT])
    documented = {**package["event"].classes, **package["events"].classes}
    lines = [
        "# Ledger events",
        "",
        "The ledger is the run's append-only event log: JSON lines in `<storage>/<name>/ledger/*.jsonl`. "
        "Each line is one event. Times are Unix times in seconds. Fields that do not apply are null.",
        "",
        "## Fields of all events",
        "",
        *_fields(documented[Event.__name__]),
    ]
    for name, kind in EVENTS.items():
        event = documented[kind.__name__]
        lines += [f"## `{name}` {{#{name}}}", "", _text(event.docstring), ""]
        for base in reversed(kind.__mro__):
            if issubclass(base, Event) and base is not Event:
                lines += _fields(documented[base.__name__])
    return "\n".join(lines)


def _fields(event: griffe.Object) -> list[str]:
    """Returns a definition list of the fields that a class of events adds."""
    lines = []
    for name, field in event.members.items():
        if field.is_attribute and (name != "event" or event.name == Event.__name__):
            lines += [f"`{name}`", f":   {_text(field.docstring)}", ""]
    return lines


def _text(docstring: griffe.Docstring | str | None) -> str:
    """Returns a docstring as Markdown, one line for each of its paragraphs."""
    text = getattr(docstring, "value", docstring) or ""
    # Outside of code, angle brackets would be HTML tags.
    parts = [part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(text.split("`"))]
    return "\n\n".join(re.sub(r"\s*\n\s*", " ", paragraph) for paragraph in "`".join(parts).split("\n\n"))
