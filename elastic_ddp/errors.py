"""The errors a user can meet. Each message names the value, the rule it broke and the setting to change."""


class ElasticDDPError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(ElasticDDPError, ValueError):
    """A configuration, or a call of the API, that cannot work. Raised before anything is started or lost."""


class DataError(ElasticDDPError):
    """The data set cannot be read as asked: missing, empty, inconsistent, changed, or broken by a transform."""


class StorageError(ElasticDDPError):
    """The run's storage refused an operation or holds something that cannot be right."""


class CheckpointError(StorageError):
    """State that cannot be written to, or read from, a checkpoint."""


class UnreadableError(StorageError):
    """An object of a commit cannot be read, and others of the same storage can. It may be as good as they are."""


class TrainFunctionError(ElasticDDPError):
    """The user's training function raised. Carries the worker's traceback; never retried."""


class WorkersLostError(ElasticDDPError):
    """Workers were lost more often than `max_restarts` allows, or could not be started."""


class DriverReplacedError(ElasticDDPError):
    """Another driver took the run over while this one was silent, as on a machine that was suspended."""


class PeerLostError(Exception):
    """What was waited for will not come, as the generation broke. Never leaves a worker: the step comes again."""


def described(error: BaseException) -> str:
    """The kind and the text of `error`, as the ledger and other errors give them."""
    return f"{type(error).__name__}: {error}"
