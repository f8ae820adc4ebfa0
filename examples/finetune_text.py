"""Fine-tunes a tiny BERT to tell code from prose, with Hugging Face's classes: `python examples/finetune_text.py`.

Needs `pip install "elastic_ddp[examples]"`, and downloads nothing: the texts are lines of Python's own library, and the
model and its tokenizer are made here. For a real model, use `AutoTokenizer.from_pretrained` and
`AutoModelForSequenceClassification.from_pretrained`.
"""

import argparse
import ast
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import Dataset, Subset
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast

import elastic_ddp as ed

MODULES = (
    "argparse",
    "ast",
    "configparser",
    "datetime",
    "difflib",
    "inspect",
    "shutil",
    "tarfile",
    "typing",
    "zipfile",
)


class Lines(Dataset[dict[str, Any]]):
    """A map-style data set: lines of docstrings (label 1) and of code (label 0), tokenized when they are read."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, int]] = []
        for name in MODULES:
            source = (Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text()
            nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
            for node in nodes:
                code = ast.unparse(node.body[-1]).splitlines()
                prose = (ast.get_docstring(node) or "").splitlines()
                self.texts += [(line, label) for label, lines in enumerate((code, prose)) for line in lines[:3] if line]
        vocabulary = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
        special = ["[PAD]", "[UNK]"]
        trainer = trainers.WordLevelTrainer(vocab_size=1000, special_tokens=special, show_progress=False)
        vocabulary.train_from_iterator((text for text, _ in self.texts), trainer)
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="[PAD]", unk_token="[UNK]")

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, row: int) -> dict[str, Any]:
        text, label = self.texts[row]
        return {**self.tokenizer(text, truncation=True, max_length=64), "labels": label}


def error_rate(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(**batch).logits.argmax(1) != batch["labels"]).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default="runs", type=Path, help="folder of all runs")
    parser.add_argument("--name", default="finetune-text", help="name of the run; the same name resumes it")
    parser.add_argument("--workers", default=2, type=int)
    options = parser.parse_args()

    lines = Lines()
    held_out = Subset(lines, range(0, len(lines), 8))
    training = Subset(lines, [row for row in range(len(lines)) if row % 8])
    pad = DataCollatorWithPadding(lines.tokenizer)  # to the longest text of each micro-batch

    def train(run: ed.Run) -> None:
        tiny = BertConfig(
            vocab_size=1000, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
        model = run.prepare(BertForSequenceClassification(tiny))
        run.prepare(torch.optim.AdamW(model.parameters(), lr=3e-3))
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    step.backward(model(**batch).loss)
                step.optimize()
        run.evaluate(error_rate, held_out, collate_fn=pad, name="error_rate")

    config = ed.RunConfig(
        name=options.name,
        storage=str(options.storage.absolute()),
        steps=60,
        global_batch_size=64,
        micro_batch_size=16,
        max_workers=options.workers,
    )
    result = ed.ElasticTrainer(train, data=training, config=config, collate_fn=pad).fit()
    print(f"{len(training)} texts; error rate {result.metrics['error_rate']:.3f}")


if __name__ == "__main__":
    main()
