"""Crafted manifests with valid checksums are refused, or read in bounded memory."""

from __future__ import annotations

import copy
import itertools
import json
import operator
import os
import tracemalloc
import uuid
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ddp.checkpoint import CommitCatalog, catalog, manifest
from elastic_ddp.checkpoint.manifest import ALIGNMENT, MAX_SKELETON_BYTES, Commit, StoredTensor
from elastic_ddp.cli import checkpoints
from elastic_ddp.errors import CheckpointError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.restore import restore
from tests.ranks import single_rank_group
from tests.single_rank_store import SingleRankStore
from tests.unit.blocks import PREFIX, commit_of, write
from tests.unit.checkpoint.test_checkpoint import make_state, save, step_of
from tests.unit.crafted_commits import signed
from tests.unit.memory_checks import frees_memory


def tensor_of(shape: list[int], boxes: list[tuple[list[int], list[int]]]) -> StoredTensor:
    blocks = [{"offsets": at, "sizes": sizes, "object": 0, "start": 0, "crc32": 0} for at, sizes in boxes]
    return StoredTensor.model_validate_json(json.dumps({"dtype": "int8", "shape": shape, "blocks": blocks}))


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_a_grid_of_blocks_is_valid_unless_a_block_is_missing_or_repeated(
    sides: list[list[int]], data: st.DataObject
) -> None:
    starts = [list(itertools.accumulate(side, initial=0))[:-1] for side in sides]
    boxes = [
        ([at for at, _ in cell], [size for _, size in cell])
        for cell in itertools.product(
            *(list(zip(at, side, strict=True)) for at, side in zip(starts, sides, strict=True))
        )
    ]
    shape = [sum(side) for side in sides]
    tensor_of(shape, data.draw(st.permutations(boxes)))
    one = data.draw(st.sampled_from(boxes))
    for wrong in ([box for box in boxes if box is not one], [*boxes, one]):
        with pytest.raises(ValueError, match=r"do not add up|at least 1"):
            tensor_of(shape, wrong)


def test_empty_blocks_may_be_anywhere_in_a_tensor(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    store = SingleRankStore(storage, keep=1)
    weight = torch.arange(24.0).reshape(6, 4)
    commit = store.save({"model": weight}, step=1, record={})
    body = json.loads(commit.to_bytes())
    [block] = body["tensors"]["model.value"]["blocks"]
    none = [{**block, "offsets": at, "sizes": [0, 4], "crc32": 0} for at in ([0, 0], [3, 0], [6, 0])]
    body["tensors"]["model.value"]["blocks"] = [*none, block]
    storage.write(commit.key, signed(body))
    restored = store.load_latest()
    assert restored is not None and torch.equal(restored[1]["model"], weight)


def test_an_empty_block_may_start_where_another_block_does(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    store = SingleRankStore(storage, keep=1)
    weight = torch.arange(16.0).reshape(4, 4)
    commit = store.save({"model": weight}, step=1, record={})
    body = json.loads(commit.to_bytes())
    [item] = body["objects"]
    stored, blocks = b"", [{"offsets": [2, 2], "sizes": [2, 0], "object": 0, "start": 0, "crc32": 0}]
    for (row, column), (rows, columns) in {
        (0, 0): (2, 2),
        (2, 0): (2, 2),
        (0, 2): (2, 2),
        (2, 2): (1, 2),
        (3, 2): (1, 2),
    }.items():
        box = weight[row : row + rows, column : column + columns].numpy().tobytes().ljust(ALIGNMENT, b"\0")
        place = {"object": 0, "start": len(stored), "crc32": zlib.crc32(box)}
        blocks.append({"offsets": [row, column], "sizes": [rows, columns], **place})
        stored += box
    body["tensors"]["model.value"]["blocks"], item["size"] = blocks, len(stored)
    storage.write(item["key"], stored)
    storage.write(commit.key, signed(body))
    restored = store.load_latest()
    assert restored is not None and torch.equal(restored[1]["model"], weight)


@pytest.mark.timeout(60)
def test_a_tensor_of_many_blocks_is_validated_quickly() -> None:
    """A comparison of all pairs of blocks would take minutes."""
    places = range(30)
    boxes = [([*at], [1, 1, 1]) for at in itertools.product(places, places, places)]
    assert len(tensor_of([30, 30, 30], boxes).blocks) == 27_000
    with pytest.raises(ValueError, match="do not add up"):
        tensor_of([30, 30, 30], [*boxes[:-1], boxes[0]])


def test_a_skeleton_above_the_size_limit_is_not_read(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    [_, newest] = save(storage, 1, 2)
    os.truncate(tmp_path / newest.state.key, MAX_SKELETON_BYTES + 1)
    body = json.loads(newest.to_bytes())
    body["state"]["size"] = MAX_SKELETON_BYTES + 1
    storage.write(newest.key, signed(body))
    store = SingleRankStore(storage, keep=2)
    restored = store.load_latest()
    assert restored is not None and restored[0].step == 1
    [(rejected, reason)] = store.rejected
    assert rejected == newest.key and "less than or equal" in reason


class RecordingStorage(Storage):
    """Records the most bytes that were read at once, by key, of reads with a limit."""

    most: Counter[str]

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        data = super().read(key, max_bytes)
        if max_bytes is not None:
            self.most[key] = max(self.most[key], len(data))
        return data


@pytest.mark.parametrize("which", ["manifest", "skeleton"])
def test_objects_above_their_size_limit_are_not_read_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    storage = RecordingStorage(tmp_path)
    storage.most = Counter()
    [_, newest] = save(storage, 1, 2)
    key, most = (newest.key, 1 << 20) if which == "manifest" else (newest.state.key, newest.state.size)
    os.truncate(tmp_path / key, 64 << 20)
    for module in (manifest, catalog):
        monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 1 << 20)
    store = SingleRankStore(storage, keep=2)
    restored = restore(store, storage, single_rank_group())
    assert restored is not None and restored[0].step == 1
    assert [rejected for rejected, _ in store.rejected] == [newest.key]
    assert storage.most[key] == most + 1


def test_a_commit_with_a_manifest_above_the_limit_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    save(storage, 1)
    before = storage.list()
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 500)
    with pytest.raises(CheckpointError, match=r"it has \d+ bytes; the limit is 500"):
        SingleRankStore(storage, keep=3).save(make_state(2), step=2, record={})
    assert storage.list() == before


def test_a_state_with_a_skeleton_above_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ddp.checkpoint.writer.MAX_SKELETON_BYTES", 2000)
    store = SingleRankStore(Storage(tmp_path), keep=1)
    store.save(make_state(1), step=1, record={})
    with pytest.raises(CheckpointError, match=r"\d+ bytes as JSON; the limit is 2000"):
        store.save({**make_state(2), "user": {"names": ["a name"] * 1000}}, step=2, record={})
    assert Storage(tmp_path).list("commits") == ["commits/1.json"]


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-3, 40), st.floats(allow_nan=False),
    st.sampled_from(["../../etc/passwd", "float32", "bool", "step=1", "model.weight", "", "\x00", "9" * 40, "\ud800"]),
)  # fmt: skip
ANYTHING = st.one_of(LEAVES, st.lists(LEAVES, max_size=3), st.dictionaries(st.sampled_from("ab"), LEAVES, max_size=2))


def places_in(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all values in a JSON body."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in inner for place in [(*path, key), *places_in(value, (*path, key))]]


def put(tree: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> None:
    for key in path[:-1]:
        tree = tree[key]
    change(tree, path[-1])


@pytest.fixture(scope="module")
def run() -> str:
    """Returns a run folder with commits 1 and 2."""
    uri = f"memory://{uuid.uuid4().hex}"
    save(Storage(uri).at(COMMITS), 1, 2)
    Storage(uri).at(COMMITS).write("as-it-was", Storage(uri).at(COMMITS).read("commits/2.json"))
    return uri


def check_a_change(run: str, data: st.DataObject) -> None:
    storage = Storage(run).at(COMMITS)
    body = json.loads(storage.read("as-it-was"))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places_in(body)))
        how = data.draw(st.sampled_from(["replace", "remove", "another's"]))
        if how == "another's":
            value = body
            for key in data.draw(st.sampled_from(places_in(body))):
                value = value[key]
        else:
            value = data.draw(ANYTHING)
        value = copy.deepcopy(value)
        put(
            body, path, operator.delitem if how == "remove" else lambda at, key, value=value: at.__setitem__(key, value)
        )
    storage.write("commits/2.json", signed(body))
    store = SingleRankStore(storage, keep=2)
    restored = store.load_latest()
    assert restored is not None
    if restored[0].step == 1:
        assert step_of(restored[1]) == 1 and [key for key, _ in store.rejected] == ["commits/2.json"]
    for as_json in (False, True):
        checkpoints.ls(run, as_json)
    with suppress(typer.Exit):
        checkpoints.verify(run)
    checkpoints.prune(run, keep=1, dry_run=True)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_after_any_change_of_a_manifest_its_commit_or_the_one_before_is_used(run: str, data: st.DataObject) -> None:
    """The manifest has a valid checksum. No other error is raised, by the command line either."""
    check_a_change(run, data)


@pytest.mark.chaos
@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_after_a_thousand_changes_of_a_manifest_a_commit_is_used(run: str, data: st.DataObject) -> None:
    check_a_change(run, data)


@pytest.mark.parametrize(
    ("path", "value"),
    [("step", -1), ("tensors/model.weight/shape", [1, 2]), ("record", {"samples": "many"}), ("format", 2)],
)
def test_a_rejected_manifest_is_not_kept_in_memory(run: str, path: str, value: Any) -> None:
    storage = Storage(run).at(COMMITS)
    storage.write("commits/2.json", signed(_edited(json.loads(storage.read("as-it-was")), path, value)))
    catalog = CommitCatalog(storage)
    assert frees_memory(lambda: catalog.latest())
    assert [key for key, _ in catalog.rejected] == ["commits/2.json"]
    assert frees_memory(lambda: Commit.from_bytes("commits/2.json", storage.read("commits/2.json")))


def _body(tmp_path: Path) -> dict[str, Any]:
    tensors = {"w": torch.zeros(6, 4), "b": torch.zeros(3)}
    commit = commit_of(write(Storage(tmp_path), tensors, object_bytes=10_000, block_bytes=32), tensors)
    body: dict[str, Any] = json.loads(commit.to_bytes())
    del body["sha256"]
    return body


def _edited(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    edited = copy.deepcopy(body)
    *way, last = [int(part) if part.isdecimal() else part for part in path.split("/")]
    place: Any = edited
    for part in way:
        place = place[part]
    place[last] = value
    return edited


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("tensors/w/shape", [6, 5], "do not add up"),
        ("tensors/w/shape", [2**40, 4], "do not add up"),
        ("tensors/w/shape", [2**60, 4], "less than or equal"),
        ("tensors/w/shape", [4, 4], "outside its tensor"),
        ("tensors/w/shape", [24], "different number of dimensions"),
        ("tensors/w/shape", [6, -4], "greater than or equal"),
        ("tensors/w/shape", [1] * 65, "at most 64"),
        ("tensors/w/dtype", "complex128", "not contiguous"),
        ("tensors/w/dtype", "load", "not a dtype"),
        ("tensors/w/dtype", "qint8", "not a dtype"),
        ("tensors/w/dtype", "float31", "not a dtype"),
        ("tensors/w/blocks", [], "at least 1"),
        ("tensors/w/blocks/0/offsets", [2, 0], "do not add up"),
        ("tensors/w/blocks/0/offsets", [5, 0], "outside its tensor"),
        ("tensors/w/blocks/0/sizes", [1, 4], "do not add up"),
        ("tensors/w/blocks/0/start", 16, "not contiguous"),
        ("tensors/w/blocks/0/start", 2**47, "not contiguous"),
        ("tensors/w/blocks/0/object", 1, "no object 1"),
        ("tensors/w/blocks/0/object", -1, "greater than or equal"),
        ("tensors/w/blocks/0/crc32", 2**32, "less than"),
        ("objects/0/size", 2**47, "have 256 bytes"),
        ("objects/0/key", "../../etc/passwd", "is not in"),
        ("objects/0/key", f"{PREFIX}/state.json", "listed twice"),
        ("state/key", f"{PREFIX}/../x", "is not in"),
        ("tensors/w/surprise", 1, "not permitted"),
    ],
)
def test_a_manifest_with_inconsistent_blocks_or_foreign_keys_is_refused(
    tmp_path: Path, path: str, value: Any, message: str
) -> None:
    body = _body(tmp_path)
    assert Commit.from_bytes("commits/7.json", signed(body)).step == 7
    with pytest.raises(CheckpointError, match=rf"commits/7\.json is not a valid manifest: .*{message}"):
        Commit.from_bytes("commits/7.json", signed(_edited(body, path, value)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_manifest_is_read_or_refused_in_little_memory(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any value is replaced, and the checksum computed again."""
    body = _BODY or _BODY.update(_body(tmp_path_factory.mktemp("fuzz"))) or _BODY
    path = "/".join(map(str, data.draw(st.sampled_from(places_in(body)))))
    value = data.draw(JSON | st.sampled_from([0, 1, 2**31, 2**47, 2**63, [], {}, "float64", [2**40] * 8]))
    tracemalloc.start()
    try:
        Commit.from_bytes("commits/7.json", signed(_edited(body, path, value)))
    except CheckpointError as error:
        assert "commits/7.json" in str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 20 << 20


_BODY: dict[str, Any] = {}


def test_a_deeply_nested_manifest_is_refused() -> None:
    deep = b'{"format": 3, "record": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(CheckpointError, match="is not a valid manifest"):
        Commit.from_bytes("commits/7.json", deep)
