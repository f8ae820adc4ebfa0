"""What the API of Ray's dashboard is told about a run, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig
from ray.train.v2._internal.execution.context import DistributedContext, TrainRunContext
from ray.train.v2._internal.execution.controller.state import InitializingState, RunningState
from ray.train.v2._internal.state import state_manager

from elastic_ddp.ray_internals import state_api
from elastic_ddp.ray_internals.state_api import RunInStateApi, is_tracked


class Recorder:
    """Takes the place of Ray's actor; keeps the newest run and attempt."""

    run: Any = None
    attempt: Any = None

    def __getattr__(self, method: str) -> Any:
        name = method.removeprefix("create_or_update_train_run_").replace("create_or_update_train_run", "run")
        return SimpleNamespace(remote=lambda value: setattr(self, name, value))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(state_manager, "get_or_create_state_actor", lambda: recorder)
    runtime = SimpleNamespace(get_job_id=lambda: "01", get_actor_id=lambda: "ab")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: runtime)
    return recorder


def context() -> TrainRunContext:
    from ray.train import DataConfig

    return TrainRunContext(
        run_config=RunConfig(name="session-1", worker_runtime_env={"env_vars": {"TOKEN": "secret"}}),
        train_loop_config={"job": "with the secret"},
        scaling_config=ScalingConfig(num_workers=2),
        backend_config=TorchConfig(),
        dataset_config=DataConfig(),
    )


def reported() -> RunInStateApi:
    return RunInStateApi(session="s1", name="gpt", uri="s3://b/gpt", settings={"steps": 9}, versions={"ray": "2.60"})


def worker(pid: int) -> Any:
    return SimpleNamespace(
        actor=SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: f"{pid:x}")),
        distributed_context=DistributedContext(0, 1, 0, 1, 0),
        metadata=SimpleNamespace(node_id="n", node_ip="10.0.0.1", pid=pid, gpu_ids=[]),
        resources={"CPU": 1},
        log_file_path=None,
    )


def test_a_run_is_shown_by_its_name_and_settings_without_values_of_env(recorder: Recorder) -> None:
    reported().after_controller_start(context())
    shown = recorder.run
    assert (shown.id, shown.name, shown.run_settings.run_config.storage_path) == ("s1", "gpt", "s3://b/gpt")
    assert shown.run_settings.train_loop_config == {"steps": 9} and "secret" not in shown.model_dump_json()


def test_the_api_follows_workers_that_come_and_go(recorder: Recorder) -> None:
    shown, workers = reported(), [worker(1), worker(2)]
    run = SimpleNamespace(run_attempt_id="a1", num_workers=2, resources_per_worker={"CPU": 1})
    group = SimpleNamespace(get_workers=lambda: workers, get_worker_group_context=lambda: run)
    shown.after_controller_start(context())
    shown.before_worker_group_start(run)
    shown.after_worker_group_start(group)
    assert [each.pid for each in recorder.attempt.workers] == [1, 2]
    workers[:] = [worker(2), worker(3)]
    shown.after_controller_state_update(RunningState(), RunningState())
    assert [each.pid for each in recorder.attempt.workers] == [2, 3]


def test_errors_of_the_report_do_not_end_the_run(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_api, "_Manager", lambda: 1 / 0)
    shown = reported()
    shown.after_controller_start(context())
    shown.after_controller_state_update(InitializingState(), RunningState())
    assert caplog.text.count("Ray's API cannot show this run") == 1


def test_a_run_is_reported_only_if_a_person_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TRAIN_ENABLE_STATE_TRACKING", raising=False)
    assert not is_tracked()
    monkeypatch.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")
    assert is_tracked()
