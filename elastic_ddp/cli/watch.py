"""`elastic-ddp watch`: a live view of a run on the terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from textwrap import shorten
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_ddp.cli.output import LABEL_WIDTH, console, facts_table, print_plain, ranges
from elastic_ddp.cli.run_summary import STYLES, describe_bottleneck, format_gib, training_rate
from elastic_ddp.cli.runs import RecordedRun, RunLedger
from elastic_ddp.cli.terminal_curves import Timeline, sparkline
from elastic_ddp.formatting import clock_face, first_line, format_rate, format_time, plural
from elastic_ddp.report.history import read_history
from elastic_ddp.report.marks import LOOKS
from elastic_ddp.telemetry import events, phases
from elastic_ddp.telemetry.description import describe_event, describe_outcome, describe_steps, state_of, workers_gone
from elastic_ddp.telemetry.event import Event, last_of
from elastic_ddp.telemetry.progress import MovingRate

MAX_WIDTH = 120
"""Columns that the view uses at most."""
_POLL_S = 1.0
_NUM_RECENT, _MAX_CHARACTERS = 8, 100
"""Number of recent events, and characters of each."""
_DAY_S = 86_400


def watch(
    run: RecordedRun,
    once: Annotated[bool, typer.Option("--once", help="Print the view once.")] = False,
) -> None:
    """Watch a run on the terminal.

    The view has the workers, the throughput and the loss over the same time, the phases of a step, the goodput, the
    commits, the workers of each node, and the newest events. It is read from the run's ledger, so the command needs no
    cluster. It ends with the run, or on Ctrl-C, which does not disturb the run.
    """
    ledger = RunLedger(run)
    out = console()
    events = ledger.read()
    if once or not out.is_terminal:
        out.width = min(out.width, MAX_WIDTH)
        print_plain(out, frame(events, time.time(), width=out.width, driver_is_dead=ledger.is_driver_alive() is False))
        return
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            begun = time.monotonic()
            added, is_over = ledger.poll()
            events += added
            live.update(frame(events, time.time(), width=out.width, driver_is_dead=is_over), refresh=True)
            if is_over:
                return
            time.sleep(max(_POLL_S, 4 * (time.monotonic() - begun)))  # a long ledger takes seconds


def frame(ledger: Sequence[Event], now: float, *, width: int = 80, driver_is_dead: bool = False) -> RenderableType:
    """Returns what to show of a run at a time.

    Args:
        ledger: events in the order of `read_ledger`, at least one.
        now: Unix time in seconds.
        width: columns of the terminal.
        driver_is_dead: whether the driver is known to be dead.
    """
    history = read_history(ledger)
    summary = history.summary
    state = state_of(ledger, driver_is_dead=driver_is_dead)
    width = min(width, MAX_WIDTH)
    columns = max(8, width - LABEL_WIDTH - 15)
    timeline = Timeline(history, max(0.0, now - ledger[-1].time) if state.is_live else None)
    rate = _recent_rate(ledger) if state.is_live else None
    parts: list[RenderableType] = [_heading(summary, state.text, timeline.length_s)]
    parts += [_progress(summary, rate, width), Text(), _curves(summary, rate, timeline, columns)]
    parts += [Text(), _phases(summary, ledger, columns), _facts(summary, ledger, now)]
    parts += [Text(), _members(ledger)] if state.is_live else []
    parts += [Text(), _recent(ledger, now)]
    return Group(*parts)


def _heading(summary: Mapping[str, Any], state: str, seconds: float) -> Text:
    sessions = f"  session {summary['sessions']}" if summary["sessions"] > 1 else ""
    style = STYLES.get(state, "bold yellow")
    return Text.assemble(
        (str(summary["name"] or "run"), "bold"), "  ", (state, style), f"  {clock_face(seconds)}", sessions
    )


def _progress(summary: Mapping[str, Any], rate: MovingRate | None, width: int) -> Table:
    done = summary["steps"] or 0
    total = summary["total_steps"]
    text = f"step {describe_steps(summary)}"
    if total and rate is not None and (steps_per_s := rate.steps_per_s):
        text += f"  {clock_face(max(0, total - done) / steps_per_s)} left"
    line = Table.grid(padding=(0, 1))
    columns = min(36, width - len(text) - 2)
    bar = [ProgressBar(total=total, completed=min(done, total), width=columns)] if total and columns >= 8 else []
    line.add_row(*bar, text)
    return line


def _curves(summary: Mapping[str, Any], rate: MovingRate | None, timeline: Timeline, columns: int) -> Table:
    """Workers, throughput and loss, over the same time: a dip in one stands below its cause in another."""
    sizes = timeline.world_sizes(columns)
    samples_per_s, mean = (rate.samples_per_s, "") if rate is not None else (training_rate(summary), "mean ")
    figure = "-" if samples_per_s is None else f"{mean}{format_rate(samples_per_s)}"
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim", min_width=LABEL_WIDTH)
    rows.add_column(justify="right", min_width=10)
    rows.add_column(width=columns)
    rows.add_row("workers", f"{sizes[-1]:.0f}", Text(sparkline(sizes, floor=0.0), style="cyan"))
    rows.add_row("samples/s", figure, Text(sparkline(timeline.samples_per_s(columns), floor=0.0), style="green"))
    loss = summary["loss"]["last"]
    losses = Text(sparkline(timeline.losses(columns)), style="magenta")
    rows.add_row("loss", "-" if loss is None else f"{float(loss):.4g}", losses)
    marks = timeline.marks(columns)
    if marks.plain.strip():
        rows.add_row("", "", marks)
    end = clock_face(timeline.length_s)
    rows.add_row("", "", Text("0:00" + end.rjust(columns - 4), style="dim"))
    seen = [
        Text.assemble((look.glyph, f"bold {look.color}"), (f" {kind}", "dim"), no_wrap=True)
        for kind, look in LOOKS.items()
        if look.glyph in marks.plain
    ]
    if seen:
        rows.add_row("", "", Columns(seen, padding=(0, 2)))
    return rows


def _phases(summary: Mapping[str, Any], ledger: Sequence[Event], columns: int) -> RenderableType:
    """The phases of the newest steps, if the current generation has measured some, and what bounds the run."""
    since = max((n for n, event in enumerate(ledger) if isinstance(event, events.GenerationStarted)), default=0)
    measured = [event for event in ledger[since:] if isinstance(event, events.PhasesMeasured)]
    newest = phases.newest(measured)
    if newest is None:
        return Text()
    step_s = math.fsum(newest.phases.values()) or 1.0
    bar = Text()
    legend = list[Text]()
    done_s = 0.0
    for name, seconds in newest.phases.items():
        color = phases.PHASE_COLORS[name]
        done_s += seconds
        bar.append("█" * (round((columns + 12) * done_s / step_s) - len(bar)), style=color)
        legend.append(Text.assemble(("█", color), f" {name} {100 * seconds / step_s:.0f} %"))
    rows = facts_table()
    rows.add_row("step", f"{1000 * step_s:,.1f} ms")
    rows.add_row("", bar)
    rows.add_row("", Columns(legend, padding=(0, 2)))
    if summary["bottleneck"] is not None:
        rows.add_row("bound by", describe_bottleneck(summary["bottleneck"]))
    return rows


def _facts(summary: Mapping[str, Any], ledger: Sequence[Event], now: float) -> Table:
    rows = facts_table()
    newest = last_of(ledger, events.CommitSucceeded)
    if newest is not None:
        age = clock_face(max(0.0, now - newest.time))
        facts = f"newest at step {newest.step:,}, {age} ago ({newest.seconds:.2f} s, {decimal(newest.num_bytes)})"
        rows.add_row("commits", f"{summary['commits']:,}, {facts}")
    share = summary["goodput"]["goodput"]
    if share is not None:
        rows.add_row("goodput", f"{100 * share:.1f} %")
    gone = workers_gone(summary)
    if gone:
        rows.add_row("workers", gone)
    return rows


def _members(ledger: Sequence[Event]) -> Table:
    """The ranks on each node, and their GPU memory."""
    formed = last_of(ledger, events.GenerationFormed)
    measured = last_of(ledger, events.PhasesMeasured)
    rows = facts_table()
    nodes = dict[str, list[int]]()
    if formed is None:
        return rows
    memory: Sequence[int] = []
    busy: Sequence[float | None] = []
    if measured is not None and (measured.generation, measured.session) == (formed.generation, formed.session):
        memory = measured.memory_bytes or []
        busy = measured.utilization or []
    for member in formed.members:
        nodes.setdefault(str(member.get("node")), []).append(int(member.get("rank", 0)))
    for node, ranks in nodes.items():
        facts = [f"{plural(len(ranks), 'worker')}, rank {ranges(sorted(ranks))}"]
        used = [memory[rank] for rank in ranks if rank < len(memory)]
        if used:
            facts.append(f"GPU memory {format_gib(max(used))}")
        shares = [share for rank in ranks if rank < len(busy) and (share := busy[rank]) is not None]
        if shares:
            facts.append(f"GPU busy {100 * sum(shares) / len(shares):.0f} %")
        rows.add_row(node, "  ".join(facts))
    return rows


def _recent(ledger: Sequence[Event], now: float) -> Table:
    """The newest events except commits. Those older than a day have the date."""
    sessions = list(dict.fromkeys(event.session for event in ledger))
    others = (event for event in reversed(ledger) if not isinstance(event, events.CommitSucceeded))
    described = ((event, line) for event in others if (line := _describe(event, sessions)) is not None)
    rows = facts_table()
    for event, line in reversed([*islice(described, _NUM_RECENT)]):
        when = format_time(event.moment, "%H:%M:%S" if now - event.moment < _DAY_S else "%Y-%m-%d %H:%M:%S")
        rows.add_row(when, Text(shorten(first_line(line), _MAX_CHARACTERS, placeholder=" …")))
    return rows


def _describe(event: Event, sessions: Sequence[str]) -> str | None:
    """The line about an event, also about the start and the end of a session."""
    number = sessions.index(event.session) + 1
    match event:
        case events.SessionStarted(resumed_from_step=None):
            return f"session {number} starts"
        case events.SessionStarted(resumed_from_step=step):
            return f"session {number} resumes from step {step}"
        case events.RunFinished():
            error = first_line(event.error or "")
            return describe_outcome(vars(event)) + (f": {error}" if error else "")
    return describe_event(event, number if len(sessions) > 1 else None)


def _recent_rate(ledger: Sequence[Event]) -> MovingRate:
    """The rate over the last 30 s of steps in the newest session; stalls between two generations lower it."""
    rate = MovingRate()
    for event in ledger:
        match event:
            case events.SessionStarted():
                rate.clear()
            case events.StepsCompleted():
                rate.add(event.moment, event.step, event.samples)
    return rate
