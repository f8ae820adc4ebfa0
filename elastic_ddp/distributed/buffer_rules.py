"""What becomes of a buffer that the micro-batches of a step change, each from the same value."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch

from elastic_ddp.errors import ConfigError, shorten
from elastic_ddp.torch_internals import buffers_of, is_normalization

MEAN = "mean"
SUM = "sum"
FIRST = "first"
RULES = {
    MEAN: "averages the changes over the rows of the global batch",
    SUM: "adds the changes of all micro-batches",
    FIRST: "keeps what micro-batch 0 leaves",
}
"""What `run.prepare(model, buffers=...)` takes, and what each rule does."""
Place = tuple[int, str]
"""A buffer's owner, as its `id`, and its name there."""


def check_rules(module: torch.nn.Module, rules: Mapping[str, str]) -> None:
    """Raises a ConfigError for rules of buffers, by name or glob pattern, that a model cannot follow."""
    if not isinstance(rules, Mapping):
        raise ConfigError(
            f'run.prepare got buffers={rules!r}. Give a dict of names and rules, such as {{"usage": "sum"}}.'
        )
    buffers = dict(module.named_buffers())
    for pattern, rule in rules.items():
        given = f"run.prepare got buffers={{{pattern!r}: {rule!r}}}"
        if rule not in RULES:
            raise ConfigError(
                f"{given}. Use one of {', '.join(f'{name!r}, which {does}' for name, does in RULES.items())}."
            )
        named = [name for name in buffers if fnmatchcase(name, pattern)]
        if not named:
            raise ConfigError(f"{given}, but the model has no such buffer. It has {shorten(sorted(buffers))}.")
        for name in named:
            dtype = buffers[name].dtype
            if rule == MEAN and not dtype.is_floating_point:
                raise ConfigError(f"{given}, but {name} has {dtype}, which has no mean. Use 'sum' or 'first'.")
            if rule == SUM and (dtype == torch.bool or dtype.is_complex):
                raise ConfigError(f"{given}, but {name} has {dtype}, which is not summed. Use 'first'.")


def find_rules(module: torch.nn.Module, rules: Mapping[str, str]) -> dict[Place, tuple[str, str | None]]:
    """Returns the full name of each buffer and its rule: the first in `rules` that matches, or torch's layers' own.

    The statistics of torch's normalization layers are averaged, and their counters are those of micro-batch 0. A buffer
    without a rule is None: no micro-batch may change it.
    """
    found = {}
    for path, owner in module.named_modules():
        for name, buffer in buffers_of(owner).items():
            full_name = f"{path}.{name}" if path else name
            rule = next((rule for pattern, rule in rules.items() if fnmatchcase(full_name, pattern)), None)
            if rule is None and is_normalization(owner, name):
                rule = MEAN if buffer is None or buffer.is_floating_point() else FIRST
            found[id(owner), name] = full_name, rule
    return found


def evaluated_error(names: list[str]) -> ConfigError:
    """Returns the error for buffers without a rule that a forward of an evaluation changed."""
    return ConfigError(
        f"a forward in run.evaluate changed buffers: {shorten(names, 5)}. An evaluation restores buffers after each "
        "batch. If the model does not need the changes, as those of a cache, keep them in an attribute that is no "
        f"buffer, or choose a rule: run.prepare(model, buffers={{{names[0]!r}: {FIRST!r}}}). Return what should be "
        "counted or averaged from loss_fn."
    )


def changed_error(names: list[str]) -> ConfigError:
    """Returns the error for buffers without a rule that a forward changed."""
    return ConfigError(
        f"a forward changed buffers: {shorten(names, 5)}. The micro-batches of a step all start from the same "
        "buffers, so it is not known what the step should leave there. Change it once per step, after step.optimize() "
        "in the block, with what step.gather() collects from all micro-batches. Or choose how the changes combine: "
        f"run.prepare(model, buffers={{{names[0]!r}: {SUM!r}}}) {RULES[SUM]}, {MEAN!r} {RULES[MEAN]}, and {FIRST!r} "
        f"{RULES[FIRST]}."
    )
