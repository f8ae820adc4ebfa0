"""Error messages for invalid settings: pydantic's findings, with the setting, its value and a fix."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

_HINTS = {
    "int_type": " (a number without quotes or a fraction)",
    "float_type": " (a number without quotes)",
    "bool_type": " (true or false, without quotes)",
    "string_type": " (text in quotes)",
    "tuple_type": ' (a list, such as ["name"])',
    "string_pattern_mismatch": " (letters, digits, '.', '_' and '-', beginning with a letter or digit)",
}
"""What to give instead, by pydantic's error type, where pydantic's own message does not name it."""


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Returns one line that names every problem in `error`, which pydantic raised while it built `model`."""
    return "invalid configuration: " + "; ".join(
        _explain_problem(problem, model) for problem in error.errors(include_url=False)
    )


def _explain_problem(problem: Mapping[str, Any], model: type[BaseModel]) -> str:
    setting, value = ".".join(map(str, problem["loc"])), problem["input"]
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
