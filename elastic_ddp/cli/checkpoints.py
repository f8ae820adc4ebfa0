"""The command line: `elastic-ddp checkpoints ls | verify | prune | export`, which need storage and no cluster."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from elastic_ddp.errors import (
    CheckpointError,
    ConfigError,
    StorageError,
    format_exception,
    printable,
    shorten,
)
from elastic_ddp.storage import local
from elastic_ddp.storage.lease import DriverLease, find_holder
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import new_session

if TYPE_CHECKING:
    import torch

    from elastic_ddp.checkpoint import Commit, CommitCatalog, Retention

app = typer.Typer(help="Look at, check and take out what a run has committed.", no_args_is_help=True)
# What it shows is the run's: a metric may be called [/loss].
_console = Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False)

RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, <storage>/<name>.")]


@app.command()
def ls(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List a run's commits, newest first. One is complete if all of its objects are there, in their sizes: `verify`
    reads their bytes, too."""
    store = _store_of(run)
    rows = [_row(step, commit) for step, commit in store.all_commits()]
    if not rows:
        raise _nothing_in(run, store)
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(box=None, padding=(0, 2))
    for column in ("step", "committed", "epoch", "samples", "size", "objects", "metrics", "state"):
        table.add_column(column, justify="left" if column in ("committed", "metrics", "state") else "right")
    for row in rows:
        at = datetime.fromtimestamp(row["time"]).astimezone().strftime("%Y-%m-%d %H:%M:%S") if row["time"] else "-"
        size = "-" if row["bytes"] is None else _size(row["bytes"])
        metrics = "  ".join(_told(name, row) for name in row["metrics"] or {}) or None
        facts = [row["step"], at, row["epoch"], row["samples"], size, row["objects"], metrics]
        cells = [*facts, "complete" if row["error"] is None else f"bad: {row['error']}"]
        table.add_row(*("-" if cell is None else printable(str(cell)) for cell in cells))
    _console.print(table)
    _tell_of_set_aside(store)


@app.command()
def verify(
    run: RunFolder, step: Annotated[int | None, typer.Option(help="The commit at this step; by default all.")] = None
) -> None:
    """Read every byte of a run's commits and check it; exits with 1 if any is bad."""
    store, bad = _store_of(run), False
    for number, commit in _chosen(store, run, step):
        found = "every byte is as it was committed"
        try:
            if isinstance(commit, StorageError):
                raise commit
            store.verify(commit)
        except FileNotFoundError:
            found = "it was removed meanwhile, as a live run does with what it does not keep"
        except CheckpointError as error:
            found, bad = f"bad: {error}", True
        _console.print(printable(f"step {number}: {found}"))
    _tell_of_set_aside(store)
    if bad:
        raise typer.Exit(1)


@app.command()
def prune(
    run: RunFolder,
    keep: Annotated[int | None, typer.Option(min=1, help="Commits to keep, the newest ones; by default all.")] = None,
    keep_every_steps: Annotated[
        int | None, typer.Option(min=1, help="Keep also the first at or after every multiple of so many steps.")
    ] = None,
    keep_best: Annotated[int, typer.Option(min=0, help="Keep also so many with the best value of a metric.")] = 0,
    best_metric: Annotated[str | None, typer.Option(help="Its name.")] = None,
    best_mode: Annotated[str, typer.Option(help="Whether its best value is the min or the max.")] = "min",
    orphans_older_than_s: Annotated[
        float | None,
        typer.Option(min=0, help="Remove what was never committed and not written to for so long; by default a day."),
    ] = None,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Remove also what was set aside, as it did not verify.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Remove of a run's commits what is not to be kept, and what was never committed; no run may be live meanwhile.

    The newest commit of which every byte verifies always stays, and so does what is newer, or cannot be read.
    """
    from elastic_ddp.checkpoint.housekeeping import ORPHAN_AGE_S, unfinished_uploads
    from elastic_ddp.checkpoint.prune import prune as remove
    from elastic_ddp.checkpoint.prune import removals
    from elastic_ddp.worker.job import COMMITS

    age_s = ORPHAN_AGE_S if orphans_older_than_s is None else orphans_older_than_s
    keep_what = _retention(keep, keep_every_steps, keep_best, best_metric, best_mode)
    commits = Storage(run).at(COMMITS)
    if not commits.list() and not unfinished_uploads(commits):
        raise ConfigError(f"{run}: there is nothing to prune here; give <storage>/<name>")
    with nullcontext() if dry_run else _alone_with(run) as lease:
        # To ask for the storage's own time would write something there.
        now = time.time if dry_run else None
        going, doubtful = removals(commits, keep_what, orphan_age_s=age_s, with_set_aside=set_aside, now=now)
        if lease is not None:
            lease.renew()  # to read a commit may have taken long
            remove(commits, going, orphan_age_s=age_s)
    if as_json:
        told = {step: str(error) for step, error in doubtful.items()}
        items = [asdict(each) for each in going]
        print(json.dumps({"removed": not dry_run, "items": items, "doubtful": told}, indent=1))
        return
    table = Table(box=None, padding=(0, 2))
    for column in ("step", "what", "size", "folder"):
        table.add_column(column, justify="left" if column in ("what", "folder") else "right")
    for each in going:
        folders = "\n".join(each.folders) or "-"
        table.add_row(str(each.step), each.what, _size(each.num_bytes), folders)
    if going:
        _console.print(table)
    for step, error in doubtful.items():
        _console.print(printable(f"step {step} stays, with all that was written at it: {error}"))
    total = _size(sum(each.num_bytes for each in going))
    _console.print(f"{total} {'would be' if dry_run else 'were'} removed" if going else "there is nothing to remove")


@app.command()
def export(
    run: RunFolder,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Ends in .safetensors, .pt or .pth.")],
    step: Annotated[int | None, typer.Option(help="The commit at this step; by default the newest.")] = None,
) -> None:
    """Write the weights of a commit to one file, for use without elastic_ddp: what `model.load_state_dict` takes.

    What is no tensor in them (`get_extra_state` of a module) has no place in .safetensors.
    """
    if file.suffix not in (".safetensors", ".pt", ".pth"):
        raise ConfigError(f"{file}: end the file's name in .safetensors or, for torch.load, in .pt or .pth")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {file.absolute().parent}; make it, or give another")
    store = _store_of(run)
    chosen = _chosen(store, run, step)
    commit, older = chosen[0][1], [number for number, each in chosen[1:] if not isinstance(each, StorageError)]
    try:
        if isinstance(commit, StorageError):
            raise commit
        weights: dict[str, Any] = store.load(commit, {"model"})["model"]
    except FileNotFoundError as error:
        assert not isinstance(commit, StorageError)
        raise CheckpointError(f"{commit.key} was removed while it was read; run the command again") from error
    except CheckpointError as error:
        if not older:
            raise
        raise CheckpointError(f"{error}. The commit before it is that of step {older[0]}: --step {older[0]}") from error
    if not isinstance(weights, dict):
        raise CheckpointError(f"{commit.key} does not hold the weights of a model")
    with _whole_or_not_at_all(file) as beside:
        note = (_write_safetensors if file.suffix == ".safetensors" else _write_for_torch)(weights, beside)
    _console.print(f"the weights of step {commit.step} are in {file}")
    if note:
        _console.print(printable(note))


def _write_safetensors(weights: dict[str, Any], file: Path) -> str | None:
    """What there is to say of it; ConfigError, before it writes, where the format has not a dtype."""
    import torch
    from safetensors.torch import save_file

    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    lacking = {dtype for dtype in {each.dtype for each in tensors.values()} if not _safetensors_has(dtype)}
    if refused := [f"{name} ({each.dtype})" for name, each in tensors.items() if each.dtype in lacking]:
        raise ConfigError(
            f"the format .safetensors has not the dtype of {shorten(refused, 5)}; "
            "export to a file that ends in .pt, which has all of them"
        )
    # Tied weights are one tensor under two names, which the format does not have.
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, file)
    left_out = [name for name in weights if name not in tensors]
    return f"without what is no tensor, which .pt has room for: {', '.join(left_out)}" if left_out else None


def _safetensors_has(dtype: torch.dtype) -> bool:
    """Which ones it has is written nowhere that one may look, and more come with its versions."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save

    try:
        save({"none": torch.empty(0, dtype=dtype)})
    except (KeyError, SafetensorError):
        return False
    return True


def _write_for_torch(weights: dict[str, Any], file: Path) -> str | None:
    """What there is to say of it."""
    import torch

    with file.open("wb") as out:  # by its name alone, torch would not say what failed
        torch.save(weights, out)
    if refused := [name for name, value in weights.items() if not _is_plain(value)]:
        return f"torch.load takes it with weights_only=False alone, for what is in {shorten(refused, 5)}"
    return None


def _is_plain(value: Any) -> bool:
    """Whether `torch.load`, called plainly, takes it, of what is kept in a state."""
    import numpy as np

    if isinstance(value, dict):
        return not isinstance(value, defaultdict) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return not isinstance(value, np.ndarray | np.generic | deque)


@contextmanager
def _whole_or_not_at_all(file: Path) -> Iterator[Path]:
    """Where to write a file that takes the place of another only once it is whole, and on the disk. A symbolic link
    stays one, to the new file."""
    from safetensors import SafetensorError

    place = Path(os.path.realpath(file))
    beside = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
    try:
        beside.touch()
        mode = (place if place.exists() else beside).stat().st_mode  # safetensors lets nobody else read what it writes
        yield beside
        local.sync(beside)
        beside.chmod(mode)
        os.replace(beside, place)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, as torch and safetensors say it
        what = format_exception(error.__context__ if isinstance(error.__context__, OSError) else error).splitlines()[0]
        raise StorageError(
            f"cannot write {file}: {what}; what was there before is as it was. Is there room in "
            f"{place.parent}, and may you write there?"
        ) from error
    finally:
        with suppress(OSError):  # a file system that is read-only now; what failed first is said
            beside.unlink(missing_ok=True)
    local.sync_directory(place.parent)


def _retention(keep: int | None, every_steps: int | None, best: int, metric: str | None, mode: str) -> Retention | None:
    """None where all commits stay; ConfigError if the options do not fit each other."""
    from elastic_ddp.checkpoint import Retention

    if mode not in ("min", "max"):
        raise ConfigError(f"--best-mode {mode}: the best value of a metric is the min or the max; give one of them")
    if best and metric is None:
        raise ConfigError(f"--keep-best {best} without --best-metric: the best by what? `ls` shows what commits know")
    if metric is not None and not best:
        raise ConfigError(
            f"--best-metric {metric} without --keep-best: nothing is kept by it; give the number of commits"
        )
    if keep is None:
        if every_steps is not None or best:
            raise ConfigError(
                "--keep-every-steps and --keep-best say what stays beside the newest commits; give --keep, too, for "
                "without it all commits stay"
            )
        return None
    return Retention(
        last=keep, every_steps=every_steps, best=best, metric=metric, mode="max" if mode == "max" else "min"
    )


@contextmanager
def _alone_with(run: str) -> Iterator[DriverLease]:
    """Holds the run's lease: no driver is live, and none begins meanwhile. ConfigError if one is live.

    A live run removes what it does not keep itself, and may be reading, or writing, what a person would remove.
    """
    storage, name = Storage(run), run.rstrip("/").rpartition("/")[2]
    with DriverLease(storage, name, new_session(), lambda text: Console(stderr=True).print(text)) as lease:
        try:
            lease.acquire()
        except ConfigError:
            raise ConfigError(
                f"{run}: nothing is removed while the run is live. Its driver is {find_holder(storage)}. Stop it, "
                "or leave it to the run's own settings (checkpoint.keep and those after it); --dry-run says what there "
                "is"
            ) from None
        yield lease


def _store_of(run: str) -> CommitCatalog:
    from elastic_ddp.checkpoint import CommitCatalog
    from elastic_ddp.worker.job import COMMITS

    return CommitCatalog(Storage(run).at(COMMITS))


def _chosen(store: CommitCatalog, run: str, step: int | None) -> list[tuple[int, Commit | StorageError]]:
    """Those that a command is about; ConfigError if there are none."""
    every = store.all_commits()
    chosen = [each for each in every if step in (None, each[0])]
    if not every:
        raise _nothing_in(run, store)
    if not chosen:
        there = ", ".join(str(number) for number, _ in every)
        raise ConfigError(f"{run}: there is no commit at step {step}; there are those at {there}")
    return chosen


def _nothing_in(run: str, store: CommitCatalog) -> ConfigError:
    from elastic_ddp.worker.job import COMMITS

    if told := _set_aside(store):
        return ConfigError(f"{run}: no commit is left; {told}")
    above, inside, _ = run.rpartition(f"/{COMMITS}")
    where = f"the run's folder, {above}" if inside and _store_of(above).steps() else "<storage>/<name>"
    return ConfigError(f"{run}: there are no commits of a run here; give {where}")


def _tell_of_set_aside(store: CommitCatalog) -> None:
    if told := _set_aside(store):
        _console.print(told)


def _set_aside(store: CommitCatalog) -> str | None:
    if not (count := store.num_set_aside()):
        return None
    what = "1 commit that did not verify was" if count == 1 else f"{count} commits that did not verify were"
    return f"{what} set aside, into set-aside/ beside commits/; `prune --set-aside` removes such"


def _row(step: int, commit: Commit | StorageError) -> dict[str, Any]:
    from elastic_ddp.checkpoint.metrics import measurements

    if isinstance(commit, StorageError):
        empty = dict.fromkeys(("time", "epoch", "samples", "bytes", "objects", "metrics", "measured_at"))
        return {"step": step, **empty, "error": str(commit)}
    measured = measurements(commit.record)
    return {
        "step": step,
        **{name: commit.record.get(name) for name in ("time", "epoch", "samples")},
        "bytes": commit.num_bytes,
        "objects": len(commit.all_objects),
        "metrics": {name: each.value for name, each in measured.items()},
        "measured_at": {name: each.step for name, each in measured.items()},
        "error": None,
    }


def _size(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes / 2**10:,.1f} KiB"


def _told(metric: str, row: dict[str, Any]) -> str:
    """A value, and of which step it is where that is another one."""
    value, step = row["metrics"][metric], row["measured_at"][metric]
    return f"{metric} {value:.4g}" + (f" (step {step:,})" if step != row["step"] else "")
