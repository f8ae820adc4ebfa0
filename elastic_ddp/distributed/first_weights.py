"""The first weights of a model that was built on the meta device, made for some of its modules at a time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial

import torch

from elastic_ddp.errors import ConfigError, shorten
from elastic_ddp.seeding import preserve_rng_state, seed_all
from elastic_ddp.tensors.dtensor import is_dtensor
from elastic_ddp.torch_internals import version

Initialize = Callable[[torch.nn.Module], object]
"""Initializes the tensors that a module has itself, without its submodules."""
_UNSET = 255
"""The bytes of new tensors: floats are NaN, integers -1. If all bytes have this value, and torch counted no change, the
tensor is uninitialized. Torch does not count changes of `tensor.data`."""


class FirstWeights:
    """Makes and initializes the tensors of modules; the random numbers that a module gets depend on its name only.

    Args:
        seed: of the run.
        initialize: called with each module that has tensors on the meta device, itself or in submodules; None for
            `module.reset_parameters()` of the modules that have such tensors themselves.
    """

    def __init__(self, seed: int, initialize: Initialize | None = None) -> None:
        self._seed = seed
        self._initialize = initialize
        self.uninitialized: set[str] = set()
        """The names of tensors that were made and have no value yet."""

    def make(self, modules: Mapping[str, torch.nn.Module], device: torch.device) -> None:
        """Replaces the tensors that modules have on the meta device, and initializes the modules.

        `modules` has the modules by name, parents first. Submodules are initialized before their parents.
        """
        made: dict[torch.Tensor, torch.Tensor] = {}  # by the tensors that they replace, which tied weights share
        unset: dict[torch.Tensor, int] = {}  # their versions
        places: list[tuple[str, torch.nn.Module, str]] = []
        for name, module in modules.items():
            for key, tensor in _own_tensors(module).items():
                if tensor not in made and tensor.is_meta:
                    new = torch.empty_like(tensor, device=device, requires_grad=False)
                    _bytes_of(new).fill_(_UNSET)
                    made[tensor] = _like(tensor, new)
                    unset[made[tensor]] = version(new)
                if tensor in made:
                    setattr(module, key, made[tensor])
                    places.append((name, module, key))
        if not made:
            return
        with preserve_rng_state(device), torch.no_grad(), torch.device(device):
            for name, module in reversed(list(modules.items())):
                initialize = self._initializer_of(module, unset)
                if initialize is not None:
                    seed_all(self._seed, "init", name)
                    # Inner units are sharded already.
                    sharded = {key: each for key, each in module.named_parameters() if is_dtensor(each)}
                    before = {key: version(each) for key, each in sharded.items()}
                    initialize()
                    changed = [key for key, each in sharded.items() if version(each) != before[key]]
                    if changed:
                        raise ConfigError(
                            f"the initialization of {name or 'the model itself'} changed {shorten(changed, 5)} in its "
                            "submodules, which are sharded already. Let it initialize what the module has itself: "
                            "parameters(recurse=False)."
                        )
        for name, module, key in places:
            tensor = getattr(module, key)
            if unset.get(tensor) == version(tensor) and tensor.numel() and int(_bytes_of(tensor).min()) == _UNSET:
                self.uninitialized.add(f"{name}.{key}" if name else key)
            elif tensor.device != device:  # the initialization has made it
                setattr(module, key, _like(tensor, tensor.detach().to(device)))

    def note_loaded(self, module: torch.nn.Module, names: Iterable[str]) -> None:
        """Notes that tensors of the model with these names have values, also under other names."""
        options = {"remove_duplicate": False}
        tensors = {**dict(module.named_parameters("", **options)), **dict(module.named_buffers("", **options))}
        loaded = {tensors[name] for name in names if name in tensors}
        self.uninitialized -= {name for name, tensor in tensors.items() if tensor in loaded}

    def _initializer_of(self, module: torch.nn.Module, new: Container[torch.Tensor]) -> Callable[[], object] | None:
        if self._initialize is None:
            has_new = any(tensor in new for tensor in _own_tensors(module).values())
            return getattr(module, "reset_parameters", None) if has_new else None
        has_new = any(tensor in new for each in module.modules() for tensor in _own_tensors(each).values())
        return partial(self._initialize, module) if has_new else None

    def check(self) -> None:
        """Raises a ConfigError if a tensor has no value, after weights were loaded."""
        if self.uninitialized:
            raise ConfigError(
                "the model was built on the meta device, and nothing has initialized "
                f"{shorten(sorted(self.uninitialized), 5)}. Let param_init_fn of run.prepare do it in place: it "
                "replaces reset_parameters() of all modules. Or, without it, give their modules a reset_parameters()."
            )


def _own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers that a module has itself."""
    options = {"recurse": False, "remove_duplicate": False}
    return {**dict(module.named_parameters("", **options)), **dict(module.named_buffers("", **options))}


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns a value as a parameter if a tensor is one."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
