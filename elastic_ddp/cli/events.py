"""`elastic-ddp events`: the ledger of a run, for people and as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any

import typer

from elastic_ddp.cli.output import console, json_option, print_json
from elastic_ddp.cli.runs import RecordedRun, RunLedger
from elastic_ddp.errors import ConfigError
from elastic_ddp.telemetry.event import EVENTS, Event

_POLL_S = 1.0
_MAX_TEXT = 120


def events(
    run: RecordedRun,
    kind: Annotated[
        list[str] | None, typer.Option(help="Print events of this kind only, such as worker_failed. May be repeated.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Print new events as well, until the driver ends.")] = False,
    last: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Print the last N events only. --follow also prints new events."),
    ] = None,
    as_json: Annotated[bool, json_option("Print one JSON object in each line.")] = False,
) -> None:
    """Print the events of a run's ledger.

    Each line has the time, the number of the session, the kind and the fields of an event. Long texts are cut; --json
    prints them whole. The command needs no cluster.
    """
    unknown = [name for name in kind or () if name not in EVENTS]
    if unknown:
        raise ConfigError(f"--kind {unknown[0]}: there is no event of this kind. Use one of {', '.join(EVENTS)}.")
    ledger = RunLedger(run)
    out = console()
    sessions = dict[str, int]()
    for batch in _follow(ledger) if follow else [ledger.read()]:
        for event in batch:
            sessions.setdefault(event.session, len(sessions) + 1)
        chosen = [event for event in batch if not kind or event.event in kind]
        for event in chosen if last is None else chosen[-last:]:
            if as_json:
                entry = {"time": event.time, "seq": event.seq, **event.to_json(), "session": event.session}
                print_json(entry, indent=None)
            else:
                out.print(_line(event, sessions[event.session]), soft_wrap=True)
        last = None


def _follow(ledger: RunLedger) -> Iterator[list[Event]]:
    """Yields the recorded events, then new ones, until the run has no driver any more."""
    while True:
        events, is_over = ledger.poll()
        yield events
        if is_over:
            return
        time.sleep(_POLL_S)


def _line(event: Event, session: int) -> str:
    when = datetime.fromtimestamp(event.moment).astimezone().isoformat(timespec="seconds")
    fields = {name: value for name, value in event.to_json().items() if name not in ("event", "at")}
    return f"{when}  {session}  {event.event:<20}  {' '.join(_texts(fields))}".rstrip()


def _texts(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields fields as `name=value`; those that are null or empty are left out."""
    yield from (f"{name}={_value(value)}" for name, value in fields.items() if value not in (None, "", [], {}))


def _value(value: Any) -> str:
    """Returns a value in one line of at most 120 characters."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        text = "{" + ", ".join(_texts(value)) + "}"
    elif isinstance(value, list):
        text = "[" + ", ".join(map(_value, value)) + "]"
    else:
        text = str(value)
    lines = text.strip().splitlines() or [""]
    return lines[0] if len(lines) == 1 and len(text) <= _MAX_TEXT else f"{lines[0][: _MAX_TEXT - 2]} …"
