"""Differences between the hyperparameters in a commit and those in the code, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic_ddp.tensors.state_tree import flatten, unflatten

DERIVED = frozenset({"base_lrs", "_last_lr"})
"""State of a scheduler that repeats settings of its optimizer."""


@dataclass(frozen=True)
class Change:
    """A hyperparameter that differs between a commit and the code."""

    name: str
    saved: Any
    now: Any

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "saved": _as_json(self.saved), "now": _as_json(self.now)}


def of_groups(name: str, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    """Yields the changes of an optimizer's settings; one that is the same in all param_groups once."""
    differing = [differing_keys(saved, own) for saved, own in zip(before, after, strict=True)]
    for key in dict.fromkeys(key for keys in differing for key in keys):
        # With a scheduler, `initial_lr` is what the code sets as `lr`. That of a warm-up's first step follows from it.
        numbers = [n for n, keys in enumerate(differing) if key in keys and not (key == "lr" and "initial_lr" in keys)]
        label = "lr" if key == "initial_lr" else key
        changes = [Change(f"{name}.param_groups[{n}].{label}", before[n][key], after[n][key]) for n in numbers]
        if len(changes) == len(differing) and all(is_same(_values(change), _values(changes[0])) for change in changes):
            changes = [Change(f"{name}.{label}", *_values(changes[0]))]
        yield from changes


def differences(name: str, saved: Any, now: Any) -> Iterator[Change]:
    """Yields the differences of two trees, each at the deepest place."""
    if name.rpartition(".")[2] in DERIVED:
        return
    if type(saved) is dict and type(now) is dict and saved.keys() == now.keys():
        for key, value in saved.items():
            yield from differences(f"{name}.{key}", value, now[key])
    elif type(saved) is list and type(now) is list and len(saved) == len(now) and any(type(v) is dict for v in now):
        for number, value in enumerate(saved):
            yield from differences(f"{name}[{number}]", value, now[number])
    elif not is_same(saved, now):
        yield Change(name, saved, now)


def differing_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns the keys with different values. Versions of torch add keys."""
    return [key for key in before if key in after and not is_same(before[key], after[key])]


def is_same(first: Any, second: Any) -> bool:
    (skeleton, tensors), (other_skeleton, others) = flatten(first), flatten(second)
    return skeleton == other_skeleton and all(torch.equal(tensors[name].cpu(), others[name].cpu()) for name in tensors)


def copy_of(value: Any) -> Any:
    skeleton, tensors = flatten(value)
    return unflatten(skeleton, {name: tensor.clone() for name, tensor in tensors.items()})


def name_of(thing: object, all_things: Sequence[object]) -> str:
    """Returns the name of the class, with a number if there are several."""
    alike = [other for other in all_things if type(other) is type(thing)]
    number = next(number for number, other in enumerate(alike) if other is thing)
    return type(thing).__name__ + (f"[{number}]" if len(alike) > 1 else "")


def _values(change: Change) -> tuple[Any, Any]:
    return change.saved, change.now


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
