"""Trees of state split into a skeleton and tensors, and rebuilt."""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from elastic_ddp.errors import CheckpointError
from elastic_ddp.tensors.state_tree import flatten, unflatten, weights_sha256

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def round_trip(state: Any) -> Any:
    skeleton, tensors = flatten(state)
    # JSON may reorder the objects of the skeleton.
    return unflatten(json.loads(json.dumps(skeleton, sort_keys=True, allow_nan=False)), tensors)


def same(left: Any, right: Any) -> bool:
    """Whether two trees have equal types and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and _raw(left) == _raw(right)
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True) if len(left) == len(right) else [((0, 0), (1, 1))]
        extra = getattr(left, "default_factory", None) is getattr(right, "default_factory", None)
        return extra and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(left, list | tuple | deque):
        extra = getattr(left, "maxlen", None) == getattr(right, "maxlen", None)
        return extra and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    raw = draw(st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    return tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor


ARRAYS = npst.arrays(
    st.one_of(
        npst.boolean_dtypes(), npst.integer_dtypes(), npst.unsigned_integer_dtypes(), npst.floating_dtypes(),
        npst.complex_number_dtypes(), npst.datetime64_dtypes(), npst.unicode_string_dtypes(), npst.byte_string_dtypes(),
    ),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=8),
    st.sampled_from([*DTYPES, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 0]), torch.Size([])]),
    st.sampled_from([np.float32("nan"), np.int64(-3), np.bool_(True), np.float64(-0.0), np.complex64(1j)]),
)  # fmt: skip
KEYS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=6), st.binary(max_size=4), st.floats()),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
TREES = st.recursive(
    st.one_of(SCALARS, tensors(), ARRAYS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.dictionaries(KEYS, inner, max_size=3).map(lambda items: defaultdict(list, items)),
        st.lists(inner, max_size=4).map(lambda items: deque(items, 5)),
        st.text("abc", max_size=5).map(Counter),
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(TREES)
def test_every_tree_of_plain_values_round_trips_bit_for_bit(tree: Any) -> None:
    assert same(round_trip(tree), tree)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_can_be_rebuilt_from_raw_bytes(dtype: torch.dtype) -> None:
    state = {
        "a": torch.ones(3, 2).to(dtype),
        "scalar": torch.ones(()).to(dtype),
        "empty": torch.empty(0, 2, dtype=dtype),
    }
    skeleton, found = flatten(state)
    raw = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in found.items()}
    assert same(unflatten(skeleton, raw), state)


def test_the_state_of_a_training_loop_round_trips_and_loads() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3])
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "random": [random.getstate(), np.random.get_state(), torch.get_rng_state()],
    }
    restored = round_trip(state)
    assert same(restored, state)
    assert restored["model"]._metadata == state["model"]._metadata
    assert list(restored["optimizer"]["state"]) == [0, 1, 2, 3]
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    other.load_state_dict(restored["model"])
    torch.optim.AdamW(other.parameters()).load_state_dict(restored["optimizer"])
    torch.optim.lr_scheduler.MultiStepLR(optimizer, [1]).load_state_dict(restored["schedule"])
    random.setstate(restored["random"][0])
    np.random.set_state(restored["random"][1])
    torch.set_rng_state(restored["random"][2])
    assert weights_sha256(other.state_dict().items()) == weights_sha256(model.state_dict().items())


def test_tensors_are_named_by_their_path_and_names_never_collide() -> None:
    one = torch.ones(1)
    state = {"a": {"b": one, 0: [one + 1, one + 2]}, "a.b": one + 3, "__metadata__": one + 4, "\n": one + 5}
    _, found = flatten(state)
    assert list(found) == ["a.b", "a.0.0", "a.0.1", "a.b~", "__metadata__~", "'\\n'"]
    assert same(round_trip(state), state)
    assert list(flatten(one)[1]) == ["value"]


def test_tied_weights_are_stored_once_and_views_of_one_buffer_separately() -> None:
    buffer = torch.arange(10.0)
    weight = torch.nn.Parameter(torch.ones(2, 3))
    state = {
        "embedding": weight,
        "head": weight,
        "low": buffer[:6],
        "high": buffer[4:],
        "column": buffer.view(2, 5)[:, 1],
    }
    _, found = flatten(state)
    assert list(found) == ["embedding", "low", "high", "column"]
    assert not any(tensor.requires_grad for tensor in found.values())
    assert found["low"].data_ptr() == buffer.data_ptr()
    assert found["column"].data_ptr() == buffer[1:].data_ptr(), "strided views are not copied"
    restored = round_trip(state)
    assert restored["embedding"] is not weight and torch.equal(restored["head"], weight)
    assert restored["column"].tolist() == [1.0, 6.0]


class _Plain:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.Generator(), r"user\.sampler\.0: a Generator cannot be saved without pickle.*get_state"),
        (_Plain(), r"user\.sampler\.0: a _Plain cannot be saved without pickle.*state_dict"),
        ({1, 2}, r"user\.sampler\.0: a set .*sorted list"),
        (print, r"user\.sampler\.0: a builtin_function_or_method .*build it again"),
        (np.array([object()]), r"user\.sampler\.0: a ndarray of dtype object"),
        (np.zeros(1, [("a", "i4")]), r"user\.sampler\.0: a ndarray of dtype"),
        (torch.ones(2).to_sparse(), r"user\.sampler\.0: .*not a plain dense tensor"),
        (torch.ones(2, device="meta"), r"user\.sampler\.0: .*has no data"),
        ({torch.ones(1): 1}, r"user\.sampler\.0 has a key of type Tensor"),
        (defaultdict(_Plain), r"user\.sampler\.0: a defaultdict of .*_Plain"),
        (np.random.default_rng(), r"user\.sampler\.0: a Generator"),
    ],
)
def test_a_value_that_needs_pickle_is_refused_with_its_path(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        flatten({"user": {"sampler": [value]}})


def test_loops_and_unlimited_depth_are_refused() -> None:
    loop: dict[str, Any] = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(CheckpointError, match=r"a\.0 contains itself"):
        flatten(loop)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="nested deeper"):
        flatten(deep)
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]


def test_the_deepest_allowed_state_round_trips_deep_in_a_call_stack() -> None:
    deep: Any = 7
    for _ in range(50):
        deep = {"in": [deep]}

    def round_trip_at(depth: int) -> Any:
        return round_trip_at(depth - 1) if depth else round_trip(deep)

    assert round_trip_at(400) == deep
    with pytest.raises(CheckpointError, match="nested deeper than 100 levels"):
        flatten([deep])


@pytest.mark.parametrize(
    "skeleton",
    [
        {"kind": "pickle", "value": "gASVIQ=="},
        {"kind": "defaultdict", "value": [], "factory": "eval"},
        {"kind": "numpy_scalar", "value": "AAAAAAAAAAA=", "dtype": "O"},
        {"kind": "torch_dtype", "value": "load"},
    ],
)
def test_a_skeleton_cannot_name_code_to_run(skeleton: Any) -> None:
    with pytest.raises((CheckpointError, KeyError, ValueError)):
        unflatten(skeleton, {})


def test_the_hash_of_weights_covers_the_documented_bytes() -> None:
    weights = [
        ("a", torch.tensor([[1.0, -2.0]])),
        ("é", torch.tensor(3)),
        ("c", torch.ones(0, 2, dtype=torch.bfloat16)),
    ]
    framed = b"elastic_ddp weights 1\n"
    framed += struct.pack("<Q1sQ7sQQQ2f", 1, b"a", 7, b"float32", 2, 1, 2, 1.0, -2.0)
    framed += struct.pack("<Q2sQ5sQq", 2, "é".encode(), 5, b"int64", 0, 3)
    framed += struct.pack("<Q1sQ8sQQQ", 1, b"c", 8, b"bfloat16", 2, 0, 2)
    assert weights_sha256(weights) == hashlib.sha256(framed).hexdigest()


def test_the_hash_depends_on_names_dtypes_shapes_order_and_bits_not_on_strides() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    variants = [
        [("w", base)],
        [("v", base)],
        [("w", base.reshape(3, 2))],
        [("w", base.double())],
        [("w", base.view(torch.int32))],
        [("w", base), ("x", base)],
        [("x", base), ("w", base)],
        [("w", torch.cat([base[:1], -base[1:]]))],
        [("w", base[:1]), ("", base[1:])],
    ]
    assert len({weights_sha256(variant) for variant in variants}) == len(variants)
    assert weights_sha256([("w", torch.tensor([0.0]))]) != weights_sha256([("w", torch.tensor([-0.0]))])
    strided = base.t().contiguous().t()
    assert not strided.is_contiguous()
    assert weights_sha256([("w", strided)]) == weights_sha256([("w", torch.nn.Parameter(base))])
    assert weights_sha256([("w", base[:1, 1])]) == weights_sha256([("w", torch.ones(1))])
