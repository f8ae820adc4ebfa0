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
        CheckpointError: as `load_state_dict`; or a scheduler has another class, without `use_code`.
        ConfigError: a changed scheduler cannot be moved to the run's position.
    """
    then, now = Prepared.of(saved.get(PREPARED)), state.prepared
    assert now is not None, "recorded before the first step"
    replaced, schedulers = then.replaced_in(now), saved.get("scheduler")
    if replaced and not use_code:
        key = replaced[0]
        before, after = (f"{each.kind[key]} (every={each.every[key]!r})" for each in (then, now))
        raise CheckpointError(
            f"scheduler {key} is a {before} in the commit, and a {after} in the code. Restore it, or set "
            'checkpoint.hyperparameters = "code", which moves the new scheduler to the step of the commit.'
        )
    if isinstance(schedulers, dict):
        saved = {**saved, "scheduler": schedulers | {key: now.scheduler[key] for key in replaced if key in schedulers}}
    state.load_state_dict(saved)
    try:
        changes = hyperparameters.compare(state.optimizers, state.schedules(), then, now)
        if use_code:
            hyperparameters.use_code(state.optimizers, state.schedules(), then, now)
            state.guard.count(state.schedulers)
    except ConfigError:
        raise
    except MALFORMED as error:
        raise invalid(error) from error
    state.prepared = now if use_code else then
    return changes
