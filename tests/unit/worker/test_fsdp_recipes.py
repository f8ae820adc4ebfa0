"""What people do with FSDP, on two ranks: compiled and checkpointed blocks, a Hugging Face model, LoRA."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fsdp_workers import WIDTH, Block, Fault, Plan, hashes, workers
from tests.unit.distributed.test_first_weights import on_meta

COMPILES_WITHIN_S = 180.0
CONFIG = LlamaConfig(
    vocab_size=61, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, use_cache=False
)


def trained(folder: Path, size: int, classes: list[str], *faults: Fault, **changes: Any) -> dict[str, Any]:
    settings = {"steps": 5, "fsdp": {"shard_classes": classes}}
    with workers(Plan(folder, settings, faults, **changes)) as run:
        run.start(size)
        return hashes(run, COMPILES_WITHIN_S)


class Recomputed(Block):
    """Computes its activations again in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Compiled(torch.nn.Sequential):
    def __init__(self) -> None:
        blocks = [Recomputed() for _ in range(3)]
        for block in blocks:
            block.compile()
        super().__init__(torch.nn.Linear(3, WIDTH), *blocks)


@pytest.mark.chaos
def test_blocks_may_be_compiled_and_checkpointed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"make_model": Compiled}
    one = trained(tmp_path / "1", 1, ["Recomputed"], **options)
    assert trained(tmp_path / "2", 2, ["Recomputed"], **options) == one
    assert trained(tmp_path / "death", 3, ["Recomputed"], Fault(1, "exchange"), **options) == one


class Llama(torch.nn.Module):
    """Reads numbers as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = LlamaForCausalLM(CONFIG)
        self.llama.gradient_checkpointing_enable()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.llama(input_ids=(x.abs() * 20).long().clamp(max=60)).logits  # type: ignore[no-any-return]


@cache
def _llama_on_meta() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(CONFIG)


def init_llama(module: torch.nn.Module) -> None:
    _llama_on_meta()._init_weights(module)


def test_a_hugging_face_model_is_made_from_its_configuration_and_loaded_from_a_folder(tmp_path: Path) -> None:
    make, classes = partial(on_meta, Llama), ["LlamaDecoderLayer"]
    torch.manual_seed(3)
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path / "weights")
    options: dict[str, Any] = {"weights": tmp_path / "weights", "key_mapping": {"^": "llama."}}
    built = trained(tmp_path / "built", 1, classes, make_model=Llama, **options)
    loaded = trained(tmp_path / "loaded", 2, classes, make_model=make, param_init_fn=init_llama, **options)
    assert loaded == built


class LoRA(torch.nn.Module):
    """A frozen layer with a trained update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(WIDTH, 2, bias=False), torch.nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Adapted(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, WIDTH), *(LoRA() for _ in range(3)))


@pytest.mark.chaos
def test_lora_trains_on_a_sharded_frozen_base(tmp_path: Path) -> None:
    torch.manual_seed(3)
    base = {name.replace(".base.", "."): value for name, value in Adapted().state_dict().items() if ".up" not in name}
    save_file({name: value for name, value in base.items() if ".down" not in name}, tmp_path / "base.safetensors")
    options: dict[str, Any] = {
        "make_model": partial(on_meta, Adapted),
        "weights": tmp_path / "base.safetensors",
        "key_mapping": {r"^([123])\.": r"\1.base."},
        "strict": False,
    }
    one = trained(tmp_path / "1", 1, ["LoRA"], **options)
    assert trained(tmp_path / "2", 2, ["LoRA"], **options) == one
    assert trained(tmp_path / "death", 3, ["LoRA"], Fault(1, "exchange"), **options) == one
