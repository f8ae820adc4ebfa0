"""Nothing in a step waits for Ray: a run in whose workers every call to Ray is recorded, with its thread."""

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
MAY_TALK = ("micro-batch-feed", "rendezvous-", "StreamingExecutor-", "ray-data-")
"""Threads of the feed (the last two are Ray Data's own) and the one beside the loop that talks to the rendezvous."""


class Calls:
    """What this process asks of Ray, as (call, thread); and every function of Ray's that the training thread enters,
    from the first step's begin to the last one's end."""

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
        def entered(frame: Any, event: str, _: Any) -> None:
            module = frame.f_globals.get("__name__", "")
            if event == "call" and module.partition(".")[0] == "ray":
                self.in_training_thread[f"{module}.{frame.f_code.co_qualname}"] += 1

        sys.setprofile(entered)

    def write(self, path: Path) -> None:
        sys.setprofile(None)
        by_thread = [[*key, count] for key, count in self.by_thread.items()]
        path.write_text(json.dumps({"by_thread": by_thread, "in_training_thread": self.in_training_thread}))


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """What each of two workers recorded, in a run that logs, commits and has more data than fits in its feed."""
    folder = tmp_path_factory.mktemp("no-ray")
    (folder / "data").mkdir()
    jobs.write_rows(str(folder / "data"))

    def train(run: ed.Run) -> None:
        model = run.prepare(jobs.Model())
        run.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
        calls = Calls()
        for step in run.steps():
            if step.index == 0:
                calls.by_thread.clear()  # what it took to get here
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


def test_the_training_thread_enters_no_function_of_ray_in_a_step_or_between_steps(calls: list[dict[str, Any]]) -> None:
    assert [worker["in_training_thread"] for worker in calls] == [{}, {}]


def test_only_the_feed_and_the_link_to_the_rendezvous_talk_to_ray(calls: list[dict[str, Any]]) -> None:
    for worker in calls:
        threads = {thread for _, thread, _ in worker["by_thread"]}
        assert {thread for thread in threads if not thread.startswith(MAY_TALK)} == set()
        if worker is calls[0]:
            assert "rendezvous--out" in threads, "the record sees calls: rank 0 tells of its steps"
