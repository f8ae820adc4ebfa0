"""Blocks read into tensors and verified, at any number of readers and writers."""

from __future__ import annotations

import math
import random
import uuid
import weakref
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from zlib_ng import zlib_ng

from elastic_ddp.checkpoint import Commit, CommitCatalog, reader
from elastic_ddp.checkpoint import pieces as pieces_module
from elastic_ddp.checkpoint.manifest import Skeleton, StoredBlock, StoredObject, StoredTensor
from elastic_ddp.checkpoint.pieces import Piece, Targets, pieces_of
from elastic_ddp.checkpoint.planning import BLOCK_BYTES, Box, local_box
from elastic_ddp.checkpoint.reader import PIECES_READ_AHEAD, ReadAhead, allocate_state, read_pieces
from elastic_ddp.checkpoint.writer import OBJECT_BYTES
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors import host_memory
from elastic_ddp.worker.restore import restore
from tests.ranks import run_ranks
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.blocks import ATTEMPT, PREFIX, SHAPES, commit_of, in_slabs_from, read, same, write


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 4), st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 6)), st.data()
)
def test_any_part_of_a_tensor_can_be_read_at_any_number_of_writers(
    tmp_path_factory: pytest.TempPathFactory,
    writers: int,
    readers: int,
    shape: tuple[int, int, int],
    data: st.DataObject,
) -> None:
    storage = Storage(tmp_path_factory.mktemp("any"))
    full = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    commit = commit_of(write(storage, {"w": full}, writers, block_bytes=data.draw(st.integers(8, 200))), ["w"])
    axis, first = data.draw(st.sampled_from([0, 1, 2])), 0
    for part in full.tensor_split(readers, axis):
        offsets = torch.Size([first if dimension == axis else 0 for dimension in range(3)])
        first += part.shape[axis]
        if not part.numel():
            continue
        with in_slabs_from(data.draw(st.sampled_from([1, 10_000]))):
            memory = host_memory.Memory([{"w": (part.shape, part.dtype)}])
        target = memory.tensors["w"].fill_(-1.0)
        targets = Targets({"w": (commit.tensors["w"], Box(offsets, part.shape))}, memory)
        for _ in read_pieces(storage, pieces_of(commit, ["w"]), targets):
            pass
        assert torch.equal(target, part)


SIZES = st.integers(0, 200).map(lambda length: torch.Size([length]))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([torch.uint8, torch.float32, torch.float64]), SIZES | SHAPES), min_size=2, max_size=6
    ),
    st.integers(1, 3),
    st.integers(1, 100) | st.just(1 << 20),
    st.sampled_from([1, 200, 2000]),
    st.sampled_from([1, 50, 10_000]),
    st.booleans(),
    st.integers(0, 2**32),
)
@example([(torch.uint8, torch.Size([111])), (torch.uint8, torch.Size([13]))], 3, 40, 2000, 1, False, 0)
@example([(torch.uint8, torch.Size([4])), (torch.uint8, torch.Size([1]))], 1, 1, 1, 1, False, 0)
def test_a_state_round_trips_whether_pieces_are_read_in_place_or_copied(
    kinds: list[tuple[torch.dtype, torch.Size]],
    writers: int,
    block_bytes: int,
    object_bytes: int,
    small_bytes: int,
    apart: bool,
    seed: int,
) -> None:
    """Pieces are read one by one, in any order: what a piece overwrites by mistake stays wrong."""
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"{number}": torch.randint(1, 100, shape, generator=generator).to(dtype)
        for number, (dtype, shape) in enumerate(kinds)
    }
    parts = write(storage, tensors, writers, block_bytes=block_bytes, object_bytes=object_bytes)
    commit = commit_of(parts, tensors)
    with (
        in_slabs_from(small_bytes),
        patch.object(pieces_module, "MAX_PIECE_BYTES", 1 if apart else pieces_module.MAX_PIECE_BYTES),
    ):
        loaded, targets = allocate_state(commit)
        pieces = pieces_of(commit, loaded)
    order = random.Random(seed).sample(pieces, len(pieces)) if seed else pieces
    for piece in order:
        for _ in read_pieces(storage, [piece], targets):
            pass
    for name, tensor in tensors.items():
        assert same(loaded[name], tensor), name


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_padding_of_a_large_tensor_does_not_overwrite_the_next_one(tmp_path: Path, world_size: int) -> None:
    storage = Storage(tmp_path)
    tensors = {"head.weight": torch.randn(100, 50257), "head.bias": torch.randn(20_000)}
    parts = write(storage, tensors, world_size, block_bytes=BLOCK_BYTES, object_bytes=OBJECT_BYTES)
    commit = commit_of(parts, tensors)
    assert len(commit.tensors["head.weight"].blocks) == 2
    for _ in range(2):  # pieces are read in parallel
        loaded = read(storage, commit)
        assert all(same(loaded[name], tensor) for name, tensor in tensors.items())


def some_layers(width: int) -> dict[str, torch.Tensor]:
    return {
        f"optimizer.{number}.{name}": tensor
        for number in range(20)
        for name, tensor in {"step": torch.tensor(1.0), "odd": torch.ones(7), "w": torch.rand(width, 10)}.items()
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("small_bytes", [1, 100])
def test_neighboring_blocks_are_read_into_their_tensors_by_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, small_bytes: int
) -> None:
    tensors, storage = some_layers(40), Storage(tmp_path)
    parts = write(storage, tensors, world_size, block_bytes=BLOCK_BYTES, object_bytes=8000)
    commit = commit_of(parts, tensors)
    with in_slabs_from(small_bytes):
        loaded, targets = allocate_state(commit)
    monkeypatch.setattr(Piece, "empty", lambda piece: pytest.fail(f"{piece} is not read in place"))
    pieces = pieces_of(commit, loaded)
    assert len(pieces) == len(commit.objects) < len(tensors) / 5
    for _ in read_pieces(storage, pieces, targets):
        pass
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())


def test_large_tensors_are_read_in_place_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, storage = some_layers(20_000), Storage(tmp_path)
    commit = commit_of(write(storage, tensors, block_bytes=BLOCK_BYTES, object_bytes=OBJECT_BYTES), tensors)
    monkeypatch.setattr(Piece, "empty", lambda piece: pytest.fail(f"{piece} is not read in place"))
    loaded = read(storage, commit)
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_block_that_is_needed_in_part_does_not_overwrite_the_next_tensor(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    tensors = {"w": torch.arange(80.0).reshape(10, 8), "v": torch.arange(200.0)}
    commit = commit_of(write(storage, tensors, block_bytes=BLOCK_BYTES, object_bytes=OBJECT_BYTES), tensors)
    with in_slabs_from(1), patch.object(pieces_module, "MAX_PIECE_BYTES", 1):
        memory = host_memory.Memory([{"w": ([5, 8], torch.float32), "v": ([200], torch.float32)}])
        pieces = pieces_of(commit, tensors)
    wanted = {name: (commit.tensors[name], local_box(tensor)) for name, tensor in memory.tensors.items()}
    targets = Targets(wanted, memory)
    assert [piece.blocks[0][0] for piece in pieces] == ["w", "v"]
    for piece in reversed(pieces):
        for _ in read_pieces(storage, [piece], targets):
            pass
    assert same(memory.tensors["w"], tensors["w"][:5]) and same(memory.tensors["v"], tensors["v"])


def test_large_blocks_share_a_piece_only_if_they_are_neighbors_in_memory(tmp_path: Path) -> None:
    """They are for a reader that needs one block of each tensor, and not for a reader that needs several."""
    tensors = {"a": torch.rand(4000), "b": torch.rand(4000)}
    commit = commit_of(write(Storage(tmp_path), tensors, 2, block_bytes=8000, object_bytes=OBJECT_BYTES), tensors)
    with patch.object(pieces_module, "LONE_BLOCK_BYTES", 8000):
        of_all = pieces_of(commit, tensors)
        of_shards = pieces_of(commit, tensors, lambda name, block: block.offsets)
    assert [[name for name, _ in piece.blocks] for piece in of_all] == [["a"], ["b"], ["a"], ["b"]]
    assert [[name for name, _ in piece.blocks] for piece in of_shards] == [["a", "b"], ["a", "b"]]


def test_a_large_block_of_several_is_a_piece_without_the_small_one_after_it(tmp_path: Path) -> None:
    tensors = {"a": torch.rand(4000), "b": torch.rand(10)}
    commit = commit_of(write(Storage(tmp_path), tensors, 2, block_bytes=8000, object_bytes=OBJECT_BYTES), tensors)
    assert [block.object for block in commit.tensors["a"].blocks + commit.tensors["b"].blocks] == [0, 1, 0]
    with patch.object(pieces_module, "LONE_BLOCK_BYTES", 8000):
        pieces = pieces_of(commit, tensors)
    assert [[name for name, _ in piece.blocks] for piece in pieces] == [["a"], ["b"], ["a"]]


def test_shards_by_columns_are_read_into_the_full_tensor(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    full = torch.arange(32.0, dtype=torch.float64).reshape(4, 8)
    shards = [full[:, :4].contiguous(), full[:, 4:].contiguous()]
    data = [bytes(shard.view(torch.uint8).numpy().data) for shard in shards]
    blocks = tuple(
        StoredBlock(offsets=(0, 4 * number), sizes=(4, 4), object=0, start=128 * number, crc32=zlib_ng.crc32(shard))
        for number, shard in enumerate(data)
    )
    key = f"{PREFIX}/0-0.bin"
    storage.write(key, b"".join(data))
    commit = Commit(
        step=7,
        attempt=ATTEMPT,
        state=Skeleton(key=f"{PREFIX}/state.json", size=0, crc32=0),
        objects=(StoredObject(key=key, size=256),),
        tensors={"w": StoredTensor(dtype="float64", shape=(4, 8), blocks=blocks)},
        record={},
    )
    for lone_block_bytes in (1, 1 << 20):
        with in_slabs_from(1), patch.object(pieces_module, "LONE_BLOCK_BYTES", lone_block_bytes):
            assert same(read(storage, commit)["w"], full)


def test_a_kept_tensor_keeps_no_memory_of_another_component(tmp_path: Path) -> None:
    tensors = {
        f"{component}.{name}": tensor
        for component in ("model", "optimizer")
        for name, tensor in {"w": torch.rand(2000, 1000), "step": torch.tensor(1.0)}.items()
    }
    commit = commit_of(write(Storage(tmp_path), tensors, object_bytes=OBJECT_BYTES, block_bytes=BLOCK_BYTES), tensors)
    loaded, targets = allocate_state(commit)
    slabs = [weakref.ref(slab.base) for slab in targets._memory._slabs]
    del targets
    assert len(slabs) == 2 and all(slab() is not None for slab in slabs)
    kept = loaded.pop("model.w")
    steps = [loaded.pop("model.step"), loaded.pop("optimizer.step")]
    del loaded
    assert sum(slab() is not None for slab in slabs) == 1
    del kept
    assert sum(slab() is not None for slab in slabs) == 0 and len(steps) == 2, "step counts keep no slab"


def test_pieces_are_read_ahead_from_the_start_and_up_to_the_limit() -> None:
    pieces = [Piece("object", number, number + 1, ()) for number in range(3 * PIECES_READ_AHEAD)]
    begun: Queue[Piece] = Queue()

    def read(piece: Piece) -> memoryview:
        begun.put(piece)
        return memoryview(bytes([piece.start]))

    reading = ReadAhead(pieces, read)
    assert {begun.get(timeout=60) for _ in range(PIECES_READ_AHEAD)} == {*pieces[:PIECES_READ_AHEAD]}
    for number, (piece, data) in enumerate(reading):
        assert (piece, bytes(data)) == (pieces[number], bytes([number]))
        ahead = {begun.get(timeout=60) for _ in range(number > 0 and number + PIECES_READ_AHEAD <= len(pieces))}
        assert begun.empty() and ahead <= {pieces[(number + PIECES_READ_AHEAD - 1) % len(pieces)]}
    assert number + 1 == len(pieces) and [*reading] == []


def test_no_more_pieces_are_read_after_an_error_or_a_close() -> None:
    pieces = [Piece("object", number, number + 1, ()) for number in range(3 * PIECES_READ_AHEAD)]
    begun: list[int] = []

    def read(piece: Piece) -> memoryview:
        begun.append(piece.start)
        if piece.start == 1:
            raise CheckpointError("bad")
        return memoryview(b"")

    reading = ReadAhead(pieces, read)
    assert next(reading)[0] == pieces[0]
    with pytest.raises(CheckpointError, match="bad"):
        next(reading)
    assert [*reading] == [] and len(begun) <= PIECES_READ_AHEAD + 1
    begun.clear()
    closed = ReadAhead(pieces[2:], read)
    closed.close()
    assert [*closed] == [] and len(begun) <= PIECES_READ_AHEAD


def test_closing_waits_for_the_reads_in_progress() -> None:
    begun, go_on, done = Event(), Event(), Event()

    def read(piece: Piece) -> memoryview:
        begun.set()
        assert go_on.wait(60)
        done.set()
        return memoryview(b"")

    reading = ReadAhead([Piece("object", 0, 1, ())], read)
    assert begun.wait(60)
    closing = Thread(target=reading.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive() and not done.is_set()
    go_on.set()
    closing.join(60)
    assert not closing.is_alive() and done.is_set()


@pytest.mark.parametrize("why", ["larger than the memory", "allocation fails"])
def test_a_commit_that_does_not_fit_into_memory_is_refused_and_not_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    store = SingleRankStore(Storage(tmp_path), keep=2)
    for step in (1, 2):
        store.save({"model": torch.zeros(1000 * step)}, step=step, record={})
    if why == "allocation fails":
        monkeypatch.setattr(host_memory, "Memory", Mock(side_effect=MemoryError("unable to allocate 34.0 MiB")))
        reason = "unable to allocate 34.0 MiB"
    else:
        monkeypatch.setattr(reader, "MEMORY_BYTES", 2 * 8000 - 1)  # the tensor, and its bytes as they are read
        reason = "this machine or container has 15999 bytes"
    with pytest.raises(ConfigError, match=rf"commits/2.json needs 16000 bytes of memory on .*{reason}.*more memory"):
        store.load_latest()
    assert not store.rejected


def refusal(group: ProcessGroup, uri: str) -> str:
    """The error of a restore on two ranks, of which rank 1 has too little memory."""
    memory_bytes = 1 if group.rank else reader.MEMORY_BYTES
    with patch.object(reader, "MEMORY_BYTES", memory_bytes), pytest.raises(ConfigError) as caught:
        restore(CommitCatalog(Storage(uri)), Storage(uri), group)
    return str(caught.value)


def test_all_ranks_refuse_a_commit_that_one_rank_has_too_little_memory_for(tmp_path: Path) -> None:
    SingleRankStore(Storage(tmp_path), keep=1).save({"model": torch.zeros(10)}, step=2, record={})
    before = Storage(tmp_path).list()
    first, second = run_ranks(2, refusal, str(tmp_path))
    assert first == second and "commits/2.json needs" in first
    assert Storage(tmp_path).list() == before, "the commit may be good"
