"""The errors that a user can meet. Each message names the value, the rule it broke and the setting to change."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence


class ElasticDDPError(Exception):
    """Base class of all errors that this package raises on purpose; catch it to handle any of them."""


class ConfigError(ElasticDDPError, ValueError):
    """A setting or an API call is invalid; change what the message names and start the run again."""


class DataError(ElasticDDPError):
    """The data set is missing, empty, inconsistent or changed, or the transform failed; fix the one it names."""


class StorageError(ElasticDDPError):
    """An operation on the run's storage failed; check its address, credentials, free space and network."""


class CheckpointError(StorageError):
    """A checkpoint cannot be written or restored; `elastic-ddp checkpoints verify` shows which commits are intact."""


class TrainFunctionError(ElasticDDPError):
    """The training function raised, hung, or let ranks wait at different places; the message says where."""


class NonFiniteError(ElasticDDPError):
    """A loss, a gradient or a weight is NaN or infinite; the newest commit is from before that. See `on_nonfinite`."""


class WorkersFailedError(ElasticDDPError):
    """Workers failed more often than `max_restarts` allows, or three times in a row at the same step or start."""


class DriverReplacedError(ElasticDDPError):
    """Another driver took over the run while this one was silent, such as on a suspended machine; let that one run."""


class ReplicasDifferError(ElasticDDPError):
    """Ranks hold different values of replicated state, such as weights; make every rank update it alike."""


class CorruptionError(ElasticDDPError):
    """A worker computes wrong values, and `verify.action` is to end the run; the message names its rank and node."""


class WorkerAtFaultError(BaseException):
    """This worker computes wrong values, so it leaves the run. Internal: Ray Train replaces it.

    Not an Exception, so that the training function does not catch it.
    """


class PeerFailedError(Exception):
    """The generation ended while this rank waited for a peer. Internal: the worker repeats the step."""


def format_exception(error: BaseException) -> str:
    """Returns the error's type and text, as the ledger and other errors show them."""
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(error: BaseException, show: Callable[[BaseException], str] = str) -> str:
    """Returns `show(error)`, which is `str` or `repr`. Names the type if the exception's own method raises."""
    try:
        return show(error)
    except Exception as failure:
        return f"<{type(error).__name__}, whose __{show.__name__}__ raises {type(failure).__name__}>"


def printable(text: str) -> str:
    """Returns `text` without control characters, so that names from a checkpoint cannot control a terminal."""

    def is_harmless(char: str) -> bool:
        return char.isprintable() or char == "\n" or unicodedata.category(char) == "Zs"  # spaces, such as no-break ones

    return "".join(char if is_harmless(char) else "\N{REPLACEMENT CHARACTER}" for char in text)


def shorten(names: Sequence[str], limit: int = 10, separator: str = ", ") -> str:
    """Returns the first `limit` names, joined, with `…` for the rest; "none" without any."""
    return separator.join([*names[:limit], *(["…"] if len(names) > limit else [])]) or "none"
