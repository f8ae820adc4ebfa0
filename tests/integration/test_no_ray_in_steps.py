"""No step waits for Ray: a run whose workers record every call to Ray, with its thread."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.actor import ActorMethod
from ray.remote_function import RemoteFunction

import elastic_ddp as ed
from tests.integration import jobs

pytestmark = pytest.mark.slow

STEPS = 25
ALLOWED = ("micro-batch-feed", "rendezvous-", "StreamingExecutor-", "ray-data-")
"""Threads of the feed (the last two are Ray Data's) and of the rendezvous client."""


class Calls:
    """Records the calls of this process to Ray, by thread, and all of Ray's functions that the training thread enters.

    Recording lasts from the start of the first step to the end of the last one.
    """

    def __init__(self) -> None:
        self.by_thread: Counter[tuple[str, str]] = Counter()
        self.in_training_thread: Counter[str] = Counter()
        for owner, name in (
            (ray, "get"),
            (ray, "wait"),
            (ray, "put"),
            (ActorMethod, "_remote"),
            (RemoteFunction, "_remote"),
        ):
            setattr(owner, name, self._recorded(f"{owner.__name__}.{name}", getattr(owner, name)))

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.by_thread[name, threading.current_thread().name] += 1
            return function(*args, **kwargs)

        return call

    def watch_this_thread(self) -> None:
        def on_call(frame: Any, event: str, _: Any) -> None:
            module = frame.f_globals.get("__name__", "")
            if event == "call" and module.partition(".")[0] == "ray":
                self.in_training_thread[f"{module}.{frame.f_code.co_qualname}"] += 1

        sys.setprofile(on_call)

    def write(self, path: Path) -> None:
        sys.setprofile(None)
        by_thread = [[*key, count] for key, count in self.by_thread.items()]
        path.write_text(json.dumps({"by_thread": by_thread, "in_training_thread": self.in_training_thread}))


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """The records of two workers, in a run that logs, commits, and has more data than its feed buffers."""
    folder = tmp_path_factory.mktemp("no-ray")
    (folder / "data").mkdir()
    jobs.write_rows(str(folder / "data"))

    def train(run: ed.Run) -> None:
        model = run.prepare(jobs.Model())
        run.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
        calls = Calls()
        for step in run.steps():
            if step.index == 0:
                calls.by_thread.clear()  # calls before the first step
                calls.watch_this_thread()
            with step:
                for batch in step.micro_batches():
                    loss = jobs.loss_fn(model, batch)
                    step.log(twice=2 * loss)
                    step.backward(loss)
                step.optimize()
            if step.index == STEPS - 1:
                calls.write(folder / f"rank-{run.rank}")

    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="WARNING")
    config = jobs.settings(str(folder / "runs"), "no-ray", 2, steps=STEPS, data={"chunk_rows": 8})
    ed.ElasticTrainer(train, str(folder / "data"), config, transform=jobs.jitter).fit()
    ray.shutdown()
    yield [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(2)]


def test_the_training_thread_enters_no_function_of_ray_in_or_between_steps(calls: list[dict[str, Any]]) -> None:
    assert [worker["in_training_thread"] for worker in calls] == [{}, {}]


def test_only_the_feed_and_the_rendezvous_client_call_ray(calls: list[dict[str, Any]]) -> None:
    for worker in calls:
        threads = {thread for _, thread, _ in worker["by_thread"]}
        assert {thread for thread in threads if not thread.startswith(ALLOWED)} == set()
        if worker is calls[0]:
            assert any(thread.startswith("rendezvous-sender") for thread in threads), (
                "rank 0 reports its steps, so calls are recorded"
            )
