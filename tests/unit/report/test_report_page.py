"""The page of a report in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ddp.report.history import read_history
from elastic_ddp.report.page import render_page
from tests.unit import chromium
from tests.unit.report.test_report import evil_run
from tests.unit.report_runs import calm, eventful

DRAWN = "[...document.querySelectorAll('.chart')].map(chart => chart.querySelector('.main-svg') !== null)"
pytestmark = pytest.mark.skipif(chromium.EXECUTABLE is None, reason="there is no Chromium on this machine")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[chromium.Page]:
    pytest.importorskip("plotly", reason="Plotly is not installed; the extra `report` has it")
    with chromium.page(tmp_path / "chromium") as page:
        yield page


RUNS = {"several": (eventful, calm), "one": (evil_run,), "begun": (lambda: calm()[:5],)}


@pytest.mark.parametrize(
    "runs", ["several", *(pytest.param(name, marks=pytest.mark.chaos) for name in ("one", "begun"))]
)
def test_the_page_draws_all_charts_without_errors_requests_or_overflow(
    page: chromium.Page, tmp_path: Path, runs: str
) -> None:
    file = tmp_path / "report.html"
    file.write_text(render_page([read_history(events()) for events in RUNS[runs]]), encoding="utf-8")
    for width in (360, 1100):
        page.open(file, width=width, dark=width == 1100)
        drawn = page.evaluate(DRAWN)
        assert drawn and all(drawn)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelectorAll('main :is(a, img, script)').length") == 0
        assert page.of("Page.javascriptDialogOpening") == []
        assert page.of("Runtime.exceptionThrown") == page.of("Runtime.consoleAPICalled") == []
        assert page.of("Log.entryAdded") == [], "no console error, and nothing that the policy of the page blocks"
        urls = {sent["request"]["url"] for sent in page.of("Network.requestWillBeSent")}
        assert {url for url in urls if not url.startswith("data:")} == {file.as_uri()}
