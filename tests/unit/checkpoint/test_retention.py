"""Which commits stay, and what can be removed: plain values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ddp.checkpoint.manifest import Commit, Skeleton, committed_steps
from elastic_ddp.checkpoint.record import Measurement
from elastic_ddp.checkpoint.retention import Removal, Retention, kept, plan_removals
from elastic_ddp.storage.folder import Entry


def complete(*steps: int) -> dict[int, Measurement | None]:
    return dict.fromkeys(steps)


def valued(values: dict[int, float]) -> dict[int, Measurement | None]:
    """Returns commits with a value measured at their own step."""
    return {step: Measurement(value, step) for step, value in values.items()}


def test_the_newest_complete_commits_stay_and_bad_ones_among_them() -> None:
    assert kept([1, 2, 3, 4, 5], complete(1, 2, 4, 5), Retention(last=3)) == {2, 3, 4, 5}


def test_the_first_commit_at_or_after_each_multiple_stays() -> None:
    steps = [30, 60, 90, 120, 150, 200, 230, 450, 480, 500]
    staying = kept(steps, complete(*steps), Retention(last=1, every_steps=100))
    assert staying == {120, 200, 450, 500}, "none before 100; 450 is the first after 300 and after 400"


def test_commits_kept_for_good_stay_after_every_later_commit() -> None:
    retention = Retention(last=2, every_steps=100)
    there: set[int] = set()
    for step in range(7, 1000, 7):
        there.add(step)
        there = kept(sorted(there), complete(*there), retention)
    assert there == {105, 203, 301, 406, 504, 602, 700, 805, 903, 987, 994}


def test_a_bad_commit_does_not_count_for_a_multiple_and_stays() -> None:
    steps = [100, 110, 120, 130]
    assert kept(steps, complete(110, 120, 130), Retention(last=1, every_steps=100)) == {100, 110, 130}


@pytest.mark.parametrize(("mode", "expected"), [("min", {20, 40, 60}), ("max", {10, 50, 60})])
def test_the_best_commits_by_a_metric_stay(mode: Any, expected: set[int]) -> None:
    values = {10: 0.9, 20: 0.1, 30: 0.5, 40: 0.2, 50: 0.8}
    staying = kept([*values, 60], valued(values) | complete(60), Retention(last=1, best=2, metric="loss", mode=mode))
    assert staying == expected, "60 is the newest, without a value"


def test_the_earlier_of_equal_values_is_better() -> None:
    assert kept([1, 2, 3], valued({1: 0.5, 2: 0.5, 3: 0.7}), Retention(last=1, best=1, metric="loss")) == {1, 3}


def test_a_repeated_measurement_counts_for_the_first_commit() -> None:
    old, new = Measurement(0.1, 10), Measurement(0.4, 40)
    commits = {11: old, 20: old, 30: old, 40: new, 50: new}
    assert kept([*commits], commits, Retention(last=1, best=2, metric="loss")) == {11, 40, 50}


def test_a_retention_of_no_commits_is_refused() -> None:
    with pytest.raises(ValueError, match="keep=0"):
        Retention(last=0)


def commit(step: int, attempt: int = 0) -> Commit:
    prefix = f"step={step}/attempt={attempt:032x}"
    state = Skeleton(key=f"{prefix}/state.json", size=1, crc32=0)
    return Commit(step=step, attempt=f"{attempt:032x}", state=state, objects=(), tensors={}, record={})


def keys_of(*steps: int) -> list[str]:
    return [key for step in steps for key in (commit(step).key, commit(step).state.key)]


def orphan(step: int) -> Commit:
    return commit(step, attempt=1)


def planned(keys: list[str], staying: set[int], read: list[Commit], **options: Any) -> list[Removal]:
    """Plans with objects of one byte, all of the same age."""
    listing = dict.fromkeys(keys, Entry(1, 1000.0))
    return plan_removals(listing, [], staying, read, written_before=1000.0, **options).items


def folders(removals: list[Removal], what: str) -> list[str]:
    return [folder for removal in removals if removal.what == what for folder in removal.folders]


def test_all_attempts_at_the_step_of_an_unread_manifest_stay() -> None:
    keys = [*keys_of(10, 20, 30), orphan(10).state.key, orphan(20).state.key, orphan(25).state.key]
    going = planned(keys, {10, 20, 30}, [commit(20), commit(30)], newest=30)
    assert {removal.what for removal in going} == {"orphan"}
    assert folders(going, "orphan") == [orphan(20).prefix, orphan(25).prefix], "either attempt may be that of step 10"


def test_commits_set_aside_stay_with_their_objects() -> None:
    keys = [*keys_of(30), f"set-aside/10-{1:032x}.json", orphan(10).state.key, commit(10).state.key]
    assert folders(planned(keys, {30}, [commit(30)], newest=30), "orphan") == [commit(10).prefix]
    [aside, other] = planned(keys, {30}, [commit(30)], newest=30, with_set_aside=True)
    assert (aside.what, aside.manifest, aside.folders) == ("set aside", keys[2], (orphan(10).prefix,))
    assert other.folders == (commit(10).prefix,)
    keys = [*keys, f"set-aside/10-unknown-{2:032x}.json"]
    assert planned(keys, {30}, [commit(30)], newest=30) == [], "the attempt is unknown"


def test_attempts_without_a_manifest_are_orphans() -> None:
    keys = [*keys_of(20, 40), *(orphan(step).state.key for step in (10, 20, 30, 40))]
    going = planned(keys, {20, 40}, [commit(20)], newest=20)
    expected = [orphan(step).prefix for step in (10, 20, 30)]
    assert folders(going, "orphan") == expected, "none at step 40, whose manifest was not read"


def test_attempts_are_removed_with_the_manifest_of_their_step() -> None:
    keys = [*keys_of(10, 20), orphan(10).state.key, orphan(5).state.key]
    [superseded, other] = planned(keys, {20}, [commit(20)], newest=20)
    assert (superseded.what, superseded.manifest, superseded.num_bytes) == ("commit", commit(10).key, 3)
    assert superseded.folders == (commit(10).prefix, orphan(10).prefix)
    assert (other.what, other.folders) == ("orphan", (orphan(5).prefix,))


retentions = st.builds(
    Retention,
    last=st.integers(1, 4),
    every_steps=st.none() | st.integers(1, 12),
    best=st.integers(0, 3),
    metric=st.just("loss"),
    mode=st.sampled_from(["min", "max"]),
)


@given(st.sets(st.integers(0, 30), min_size=1), retentions, st.sets(st.integers(0, 30)), st.data())
@settings(deadline=None)
def test_kept_commits_and_later_steps_are_never_removed(
    steps: set[int], retention: Retention, orphans: set[int], data: st.DataObject
) -> None:
    newest = data.draw(st.sampled_from(sorted(steps)))
    counting = sorted(step for step in steps if step <= newest)
    bad = data.draw(st.sets(st.sampled_from(counting))) - {newest}
    values = data.draw(st.fixed_dictionaries({step: st.none() | st.floats(0, 9) for step in counting}))
    good = {
        step: None if value is None else Measurement(value, step) for step, value in values.items() if step not in bad
    }
    staying = kept(counting, good, retention)
    last = sorted(good)[-retention.last :]
    read = [commit(step) for step in last]
    keys = [*keys_of(*steps), *(orphan(step).state.key for step in orphans)]
    going = planned(keys, staying, read, newest=newest)
    removed = {removal.manifest for removal in going} | {folder for removal in going for folder in removal.folders}
    gone = {key for key in keys if key in removed or key.rpartition("/")[0] in removed}
    for step in [*last, *staying, *(step for step in steps if step > newest)]:
        assert not gone & set(keys_of(step))
    assert not [removal for removal in going if removal.what == "commit" and removal.step >= newest]
    assert committed_steps(set(keys) - gone) == sorted(staying | {s for s in steps if s > newest}, reverse=True)
    measured = sorted((value for step, value in values.items() if value is not None and step not in bad))
    if retention.best and measured:
        best = measured[0] if retention.mode == "min" else measured[-1]
        assert best in [values[step] for step in staying]
    # Other commits are removed with all their bytes.
    assert not [step for step in steps - staying if step <= newest and not gone >= set(keys_of(step))]
    assert not [step for step in orphans - steps if step < newest and orphan(step).prefix not in removed]
