"""The command line: `elastic-ddp run | status | show`."""

from __future__ import annotations

import importlib
import json
import logging
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from elastic_ddp.config import RunConfig, read_toml
from elastic_ddp.errors import ConfigError, ElasticDDPError
from elastic_ddp.storage import Storage
from elastic_ddp.telemetry import read_ledger, render, summarize

app = typer.Typer(
    help="Elastic, fault-tolerant PyTorch training on Ray.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_console = Console()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    job: Annotated[
        Path, typer.Argument(help="A Python script, or a TOML file with a [job] table and a run's settings.")
    ],
) -> None:
    """Run a training script with the arguments that follow, or the job of a TOML file.

    The `[job]` table names the training function and its data: `train = "module:function"` or `"file.py:function"`, and
    `data = "s3://bucket/train/"`; `transform` may name a function like `train`. All else in the file are settings.
    """
    if job.suffix == ".py":
        sys.argv = [str(job), *context.args]
        sys.path.insert(0, str(job.resolve().parent))
        runpy.run_path(str(job), run_name="__main__")
        return
    if context.args:
        raise ConfigError(f"{' '.join(context.args)}: a TOML file takes no further arguments; put them into {job}")
    from elastic_ddp.trainer import ElasticTrainer

    table = read_toml(job).get("job", {})
    unknown = sorted(set(table) - {"train", "data", "transform"})
    if unknown or not {"train", "data"} <= set(table):
        raise ConfigError(
            f"{job}: [job] holds {sorted(table)}; it takes train and data, and may have transform: "
            'train = "file.py:function", data = "s3://bucket/train/"'
        )
    transform = _load_function(table["transform"], job) if "transform" in table else None
    trainer = ElasticTrainer(
        _load_function(table["train"], job), data=table["data"], config=RunConfig.load(job), transform=transform
    )
    result = trainer.fit()
    _console.print(render(result.summary))


@app.command()
def status() -> None:
    """Show the runs that are live on the cluster."""
    import ray

    from elastic_ddp.elastic.rendezvous import NAMESPACE, RENDEZVOUS_PREFIX, RendezvousHandle

    if os.environ.get("RAY_ADDRESS") == "local":
        raise ConfigError("RAY_ADDRESS=local is no cluster to ask; set it to the address that the run printed")
    try:
        ray.init(address="auto", namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError:
        raise ConfigError(
            "there is no Ray cluster to ask; set RAY_ADDRESS, or run this on a node of the cluster"
        ) from None
    table = Table(box=None, padding=(0, 2))
    columns = ("name", "state", "generation", "world_size", "step", "total_steps", "loss", "last_commit")
    for column in columns:
        table.add_column(column.replace("_", " "))
    actors = [
        each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE
    ]
    names = sorted(name for name in actors if name.startswith(RENDEZVOUS_PREFIX))
    for name in names:
        rendezvous: RendezvousHandle = ray.get_actor(name, namespace=NAMESPACE)
        facts = ray.get(rendezvous.status.remote())
        table.add_row(*(_cell(facts[column]) for column in columns))
    _console.print(table if names else "no run is live on this cluster")
    _console.print(f"(Ray at {ray.get_runtime_context().gcs_address})")


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@app.command()
def show(
    run: Annotated[str, typer.Argument(help="The run's folder, <storage>/<name>.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what is recorded of a run: how far it is, its generations, its fingerprints."""
    storage = Storage(run)
    summary = summarize(read_ledger(storage), storage=storage.uri)
    if not summary["sessions"]:
        raise ConfigError(f"{run}: there is no run here; give <storage>/<name>")
    if as_json:
        print(json.dumps(summary, indent=1))
    else:
        _console.print(render(summary))


def _load_function(reference: str, job: Path) -> Callable[..., Any]:
    """The function that a `[job]` table names: `module:function`, or `file.py:function` beside the TOML file."""
    sys.path.insert(0, "")  # a module beside the person who types, as `python -m` finds it
    where, _, name = reference.rpartition(":")
    if not where:
        raise ConfigError(f"{job}: {reference!r} names no function; write module:function or file.py:function")
    if where.endswith(".py"):
        path = (job.parent / where).resolve()
        sys.path.insert(0, str(path.parent))
        where = path.stem
    try:
        function = getattr(importlib.import_module(where), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{job}: {reference!r} cannot be loaded: {error}") from error
    if not callable(function):
        raise ConfigError(f"{job}: {reference!r} is a {type(function).__name__}, not a function")
    return function


def main() -> None:
    """The console script: our own errors are one line, without a traceback."""
    try:
        app()
    except ElasticDDPError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {type(error).__name__}: ", end="")
        print(error, file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
