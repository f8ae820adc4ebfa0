"""Counts the bytes of all live tensors of a process."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Knows every storage that an operation in its context has read or written, and each that lived before.

    After every operation it adds up the storages that are alive, each once and with its present size: FSDP frees
    gathered parameters by resizing their storages to 0. It does not see memory that a kernel uses only while it runs.

    Attributes:
        point: the point of the step, under which sums are noted.
        peaks: the largest sum at each point, also at the operations that `named` names.
    """

    def __init__(self, named: dict[str, str]) -> None:
        """`named` has the points of operations, by the beginning of the operation's name."""
        super().__init__()
        self.peaks: dict[str, int] = defaultdict(int)
        self._named = named
        self.point = ""
        self._storages: dict[int, StorageWeakRef] = {}

    def __enter__(self) -> LiveBytes:
        # By type: `isinstance` calls code of other objects, of which some warn.
        self._add(thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
        super().__enter__()
        return self

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls the operation for the local tensors, which comes here
        result = function(*args, **(kwargs or {}))
        self._add(leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor))
        points = [point for name, point in self._named.items() if str(function).startswith(name)]
        self.note(self.point, *points)
        return result

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if isinstance(tensor, DTensor) or tensor.device.type == "meta" or tensor.layout is not torch.strided:
                continue
            storage = StorageWeakRef(tensor.untyped_storage())
            self._storages.setdefault(storage.cdata, storage)

    def note(self, *points: str) -> None:
        """Notes the sum at some points."""
        total = self._count()
        for point in points:
            self.peaks[point] = max(self.peaks[point], total)

    def _count(self) -> int:
        """Returns the bytes of all live storages."""
        total = 0
        for key, weak in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total
