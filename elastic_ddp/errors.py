"""The errors a user can meet. Each message names the value, the rule it broke and the setting to change."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError


class ElasticDDPError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(ElasticDDPError, ValueError):
    """A configuration, or a call of the API, that cannot work. Most are raised before any worker starts; the rest end
    the run, and nothing that was committed is lost."""


class DataError(ElasticDDPError):
    """The data set cannot be read as asked: missing, empty, inconsistent, changed, or broken by a transform."""


class StorageError(ElasticDDPError):
    """The run's storage refused an operation or holds something that cannot be right."""


class CheckpointError(StorageError):
    """State that cannot be written to, or read from, a checkpoint."""


class UnreadableError(StorageError):
    """An object of a commit cannot be read, and others of the same storage can. It may be as good as they are."""


class TrainFunctionError(ElasticDDPError):
    """The user's training function raised, whose traceback this carries, or all workers hung in it (`hang_timeout_s`).
    Never retried."""


class WorkersFailedError(ElasticDDPError):
    """The run cannot go on with the workers it has: they were lost more often than `max_restarts` allows, could not be
    started, or lose the same step again and again though none of them dies."""


class DriverReplacedError(ElasticDDPError):
    """Another driver took the run over while this one was silent, as on a machine that was suspended."""


class ReplicasDifferError(ElasticDDPError):
    """Ranks hold different values of what they should hold alike, such as weights."""


class PeerFailedError(Exception):
    """What was waited for will not come, as the generation broke. Never leaves a worker: the step comes again."""


def format_exception(error: BaseException) -> str:
    """The kind and the text of `error`, as the ledger and other errors give them."""
    return f"{type(error).__name__}: {error}"


def format_validation_error(error: ValidationError, *, with_fields: bool = False) -> str:
    """The first few that pydantic found, with where they are.

    Raise the error that tells of them outside of the block that caught this one. Whatever is raised in there leads to
    it, and it to all frames in which it was raised, and to what these have at their end: once such a frame holds the
    error that was raised, nothing of all that is ever let go, as pydantic's part in it is none that Python's garbage
    collector looks into.
    """
    found = error.errors(include_url=False, include_input=False, include_context=False)[:5]
    places = [f"{'.'.join(map(str, each['loc']))!r:.80}: " if with_fields else "" for each in found]
    return "; ".join(place + each["msg"] for place, each in zip(places, found, strict=True))


def printable(text: str) -> str:
    """A text with names that somebody else chose, without what a terminal would take for an order."""
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)


def shorten(names: Sequence[str], limit: int = 10, separator: str = ", ") -> str:
    """The first of some names, as an error gives them."""
    return separator.join([*names[:limit], *(["…"] if len(names) > limit else [])]) or "none"
