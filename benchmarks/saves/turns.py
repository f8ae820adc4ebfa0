"""Who is measured when."""

from __future__ import annotations

from collections.abc import Iterator


def turns(names: list[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Each side once a round, in an order that moves on, with a number of its own for each turn."""
    for number in range(rounds):
        first = number % len(names)
        for place, name in enumerate(names[first:] + names[:first]):
            yield number * len(names) + place + 1, name
