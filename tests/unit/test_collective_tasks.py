"""What becomes of what all do together outside of steps, when a peer is lost: each from its own memory and messages."""

from __future__ import annotations

import pytest

from elastic_ddp.worker.collective_tasks import CollectiveTasks, Task, TasksDifferError

LOSS = "validation"


def worker(*done: str, begun: int = 4, step: int = 5) -> CollectiveTasks:
    """One that has begun a step, then done these things in the state after `step` steps."""
    tasks = CollectiveTasks()
    tasks.begin_step(begun)
    for name in done:
        tasks.done(tasks.next(step, name), f"result of {name}")
    return tasks


def meet(workers: dict[CollectiveTasks, str | None], step: int = 5) -> list[Task | None]:
    """They compare; each is amid what is given, if it is. Returns what each wants."""
    wanted = [tasks.next(step, name) if name is not None else None for tasks, name in workers.items()]
    messages = [tasks.message(each) for tasks, each in zip(workers, wanted, strict=True)]
    for tasks, each in zip(workers, wanted, strict=True):
        tasks.compare(each, messages)
    return wanted


def test_what_all_are_amid_is_done_by_all() -> None:
    one, other = worker(), worker()
    task, same = meet({one: LOSS, other: LOSS})
    assert task == same == Task(5, False, 1, LOSS)
    assert one.result_of_others(one.next(5, LOSS)) is None
    assert other.result_of_others(other.next(5, LOSS)) is None


def test_who_has_lost_the_end_gets_the_result_whatever_the_other_does_since() -> None:
    for name in (None, LOSS, "weights"):
        behind, ahead = worker(), worker(LOSS)
        meet({behind: LOSS, ahead: name})
        assert behind.result_of_others(behind.next(5, LOSS)) == (f"result of {LOSS}",)
        behind.done(behind.next(5, LOSS), f"result of {LOSS}")
        if name is not None:  # and then they do the next one
            assert ahead.next(5, name) == behind.next(5, name) == Task(5, False, 2, name)
            assert ahead.result_of_others(ahead.next(5, name)) is behind.result_of_others(behind.next(5, name)) is None


def test_one_that_is_a_step_behind_asks_for_the_same_once_it_has_the_state() -> None:
    ahead, behind = worker(begun=4), worker(begun=4)
    behind.next(4, LOSS)  # in a step that it lost, and the other made
    meet({ahead: LOSS, behind: LOSS})
    assert ahead.next(5, LOSS) == behind.next(5, LOSS)


def test_what_only_some_ask_for_is_not_done_until_the_next_step_begins() -> None:
    asks, goes_on = worker(), worker()
    meet({asks: LOSS, goes_on: None})
    for name in (LOSS, "another"):
        with pytest.raises(TasksDifferError, match=f"{name!r} after step 4.*step.index"):
            asks.next(5, name)
    asks.begin_step(5)
    goes_on.begin_step(5)
    assert asks.next(5, LOSS) == goes_on.next(5, LOSS) == Task(5, True, 1, LOSS)


def test_things_of_other_places_are_not_taken_for_each_other() -> None:
    asks, other = worker(), worker()
    meet({asks: LOSS, other: "another"})
    for tasks, name in ((asks, LOSS), (other, "another")):
        with pytest.raises(TasksDifferError):
            tasks.next(5, name)
    assert asks.next(6, LOSS) == Task(6, False, 1, LOSS), "a step was made"
    before, within = worker(LOSS), worker(begun=5)
    meet({within: LOSS, before: None})
    with pytest.raises(TasksDifferError):
        within.next(5, LOSS)


def test_one_that_came_since_counts_like_the_others() -> None:
    """Before a step they had done something that a newcomer had not: then it was lost, and begins again with it."""
    old, newcomer = worker(LOSS, begun=5), CollectiveTasks()
    old.begin_step(5)
    newcomer.begin_step(5)
    task, same = meet({old: LOSS, newcomer: LOSS})
    assert task == same == Task(5, True, 1, LOSS)


def test_at_the_end_everybody_is_waited_for() -> None:
    at_the_end, evaluates = worker(), worker()
    at_the_end.end_steps()
    meet({at_the_end: "weights", evaluates: LOSS})
    assert at_the_end.next(5, "weights") == Task(5, False, 1, "weights")
    with pytest.raises(TasksDifferError):
        evaluates.next(5, LOSS)
    evaluates.end_steps()
    assert evaluates.next(5, "weights") == at_the_end.next(5, "weights")
