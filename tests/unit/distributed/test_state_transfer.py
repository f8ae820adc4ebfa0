"""A state sent from one rank to others over a real process group."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic_ddp.distributed import state_transfer
from elastic_ddp.distributed.process_group import ProcessGroup, is_peer_failure
from elastic_ddp.distributed.state_transfer import check_same_model, transfer_state
from elastic_ddp.errors import ConfigError
from elastic_ddp.tensors.state_tree import flatten
from tests.ranks import abort_when, run_ranks, set_key


def make_state(size: int = 100) -> dict[str, Any]:
    """A state with tensors of unusual layouts and dtypes, and with more chunks than may be in flight."""
    generator = torch.Generator().manual_seed(7)
    many = {
        str(number): torch.randn(number % 5, generator=generator)
        for number in range(3 * state_transfer.MAX_CHUNKS_IN_FLIGHT)
    }
    return {
        "large": torch.randn(size, generator=generator),
        "transposed": torch.randn(3, 50, generator=generator).t(),
        "bf16": torch.randn(77, generator=generator).bfloat16(),
        "flags": torch.rand(13, generator=generator) > 0.5,
        "complex": torch.randn(5, generator=generator, dtype=torch.complex64),
        "number": torch.tensor(3),
        "column_of_one": torch.randn(1, 4, generator=generator)[:, 1],
        "empty": torch.empty(0, 4),
        "many": many,
        "plain": [1, "two", None],
    }


def digest(tree: Any) -> str:
    skeleton, tensors = flatten(tree)
    sha256 = hashlib.sha256(repr(skeleton).encode())
    for key in sorted(tensors):
        tensor = torch.empty(tensors[key].shape, dtype=tensors[key].dtype).copy_(tensors[key])
        sha256.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha256.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def transferred(group: ProcessGroup, source: int, receivers: tuple[int, ...], chunk_bytes: int) -> str | None:
    """The digest of what this rank receives."""
    state_transfer.CHUNK_BYTES = chunk_bytes
    state_transfer.MAX_BYTES_IN_FLIGHT = 4 * chunk_bytes
    state = make_state() if group.rank == source else {"another": torch.zeros(3)}
    received = transfer_state(state, group, source=source, receivers=receivers)
    return None if received is None else digest(received)


@pytest.mark.parametrize("chunk_bytes", [16 << 20, 3])  # 3: smaller than a number
def test_receivers_get_the_bits_of_the_source_and_other_ranks_nothing(chunk_bytes: int) -> None:
    sent = digest(make_state())
    assert run_ranks(3, transferred, 1, (2, 0), chunk_bytes) == [sent, None, sent]
    assert run_ranks(3, transferred, 0, (2,), chunk_bytes) == [None, None, sent]


def count_ticks(group: ProcessGroup) -> tuple[int, int]:
    """How often `tick` is called, and the number of chunks."""
    state_transfer.CHUNK_BYTES = 64
    state, ticks = make_state(), []
    transfer_state(state, group, source=0, receivers=(1, 2), tick=lambda: ticks.append(1))
    return len(ticks), len(list(state_transfer._pieces(flatten(state)[1])))


def test_every_rank_of_the_chain_ticks_for_each_chunk() -> None:
    assert all(num_ticks >= num_chunks > 100 for num_ticks, num_chunks in run_ranks(3, count_ticks))


def fail_in_the_middle(group: ProcessGroup) -> str:
    """Rank 1, in the middle of the chain, closes its connections while chunks are in flight, as if it had died."""
    state_transfer.CHUNK_BYTES, state_transfer.MAX_BYTES_IN_FLIGHT = 1 << 20, 4 << 20
    if group.rank == 1:
        pieces = state_transfer._pieces

        def first_pieces(tensors: Any) -> Iterator[torch.Tensor]:
            for number, piece in enumerate(pieces(tensors)):
                if number == 20:
                    raise KeyboardInterrupt
                yield piece

        state_transfer._pieces = first_pieces
    abort_when(group, "rank 1 failed")
    with pytest.raises(KeyboardInterrupt if group.rank == 1 else Exception) as caught:
        transfer_state(make_state(size=50 << 20), group, source=0, receivers=(1, 2))
    is_failure = is_peer_failure(caught.value)
    del caught
    group.close(intact=False)
    if group.rank == 1:
        set_key(group, "rank 1 failed")
    return "a peer failed" if is_failure else "failed"


def test_a_rank_that_fails_in_a_transfer_is_a_peer_failure_on_the_others() -> None:
    assert run_ranks(3, fail_in_the_middle) == ["a peer failed", "failed", "a peer failed"]


def check_changed_model(group: ProcessGroup, change: str) -> str:
    """The error if rank 1 has built another model."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    check_same_model(model, group)
    if group.rank == 1 and change == "frozen":
        model[1].bias.requires_grad_(False)
    elif group.rank == 1:
        model.append(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError) as caught:
        check_same_model(model, group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("frozen", "parameter 3 is '1.bias (1,) float32 requires_grad=False' on rank 1 and '1.bias (1,) float32 requ"),
        ("longer", "parameter 4 is '2.weight (1, 1) float32 requires_grad=True' on rank 1 and 'no such parameter' on"),
    ],
)
def test_models_that_differ_are_refused_with_parameter_and_rank(change: str, message: str) -> None:
    first, second = run_ranks(2, check_changed_model, change)
    assert message in first and first == second


def test_tensors_are_received_in_the_order_in_which_they_are_sent() -> None:
    layout = {"a.x": ("float32", [3]), "b.y": ("float32", [5]), "a.z": ("float32", [7]), "b": ("int64", [])}
    allocated = state_transfer._allocate(layout)
    assert [(key, list(tensor.shape)) for key, tensor in allocated.items()] == [
        (key, shape) for key, (_, shape) in layout.items()
    ]
