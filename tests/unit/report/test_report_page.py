"""The page of a report in a real browser: a headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.report.history import read_history
from elastic_ddp.report.page import render_page
from tests.unit.report.test_report import evil_run
from tests.unit.report_runs import calm, eventful

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe about:blank"
DRAWN = "[...document.querySelectorAll('.chart')].map(chart => chart.querySelector('.main-svg') !== null)"
pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium on this machine")


class Page:
    """One page of a browser, with what happened in it."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._number = 0
        self._rest = b""
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, file: Path, *, width: int, dark: bool) -> None:
        """Opens a file in a window of this width, and waits until it has loaded."""
        self.events.clear()
        size: dict[str, Any] = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=file.as_uri())
        while not self.of("Page.loadEventFired"):
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"]["value"]

    def of(self, method: str) -> list[dict[str, Any]]:
        """Returns the parameters of the events of one kind."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._answers, 1 << 20)
            assert data, "Chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    commands, to_commands = os.pipe()
    from_answers, answers = os.pipe()
    # The protocol uses the descriptors 3 and 4.
    script = f'exec "$@" 3<&{commands} 4>&{answers}'
    command = ["bash", "-c", script, "bash", str(EXECUTABLE), f"--user-data-dir={tmp_path / 'chromium'}"]
    browser = subprocess.Popen(
        [*command, *OPTIONS.split()],
        pass_fds=(commands, answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(commands)
    os.close(answers)
    try:
        yield Page(to_commands, from_answers)
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
        os.close(to_commands)
        os.close(from_answers)


RUNS = {"one": (evil_run,), "several": (eventful, calm), "begun": (lambda: calm()[:5],)}


@pytest.mark.parametrize(
    "runs", ["one", *(pytest.param(name, marks=pytest.mark.chaos) for name in ("several", "begun"))]
)
def test_the_page_draws_all_charts_without_errors_requests_or_overflow(page: Page, tmp_path: Path, runs: str) -> None:
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
