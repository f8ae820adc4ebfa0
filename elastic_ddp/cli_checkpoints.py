"""The command line: `elastic-ddp checkpoints ls | verify | export`, which need storage and no cluster."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.storage import Storage

if TYPE_CHECKING:
    from elastic_ddp.checkpoint import CheckpointStore, Commit

app = typer.Typer(help="Look at, check and take out what a run has committed.", no_args_is_help=True)
_console = Console(width=None if sys.stdout.isatty() else 200)

RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, <storage>/<name>.")]
Step = Annotated[int | None, typer.Option(help="The commit at this step; by default the newest.")]


@app.command()
def ls(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List a run's commits, newest first."""
    rows = [_row(step, commit) for step, commit in _store_of(run).all_commits()]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(box=None, padding=(0, 2))
    for column in ("step", "committed", "epoch", "samples", "size", "objects", "state"):
        table.add_column(column, justify="left" if column in ("committed", "state") else "right")
    for row in rows:
        at = datetime.fromtimestamp(row["time"]).astimezone().strftime("%Y-%m-%d %H:%M:%S") if row["time"] else "-"
        size = "-" if row["bytes"] is None else f"{row['bytes'] / 2**20:,.1f} MiB"
        cells = [row["step"], at, row["epoch"], row["samples"], size, row["objects"], row["error"] or "complete"]
        table.add_row(*("-" if cell is None else str(cell) for cell in cells))
    _console.print(table if rows else "this run has no commits")


@app.command()
def verify(run: RunFolder, step: Step = None) -> None:
    """Read every byte of a run's commits and check it; exits with 1 if any is bad."""
    store, bad = _store_of(run), False
    for number, commit in _chosen(store, run, step):
        error = commit if isinstance(commit, CheckpointError) else None
        if not isinstance(commit, CheckpointError):
            try:
                store.verify(commit)
            except CheckpointError as found:
                error = found
        bad = bad or error is not None
        _console.print(f"step {number}: {f'bad: {error}' if error else 'every byte is as it was committed'}")
    if bad:
        raise typer.Exit(1)


@app.command()
def export(
    run: RunFolder,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Ends in .safetensors, .pt or .pth.")],
    step: Step = None,
) -> None:
    """Write the weights of a commit to one file, for use without elastic_ddp: what `model.load_state_dict` takes."""
    if file.suffix not in (".safetensors", ".pt", ".pth"):
        raise ConfigError(f"{file}: end the file's name in .safetensors or, for torch.load, in .pt or .pth")
    store = _store_of(run)
    _, commit = _chosen(store, run, step)[0]
    if isinstance(commit, CheckpointError):
        raise commit
    weights: dict[str, Any] = store.load(commit)["model"]
    if file.suffix == ".safetensors":
        from safetensors.torch import save_file

        # Tied weights are one tensor under two names, which the format does not have.
        save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, file)
    else:
        import torch

        torch.save(weights, file)
    _console.print(f"the weights of step {commit.step} are in {file}")


def _store_of(run: str) -> CheckpointStore:
    from elastic_ddp.checkpoint import CheckpointStore
    from elastic_ddp.job import COMMITS

    return CheckpointStore(Storage(run).at(COMMITS), keep=1)


def _chosen(store: CheckpointStore, run: str, step: int | None) -> list[tuple[int, Commit | CheckpointError]]:
    """Those that a command is about; ConfigError if there are none."""
    every = store.all_commits()
    chosen = [each for each in every if step in (None, each[0])]
    if not chosen:
        there = ", ".join(str(number) for number, _ in every) or "none"
        what = "no commits" if step is None else f"no commit at step {step}"
        raise ConfigError(f"{run}: there is {what} here; those there are: {there}. Give <storage>/<name>")
    return chosen


def _row(step: int, commit: Commit | CheckpointError) -> dict[str, Any]:
    if isinstance(commit, CheckpointError):
        empty = dict.fromkeys(("time", "epoch", "samples", "bytes", "objects"))
        return {"step": step, **empty, "error": str(commit)}
    return {
        "step": step,
        **{name: commit.record.get(name) for name in ("time", "epoch", "samples")},
        "bytes": commit.num_bytes,
        "objects": len(commit.all_objects),
        "error": None,
    }
