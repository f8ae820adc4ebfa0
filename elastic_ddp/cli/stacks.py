"""`elastic-ddp stacks`: what the threads of a run's workers are doing, now or in the run's last hang."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from elastic_ddp.cli.output import AsJson, console, print_json, ranges
from elastic_ddp.cli.runs import RunLedger, get_run
from elastic_ddp.errors import ConfigError
from elastic_ddp.formatting import format_time
from elastic_ddp.telemetry.stacks import stacks_of_last_hang


def stacks(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run: its name, or <storage>/<name>.")],
    last_hang: Annotated[
        bool, typer.Option("--last-hang", help="Print the stacks of the last hang, also if the run is live.")
    ] = False,
    all_threads: Annotated[
        bool, typer.Option("--all-threads", help="Print all threads of a worker, not only the training thread.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the Python stacks of all ranks of a live run, or of a run's last hang.

    A rank of a live run answers also while it hangs in a collective or in native code that does not hold Python's lock.
    If the run is not live, the command prints the stacks that its workers recorded in the last hang. No cluster is
    needed then. Equal stacks of several ranks are printed once. --json prints the stacks of all threads.
    """
    facts = _of_last_hang(run) if last_hang else _now(run)
    if as_json:
        print_json(facts)
        return
    out = console()
    if "time" in facts:
        out.print(f"No worker made progress for {facts['seconds']:g} s. The hang was at {format_time(facts['time'])}.")
    for line in _lines(facts, all_threads=all_threads):
        out.print(line, soft_wrap=True)


def _now(run: str) -> Mapping[str, Any]:
    try:
        handle = get_run(run)
    except ConfigError as error:  # not live, or this machine is not a node of its cluster
        try:
            facts = stacks_of_last_hang(RunLedger(run).read())
        except ConfigError:  # nor is it a folder, or the name of one
            raise error from None
        if facts is None:
            raise ConfigError(f"{error} Its ledger has no hang.") from error
        return facts
    return handle.stacks()


def _of_last_hang(run: str) -> Mapping[str, Any]:
    facts = stacks_of_last_hang(RunLedger(run).read())
    if facts is None:
        raise ConfigError(
            f"{run}: its ledger has no hang. Without --last-hang, a live run's current stacks are printed."
        )
    return facts


def _lines(facts: Mapping[str, Any], *, all_threads: bool) -> Iterator[Text]:
    """The workers by equal stacks of their training threads, and on request the other threads of each group."""
    culprits = facts.get("culprits", ())
    for group in _grouped(facts["workers"], lambda worker: (worker["place"], _stack(worker))):
        first = group[0]
        nodes = ", ".join(dict.fromkeys(str(worker["node"]) for worker in group))
        blamed = ", others waited for it" if any(worker["id"] in culprits for worker in group) else ""
        yield Text()
        yield Text(f"{_name(group)} ({nodes}), in '{first['place']}'{blamed}", style="bold")
        yield Text(_stack(first))
        threads = [(worker, thread) for worker in group for thread in worker["threads"][1:] if all_threads]
        for same in _grouped(threads, lambda pair: pair[1]["stack"]):
            names = ", ".join(dict.fromkeys(thread["name"] for _, thread in same))
            owners = list({worker["id"]: worker for worker, _ in same}.values())
            of = f" of {_name(owners)}" if len(owners) < len(group) else ""
            yield Text(f"Thread {names}{of}", style="dim")
            yield Text(same[0][1]["stack"], style="dim")
    for group in _grouped(facts["missing"], lambda worker: worker["reason"]):
        nodes = ", ".join(dict.fromkeys(str(worker["node"]) for worker in group))
        yield Text()
        yield Text(f"{_name(group)} ({nodes}): {group[0]['reason']}", style="bold red")


def _stack(worker: Mapping[str, Any]) -> str:
    """The stack of the training thread."""
    return str(worker["threads"][0]["stack"]) if worker["threads"] else "(no thread runs Python code)"


def _grouped(items: Iterable[Any], key: Any) -> list[Sequence[Any]]:
    groups: dict[Hashable, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [*groups.values()]


def _name(workers: Sequence[Mapping[str, Any]]) -> str:
    """Returns "rank 3" or "ranks 0-6, 9"; a worker that is not in a generation has its process id."""
    ranks = sorted(worker["rank"] for worker in workers if worker["rank"] is not None)
    others = [f"worker {worker['pid'] or worker['id']}" for worker in workers if worker["rank"] is None]
    ranked = [f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"] if ranks else []
    return ", ".join([*ranked, *others])
