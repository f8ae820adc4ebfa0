"""The command line: `elastic-ddp checkpoints ls | verify | prune | export`. These need storage, but no cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal as format_size

from elastic_ddp.cli.export import check_target, write_weights
from elastic_ddp.cli.output import AsJson, console, print_json, table
from elastic_ddp.cli.runs import folders_of
from elastic_ddp.errors import CheckpointError, ConfigError, StorageError, printable
from elastic_ddp.formatting import format_time, plural
from elastic_ddp.storage.lease import DriverLease, find_holder
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import new_session

if TYPE_CHECKING:
    from elastic_ddp.checkpoint import Commit, CommitCatalog, Retention
    from elastic_ddp.checkpoint.retention import Removal

app = typer.Typer(help="List, check, prune and export the commits of a run.", no_args_is_help=True)

RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, <storage>/<name>.")]


@app.command()
def ls(run: RunFolder, as_json: AsJson = False) -> None:
    """List a run's commits, newest first.

    A commit is complete if all of its objects exist with the right size. Use verify to check their content.
    """
    catalog = _catalog(run)
    rows = [_describe_commit(step, commit) for step, commit in catalog.all_commits()]
    if not rows:
        raise _no_commits(run, catalog)
    if as_json:
        print_json(rows)
        return
    has_verified = any(row["verified_step"] is not None for row in rows)
    verified = ["verified"] if has_verified else []
    commits = table("step", "committed", "epoch", "size", "state", *verified, "metrics", text=("metrics",))
    for row in rows:
        older = {name: f" (step {at:,})" for name, at in row["measured_at"].items() if at != row["step"]}
        metrics = [f"{name} {value:.4g}{older.get(name, '')}" for name, value in row["metrics"].items()]
        commits.add_row(
            f"{row['step']:,}",
            format_time(row["time"]) if row["time"] else "-",
            "-" if row["epoch"] is None else printable(str(row["epoch"])),
            "-" if row["bytes"] is None else format_size(row["bytes"]),
            "complete" if row["error"] is None else "bad",
            *(["-" if row["verified_step"] is None else f"step {row['verified_step']:,}"] if has_verified else []),
            printable("\n".join(metrics)) or "-",
        )
    out = console()
    out.print(commits)
    for row in rows:
        if row["error"] is not None:
            out.print(printable(f"step {row['step']:,} is bad: {row['error']}"))
    note = _set_aside_note(catalog)
    if note:
        out.print(note)


@app.command()
def verify(
    run: RunFolder, step: Annotated[int | None, typer.Option(help="Check only the commit at this step.")] = None
) -> None:
    """Read and check every byte of a run's commits.

    The exit status is 1 if a commit is bad.
    """
    catalog = _catalog(run)
    is_bad = False
    for number, commit in _select(catalog, run, step):
        result = "all bytes are intact"
        try:
            if isinstance(commit, StorageError):
                raise commit
            catalog.verify(commit)
        except FileNotFoundError:
            result = "removed during the check, by a live run that does not keep it"
        except CheckpointError as error:
            result = f"bad: {error}"
            is_bad = True
        console().print(printable(f"step {number:,}: {result}"))
    note = _set_aside_note(catalog)
    if note:
        console().print(note)
    if is_bad:
        raise typer.Exit(1)


@app.command()
def prune(
    run: RunFolder,
    keep: Annotated[int | None, typer.Option(min=1, help="Number of newest commits to keep; by default all.")] = None,
    keep_every_steps: Annotated[
        int | None, typer.Option(min=1, help="Also keep the first commit at or after each multiple of this many steps.")
    ] = None,
    keep_best: Annotated[
        int, typer.Option(min=0, help="Also keep this many commits with the best value of --best-metric.")
    ] = 0,
    best_metric: Annotated[str | None, typer.Option(help="Name of the metric for --keep-best.")] = None,
    best_mode: Annotated[str, typer.Option(help="Whether the best value is the min or the max.")] = "min",
    orphans_older_than_s: Annotated[
        float | None,
        typer.Option(
            min=0, help="Remove uncommitted objects that were not written to for this many seconds; by default a day."
        ),
    ] = None,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Also remove commits that were set aside because they were bad.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove commits that are not to be kept.

    Objects that were never committed are removed too. The run must not be live. The newest intact commit is never
    removed, nor are newer commits or commits that cannot be read.
    """
    from elastic_ddp.checkpoint.housekeeping import ORPHAN_AGE_S, plan_prune, remove, unfinished_uploads
    from elastic_ddp.worker.job import COMMITS

    age_s = ORPHAN_AGE_S if orphans_older_than_s is None else orphans_older_than_s
    retention = _retention(keep, keep_every_steps, keep_best, best_metric, best_mode)
    commits = Storage(run).at(COMMITS)
    if not commits.list() and not unfinished_uploads(commits):
        raise ConfigError(f"{run}: there is nothing to prune in this folder. Use <storage>/<name>.")
    with nullcontext() if dry_run else _exclusive_access(run) as lease:
        going, doubtful = plan_prune(commits, retention, orphan_age_s=age_s, with_set_aside=set_aside)
        if lease is not None:
            lease.renew()  # reading the commits can take long
            remove(commits, going)
    if as_json:
        errors = {step: str(error) for step, error in doubtful.items()}
        report = {"removed": not dry_run, "items": [asdict(item) for item in going.items], "doubtful": errors}
        print_json(report)
        return
    _print_removals(going.items, doubtful, dry_run=dry_run)


@app.command()
def export(
    run: RunFolder,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Target file: .safetensors, .pt or .pth.")],
    step: Annotated[int | None, typer.Option(help="Step of the commit; by default the newest.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Export the commit with the best value of the run's checkpoint.best_metric.")
    ] = False,
    registered: Annotated[
        str | None, typer.Option(metavar="NAME", help="Export what run.register added under this name, not the model.")
    ] = None,
) -> None:
    """Write the weights of a commit to one file.

    load_state_dict of the model, or of the registered object, accepts its content. Values that are not tensors, for
    example from get_extra_state, are left out of .safetensors files.
    """
    check_target(file)
    catalog = _catalog(run)
    if best:
        if step is not None:
            raise ConfigError(f"--step {step} and --best: use one of them.")
        step = _best_step(catalog, run)
    (_, commit), *others = _select(catalog, run, step)
    older = [number for number, other in others if not isinstance(other, StorageError)]
    try:
        if isinstance(commit, StorageError):
            raise commit
        weights = _state_of(catalog, commit, run, registered)
    except FileNotFoundError as error:
        assert not isinstance(commit, StorageError)
        raise CheckpointError(f"{commit.key} was removed while it was read. Run the command again.") from error
    except CheckpointError as error:
        if not older:
            raise
        raise CheckpointError(f"{error}. To export the previous commit, use --step {older[0]}.") from error
    note = write_weights(weights, file)
    out = console()
    what = "the weights" if registered is None else f"the values of {registered!r}"
    out.print(printable(f"{what} of step {commit.step:,} are in {file}"))
    if note:
        out.print(printable(note))


def _state_of(catalog: CommitCatalog, commit: Commit, run: str, registered: str | None) -> dict[str, Any]:
    """Returns the weights in a commit, or the state of what the run registered under a name."""
    if registered is None:
        state = catalog.load(commit, {"model"})["model"]
    else:
        states = catalog.load(commit, {"user"})["user"]
        if not isinstance(states, dict) or registered not in states:
            known = ", ".join(map(repr, states)) or "nothing"
            raise ConfigError(
                f"{run}: --registered {registered}: step {commit.step:,} has no such name. It has {known}."
            )
        state = states[registered]
    if not isinstance(state, dict):
        raise CheckpointError(f"{commit.key} does not hold the weights of a model")
    return state


def _print_removals(items: list[Removal], doubtful: dict[int, StorageError], *, dry_run: bool) -> None:
    out = console()
    for item in items:
        out.print(f"step {item.step:,}: {item.what}, {format_size(item.num_bytes)}")
        for folder in item.folders:
            out.print(f"  {folder}")
    for step, error in doubtful.items():
        out.print(printable(f"step {step:,} is kept, with all of its objects: {error}"))
    if not items:
        out.print("nothing to remove")
        return
    total = format_size(sum(item.num_bytes for item in items))
    out.print(f"{total} would be removed" if dry_run else f"{total} removed")


def _retention(keep: int | None, every_steps: int | None, best: int, metric: str | None, mode: str) -> Retention | None:
    """Returns which commits are kept, or None for all."""
    from elastic_ddp.checkpoint import Retention

    if mode not in ("min", "max"):
        raise ConfigError(f"--best-mode {mode}: use min or max.")
    if bool(best) != (metric is not None):
        raise ConfigError(
            f"--keep-best {best} and --best-metric {metric}: use both or neither. `checkpoints ls` shows the metrics."
        )
    if keep is None and (every_steps is not None or best):
        raise ConfigError("--keep-every-steps and --keep-best need --keep; without it, all commits are kept.")
    if keep is None:
        return None
    return Retention(last=keep, every_steps=every_steps, best=best, metric=metric, mode=mode)  # type: ignore[arg-type]


@contextmanager
def _exclusive_access(run: str) -> Iterator[DriverLease]:
    """Holds the run's lease, so that no driver is live or starts."""
    storage = Storage(run)
    name = run.rstrip("/").rpartition("/")[2]
    with DriverLease(storage, name, new_session, lambda text: Console(stderr=True).print(text)) as lease:
        try:
            lease.acquire()
        except ConfigError:
            raise ConfigError(
                f"{run}: the run is live, and nothing is removed. Its driver is {find_holder(storage)}. Stop it, "
                "or use the run's checkpoint.keep settings; --dry-run shows what could be removed."
            ) from None
        yield lease


def _catalog(run: str) -> CommitCatalog:
    from elastic_ddp.checkpoint import CommitCatalog
    from elastic_ddp.worker.job import COMMITS

    return CommitCatalog(Storage(run).at(COMMITS))


def _select(catalog: CommitCatalog, run: str, step: int | None) -> list[tuple[int, Commit | StorageError]]:
    """Returns the commit at a step, or all commits, newest first."""
    commits = catalog.all_commits()
    selected = [(number, commit) for number, commit in commits if step in (None, number)]
    if not commits:
        raise _no_commits(run, catalog)
    if not selected:
        steps = ", ".join(str(number) for number, _ in commits)
        raise ConfigError(f"{run}: there is no commit at step {step}. The commits are at steps {steps}.")
    return selected


def _best_step(catalog: CommitCatalog, run: str) -> int:
    """Returns the step of the commit with the best value of the run's metric."""
    from elastic_ddp.checkpoint.record import measurements
    from elastic_ddp.checkpoint.retention import best_commit
    from elastic_ddp.telemetry import read_ledger
    from elastic_ddp.telemetry.events import SessionStarted

    sessions = [event for event in read_ledger(Storage(run)) if isinstance(event, SessionStarted)]
    settings = sessions[-1].config.get("checkpoint", {}) if sessions else {}
    metric = settings.get("best_metric")
    mode = settings.get("best_mode", "min")
    intact = [commit for _, commit in _select(catalog, run, None) if not isinstance(commit, StorageError)]
    found = best_commit(intact, metric, mode) if metric is not None else None
    if found is None:
        known = sorted({name for commit in intact for name in measurements(commit.record)})
        what = "has no checkpoint.best_metric" if metric is None else f"has no commit with a value of {metric!r}"
        raise ConfigError(
            f"{run}: the run {what}. Use --step; `checkpoints ls` shows the metrics of each commit: "
            f"{', '.join(known) or 'none'}."
        )
    return found[0].step


def _no_commits(run: str, catalog: CommitCatalog) -> ConfigError:
    from elastic_ddp.worker.job import COMMITS

    note = _set_aside_note(catalog)
    if note:
        return ConfigError(f"{run}: no commit is left. {note}")
    parent, is_inside, _ = run.rpartition(f"/{COMMITS}")
    folder = f"the run's folder, {parent}" if is_inside else " or ".join(folders_of(run)) or "<storage>/<name>"
    return ConfigError(f"{run}: there are no commits of a run in this folder. Use {folder}.")


def _set_aside_note(catalog: CommitCatalog) -> str | None:
    count = catalog.num_set_aside()
    return f"Bad commits in set-aside/: {plural(count, 'commit')}. `prune --set-aside` removes them." if count else None


def _describe_commit(step: int, commit: Commit | StorageError) -> dict[str, Any]:
    from elastic_ddp.checkpoint.record import measurements

    record = {} if isinstance(commit, StorageError) else commit.record
    measured = measurements(record)
    return {
        "step": step,
        **{name: record.get(name) for name in ("time", "epoch", "samples", "verified_step")},
        "bytes": None if isinstance(commit, StorageError) else commit.num_bytes,
        "metrics": {name: measurement.value for name, measurement in measured.items()},
        "measured_at": {name: measurement.step for name, measurement in measured.items()},
        "error": str(commit) if isinstance(commit, StorageError) else None,
    }
