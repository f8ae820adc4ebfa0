"""All loggers of a run: they are checked before it starts, fed while it runs, and waited for at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

from elastic_ddp.errors import ConfigError
from elastic_ddp.loggers.delivery import Delivery, LoggedSession
from elastic_ddp.loggers.logger import Logger

FINISH_TIMEOUT_S = 30.0
"""How long the end of a session waits for all loggers together."""
RAISED_TIMEOUT_S = 5.0
"""How long a session waits for them that ends with an exception of the driver."""
_POLL_S = 0.1

_CLASSES = {
    "mlflow": ("mlflow", "mlflow-skinny", "elastic_ddp.loggers.mlflow", "MlflowLogger"),
    "tensorboard": ("tensorboardX", "tensorboardX", "elastic_ddp.loggers.tensorboard", "TensorBoardLogger"),
    "wandb": ("wandb", "wandb", "elastic_ddp.loggers.wandb", "WandbLogger"),
}
"""For each logger of `RunConfig.loggers`: what it imports, the package to install, and its module and class."""


def open_loggers(names: Iterable[str], objects: Sequence[Any]) -> dict[str, Logger]:
    """Returns the loggers of a configuration and of the user, by the name for messages.

    Raises:
        ConfigError: a package is not installed, a credential is missing, or an object is no logger.
    """
    loggers: dict[str, Logger] = {}
    for name in names:
        imported, package, module, class_name = _CLASSES[name]
        if find_spec(imported) is None:
            raise ConfigError(
                f"loggers={name!r} needs a package that is not installed: pip install {package}, or remove it from "
                "loggers"
            )
        loggers[name] = getattr(import_module(module), class_name)()
    for number, logger in enumerate(objects):
        methods = ("start", "log", "finish")
        if isinstance(logger, str | type) or not all(callable(getattr(logger, method, None)) for method in methods):
            raise ConfigError(
                f"loggers[{number}]={logger!r} is no logger. Give objects with the methods start(run), log(step, "
                "values, time) and finish(status); names such as 'wandb' belong into the setting loggers"
            )
        name = type(logger).__name__
        loggers[name if name not in loggers else f"{name} {number + 1}"] = logger
    return loggers


class RunLoggers:
    """Feeds the loggers of one session, which are given by name; see `Delivery`."""

    def __init__(self, loggers: Mapping[str, Logger], session: LoggedSession) -> None:
        self._loggers = loggers
        self._session = session
        self._deliveries: list[Delivery] = []
        self._is_finished = False

    def start(self) -> None:
        """Starts the loggers' threads."""
        self._deliveries = [Delivery(name, logger, self._session) for name, logger in self._loggers.items()]
        for delivery in self._deliveries:
            delivery.start()

    def notify(self) -> None:
        """Tells the loggers that the ledger may have new events. Never blocks."""
        for delivery in self._deliveries:
            delivery.notify()

    def finish(
        self, status: str, is_interrupted: Callable[[], bool] = lambda: False, timeout_s: float | None = None
    ) -> None:
        """Waits until the loggers have all steps: by default `FINISH_TIMEOUT_S`, and not after an interrupt."""
        self._is_finished = True
        timeout_s = FINISH_TIMEOUT_S if timeout_s is None else timeout_s
        for delivery in self._deliveries:
            delivery.finish(status)
        deadline = time.monotonic() + timeout_s
        for delivery in self._deliveries:
            while not (is_done := delivery.join(_POLL_S)) and time.monotonic() < deadline and not is_interrupted():
                pass
            if not is_done:
                self._note_unfinished(delivery, timeout_s)

    def complete(self) -> None:
        """Waits until the loggers of a finished run have all steps, or fail for `FINISH_TIMEOUT_S`."""
        self._is_finished = True
        for delivery in self._deliveries:
            delivery.finish("finished")
        for delivery in self._deliveries:
            begun = worked_at = time.monotonic()
            is_noted = False
            while not (is_done := delivery.join(_POLL_S)) and time.monotonic() < worked_at + FINISH_TIMEOUT_S:
                if not delivery.is_failing:
                    worked_at = time.monotonic()
                if not is_noted and time.monotonic() > begun + FINISH_TIMEOUT_S:
                    is_noted = True
                    self._session.notify(f"logger {delivery.name} still gets the steps that it lacks. Ctrl-C ends this")
            if not is_done:
                self._note_unfinished(delivery, FINISH_TIMEOUT_S)

    def _note_unfinished(self, delivery: Delivery, timeout_s: float) -> None:
        newest = "no step" if delivery.newest is None else f"the steps up to {delivery.newest}"
        self._session.notify(
            f"logger {delivery.name} did not finish within {timeout_s:g} s and has {newest}. The same command gives it "
            "the others"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *details: object) -> None:
        """Ends the delivery at once. If the session raises, it is finished as failed before that."""
        if error is not None and not self._is_finished:
            self.finish("failed", timeout_s=RAISED_TIMEOUT_S)
        for delivery in self._deliveries:
            delivery.abandon()
