"""The command line: `elastic-ddp run | status | resize | drain | checkpoint | stop | show | checkpoints`."""

from __future__ import annotations

import glob
import importlib
import importlib.util
import json
import runpy
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastic_ddp.cli import checkpoints
from elastic_ddp.cli.run_summary import render
from elastic_ddp.config.run_config import RunConfig, read_toml
from elastic_ddp.errors import ConfigError, ElasticDDPError, format_exception, printable
from elastic_ddp.storage.lease import find_holder
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger, summarize

_JOB = 'train = "file.py:function", data = "s3://bucket/train/"'

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(checkpoints.app, name="checkpoints")
# Not on a terminal nobody can widen it, and what is cut off cannot be searched for.
_console = Console(width=None if sys.stdout.isatty() else 200)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"elastic_ddp {version('elastic_ddp')}")
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Elastic, fault-tolerant PyTorch training on Ray."""


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    context: typer.Context,
    job: Annotated[
        Path,
        typer.Argument(
            metavar="JOB [ARGS]...", help="A Python script, or a TOML file with a [job] table and a run's settings."
        ),
    ],
) -> None:
    """Run a training script with the arguments that follow, or the job of a TOML file.

    The `[job]` table names the training function and its data: `train = "module:function"` or `"file.py:function"`, and
    `data = "s3://bucket/train/"`; `transform` may name a function like `train`. All else in the file are settings. A
    `file.py` lies beside the TOML file; `data` and `storage`, where they are no URIs, are paths from where you are.
    """
    if not job.exists():
        raise ConfigError(f"{job}: there is no such file; give a Python script or a TOML file")
    if job.suffix == ".py":
        sys.argv = [str(job), *context.args]
        sys.path.insert(0, str(job.resolve().parent))
        runpy.run_path(str(job), run_name="__main__")
        return
    if context.args:
        raise ConfigError(f"{' '.join(context.args)}: a TOML file takes no further arguments; put them into {job}")
    from elastic_ddp.driver.trainer import ElasticTrainer

    table = read_toml(job).get("job", {})
    if not table:
        raise ConfigError(f"{job}: there is no [job] table; it says what to run: {_JOB}")
    unknown = sorted(set(table) - {"train", "data", "transform"})
    if unknown or not {"train", "data"} <= set(table):
        raise ConfigError(
            f"{job}: [job] holds {sorted(table)}; it takes train and data, and may have transform: {_JOB}"
        )
    transform = _load_function(table["transform"], job) if "transform" in table else None
    trainer = ElasticTrainer(
        _load_function(table["train"], job), data=table["data"], config=RunConfig.load(job), transform=transform
    )
    result = trainer.fit()
    _console.print(render(result.summary))


RunName = Annotated[str, typer.Argument(metavar="RUN", help="A live run: its name, or <storage>/<name>.")]


@app.command()
def status(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="One run, with its members; by default all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the runs that are live on the cluster."""
    from elastic_ddp.driver.run_handle import get_run, live_runs

    if run is not None:
        runs = [get_run(run).status()]
    else:
        runs = []
        for name in live_runs():
            with suppress(ElasticDDPError):  # it has ended since
                runs.append(get_run(name).status())
    if as_json:
        print(json.dumps(runs, indent=1))
        return
    table = Table(box=None, padding=(0, 2))
    columns = ("name", "state", "generation", "world_size", "step", "total_steps", "steps_per_s", "loss", "last_commit")
    for column in columns:
        table.add_column(column.replace("_", " "))
    for facts in runs:
        table.add_row(*(_cell(facts[column]) for column in columns))
    _console.print(table if runs else "no run is live on this cluster; the command of an interrupted one resumes it")
    if run is not None:
        _console.print(_members(runs[0]))
        if (lost := runs[0]["last_worker_failure"]) is not None:
            at = datetime.fromtimestamp(lost["time"]).astimezone().strftime("%H:%M:%S")
            _console.print(Text(f"a worker was lost at {at}: {lost['error'].splitlines()[0]}"))
    import ray

    _console.print(f"(Ray at {ray.get_runtime_context().gcs_address})")


def _members(facts: Mapping[str, Any]) -> Table:
    """The members of one run."""
    table = Table(box=None, padding=(0, 2))
    for column in ("rank", "node", "pid", "node id"):
        table.add_column(column)
    for member in facts["members"]:
        leaving = " (draining)" if member["node_id"] in facts["draining"] else ""
        table.add_row(str(member["rank"]), member["node"] + leaving, str(member["pid"]), member["node_id"])
    return table


@app.command()
def resize(
    run: RunName, num_workers: Annotated[int, typer.Argument(metavar="N", help="How many workers it should have.")]
) -> None:
    """Have a live run train on N workers, or as many of them as there is room for."""
    from elastic_ddp.driver.run_handle import get_run

    get_run(run).resize(num_workers)
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    _console.print(f"run {run} is to have {workers}: `elastic-ddp status` tells how many it has")


@app.command()
def drain(
    run: RunName,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's address, or its id by Ray.")],
    deadline_s: Annotated[float, typer.Option(help="Seconds until the node is gone.")] = 30.0,
) -> None:
    """Have a live run's workers leave a node; returns when they have."""
    from elastic_ddp.driver.run_handle import get_run

    handle = get_run(run)
    left = handle.drain(node, deadline_s=deadline_s)
    _console.print(f"{left} {'worker' if left == 1 else 'workers'} of run {run} left {node}")
    if handle.status()["state"] == "waiting":
        _console.print("it has no other node: it is committed, and waits for one (or stop it)")


@app.command()
def checkpoint(run: RunName) -> None:
    """Have a live run commit at its next step boundary; returns when the commit is durable."""
    from elastic_ddp.driver.run_handle import get_run

    _console.print(f"run {run} committed step {get_run(run).checkpoint()}")


@app.command()
def stop(run: RunName) -> None:
    """Have a live run commit and stop, as Ctrl-C in its driver does."""
    from elastic_ddp.driver.run_handle import get_run

    get_run(run).stop()
    _console.print(f"run {run} commits and stops at its next step boundary; its own command resumes it")


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@app.command()
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, <storage>/<name>.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what is recorded of a run: how far it is, its generations, its fingerprints."""
    storage = Storage(run)
    summary = summarize(read_ledger(storage), storage=storage.uri)
    if not summary["sessions"]:
        here = [str(path) for path in Path().glob(f"*/{glob.escape(run)}") if read_ledger(Storage(path))]
        raise ConfigError(f"{run}: there is no run here; give {' or '.join(here) or '<storage>/<name>'}")
    if summary["status"] == "unfinished" and (driver := find_holder(storage)) is not None and driver.is_alive():
        summary["status"] = "running"
    if as_json:
        print(json.dumps(summary, indent=1))
    else:
        _console.print(render(summary))


def _load_function(reference: str, job: Path) -> Callable[..., Any]:
    """The function that a `[job]` table names: `module:function`, or `file.py:function` beside the TOML file."""
    sys.path.insert(0, "")  # a module beside the person who types, as `python -m` finds it
    where, _, name = reference.rpartition(":") if isinstance(reference, str) else ("", "", "")
    if not where:
        raise ConfigError(f"{job}: {reference!r} names no function; write module:function or file.py:function")
    try:
        is_file = where.endswith(".py")
        module = _module_of((job.parent / where).resolve()) if is_file else importlib.import_module(where)
        function = getattr(module, name)
    except Exception as error:  # whatever the module does when it is imported
        raise ConfigError(f"{job}: {reference!r} cannot be loaded: {format_exception(error)}") from error
    if not callable(function):
        raise ConfigError(f"{job}: {reference!r} is a {type(function).__name__}, not a function")
    return function


def _module_of(path: Path) -> ModuleType:
    """A file beside the job as a module. It goes to the workers as it is, as they may not have it; what it imports from
    its folder they find where they share that."""
    for name in (path.stem, f"{path.stem} ({path})"):  # the second where it is named like another module
        known = sys.modules.get(name)
        if known is None:
            break
        if getattr(known, "__file__", None) == str(path):
            return known
    sys.path.insert(0, str(path.parent))
    sys.argv[0] = str(path)  # the program, whose folder Ray adds to the path of the workers
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    from ray.cloudpickle import register_pickle_by_value

    register_pickle_by_value(module)
    return module


def main() -> None:
    """The console script: our own errors are one line, without a traceback."""
    try:
        app()
    except ElasticDDPError as error:
        Console(stderr=True).print("[bold red]error:[/] ", end="")
        print(printable(str(error)), file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
