"""Fakes of the metadata services of AWS and GCP, on the loopback interface.

`python -m tests.metadata_server SECONDS` runs `elastic-ddp watch-notices` with a spot interruption notice from AWS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

INTERRUPTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"


class MetadataServer(ThreadingHTTPServer):
    """Serves `values` by their path; others are missing. AWS's need a token, and GCP's a header."""

    daemon_threads = True

    def __init__(self, values: dict[str, str], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.values = values
        self.tokens: list[str] = []
        """Those that are valid now."""
        self.num_tokens = 0
        self.is_failing = False

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """By which a process finds this server, whichever cloud it is of."""
        return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{self.host}", "GCE_METADATA_HOST": self.host}

    def put(self, path: str, value: str | None) -> None:
        """Sets a value, or removes it."""
        if value is None:
            self.values.pop(path, None)
        else:
            self.values[path] = value


class _Handler(BaseHTTPRequestHandler):
    server: MetadataServer

    def do_PUT(self) -> None:
        is_aws = PREEMPTED not in self.server.values
        if self.path != "/latest/api/token" or not is_aws or "X-aws-ec2-metadata-token-ttl-seconds" not in self.headers:
            self._answer(404)
            return
        self.server.num_tokens += 1
        self.server.tokens.append(f"token {self.server.num_tokens}")
        self._answer(200, self.server.tokens[-1])

    def do_GET(self) -> None:
        is_google = self.path.startswith("/computeMetadata")
        if self.server.is_failing:
            self._answer(503)
        elif is_google and self.headers["Metadata-Flavor"] != "Google":
            self._answer(403)
        elif not is_google and self.headers["X-aws-ec2-metadata-token"] not in self.server.tokens:
            self._answer(401)
        else:
            value = self.server.values.get(self.path)
            self._answer(200 if value is not None else 404, value or "")

    def _answer(self, status: int, body: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@contextmanager
def serving(values: dict[str, str] | None = None, port: int = 0) -> Iterator[MetadataServer]:
    """Runs a server for a block: of GCP if it has GCP's values, of AWS otherwise."""
    server = MetadataServer(dict(values or {}), port)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def interruption(at: str, action: str = "terminate") -> str:
    """Returns AWS's spot interruption notice."""
    return json.dumps({"action": action, "time": at})


def rebalance(at: str) -> str:
    """Returns AWS's rebalance recommendation."""
    return json.dumps({"noticeTime": at})


def main(within_s: float) -> None:
    at = datetime.fromtimestamp(time.time() + within_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    with serving({INTERRUPTION: interruption(at)}) as server:
        command = [sys.executable, "-m", "elastic_ddp.cli.main", "watch-notices"]
        subprocess.run(command, env={**os.environ, **server.environment})


if __name__ == "__main__":
    main(float(sys.argv[1]))
