"""Which collective tasks the survivors of a failure run, decided from their messages."""

from __future__ import annotations

import pytest

from elastic_ddp.worker.collective_tasks import CollectiveTasks, Task, TasksDifferError

LOSS = "validation"


def worker(*done: str, begun: int = 4, step: int = 5) -> CollectiveTasks:
    """A worker that began step `begun`, and then did these tasks after `step` steps."""
    tasks = CollectiveTasks()
    tasks.begin_step(begun)
    for name in done:
        tasks.done(tasks.next(step, name), f"result of {name}")
    return tasks


def compare(workers: dict[CollectiveTasks, str | None], step: int = 5) -> list[Task | None]:
    """The workers compare their tasks: each is in the task with the given name, if any. Returns those tasks."""
    wanted = [tasks.next(step, name) if name is not None else None for tasks, name in workers.items()]
    messages = [tasks.message(task) for tasks, task in zip(workers, wanted, strict=True)]
    for tasks, task in zip(workers, wanted, strict=True):
        tasks.compare(task, messages)
    return wanted


def test_a_task_that_all_workers_are_in_is_done_by_all() -> None:
    one, other = worker(), worker()
    task, same = compare({one: LOSS, other: LOSS})
    assert task == same == Task(5, False, 1, LOSS)
    assert one.result_of_others(one.next(5, LOSS)) is None
    assert other.result_of_others(other.next(5, LOSS)) is None


def test_a_worker_that_missed_the_end_of_a_task_receives_its_result() -> None:
    for name in (None, LOSS, "weights"):
        behind, ahead = worker(), worker(LOSS)
        compare({behind: LOSS, ahead: name})
        assert behind.result_of_others(behind.next(5, LOSS)) == (f"result of {LOSS}",)
        behind.done(behind.next(5, LOSS), f"result of {LOSS}")
        if name is not None:  # the next task is done by both
            assert ahead.next(5, name) == behind.next(5, name) == Task(5, False, 2, name)
            assert ahead.result_of_others(ahead.next(5, name)) is behind.result_of_others(behind.next(5, name)) is None


def test_a_worker_one_step_behind_has_the_same_task_once_it_has_the_state() -> None:
    ahead, behind = worker(begun=4), worker(begun=4)
    behind.next(4, LOSS)  # in a step that only the other worker did
    compare({ahead: LOSS, behind: LOSS})
    assert ahead.next(5, LOSS) == behind.next(5, LOSS)


def test_a_task_of_some_workers_only_is_not_done_until_the_next_step() -> None:
    asks, continues = worker(), worker()
    compare({asks: LOSS, continues: None})
    for name in (LOSS, "another"):
        with pytest.raises(TasksDifferError, match=f"{name!r} after step 4.*step.index"):
            asks.next(5, name)
    asks.begin_step(5)
    continues.begin_step(5)
    assert asks.next(5, LOSS) == continues.next(5, LOSS) == Task(5, True, 1, LOSS)


def test_tasks_at_different_places_are_different() -> None:
    asks, other = worker(), worker()
    compare({asks: LOSS, other: "another"})
    for tasks, name in ((asks, LOSS), (other, "another")):
        with pytest.raises(TasksDifferError):
            tasks.next(5, name)
    assert asks.next(6, LOSS) == Task(6, False, 1, LOSS), "a step was done"
    before, within = worker(LOSS), worker(begun=5)
    compare({within: LOSS, before: None})
    with pytest.raises(TasksDifferError):
        within.next(5, LOSS)


def test_a_new_worker_counts_like_the_others() -> None:
    """The others did a task before the step, which is repeated with the new worker."""
    old, newcomer = worker(LOSS, begun=5), CollectiveTasks()
    old.begin_step(5)
    newcomer.begin_step(5)
    task, same = compare({old: LOSS, newcomer: LOSS})
    assert task == same == Task(5, True, 1, LOSS)


def test_at_the_end_of_the_run_all_workers_are_waited_for() -> None:
    at_the_end, evaluates = worker(), worker()
    at_the_end.end_steps()
    compare({at_the_end: "weights", evaluates: LOSS})
    assert at_the_end.next(5, "weights") == Task(5, False, 1, "weights")
    with pytest.raises(TasksDifferError):
        evaluates.next(5, LOSS)
    evaluates.end_steps()
    assert evaluates.next(5, "weights") == at_the_end.next(5, "weights")
