"""Commits with valid checksums that were crafted to harm the process that restores them."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zlib_ng import zlib_ng

from elastic_ddp.checkpoint import reader
from elastic_ddp.checkpoint.manifest import MAX_BLOCK_BYTES, Commit
from elastic_ddp.checkpoint.pieces import pieces_of
from elastic_ddp.checkpoint.planning import BLOCK_BYTES
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors import host_memory
from elastic_ddp.tensors.state_tree import unflatten
from elastic_ddp.worker.pretrained import _meta_weights
from elastic_ddp.worker.restore import restore
from tests.ranks import run_ranks, single_rank_group
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import make_state, restored_step, save, step_of
from tests.unit.crafted_commits import NAMES_NOTHING, in_little_memory, limit_memory, plant, plant_sparse

MANY = 1 << 20
TENSORS = {"model.w": torch.zeros(MANY, dtype=torch.uint8), "model.none": torch.empty(0), "model.one": torch.ones(1)}


def of(name: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "tensor", "value": name, "dtype": "float32", "shape": [0], **fields}


def array(name: str, dtype: Any, shape: Any) -> dict[str, Any]:
    return {"kind": "ndarray", "value": name, "dtype": dtype, "shape": shape}


W = of("w", dtype="uint8", shape=[MANY])
NODES: dict[str, Any] = {
    "an absurd shape of nothing": of("none", shape=[2**62, 2**62, 0]),
    "a shape that overflows": of("none", shape=[0, 2**70]),
    "a shape that is none": of("one", shape="ab"),
    "a shape of something else": of("one", shape=[2**40]),
    "an array of an absurd shape": array("none", "<f4", [0, 2**40, 2**40]),
    "an array of absurd strings": array("none", "U1000000000", [1]),
    "an array of objects": array("w", "O", [MANY // 8]),
    "an array of arrays": array("w", "(1000000,1000000)f4", [0]),
    "an array of a record": array("none", {"names": ["a"], "formats": ["f4"], "itemsize": 2**31 - 1}, [0]),
    "an array of no dtype": array("none", None, [0]),
    "a tuple of all items of a tensor": {"kind": "tuple", "value": W},
    "a deque of all items of a tensor": {"kind": "deque", "value": W, "maxlen": None},
    "a deque of absurd length": {"kind": "deque", "value": [], "maxlen": 2**80},
    "a dict of all items of a tensor": {"kind": "dict", "value": of("w", dtype="uint8", shape=[MANY // 2, 2])},
    "a module of torch": {"kind": "torch_dtype", "value": "_inductor"},
    "a function of torch": of("one", dtype="load", shape=[1]),
    "a device that is none": {"kind": "torch_device", "value": "cuda:99999999999999"},
    "a size that is none": {"kind": "torch_size", "value": {"kind": "list", "value": [1]}},
    "a factory that runs code": {"kind": "defaultdict", "value": [], "factory": "eval"},
    "a pickle": {"kind": "pickle", "value": "gASVIQ=="},
}


def skeleton_of(node: Any) -> bytes:
    return json.dumps({"model": {"kind": "dict", "value": [["x", node]]}}).encode()


SKELETONS = {
    **{name: skeleton_of(node) for name, node in NODES.items()},
    "no text": b'{"model": "\xff\xfe"}',
    "nothing": b"",
    "a list": b"[{}]",
    "deep JSON": b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep tuples": b'{"model": ' + b'{"kind": "tuple", "value": [' * 500 + b"]}" * 500 + b"}",
    "a number of too many digits": b'{"model": ' + b"9" * 100_000 + b"}",
}


def restored_with(uri: str, group: ProcessGroup) -> tuple[int | None, list[str]]:
    """The step that a rank restores, and the rejected commits."""
    store = SingleRankStore(Storage(uri), keep=2)
    restored = restore(store, Storage(uri), group)
    return None if restored is None else step_of(restored[1]), [key for key, _ in store.rejected]


def restore_all(group: ProcessGroup, uris: list[str]) -> list[tuple[int | None, list[str]]]:
    return [restored_with(uri, group) for uri in uris]


def test_all_ranks_reject_a_crafted_skeleton(tmp_path: Path) -> None:
    names = ["an absurd shape of nothing", "a module of torch", "no text", "nothing", "deep JSON", "deep tuples"]
    uris = [str(tmp_path / name.replace(" ", "-")) for name in names]
    for uri, name in zip(uris, names, strict=True):
        save(Storage(uri), 1)
        plant(Storage(uri), 2, SKELETONS[name], TENSORS)
    first, second = run_ranks(2, restore_all, uris)
    assert first == [(1, ["commits/2.json"])] * len(names) and second == [(1, [])] * len(names)


def test_a_skeleton_in_another_encoding_is_rejected(tmp_path: Path) -> None:
    """Given bytes, json detects UTF-16."""
    storage = Storage(tmp_path)
    [_, newest] = save(storage, 1, 2)
    text = storage.read(newest.state.key).decode().encode("utf-16")
    storage.write(newest.state.key, text)
    state = newest.state.model_copy(update={"size": len(text), "crc32": zlib_ng.crc32(text)})
    storage.write(newest.key, newest.model_copy(update={"state": state}).to_bytes())
    assert restored_with(str(tmp_path), single_rank_group()) == (1, [newest.key])


def steps_used() -> dict[str, int | None]:
    """Which of two commits is restored, by the skeleton of the newer one."""
    steps = {}
    for name, skeleton in SKELETONS.items():
        storage = Storage(f"memory://{uuid.uuid4().hex}")
        save(storage, 1)
        plant(storage, 2, skeleton, TENSORS)
        steps[name] = restored_step(storage)
    return steps


def test_a_crafted_skeleton_is_rejected_in_little_memory() -> None:
    steps, used = in_little_memory(steps_used, more_bytes=2**30)
    assert steps == dict.fromkeys(SKELETONS, 1) and used < 100 << 20


def arrays_of_one_tensor() -> int:
    nodes = [array("w", "|u1", [MANY])] * 2000
    return len(unflatten(nodes, {"w": TENSORS["model.w"]}))


def test_a_tensor_that_a_skeleton_names_many_times_takes_memory_once() -> None:
    count, used = in_little_memory(arrays_of_one_tensor, more_bytes=2**30)
    assert count == 2000 and used < 48 << 20


# Sizes.


def refusal(group: ProcessGroup, uri: str) -> str:
    """The error of a rank that has too little memory for the newest commit."""
    before = Storage(uri).list()
    with pytest.raises(ConfigError) as caught:
        restored_with(uri, group)
    assert Storage(uri).list() == before, "the commit may be good"
    return str(caught.value)


def test_a_commit_larger_than_the_memory_is_refused_and_stays(tmp_path: Path) -> None:
    num_blocks = reader.MEMORY_BYTES // MAX_BLOCK_BYTES
    for name, tensors in {
        "one tensor": {"model.w": (num_blocks + 1, MAX_BLOCK_BYTES)},
        "several tensors together": {f"model.{n}": (num_blocks // 3 + 1, MAX_BLOCK_BYTES) for n in range(3)},
    }.items():
        folder = tmp_path / name.replace(" ", "-")
        save(Storage(folder), 1)
        plant_sparse(folder, 2, tensors)
        assert "commits/2.json needs" in refusal(single_rank_group(), str(folder))


def used_and_verified(uri: str) -> tuple[int, list[str]]:
    """The step that is restored, and the errors of `verify` for all commits."""
    store = SingleRankStore(Storage(uri), keep=2)
    errors = []
    for _, commit in store.all_commits():
        try:
            if isinstance(commit, CheckpointError):
                raise commit
            store.verify(commit)
        except CheckpointError as error:
            errors.append(str(error))
    loaded = store.load_latest()
    assert loaded is not None
    return loaded[0].step, errors


@pytest.mark.parametrize("size", [MAX_BLOCK_BYTES + 16, 3 << 29, 2**43])
def test_a_block_larger_than_the_limit_is_never_read(tmp_path: Path, size: int) -> None:
    assert MAX_BLOCK_BYTES >= BLOCK_BYTES
    save(Storage(tmp_path), 1)
    plant_sparse(tmp_path, 2, {"model.w": (1, size)})
    (step, errors), used = in_little_memory(used_and_verified, str(tmp_path), more_bytes=2**31)
    assert step == 1 and len(errors) == 1
    assert f"a block has {size} bytes; the limit is {MAX_BLOCK_BYTES}" in errors[0]
    assert used < 100 << 20


def test_a_restore_that_needs_more_memory_than_there_is_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SingleRankStore(Storage(tmp_path), keep=2)
    for step in (1, 2):
        store.save({"model": torch.zeros(1000 * step)}, step=step, record={})
    monkeypatch.setattr(reader, "MEMORY_BYTES", 2 * 8000 - 1)  # the tensor, and its bytes as they are read
    with pytest.raises(
        ConfigError, match=r"commits/2.json needs 16000 bytes of memory on .* has 15999 bytes.*more memory"
    ):
        store.load_latest()
    assert not store.rejected


def test_a_failed_allocation_does_not_reject_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(Storage(tmp_path), 1)
    monkeypatch.setattr(host_memory, "Memory", Mock(side_effect=MemoryError("unable to allocate 34.0 MiB")))
    store = SingleRankStore(Storage(tmp_path), keep=2)
    with pytest.raises(ConfigError, match=r"commits/1.json needs .* unable to allocate 34.0 MiB.*more memory"):
        store.load_latest()
    assert not store.rejected


def test_a_commit_with_impossible_shapes_is_rejected(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    save(storage, 1)
    commit = plant(storage, 2, NAMES_NOTHING, {"model.w": torch.empty(0, 1, 1)})
    body = json.loads(commit.model_dump_json())
    tensor = body["tensors"]["model.w"]
    tensor["shape"] = [2**48, 2**48, 0]
    for block in tensor["blocks"]:
        block["sizes"] = tensor["shape"]
    storage.write(commit.key, Commit.model_validate_json(json.dumps(body)).to_bytes())
    store = SingleRankStore(storage, keep=2)
    loaded = store.load_latest()
    assert loaded is not None and loaded[0].step == 1
    assert "commits/2.json lists tensors that cannot exist" in store.rejected[0][1]


def restore_in_little_memory(group: ProcessGroup, uri: str, poor: int) -> str:
    if group.rank == poor:
        limit_memory(1 << 30)
    return refusal(group, uri)


@pytest.mark.parametrize("poor", [0, 1])
def test_all_ranks_refuse_what_one_rank_has_too_little_memory_for(tmp_path: Path, poor: int) -> None:
    save(Storage(tmp_path), 1)
    plant_sparse(tmp_path, 2, {"model.w": (128, 16 << 20)})
    first, second = run_ranks(2, restore_in_little_memory, str(tmp_path), poor)
    assert first == second and "commits/2.json needs" in first


# Arbitrary skeletons.

TEXT = st.text("ab0.[~\x00é\ud800\U0001f600", max_size=4)
"""A strategy for all of Unicode builds a table of 200 MB first."""
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), TEXT,
    st.sampled_from(["weight", "bias", "state.0.exp_avg", "complex", "__metadata__"]),
    st.sampled_from(["float32", "uint8", "_dynamo", "load", "<f8", "|u1", "O", "U9", "<M8[ns]"]),
    st.sampled_from(["list", "eval", "cuda:7"]),
    st.sampled_from([8, 16, 2**31, 2**40, 2**62, -1]),
)  # fmt: skip
KINDS = [
    "dict", "tuple", "tensor", "float", "bytes", "ordered_dict", "counter", "defaultdict", "deque", "ndarray",
    "numpy_scalar", "torch_dtype", "torch_device", "torch_size",
]  # fmt: skip
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(st.tuples(inner, inner), max_size=3),
        st.dictionaries(TEXT, inner, max_size=3),
        st.fixed_dictionaries(
            {"kind": st.sampled_from(KINDS), "value": inner},
            optional={"dtype": inner, "shape": inner, "maxlen": inner, "factory": inner, "metadata": inner},
        ),
    ),
    max_leaves=12,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to everything in a tree of JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(below for key, child in inner for below in paths(child, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], other)
    return copy


def _within_tensors(skeleton: Any) -> list[tuple[Any, ...]]:
    return [path for path in paths(skeleton) if {"shape", "dtype"} & {*path}]


def restore_anything() -> None:
    """Replaces a part of the skeleton of a real state, and restores."""
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    store = SingleRankStore(storage, keep=9)
    real = store.save(make_state(2), step=2, record={})
    tensors, targets = reader.allocate_state(real)
    for _ in reader.read_pieces(storage, pieces_of(real, tensors), targets):
        pass
    skeleton = json.loads(store.skeleton(real))
    either = st.one_of(*(st.sampled_from(group) for group in (paths(skeleton), _within_tensors(skeleton))))

    @settings(max_examples=400, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(either, ANYTHING, st.randoms(use_true_random=False))
    def fuzz(path: tuple[Any, ...], value: Any, random: Any) -> None:
        text = json.dumps(changed(skeleton, path, value))
        if random.random() < 0.1:
            text = text[: random.randrange(len(text))]
        try:
            reader.build_state(real, text.encode(), tensors)
        except CheckpointError:
            pass
        except BaseException as error:  # hypothesis shows the example
            raise AssertionError(text) from error

    fuzz()
    with pytest.raises(CheckpointError, match="is not a state"):
        reader.build_state(real, b"[1]", tensors)


def test_any_skeleton_is_a_state_or_a_checkpoint_error_in_little_memory() -> None:
    _, used = in_little_memory(restore_anything, more_bytes=2**30)
    assert used < 200 << 20


# Pretrained weights.


@pytest.mark.parametrize("node", [[1], {"kind": "dict", "value": [[1, 2], ["a", 3]]}, "text", None], ids=str)
def test_a_state_that_is_not_a_models_weights_is_refused(tmp_path: Path, node: Any) -> None:
    skeleton = json.dumps({"model": node}).encode()
    commit = plant(Storage(tmp_path), 2, skeleton, {"model.w": torch.zeros(16)})
    with pytest.raises(CheckpointError, match="does not hold the weights of a model"):
        _meta_weights(commit, skeleton)
