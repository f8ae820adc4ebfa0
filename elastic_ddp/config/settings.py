"""The base class of all settings, its error messages, and the types of numbers and names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from elastic_ddp.errors import ConfigError

T = TypeVar("T")

MAX_STEP = 10**15
"""Every JSON reader represents integers up to this exactly."""
MAX_DURATION_S = 1e8
"""Three years; timers of some libraries overflow far above that."""

PositiveInt = Annotated[int, Field(ge=1, le=MAX_STEP)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=MAX_DURATION_S, allow_inf_nan=False)]

_HINTS = {
    "int_type": " (a number without quotes or a fraction)",
    "float_type": " (a number without quotes)",
    "bool_type": " (true or false, without quotes)",
    "string_type": " (text in quotes)",
    "tuple_type": ' (a list, such as ["name"])',
    "string_pattern_mismatch": " (letters, digits, '.', '_' and '-', beginning with a letter or digit)",
}
"""Advice by pydantic's error type, for errors whose message does not say which value is valid."""

_building: ContextVar[bool] = ContextVar("building", default=False)
"""Whether an outer settings object is being built, which then reports the errors of its parts."""


def check_distinct(names: tuple[T, ...]) -> tuple[T, ...]:
    """Returns names that have no duplicate. Raises ValueError if they have one."""
    if len(set(names)) < len(names):
        raise ValueError(f"{list(names)} has a duplicate; give each name once")
    return names


Names = Annotated[tuple[str, ...], Field(strict=False), AfterValidator(check_distinct)]
"""Distinct names, also from a list, as TOML and JSON have them."""


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns settings by their names in TOML, for example `checkpoint.every_steps` for one in a table."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def plain(value: Any) -> Any:
    """Returns a value with its mappings as dicts, other sequences than tuples as lists, and NumPy's as Python's."""
    if isinstance(value, Mapping):  # also OmegaConf's
        return {plain(key): plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


class Settings(BaseModel):
    """Frozen settings. An invalid value raises ConfigError."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        if _building.get():
            super().__init__(**values)
            return
        token = _building.set(True)
        try:
            super().__init__(**plain(values))
        except ValidationError as error:
            message = _explain(error, type(self))
        else:
            return
        finally:
            _building.reset(token)
        # Outside of the except block: else the errors and their frames form a cycle that Python cannot free.
        raise ConfigError(message)


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Returns one line that names every problem in `error`, which pydantic raised while it built `model`."""
    return "invalid configuration: " + "; ".join(
        _explain_problem(problem, model) for problem in error.errors(include_url=False)
    )


def _explain_problem(problem: Mapping[str, Any], model: type[BaseModel]) -> str:
    setting = ".".join(map(str, problem["loc"]))
    value = problem["input"]
    match problem["type"]:
        case "extra_forbidden":
            return f"{setting}={value!r}: there is no such setting; {_suggest_settings(problem['loc'], model)}"
        case "missing":
            return f"{setting} is missing and has no default; give it a value"
        case "value_error":  # raised by a validator of `run_config`
            return str(problem["ctx"]["error"])
    rule = problem["msg"]
    return f"{setting}={value!r}: {rule[0].lower()}{rule[1:]}{_HINTS.get(problem['type'], '')}"


def _suggest_settings(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """Returns the setting closest to an unknown one, or all settings of its table."""
    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    names = list(model.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"did you mean {close[0]}?" if close else f"the settings here are {', '.join(sorted(names))}"
