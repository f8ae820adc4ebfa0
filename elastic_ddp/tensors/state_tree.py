"""A tree of state as JSON and tensors, without pickle: what checkpoints store and ranks send to each other."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from elastic_ddp import torch_internals
from elastic_ddp.errors import CheckpointError, format_exception

Layout = Callable[[str], torch.Tensor | None]
"""From a tensor's name in a commit to one that is spread over the ranks in the same way; None if it is whole."""

_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_NUMPY_SCALARS = "biufcmM"
_NUMPY_ARRAYS = "biufcmMSU"
_FACTORIES: dict[str, Callable[[], Any]] = {
    factory.__name__: factory for factory in (bool, bytes, dict, float, int, list, str, tuple)
}
_MAX_DEPTH = 100
"""Three calls each, of the thousand that Python allows, to take a state apart and to put it together again."""
_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_NUMPY_DTYPE = re.compile(rf"[<>|=]?[{_NUMPY_ARRAYS}][0-9]+(\[[0-9]*[a-zA-Z]+\])?")


def flatten(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a tree of plain values and tensors into a skeleton and its tensors.

    The tree may hold dicts (with str, int, float, bool, None, bytes or tuple keys), lists, tuples, OrderedDicts,
    Counters, deques, defaultdicts of builtin types, None, bool, int, float, str, bytes, tensors, numpy arrays and
    scalars, `torch.dtype`, `torch.Size` and `torch.device`; values of other types are refused rather than guessed
    at.

    Returns:
        The skeleton, made only of what `json.dumps` takes, and the tensors by their place in the tree, such as
        `layers.0.weight`. Tensors are detached, and share memory with the state: they are on the device where they
        were, and need not be contiguous. A tensor that is in the tree twice is returned once, and a DTensor stays one.

    Raises:
        CheckpointError: names the place of a value that cannot be kept without pickle.
    """
    flattener = _Flattener()
    return flattener.encode(state, ()), flattener.tensors


def unflatten(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The state that `flatten` took apart, with these tensors in it; numpy arrays share memory with those on the CPU.

    Tensors may come as raw bytes (uint8) or from another device. Nothing but plain values is built, whatever the
    skeleton holds, and nothing larger than skeleton and tensors are.

    Raises:
        CheckpointError: the skeleton is not one that `flatten` makes, or does not fit the tensors.
    """
    try:
        return _decode(skeleton, tensors, 0)
    except (
        AttributeError, LookupError, MemoryError, OverflowError, RuntimeError, TypeError, ValueError, struct.error
    ) as error:  # fmt: skip
        what = format_exception(error).partition("\n")[0]  # torch's go on with a trace of C++
        raise CheckpointError(f"this skeleton of a state cannot be read: {what}") from error


def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that ranks may have shards of, put together. Every rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in one dimension, which can be viewed as any other dtype; in the same memory if it is contiguous."""
    contiguous = tensor.detach().contiguous()
    # One of a single element is, whatever its strides are, and keeps them.
    return contiguous.as_strided((contiguous.numel(),), (1,))


def weights_sha256(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A hash of names, dtypes, shapes and bits, in the order given; the same on every device and machine.

    Each tensor is framed as the lengths and the text of name and dtype, the number of dimensions, the dimensions,
    and the little-endian bytes in row-major order; all numbers are 8 bytes, little-endian.
    """
    digest = hashlib.sha256(b"elastic_ddp weights 1\n")
    for name, tensor in named_tensors:
        for text in (name.encode(), dtype_name(tensor.dtype).encode()):
            digest.update(struct.pack("<Q", len(text)) + text)
        digest.update(struct.pack(f"<Q{tensor.dim()}Q", tensor.dim(), *tensor.shape))
        digest.update(_little_endian(tensor))
    return digest.hexdigest()


class _Flattener:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._at: dict[int, list[tuple[torch.Tensor, str]]] = {}
        """Tensors by where they start, with their names."""
        self._open: set[int] = set()

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            # JSON has no infinities, and NaNs differ in their bits.
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
            raise CheckpointError(f"{_place(path)} contains itself; a state is a tree, take the loop out of it")
        if len(path) >= _MAX_DEPTH:
            raise CheckpointError(f"{_place(path)} is nested deeper than {_MAX_DEPTH} levels; flatten the state")
        self._open.add(id(value))
        try:
            if kind is list:
                return self._items(value, path)
            if kind is tuple:
                return {"kind": "tuple", "value": self._items(value, path)}
            if kind is deque:
                return {"kind": "deque", "value": self._items(value, path), "maxlen": value.maxlen}
            pairs = [
                [key if type(key) is str else self._key(key, path, len(path)), self.encode(item, (*path, key))]
                for key, item in value.items()
            ]
            if kind is dict:
                return {"kind": "dict", "value": pairs}
            if kind is Counter:
                return {"kind": "counter", "value": pairs}
            if kind is defaultdict:
                return {"kind": "defaultdict", "value": pairs, "factory": self._factory(value, path)}
            # A module's state_dict carries the versions of its layers in this attribute.
            metadata = self.encode(torch_internals.layer_versions(value), (*path, "_metadata"))
            return {"kind": "ordered_dict", "value": pairs, "metadata": metadata}
        finally:
            self._open.discard(id(value))

    def _items(self, values: Iterable[Any], path: tuple[Any, ...]) -> list[Any]:
        return [self.encode(item, (*path, index)) for index, item in enumerate(values)]

    def _key(self, key: Any, path: tuple[Any, ...], depth: int) -> Any:
        if depth >= _MAX_DEPTH:
            raise CheckpointError(f"{_place(path)} has a key that is nested too deeply; flatten it")
        if type(key) is tuple:
            return {"kind": "tuple", "value": [self._key(part, path, depth + 1) for part in key]}
        if key is None or type(key) in (bool, int, float, str, bytes):
            return self.encode(key, path)
        raise CheckpointError(
            f"{_place(path)} has a key of type {type(key).__name__}: {key!r:.80}; keys can be str, int, float, bool, "
            "None, bytes or tuples of these"
        )

    def _factory(self, value: defaultdict[Any, Any], path: tuple[Any, ...]) -> str | None:
        factory = value.default_factory
        for name, known in _FACTORIES.items():
            if factory is known:
                return name
        if factory is None:
            return None
        raise CheckpointError(
            f"{_place(path)}: a defaultdict of {factory!r} cannot be saved without pickle; give a dict, or one of "
            f"{', '.join(_FACTORIES)}"
        )

    def _numpy(self, value: np.ndarray[Any, Any] | np.generic, path: tuple[Any, ...]) -> Any:
        allowed = _NUMPY_SCALARS if isinstance(value, np.generic) else _NUMPY_ARRAYS
        if value.dtype.kind not in allowed or not (isinstance(value, np.generic) or type(value) is np.ndarray):
            raise _refusal(value, path, f" of dtype {value.dtype}")
        if isinstance(value, np.generic):
            return {"kind": "numpy_scalar", "value": _base64(value.tobytes()), "dtype": value.dtype.str}
        raw = _bytes_of(value) if value.nbytes else _no_bytes()
        return {"kind": "ndarray", "value": self._keep(raw, path), "dtype": value.dtype.str, "shape": list(value.shape)}

    def _tensor(self, value: torch.Tensor, path: tuple[Any, ...]) -> Any:
        is_plain = type(value) in _PLAIN_TENSORS or isinstance(value, DTensor)
        if not is_plain or value.layout is not torch.strided or value.is_quantized or value.is_meta:
            what = "has no data yet" if value.is_meta else "is not a plain dense tensor"
            raise CheckpointError(
                f"{_place(path)}: this {type(value).__name__} ({value.layout}, {value.dtype}, on {value.device}) "
                f"{what}; give its values as a dense tensor"
            )
        # Aliases (tied weights) are stored once. Few tensors start where another does: all but that is compared there.
        held = value.to_local() if isinstance(value, DTensor) else value
        here = self._at.setdefault(held.data_ptr(), []) if held.numel() else []
        name = next((name for other, name in here if _are_same(other, value)), None) if here else None
        if name is None:
            is_bare = type(value) is torch.Tensor and not value.requires_grad
            detached = value if is_bare else value.detach()
            is_as_stored = not (value.is_conj() or value.is_neg())
            name = self._keep(detached if is_as_stored else detached.resolve_conj().resolve_neg(), path)
            here.append((value, name))
        return {"kind": "tensor", "value": name, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}

    def _keep(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        name = ".".join([key if type(key) is str and key.isprintable() else ascii(key) for key in path]) or "value"
        # `__metadata__` belongs to the safetensors format.
        while name in self.tensors or name == "__metadata__":
            name += "~"
        self.tensors[name] = tensor
        return name


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors that start at the same place are one."""
    first, second = (
        (each.device, each.dtype, each.shape, each.stride(), each.is_conj(), each.is_neg()) for each in (one, other)
    )
    return first == second


def _decode(node: Any, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list):
        return _items(node, tensors, depth)
    kind, body = node["kind"], node["value"]
    match kind:
        case "dict":
            return dict(_pairs(body, tensors, depth))
        case "tuple":
            return tuple(_items(body, tensors, depth))
        case "tensor":
            return _restored(tensors[body], dtype_of(node["dtype"]), node["shape"])
        case "float":
            return struct.unpack("<d", bytes.fromhex(body))[0]
        case "bytes":
            return _bytes(body)
        case "ordered_dict":
            ordered = OrderedDict(_pairs(body, tensors, depth))
            if node["metadata"] is not None:
                torch_internals.set_layer_versions(ordered, _decode(node["metadata"], tensors, depth + 1))
            return ordered
        case "counter":
            return Counter(dict(_pairs(body, tensors, depth)))
        case "defaultdict":
            factory = node["factory"]
            return defaultdict(None if factory is None else _FACTORIES[factory], _pairs(body, tensors, depth))
        case "deque":
            return deque(_items(body, tensors, depth), node["maxlen"])
        case "ndarray":  # not copied: a skeleton may name a tensor again and again
            dtype, stored = _numpy_dtype(node["dtype"]), tensors[body]
            if dtype.itemsize * math.prod(node["shape"]) != stored.nbytes:
                raise ValueError(
                    f"an array of {stored.nbytes} bytes came where {dtype} {node['shape']!r:.80} was saved"
                )
            if stored.is_meta:  # there is nothing, where only names and shapes are looked at
                return np.broadcast_to(np.zeros((), dtype), node["shape"])
            return in_a_row(stored.cpu()).view(torch.uint8).numpy().view(dtype).reshape(node["shape"])
        case "numpy_scalar":
            return np.frombuffer(_bytes(body), _numpy_dtype(node["dtype"]))[0]
        case "torch_dtype":
            return dtype_of(body)
        case "torch_device":
            return torch.device(body)
        case "torch_size":
            return torch.Size(body)
        case _:
            raise ValueError(f"there is no kind of value called {kind!r:.80}")


def _items(body: Any, tensors: dict[str, torch.Tensor], depth: int) -> list[Any]:
    return [_decode(item, tensors, depth + 1) for item in _listed(body)]


def _pairs(body: Any, tensors: dict[str, torch.Tensor], depth: int) -> list[tuple[Any, Any]]:
    return [(_decode(key, tensors, depth + 1), _decode(item, tensors, depth + 1)) for key, item in _listed(body)]


def _listed(body: Any) -> list[Any]:
    """Not anything else that has items: a tensor has as many as it likes, each of them a tensor."""
    if not isinstance(body, list):
        raise TypeError(f"a {type(body).__name__} came where a list was saved")
    return body


def _restored(tensor: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if tensor.dtype != dtype:
        if tensor.dtype != torch.uint8:
            raise ValueError(f"a tensor of {tensor.dtype} came where {dtype} was saved")
        tensor = tensor.reshape(-1).view(dtype) if tensor.numel() else torch.empty(0, dtype=dtype)
    if list(tensor.shape) == shape:
        return tensor
    if tensor.dim() != 1:
        raise ValueError(f"a tensor of shape {list(tensor.shape)} came where {shape} was saved")
    return tensor.reshape(shape)


def _refusal(value: Any, path: tuple[Any, ...], detail: str = "") -> CheckpointError:
    kind = type(value).__name__
    article = "an" if kind[:1].lower() in tuple("aeiou") else "a"
    if isinstance(value, set | frozenset):
        hint = "give it as a sorted list"
    elif isinstance(value, torch.Generator):
        hint = "give its get_state(), a tensor"
    elif isinstance(value, np.ndarray | np.generic):
        hint = "give an array of numbers, strings or dates"
    elif callable(value):
        hint = "leave it out and build it again when the run resumes"
    else:
        hint = "give it state_dict() of plain values, tensors and arrays, or leave it out"
    return CheckpointError(f"{_place(path)}: {article} {kind}{detail} cannot be saved without pickle; {hint}")


def _place(path: tuple[Any, ...]) -> str:
    return ".".join(key if type(key) is str else repr(key) for key in path) or "the state"


def dtype_name(dtype: torch.dtype) -> str:
    """Without the module, as in `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name; ValueError if there is none."""
    if name not in _DTYPES:
        raise ValueError(f"{name!r:.80} is not a dtype")
    return _DTYPES[name]


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"{name!r:.80} is not a dtype that is kept")
    return np.dtype(name)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error


def _bytes_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Not copied where the array lies in one piece and may be written, as torch wants it."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy((array if array.flags.writeable else array.copy()).reshape(-1).view(np.uint8))


def _no_bytes() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _little_endian(tensor: torch.Tensor) -> memoryview:
    flat = in_a_row(tensor.detach().resolve_conj().resolve_neg().cpu())
    if not flat.numel():
        return memoryview(b"")
    raw: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
    if sys.byteorder == "big":
        width = flat.element_size() // (2 if flat.is_complex() else 1)
        raw = raw.reshape(-1, width)[:, ::-1].copy().reshape(-1)
    return raw.data
