"""A run whose data, commits and ledger are on S3."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import s3fs
from tensorboardX.proto.event_pb2 import Event

from elastic_ddp.loggers.tensorboard import FOLDER, read_records
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger
from tests.integration import jobs
from tests.unit.cli.test_cli import invoke

pytestmark = pytest.mark.slow


def test_a_run_on_s3_has_the_same_bits_as_a_local_run(undisturbed: Mapping[str, Any], s3: str, tmp_path: Path) -> None:
    bucket = s3.removeprefix("s3://")
    filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(s3fs.S3FileSystem()))
    jobs.write_rows(f"{bucket}/data", filesystem=filesystem)

    killed = ("kill-driver", str(tmp_path / "killed"), "25")
    first = jobs.drive(f"{s3}/data", f"{s3}/runs", "run", "1", *killed, LOGGERS="tensorboard")
    assert first.returncode == -9, first.stderr
    second = jobs.drive(f"{s3}/data", f"{s3}/runs", "run", "2", *killed, LOGGERS="tensorboard")
    assert second.returncode == 0, second.stderr
    assert "status='finished'" in second.stdout

    summary = json.loads(Storage(f"{s3}/runs/run").read("summary.json"))
    assert jobs.same_bits(summary, undisturbed)
    events = read_ledger(Storage(f"{s3}/runs/run"))
    resumed = [event.resumed_from_step for event in events if event.event == "session_started"]
    assert resumed[0] is None and resumed[1] >= 20
    files = [Storage(f"{s3}/runs/run").read(key) for key in Storage(f"{s3}/runs/run").list(FOLDER)]
    logged = [Event.FromString(record) for data in files for record in read_records(data)]
    steps = [event.step for event in logged if event.HasField("summary")]
    told = [(event.session, event.step) for event in events if event.event == "steps_completed"]
    assert steps == list(range(1, jobs.STEPS + 1)), f"each step once, in order: {told}\n{first.stderr}\n{second.stderr}"

    page = tmp_path / "report.html"
    invoke("report", f"{s3}/runs/run", "-o", str(page))
    assert "resumed once" in page.read_text(), "a report needs the storage only"

    secret = os.environ["AWS_SECRET_ACCESS_KEY"].encode()
    runs = Storage(f"{s3}/runs")
    stored = {key: runs.read(key) for key in runs.list()}
    logs = [path.read_bytes() for path in Path("/tmp/ray/session_latest/logs").glob("*.*")]
    assert {"ledger", "checkpoints"} <= {key.split("/")[1] for key in stored} and logs
    output = "".join((first.stdout, first.stderr, second.stdout, second.stderr)).encode()
    assert not any(secret in content for content in [*stored.values(), *logs, output])
