"""The event files of TensorBoard: what a reader finds in them after kills, on a local disk and on S3."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

import elastic_ddp as ed
from elastic_ddp.loggers import tensorboard
from elastic_ddp.loggers.tensorboard import FOLDER, TensorBoardLogger
from elastic_ddp.storage.storage import Storage
from tests.unit.logged_runs import LAST, driver, newest_commit, session_events

ALL = list(range(1, LAST + 1))


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns steps and values by tag, as TensorBoard reads them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")
    events = accumulator.EventAccumulator(str(folder / FOLDER), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def logged_run(uri: str, number: int = 1) -> ed.LoggedRun:
    return ed.LoggedRun(name="a", uri=uri, id="1", config={}, session=f"session-{number}", session_number=number)


def write(uri: str, number: int, steps: list[int]) -> int | None:
    """Logs steps in a session that is then killed. Returns the newest step at its start."""
    logger = TensorBoardLogger()
    newest = logger.start(logged_run(uri, number))
    for step in steps:
        logger.log(step, {"loss": 1 / step, "bad": math.nan}, 1e9 + step)
    return newest


def test_tensorboard_has_each_step_once_if_the_driver_dies_at_any_event(tmp_path: Path) -> None:
    events = session_events()
    for number in range(1, len(events), 4):
        folder = tmp_path / f"run{number}"
        before = events[:number]
        with driver(folder, "s000001-ffffff", TensorBoardLogger()) as first:
            first.record(*before)
        with driver(folder, "s000002-000000", TensorBoardLogger()) as second:
            second.record(*session_events(newest_commit(before)))
            second.loggers.finish("finished")
        found = read(folder)
        assert found["loss"] == [(step, pytest.approx(1 / step)) for step in ALL], number
        assert [step for step, _ in found["accuracy"]] == [2, 4, 6]


def test_a_session_that_begins_anew_replaces_all_values_of_earlier_ones(tmp_path: Path) -> None:
    assert write(str(tmp_path), 1, [1, 2, 3]) is None
    logger = TensorBoardLogger()
    assert logger.start(replace(logged_run(str(tmp_path), 2), id="2")) is None
    for step in (3, 4):
        logger.log(step, {"loss": 9.0}, 2e9)
    assert read(tmp_path)["loss"] == [(3, 9.0), (4, 9.0)]


def test_a_record_that_a_kill_cut_off_is_written_again(tmp_path: Path) -> None:
    assert write(str(tmp_path), 1, [1, 2, 3]) is None
    (file,) = (tmp_path / FOLDER).iterdir()
    whole = file.read_bytes()
    for length in range(len(whole) - 40, len(whole), 3):
        file.write_bytes(whole[:length])
        assert TensorBoardLogger().start(logged_run(str(tmp_path), 2)) == 2, length
    assert write(str(tmp_path), 2, [3, 4]) == 2
    assert write(str(tmp_path), 3, []) == 4
    assert [step for step, _ in read(tmp_path)["loss"]] == [1, 2, 3, 4]
    assert len(read(tmp_path)["bad"]) == 4


def test_a_full_disk_fails_and_a_later_start_writes_to_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = TensorBoardLogger()
    logger.start(logged_run(str(tmp_path)))
    logger.log(1, {"loss": 1.0}, 1.0)
    (file,) = (tmp_path / FOLDER).iterdir()
    file.write_bytes(file.read_bytes()[:-3])  # what a short write leaves
    assert logger.start(logged_run(str(tmp_path))) is None
    logger.log(1, {"loss": 1.0}, 1.0)
    assert read(tmp_path)["loss"] == [(1, 1.0)]


def test_on_s3_the_files_are_written_through_the_storage(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "OBJECT_BYTES", 4096)
    seconds = [0.0]
    logger = TensorBoardLogger(clock=lambda: seconds[0])
    assert logger.start(logged_run(s3)) is None
    storage = Storage(s3)
    for step in range(1, 4):
        logger.log(step, {"loss": 1.0}, 1.0)
        assert storage.list(FOLDER) == []
    seconds[0] = 20.0
    logger.log(4, {"loss": 1.0}, 1.0)
    assert len(storage.list(FOLDER)) == 1
    logger.log(5, {"loss": 1.0}, 1.0)  # lost with the process
    resumed = TensorBoardLogger(clock=lambda: seconds[0])
    assert resumed.start(logged_run(s3, 2)) == 4
    for step in range(5, 300):
        resumed.log(step, {"loss0": 1.0}, 1.0)
    resumed.finish("finished")
    assert len(storage.list(FOLDER)) > 2
    (tmp_path / FOLDER).mkdir()
    for key in storage.list(FOLDER):
        (tmp_path / key).write_bytes(storage.read(key))
    assert TensorBoardLogger().start(logged_run(s3, 3)) == 299
    assert [step for step, _ in read(tmp_path)["loss0"]] == list(range(5, 300))
