"""Splits a tree of state into JSON and tensors and rebuilds it, without pickle: for checkpoints and transfers."""

from __future__ import annotations

import base64
import hashlib
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from elastic_ddp import torch_internals
from elastic_ddp.errors import CheckpointError
from elastic_ddp.tensors.dtensor import is_dtensor

Layout = Callable[[str], torch.Tensor | None]
"""Maps a tensor's name in a commit to a DTensor that is sharded as this tensor is; to None if it is not sharded."""

_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_NUMPY_SCALARS = "biufcmM"
_NUMPY_ARRAYS = "biufcmMSU"
_FACTORIES: dict[str, Callable[[], Any]] = {
    factory.__name__: factory for factory in (bool, bytes, dict, float, int, list, str, tuple)
}
_MAX_DEPTH = 100
"""Each level takes three Python calls, and Python allows a thousand."""
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def flatten(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Splits a tree of plain values and tensors into a skeleton and its tensors.

    The tree may hold dicts (with str, int, float, bool, None, bytes or tuple keys), lists, tuples, OrderedDicts,
    Counters, deques, defaultdicts of builtin types, None, bool, int, float, str, bytes, tensors, numpy arrays and
    scalars, `torch.dtype`, `torch.Size` and `torch.device`.

    Returns:
        The skeleton, which `json.dumps` accepts, and the tensors by their path in the tree (`layers.0.weight`).
        Tensors are detached and share memory with the state; they stay on their device and need not be contiguous. A
        tensor that is in the tree twice is returned once. A DTensor stays a DTensor.

    Raises:
        CheckpointError: names the path of a value that cannot be saved without pickle.
    """
    flattener = _Flattener()
    return flattener.encode(state, ()), flattener.tensors


def unflatten(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns the state that `flatten` split. This cannot run code.

    Args:
        skeleton: as `flatten` returned it; JSON may have reordered its objects.
        tensors: by path. They may be raw bytes (uint8) or on another device. NumPy arrays share memory with them.
    """
    if skeleton is None or isinstance(skeleton, bool | int | float | str):
        return skeleton
    if isinstance(skeleton, list):
        return [unflatten(item, tensors) for item in skeleton]
    kind = skeleton["kind"]
    body = skeleton["value"]
    match kind:
        case "dict":
            return dict(_pairs(body, tensors))
        case "tuple":
            return tuple(unflatten(body, tensors))
        case "tensor":
            return _restored(tensors[body], dtype_of(skeleton["dtype"]), skeleton["shape"])
        case "float":
            return struct.unpack("<d", bytes.fromhex(body))[0]
        case "bytes":
            return base64.b64decode(body)
        case "ordered_dict":
            ordered = OrderedDict(_pairs(body, tensors))
            if skeleton["metadata"] is not None:
                torch_internals.set_layer_versions(ordered, unflatten(skeleton["metadata"], tensors))
            return ordered
        case "counter":
            return Counter(dict(_pairs(body, tensors)))
        case "defaultdict":
            factory = skeleton["factory"]
            return defaultdict(None if factory is None else _FACTORIES[factory], _pairs(body, tensors))
        case "deque":
            return deque(unflatten(body, tensors), skeleton["maxlen"])
        case "ndarray":
            dtype = np.dtype(skeleton["dtype"])
            stored = tensors[body]
            if stored.is_meta:
                return np.broadcast_to(np.zeros((), dtype), skeleton["shape"])
            return ravel(stored.cpu()).view(torch.uint8).numpy().view(dtype).reshape(skeleton["shape"])
        case "numpy_scalar":
            return np.frombuffer(base64.b64decode(body), np.dtype(skeleton["dtype"]))[0]
        case "torch_dtype":
            return dtype_of(body)
        case "torch_device":
            return torch.device(body)
        case "torch_size":
            return torch.Size(body)
        case _:
            raise ValueError(f"unknown kind of value: {kind}")


def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor as a full tensor, and any other tensor itself. Collective."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a DTensor, and any other tensor itself. The shard shares memory with the tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def ravel(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements in one dimension with stride 1, so that they can be viewed as another dtype.

    A contiguous tensor is not copied, unless it is lazily conjugated or negated.
    """
    contiguous = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor with one element counts as contiguous whatever its strides are, and torch.ravel keeps them.
    return contiguous.as_strided((contiguous.numel(),), (1,))


def weights_sha256(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Returns the SHA-256 of names, dtypes, shapes and bits, in the order given; the same on every device and machine.

    For each tensor, the hash covers the length and the text of its name and of its dtype, the number of dimensions, the
    dimensions, and the little-endian bytes in row-major order. All numbers are 8 bytes, little-endian.
    """
    digest = hashlib.sha256(b"elastic_ddp weights 1\n")
    for name, tensor in named_tensors:
        for text in (name.encode(), dtype_name(tensor.dtype).encode()):
            digest.update(struct.pack("<Q", len(text)) + text)
        digest.update(struct.pack(f"<Q{tensor.dim()}Q", tensor.dim(), *tensor.shape))
        flat = ravel(tensor.detach().cpu())
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


class _Flattener:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._by_pointer: dict[int, list[tuple[torch.Tensor, str]]] = {}
        """Tensors and their names, by data pointer."""
        self._open: set[int] = set()

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            # JSON has no infinities, and NaNs have different bits.
            return value if math.isfinite(value) else {"kind": "float", "value": struct.pack("<d", value).hex()}
        if kind is bytes:
            return {"kind": "bytes", "value": _base64(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, torch.dtype):
            return {"kind": "torch_dtype", "value": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"kind": "torch_device", "value": str(value)}
        if isinstance(value, torch.Size):
            return {"kind": "torch_size", "value": [int(length) for length in value]}
        if isinstance(value, np.ndarray | np.generic):
            return self._numpy(value, path)
        return self._container(value, path)

    def _container(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind not in (list, tuple, dict, OrderedDict, Counter, defaultdict, deque):
            raise _refusal(value, path)
        if id(value) in self._open:
            raise CheckpointError(f"{_dotted(path)} contains itself. A state is a tree: remove the loop.")
        if len(path) >= _MAX_DEPTH:
            raise CheckpointError(f"{_dotted(path)} is nested deeper than {_MAX_DEPTH} levels. Flatten the state.")
        name = "ordered_dict" if kind is OrderedDict else kind.__name__.lower()
        self._open.add(id(value))
        try:
            if kind in (list, tuple, deque):
                items = [self.encode(item, (*path, index)) for index, item in enumerate(value)]
                if kind is list:
                    return items
                return {"kind": name, "value": items} | ({"maxlen": value.maxlen} if kind is deque else {})
            pairs = [
                [key if type(key) is str else self._key(key, path), self.encode(item, (*path, key))]
                for key, item in value.items()
            ]
            node: dict[str, Any] = {"kind": name, "value": pairs}
            if kind is defaultdict:
                node["factory"] = self._factory(value, path)
            if kind is OrderedDict:  # a module's state_dict carries the versions of its layers in an attribute
                node["metadata"] = self.encode(torch_internals.layer_versions(value), (*path, "_metadata"))
            return node
        finally:
            self._open.discard(id(value))

    def _key(self, key: Any, path: tuple[Any, ...]) -> Any:
        if type(key) is tuple:
            return {"kind": "tuple", "value": [self._key(part, path) for part in key]}
        if key is None or type(key) in (bool, int, float, str, bytes):
            return self.encode(key, path)
        raise CheckpointError(
            f"{_dotted(path)} has a key of type {type(key).__name__}: {key!r:.80}. Keys can be str, int, float, bool, "
            "None, bytes, or tuples of these."
        )

    def _factory(self, value: defaultdict[Any, Any], path: tuple[Any, ...]) -> str | None:
        factory = value.default_factory
        for name, known in _FACTORIES.items():
            if factory is known:
                return name
        if factory is None:
            return None
        raise CheckpointError(
            f"{_dotted(path)}: a defaultdict of {factory!r} cannot be saved without pickle. Use a dict or a factory of "
            f"{', '.join(_FACTORIES)}."
        )

    def _numpy(self, value: np.ndarray[Any, Any] | np.generic, path: tuple[Any, ...]) -> Any:
        allowed = _NUMPY_SCALARS if isinstance(value, np.generic) else _NUMPY_ARRAYS
        if value.dtype.kind not in allowed or not (isinstance(value, np.generic) or type(value) is np.ndarray):
            raise _refusal(value, path, f" of dtype {value.dtype}")
        if isinstance(value, np.generic):
            return {"kind": "numpy_scalar", "value": _base64(value.tobytes()), "dtype": value.dtype.str}
        raw = _bytes_of(value) if value.nbytes else torch.empty(0, dtype=torch.uint8)
        return {"kind": "ndarray", "value": self._add(raw, path), "dtype": value.dtype.str, "shape": list(value.shape)}

    def _tensor(self, value: torch.Tensor, path: tuple[Any, ...]) -> Any:
        is_plain = type(value) in _PLAIN_TENSORS or is_dtensor(value)
        if not is_plain or value.layout is not torch.strided or value.is_quantized or value.is_meta:
            reason = "has no data" if value.is_meta else "is not a plain dense tensor"
            raise CheckpointError(
                f"{_dotted(path)}: this {type(value).__name__} ({value.layout}, {value.dtype}, on {value.device}) "
                f"{reason}. Save its values as a dense tensor."
            )
        # Aliases (tied weights) are stored once. Comparing only tensors with the same data pointer is fast.
        local = local_part(value)
        candidates = self._by_pointer.setdefault(local.data_ptr(), []) if local.numel() else []
        name = next((name for other, name in candidates if _are_aliases(other, value)), None)
        if name is None:
            is_bare = type(value) is torch.Tensor and not value.requires_grad
            detached = value if is_bare else value.detach()
            is_as_stored = not (value.is_conj() or value.is_neg())
            name = self._add(detached if is_as_stored else detached.resolve_conj().resolve_neg(), path)
            candidates.append((value, name))
        return {"kind": "tensor", "value": name, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}

    def _add(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        name = ".".join([key if type(key) is str and key.isprintable() else ascii(key) for key in path]) or "value"
        # safetensors files reserve `__metadata__`.
        while name in self.tensors or name == "__metadata__":
            name += "~"
        self.tensors[name] = tensor
        return name


def _are_aliases(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether tensors with the same data pointer are the same tensor."""
    views = [
        (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        for tensor in (first, second)
    ]
    return views[0] == views[1]


def _pairs(body: list[list[Any]], tensors: dict[str, torch.Tensor]) -> list[tuple[Any, Any]]:
    return [(unflatten(key, tensors), unflatten(item, tensors)) for key, item in body]


def _restored(tensor: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if tensor.dtype != dtype:  # raw bytes
        tensor = tensor.reshape(-1).view(dtype) if tensor.numel() else torch.empty(0, dtype=dtype)
    return tensor if list(tensor.shape) == shape else tensor.reshape(shape)


def _refusal(value: Any, path: tuple[Any, ...], detail: str = "") -> CheckpointError:
    kind = type(value).__name__
    article = "an" if kind[:1].lower() in tuple("aeiou") else "a"
    if isinstance(value, set | frozenset):
        fix = "Save a sorted list."
    elif isinstance(value, torch.Generator):
        fix = "Save its get_state(), a tensor."
    elif isinstance(value, np.ndarray | np.generic):
        fix = "Save an array of numbers, strings or dates."
    elif callable(value):
        fix = "Leave it out and build it again when the run resumes."
    else:
        fix = "Give it a state_dict() of plain values, tensors and arrays, or leave it out."
    return CheckpointError(f"{_dotted(path)}: {article} {kind}{detail} cannot be saved without pickle. {fix}")


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(key if type(key) is str else repr(key) for key in path) or "the state"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without its module, for example `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype with this name, for example `float32`. Raises CheckpointError if this torch has none."""
    if name not in _DTYPES:
        raise CheckpointError(f"the checkpoint has tensors of dtype {name}, which torch {torch.__version__} lacks")
    return _DTYPES[name]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Returns the array's bytes, copied only if it is not contiguous or is read-only, which torch does not support."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy((array if array.flags.writeable else array.copy()).reshape(-1).view(np.uint8))
