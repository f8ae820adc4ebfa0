"""Loads the state of a commit, with the hyperparameters that the user chooses where the code has changed since."""

from __future__ import annotations

from typing import Any

from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.worker import hyperparameters
from elastic_ddp.worker.hyperparameters import PREPARED, Change, Prepared, invalid
from elastic_ddp.worker.train_state import MALFORMED, TrainState


def resume(state: TrainState, saved: dict[str, Any], *, use_code: bool) -> list[Change]:
    """Loads the state of a commit, and returns the hyperparameters that differ between the commit and the code.

    They keep the value in the commit. With `use_code`, they get the value in the code.

    Raises:
        CheckpointError: as `load_state_dict`, or a scheduler is another one.
        ConfigError: a changed scheduler cannot be moved to the run's position.
    """
    then, now = Prepared.of(saved.get(PREPARED)), state.prepared
    assert now is not None, "recorded before the first step"
    for key in then.kind.keys() & now.kind.keys():
        before, after = (f"a {each.kind[key]} with every={each.every.get(key)!r}" for each in (then, now))
        if before != after:
            raise CheckpointError(
                f"scheduler {key} is {before} in the commit, and {after} in the code. Restore it, or use another name; "
                "run.load_weights can start that run from this run's weights."
            )
    state.load_state_dict(saved)
    schedulers = state.all_schedulers()
    try:
        changes = hyperparameters.compare(state.optimizers, schedulers, then, now)
        if use_code:
            hyperparameters.use_code(state.optimizers, schedulers, then, now)
            state.guard.count(state.schedulers)
    except ConfigError:
        raise
    except MALFORMED as error:
        raise invalid(error) from error
    state.prepared = now if use_code else then
    return changes
