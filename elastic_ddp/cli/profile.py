"""`elastic-ddp profile`: traces of a few steps of a live run, and where their time went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from elastic_ddp.cli.output import AsJson, console, print_json, table
from elastic_ddp.cli.runs import LiveRun, get_run
from elastic_ddp.errors import ConfigError
from elastic_ddp.formatting import plural

_MIB = 1 << 20
_SHOWN_OPERATORS = 5


def profile(
    run: LiveRun,
    steps: Annotated[int, typer.Option(help="The number of steps, up to 20.")] = 5,
    ranks: Annotated[str | None, typer.Option(help="The ranks to profile, such as 0,3; by default all.")] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Record allocations, too; on a GPU, also make a memory snapshot.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(help="How long to wait for the traces, in seconds.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Make torch.profiler traces of the next steps of a live run.

    The command prints where the time of each rank went, and returns when the traces are in the run's storage. All ranks
    record the same steps. Training continues, with the same weights. Times are unions of intervals: of the kernels on a
    GPU, of operators on a CPU. Overlap is the time in which a rank computed and communicated.
    """
    facts = get_run(run).profile(num_steps=steps, ranks=_numbers(ranks), memory=memory, timeout_s=timeout_s)
    if as_json:
        print_json(facts)
    else:
        out = console()
        for part in _report(facts):
            out.print(part)
    if all("error" in rank for rank in facts["ranks"]):
        raise typer.Exit(1)


def _numbers(ranks: str | None) -> list[int] | None:
    try:
        return None if ranks is None else [int(rank) for rank in ranks.split(",")]
    except ValueError:
        raise ConfigError(f"--ranks {ranks}: this is no list of ranks. Use numbers with commas, such as 0,3.") from None


def _report(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    done = [rank for rank in facts["ranks"] if "error" not in rank]
    if done:
        yield _times(done)
        yield Text()
        yield _operators(done)
        if any(rank["memory"] for rank in done):
            yield Text()
            yield _allocations(done)
    for rank in done:
        if rank["ended_early"] is not None:
            num_steps = plural(rank["num_steps"], "step")
            yield Text(f"rank {rank['rank']}: the trace ends after {num_steps}: {rank['ended_early']}")
    for rank in facts["ranks"]:
        if "error" in rank:
            yield Text(f"rank {rank['rank']} ({rank['node']}) has no trace: {rank['error']}", style="bold red")
    if done:
        yield Text(f"\nTraces, for https://ui.perfetto.dev or chrome://tracing, in {facts['uri']}:")
        yield from (Text(f"  {rank['trace']}") for rank in done)
    snapshots = [rank["snapshot"] for rank in done if rank["snapshot"]]
    if snapshots:
        yield Text("Memory snapshots, for https://pytorch.org/memory_viz:")
        yield from (Text(f"  {snapshot}") for snapshot in snapshots)


def _times(ranks: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One row for each rank: the duration of a step, and the shares of it."""
    names = ("compute", "communication", "overlap", "idle")
    rows = table("rank", "node", "steps", "s/step", *names, "peak memory", text=("node",))
    for rank in ranks:
        first = rank["first_step"]
        num_steps = rank["num_steps"]
        window_s = rank["window_s"]
        shares = [f"{100 * rank[f'{name}_s'] / window_s:.1f} %" if window_s else "-" for name in names]
        memory = f"{rank['peak_memory_bytes'] / _MIB:,.0f} MiB"
        steps = f"{first}-{first + num_steps - 1}" if num_steps > 1 else str(first)
        rows.add_row(str(rank["rank"]), rank["node"], steps, f"{window_s / num_steps:.4g}", *shares, memory)
    return rows


def _operators(ranks: Sequence[Mapping[str, Any]]) -> RenderableType:
    rows = table("rank", "ms/step", "calls/step", "operator", text=("operator",))
    for rank in ranks:
        for operator in rank["operators"][:_SHOWN_OPERATORS]:
            ms = 1000 * operator["seconds"] / rank["num_steps"]
            calls = operator["calls"] / rank["num_steps"]
            rows.add_row(str(rank["rank"]), f"{ms:.3f}", f"{calls:,.4g}", _cut(operator["name"]))
    return rows


def _allocations(ranks: Sequence[Mapping[str, Any]]) -> RenderableType:
    rows = table("rank", "MiB/step", "allocated by", text=("allocated by",))
    for rank in ranks:
        for operator in (rank["memory"] or {"operators": []})["operators"][:_SHOWN_OPERATORS]:
            rows.add_row(
                str(rank["rank"]), f"{operator['bytes'] / rank['num_steps'] / _MIB:,.3f}", _cut(operator["name"])
            )
    return rows


def _cut(name: str) -> str:
    """The name of a kernel can have hundreds of characters."""
    return name if len(name) <= 100 else f"{name[:99]}…"
