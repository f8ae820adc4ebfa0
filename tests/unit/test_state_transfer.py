"""State from one rank to others, over a real process group."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic_ddp.distributed import state_transfer
from elastic_ddp.distributed.process_group import ProcessGroup, is_peer_failure
from elastic_ddp.distributed.state_transfer import _empty, check_same_model, hand_over
from elastic_ddp.errors import ConfigError
from elastic_ddp.tensors.state_tree import flatten
from tests.ranks import run_ranks


def state(size: int = 1000) -> dict[str, Any]:
    """Of every kind of tensor that gives trouble, and of more pieces than are on their way at once."""
    random = torch.Generator().manual_seed(7)
    many = {str(k): torch.randn(k % 50, generator=random) for k in range(3 * state_transfer.MOST_PIECES)}
    return {
        "large": torch.randn(size, generator=random),
        "turned": torch.randn(30, 50, generator=random).t(),
        "bf16": torch.randn(77, generator=random).bfloat16(),
        "flags": torch.rand(13, generator=random) > 0.5,
        "complex": torch.randn(5, generator=random, dtype=torch.complex64),
        "number": torch.tensor(3),
        "column_of_one": torch.randn(1, 4, generator=random)[:, 1],
        "nothing": torch.empty(0, 4),
        "many": many,
        "plain": [1, "two", None],
    }


def digest(tree: Any) -> str:
    skeleton, tensors = flatten(tree)
    found = hashlib.sha256(repr(skeleton).encode())
    for key in sorted(tensors):
        value = torch.empty(tensors[key].shape, dtype=tensors[key].dtype).copy_(tensors[key])
        found.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def receive(group: ProcessGroup, source: int, receivers: tuple[int, ...], chunk_bytes: int) -> str | None:
    state_transfer.CHUNK_BYTES = chunk_bytes
    state_transfer.MOST_BYTES = 4 * chunk_bytes
    mine = state() if group.rank == source else {"another": torch.zeros(3)}
    received = hand_over(mine, group, source=source, receivers=receivers)
    return None if received is None else digest(received)


@pytest.mark.parametrize("chunk_bytes", [16 << 20, 64, 3])  # also where no number fits in a chunk
def test_receivers_have_the_bits_of_the_source_and_others_get_nothing(chunk_bytes: int) -> None:
    sent = digest(state())
    if chunk_bytes > 3:
        assert run_ranks(3, receive, 1, (2, 0), chunk_bytes) == [sent, None, sent]
    assert run_ranks(3, receive, 0, (2,), chunk_bytes) == [None, None, sent]


def ticks(group: ProcessGroup) -> tuple[int, int]:
    """How often it is told that a piece has arrived, and how many pieces there are."""
    state_transfer.CHUNK_BYTES = 64
    mine, counted = state(), []
    hand_over(mine, group, source=0, receivers=(1, 2), tick=lambda: counted.append(1))
    return len(counted), len(list(state_transfer._pieces(flatten(mine)[1])))


def test_everybody_who_takes_part_counts_the_pieces() -> None:
    assert all(count >= num_pieces > 100 for count, num_pieces in run_ranks(3, ticks))


def leave_in_the_midst(group: ProcessGroup) -> str:
    """Rank 1, in the middle of the chain, cuts its connections while there are pieces on their way, as its death
    would."""
    state_transfer.CHUNK_BYTES, state_transfer.MOST_BYTES = 1 << 20, 4 << 20
    if group.rank == 1:
        pieces = state_transfer._pieces

        def some(tensors: Any) -> Iterator[torch.Tensor]:
            for number, piece in enumerate(pieces(tensors)):
                if number == 20:
                    raise KeyboardInterrupt
                yield piece

        state_transfer._pieces = some
    expected = KeyboardInterrupt if group.rank == 1 else RuntimeError
    with pytest.raises(expected) as caught:
        hand_over(state(size=50 << 20), group, source=0, receivers=(1, 2))
    told = is_peer_failure(caught.value)
    del caught
    group.close(intact=False)
    return "a peer was lost" if told else "left"


def test_a_loss_in_the_midst_is_one_to_all_who_take_part() -> None:
    assert run_ranks(3, leave_in_the_midst) == ["a peer was lost", "left", "a peer was lost"]


def build_on_its_own(group: ProcessGroup, change: str) -> str:
    """What a rank is told whose model the second rank has built otherwise."""
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
def test_models_that_differ_are_refused_by_parameter_and_rank(change: str, message: str) -> None:
    one, other = run_ranks(2, build_on_its_own, change)
    assert message in one and one == other


def test_tensors_are_received_in_the_order_in_which_they_are_sent_whatever_they_are_called() -> None:
    layout = {"a.x": ("float32", [3]), "b.y": ("float32", [5]), "a.z": ("float32", [7]), "b": ("int64", [])}
    assert [(key, list(each.shape)) for key, each in _empty(layout).items()] == [
        (key, shape) for key, (_, shape) in layout.items()
    ]
