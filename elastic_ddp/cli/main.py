"""The command line: `elastic-ddp run | status | resize | drain | checkpoint | stop | ...`, one function each."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import runpy
import sys
import time
from bdb import BdbQuit
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partialmethod
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from elastic_ddp.cli import checkpoints
from elastic_ddp.cli.doctor import doctor
from elastic_ddp.cli.events import events
from elastic_ddp.cli.output import AsJson, console, print_json, print_plain, table
from elastic_ddp.cli.profile import profile
from elastic_ddp.cli.report import report
from elastic_ddp.cli.run_summary import columns_of_ranks, describe_step, format_number, render
from elastic_ddp.cli.runs import LiveRun, RecordedRun, RunLedger, get_run
from elastic_ddp.cli.stacks import stacks
from elastic_ddp.cli.submit import dead_drivers, logs, status_of, stop_submitted, submit
from elastic_ddp.cli.watch import watch
from elastic_ddp.config.run_config import RunConfig, read_toml
from elastic_ddp.errors import ConfigError, ElasticDDPError, format_exception, printable
from elastic_ddp.formatting import first_line, format_time, plural
from elastic_ddp.telemetry import summarize

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(checkpoints.app, name="checkpoints")
app.command()(doctor)


def _show_version(requested: bool) -> None:
    if requested:
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
            metavar="JOB [ARGS]...", help="A Python script, or a TOML file with settings and a [job] table."
        ),
    ],
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Ray's own messages, too.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Train on one worker in this process, where breakpoint() works.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="With --debug: begin with the newest commit.")] = False,
) -> None:
    """Run a Python script, or the job of a TOML file.

    Arguments after a script are passed to it. With --debug, ElasticTrainer.debug takes the place of fit: nothing is
    saved, and training begins at step 0.

    The [job] table has the keys train, data and, optionally, transform, collate_fn and sample_weights. train, transform
    and collate_fn name functions, as "module:function" or "file.py:function"; file.py is relative to the TOML file.
    data is the training set, and sample_weights a column of it. Local paths in data and storage are relative to the
    working directory.
    """
    if not job.exists():
        raise ConfigError(f"{job}: no such file. Use a Python script or a TOML file.")
    if verbose:
        os.environ["ELASTIC_DDP_VERBOSE"] = "1"
    if resume and not debug:
        raise ConfigError("--resume is an option of --debug. Without --debug, a run always resumes.")
    if "--debug" in context.args and not debug:
        note = f"--debug after {job} is an argument of the script: use elastic-ddp run --debug {job}"
        Console(stderr=True).print(note, markup=False)
    if debug:
        from elastic_ddp.driver.trainer import ElasticTrainer

        ElasticTrainer.fit = partialmethod(ElasticTrainer.debug, resume=resume)  # type: ignore[assignment,method-assign]
    if job.suffix == ".py":
        sys.argv = [str(job), *context.args]
        sys.path.insert(0, str(job.resolve().parent))
        runpy.run_path(str(job), run_name="__main__")
        return
    if context.args:
        raise ConfigError(
            f"{' '.join(context.args)}: a TOML file takes no arguments. Put settings into {job}, and options before it."
        )
    from elastic_ddp.driver.trainer import ElasticTrainer

    optional = {"transform", "collate_fn", "sample_weights"}
    job_table = read_toml(job).get("job", {})
    if not {"train", "data"} <= set(job_table) <= {"train", "data", *optional}:
        raise ConfigError(
            f"{job}: the [job] table has the keys {sorted(job_table)}. It needs train and data, and can have "
            'transform, collate_fn and sample_weights: train = "file.py:function", data = "s3://bucket/train/".'
        )
    functions = {
        name: _load_function(job_table[name], job) for name in ("train", "transform", "collate_fn") if name in job_table
    }
    data = {name: job_table[name] for name in ("data", "sample_weights") if name in job_table}
    result = ElasticTrainer(**functions, **data, config=RunConfig.load(job)).fit()
    print_plain(console(), render(result.summary))


@app.command()
def status(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="One run, with its workers; by default all live runs.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the live runs of a cluster, or one run and its workers."""
    from elastic_ddp.driver.run_handle import live_runs

    runs = [status_of(run)] if run is not None else []
    for name in live_runs() if run is None else ():
        with suppress(ElasticDDPError):  # the run has ended in the meantime
            runs.append(get_run(name).status())
    if as_json:
        print_json(runs)
        return
    import ray

    out = console()
    for facts in runs:
        out.print(_describe_run(facts))
        if run is not None:
            out.print(_describe_workers(facts))
        out.print()
    dead = dead_drivers([facts["name"] for facts in runs]) if run is None else {}
    for name, text in dead.items():
        out.print(Text.assemble((name, "bold"), f"  {text}\n"))
    if not runs and not dead:
        out.print("No run is live on this cluster. The command that started a run also resumes it.")
    out.print(f"Ray at {ray.get_runtime_context().gcs_address}")


def _describe_run(facts: Mapping[str, Any]) -> RenderableType:
    names = ("step", "total_steps", "last_commit", "loss", "steps_per_s", "generation")
    number = {name: format_number(facts[name]) or "-" for name in names}
    standbys = len(facts["standbys"])
    return Text.assemble(
        (facts["name"], "bold"),
        f"  {facts['state']}\n",
        f"  step {number['step']} of {number['total_steps']}, last commit {number['last_commit']}\n",
        f"  loss {number['loss']}, {number['steps_per_s']} steps/s\n",
        f"  {plural(facts['world_size'] or 0, 'worker')}, generation {number['generation']}",
        f", {plural(standbys, 'standby')}" if standbys else "",
        *(f"\n  {line}" for line in describe_step(facts)),
        f"\n  {facts['waiting_for']}" if facts["waiting_for"] else "",
        f"\n  submitted as job {facts['driver']['job']}" if facts["driver"]["job"] else "",
    )


def _describe_workers(facts: Mapping[str, Any]) -> RenderableType:
    columns = columns_of_ranks(facts)
    workers = table("rank", "pid", *columns, "node", text=("node",))
    nodes = table("Ray's node id", "node", text=("node",))
    for member in facts["members"]:
        measured = [values[member["rank"]] for values in columns.values()]
        workers.add_row(str(member["rank"]), str(member["pid"]), *measured, member["node"])
    for node_id, node in dict.fromkeys((member["node_id"], member["node"]) for member in facts["members"]):
        draining = " (draining)" if node_id in facts["draining"] else ""
        nodes.add_row(node_id, node + draining)
    for node_id in facts["draining"]:
        if all(member["node_id"] != node_id for member in facts["members"]):
            nodes.add_row(node_id, "(drained)")
    parts: list[RenderableType] = [Text(), workers, Text(), nodes]
    failure = facts["last_worker_failure"]
    if failure is not None:
        when = format_time(failure["time"], "%H:%M:%S")
        reason = first_line(failure["error"])
        parts += [Text(), Text(f"A worker failed at {when}: {reason}")]
    return Group(*parts)


@app.command()
def resize(
    run: LiveRun, num_workers: Annotated[int, typer.Argument(metavar="N", help="The number of workers.")]
) -> None:
    """Change the number of workers of a live run.

    The run trains on N workers, or on as many as fit on the cluster. The command returns at once. Surplus workers leave
    at the next step boundary; new workers join when they are ready.
    """
    get_run(run).resize(num_workers)
    console().print(
        f"run {run}: {plural(num_workers, 'worker')} requested (`elastic-ddp status` shows the current ones)"
    )


NodeOfRun = Annotated[str, typer.Argument(metavar="NODE", help="The node's address, or Ray's id of it.")]


@app.command()
def drain(
    run: LiveRun,
    node: NodeOfRun,
    deadline_s: Annotated[float, typer.Option(help="Seconds until the node is gone.")] = 30.0,
) -> None:
    """Move the workers of a live run off a node.

    The command returns when they have left. Use undrain to let workers start on the node again.
    """
    handle = get_run(run)
    num_left = handle.drain(node, deadline_s=deadline_s)
    out = console()
    out.print(f"run {run}: {plural(num_left, 'worker')} left {node}")
    if handle.status()["state"] == "waiting":
        out.print("The run has no other node. It is committed and waits for one; `elastic-ddp stop` ends it.")


@app.command()
def undrain(run: LiveRun, node: NodeOfRun) -> None:
    """Let a live run use a node again after drain.

    Workers that have not left stay, and new ones start within seconds. A node that Ray itself drains, such as after a
    spot notice, stays drained until Ray is restarted on it.
    """
    get_run(run).undrain(node)
    console().print(f"run {run}: workers may start on {node} again")


app.command()(submit)
app.command()(logs)


@app.command("watch-notices")
def watch_notices(
    drain_on_rebalance: Annotated[
        bool, typer.Option("--drain-on-rebalance", help="Also drain on AWS's rebalance recommendation.")
    ] = False,
) -> None:
    """Drain this machine's Ray node when its cloud announces that the machine goes away.

    Run it on each spot node. It polls the metadata service for AWS's spot interruption notice and for GCP's preemption
    and host maintenance notices until SIGTERM ends it. Every run on the Ray cluster then moves its workers off the node
    before the deadline.
    """
    from elastic_ddp.notices.metadata import find_service
    from elastic_ddp.notices.watch import DrainError, Watch, drain_in_ray, find_ray_nodes

    def log(line: str) -> None:
        print(f"{format_time(time.time())} {line}", flush=True)

    service = find_service(os.environ)
    try:
        log(f"watching the notices of {service.name} at {service.url} for Ray node {find_ray_nodes()}")
    except DrainError as error:
        log(f"watching the notices of {service.name} at {service.url}, but a drain would fail now: {error}")
    Watch(service, drain_in_ray, log, drain_on_rebalance=drain_on_rebalance).run()


@app.command()
def checkpoint(run: LiveRun) -> None:
    """Commit a live run at its next step boundary.

    The command returns when the commit is durable.
    """
    console().print(f"run {run}: committed step {get_run(run).checkpoint():,}")


@app.command()
def verify(run: LiveRun) -> None:
    """Verify a step of a live run now.

    Its ranks compute a micro-batch of each other again and compare bits. The command returns when that is done. The
    exit status is 1 if bits differ.
    """
    found = get_run(run).verify()
    if found:
        console().print(printable(f"run {run}: {found}"))
        raise typer.Exit(1)
    console().print(f"run {run}: all ranks compute the same bits")


@app.command()
def stop(run: LiveRun) -> None:
    """Commit and stop a live run at its next step boundary.

    Ctrl-C in the run's driver does the same. The command returns at once. A submitted driver is not restarted.
    """
    try:
        get_run(run).stop()
    except ElasticDDPError:  # not live, or not any more, or this machine is not a node of the cluster
        if not stop_submitted(run):
            raise
    console().print(f"run {run}: stopping after a commit at the next step boundary; the same command resumes it")


@app.command()
def show(run: RecordedRun, as_json: AsJson = False) -> None:
    """Show the record of a run.

    It has the progress, the time, the generations and the hashes of the run. The command needs no cluster.
    """
    ledger = RunLedger(run)
    summary = summarize(ledger.read(), storage=ledger.storage.uri)
    summary["status"] = ledger.live_status(summary["status"])
    if as_json:
        print_json(summary)
    else:
        print_plain(console(), render(summary))


app.command()(events)
app.command()(watch)
app.command()(stacks)
app.command()(report)
app.command()(profile)


def _load_function(reference: str, job: Path) -> Any:
    """Returns the function that a [job] table names as `module:function` or `file.py:function`."""
    sys.path.insert(0, "")  # finds modules in the working directory, as `python -m` does
    location, _, name = str(reference).rpartition(":")
    if not location:
        raise ConfigError(f"{job}: {reference!r} does not name a function. Use module:function or file.py:function.")
    try:
        is_file = location.endswith(".py")
        module = _load_file((job.parent / location).resolve()) if is_file else importlib.import_module(location)
        return getattr(module, name)
    except Exception as error:  # anything that the module raises on import
        raise ConfigError(f"{job}: {reference!r} cannot be loaded: {format_exception(error)}") from error


@cache
def _load_file(path: Path) -> ModuleType:
    """Imports a file as a module, which workers receive by value: they may not have the file."""
    name = path.stem if path.stem not in sys.modules else f"{path.stem} ({path})"
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from ray.cloudpickle import register_pickle_by_value

    register_pickle_by_value(module)
    return module


def main() -> None:
    """The console script. Prints this package's own errors in one line, without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # its encoding may not have every character, as stderr's
    arguments = sys.argv[1:]
    try:
        app()
    except BdbQuit:
        raise SystemExit("debugging ended") from None
    except ElasticDDPError as error:
        if arguments[:1] == ["run"] and "--debug" in arguments:
            raise  # with its place, for a debugger
        Console(stderr=True).print("[bold red]error:[/] ", end="")
        print(printable(str(error)), file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
