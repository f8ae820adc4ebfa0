"""Commits with valid checksums and malformed records."""

from __future__ import annotations

import json
import math
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from elastic_ddp.checkpoint.interval import MeasuredInterval
from elastic_ddp.checkpoint.record import Facts, Metrics, check_facts, measurements
from elastic_ddp.checkpoint.retention import Retention
from elastic_ddp.cli import checkpoints, main
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import COMMITS
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import make_state, restored_step, save
from tests.unit.crafted_commits import signed

WRONG: list[dict[str, Any]] = [
    {"metrics": {"loss": {"value": 10**400, "step": 1}}},
    {"metrics": {"loss": {"value": "0.1", "step": 1}}},
    {"metrics": {"loss": {"value": 0.1}}},
    {"metrics": {"loss": {"value": 0.1, "step": 1.5}}},
    {"metrics": {"loss": {"value": 0.1, "step": 10**400}}},
    {"metrics": {"loss": 0.1}},
    {"metrics": []},
    {"metrics": None},
    {"watched_s": 10**400, "losses": 0},
    {"watched_s": -1.0, "losses": 0},
    {"watched_s": 3.0, "losses": -1},
    {"watched_s": 3.0, "losses": True},
    {"time": "yesterday"},
    {"time": 1e300},
    {"epoch": {"a": 1}},
    {"samples": "many"},
    {"samples_sha256": 7},
]


def plant(storage: Storage, record: Any) -> None:
    """Writes two commits, the newer one with this record."""
    [_, newest] = save(storage, 1, 2)
    body = json.loads(storage.read(newest.key))
    storage.write(newest.key, signed({**body, "record": record}))


def names(record: Any) -> str:
    return json.dumps(record)[:40]


@pytest.mark.parametrize("record", WRONG, ids=names)
def test_a_commit_with_a_malformed_record_is_bad(tmp_path: Path, record: dict[str, Any]) -> None:
    storage = Storage(tmp_path / "lm").at(COMMITS)
    plant(storage, record)
    assert restored_step(storage) == 1
    result = CliRunner().invoke(main.app, ["checkpoints", "ls", str(tmp_path / "lm")])
    assert result.exit_code == 0 and "its record is malformed" in " ".join(result.stdout.split())
    result = CliRunner().invoke(main.app, ["checkpoints", "verify", str(tmp_path / "lm")])
    assert result.exit_code == 1 and "step 1: all bytes are intact" in result.stdout


@pytest.mark.parametrize("record", WRONG, ids=names)
def test_a_malformed_record_is_refused_before_a_write(record: dict[str, Any]) -> None:
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    with pytest.raises(CheckpointError, match=r"commits/1\.json .*its record is malformed: '"):
        SingleRankStore(storage, keep=1).save(make_state(1), step=1, record=record)
    assert storage.list() == []


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.sampled_from([10**400, -(10**400), 1e300, -0.0, 5e-324]),
    st.floats(allow_nan=False, allow_infinity=False), st.text("ab[]0\n\x00\ud800", max_size=4),
)  # fmt: skip
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.text("ab[]0\n", max_size=4), inner, max_size=2),
        st.fixed_dictionaries({"value": inner, "step": inner}),
    ),
    max_leaves=6,
)
METRICS = st.dictionaries(st.sampled_from(["loss", "[/red]", ""]), ANYTHING)
RECORDS = st.fixed_dictionaries({}, optional=dict.fromkeys(Facts.model_fields, ANYTHING) | {"metrics": METRICS})


@pytest.fixture(scope="module")
def run() -> str:
    uri = f"memory://{uuid.uuid4().hex}"
    save(Storage(uri).at(COMMITS), 1, 2)
    return uri


@settings(max_examples=120, deadline=None)
@given(st.one_of(RECORDS, ANYTHING))
def test_with_any_record_its_commit_or_the_one_before_is_used(run: str, record: Any) -> None:
    storage = Storage(run).at(COMMITS)
    body = json.loads(storage.read("commits/2.json"))
    storage.write("commits/2.json", signed({**body, "record": record}))
    commit = SingleRankStore(storage, keep=2).latest()
    assert commit is not None
    assert all(math.isfinite(entry.value) for entry in measurements(commit.record).values())
    measured = MeasuredInterval("auto", None)
    measured.merge(commit.record)
    measured.stalled(1.0)
    assert 0 < measured.seconds < math.inf
    for as_json in (False, True):
        checkpoints.ls(run, as_json)
    metrics = Metrics()
    metrics.merge(commit.record)
    check_facts(json.dumps(metrics.to_record()))
    with suppress(ConfigError):  # no commit has a value of the metric
        checkpoints.prune(run, keep=1, keep_best=1, best_metric="loss", dry_run=True)


def test_keeping_the_best_commits_works_beside_a_malformed_record() -> None:
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    plant(storage, WRONG[0])
    store = SingleRankStore(storage, keep=Retention(last=1, best=1, metric="loss"))
    store.save(make_state(3), step=3, record={"metrics": {"loss": {"value": 1.0, "step": 3}}})
    assert [commit.step for commit in store.candidates()] == [3]
