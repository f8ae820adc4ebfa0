"""The order in which the sides of a measurement run."""

from __future__ import annotations

from collections.abc import Iterator


def turns(names: list[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yields each side once a round, each round beginning with the next side, with the number of the turn."""
    for number in range(rounds):
        first = number % len(names)
        for index, name in enumerate(names[first:] + names[:first]):
            yield number * len(names) + index + 1, name
