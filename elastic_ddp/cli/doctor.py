"""`elastic-ddp doctor`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from elastic_ddp.cli.output import AsJson, console, print_json, table
from elastic_ddp.config.environment import check_uri_is_public
from elastic_ddp.config.storage_uri import STORAGE
from elastic_ddp.formatting import plural
from elastic_ddp.storage.storage import Storage

if TYPE_CHECKING:
    from elastic_ddp.doctor.facts import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    data: Annotated[str | None, typer.Option(metavar="PATH", help="The training data, which all nodes read.")] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URI", envvar=STORAGE, help="The runs' storage, which all nodes write and read."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a cluster before a run: versions, clocks, GPUs, storage, and whether its nodes reach each other.

    Call it on any node. It reserves no resources in Ray, and does not touch GPUs that are in use. The exit status is 1
    if a check fails; warnings do not change it.
    """
    from elastic_ddp.doctor.checks import judge  # imports torch
    from elastic_ddp.doctor.examination import examine
    from elastic_ddp.driver.cluster import connect

    if data is not None:
        check_uri_is_public(data, "--data")
    folder = None if storage is None else Storage(storage)
    connect()
    err = console(stderr=True)
    with err.status("") as status:
        facts = examine(data=data, storage=folder, note=status.update)
    findings = judge(facts)
    if as_json:
        print_json({"findings": [asdict(each) for each in findings], "facts": asdict(facts)})
    else:
        _print(findings)
    if any(finding.verdict == "fail" for finding in findings):
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    out = console()
    rows = table("check", "node", "", "finding", text=("check", "node", "finding"))
    for each in findings:
        rows.add_row(each.check, each.node, Text(each.verdict, style=_STYLES[each.verdict]), each.text)
    out.print(rows)
    counts = Counter(each.verdict for each in findings)
    out.print(f"\n{counts['ok']} ok, {plural(counts['warn'], 'warning')}, {plural(counts['fail'], 'failure')}")
