"""Trains a Hugging Face model that no worker ever holds as a whole: `python examples/fsdp.py`.

The model is built from its configuration on the meta device, and each worker makes its shard of it, unit by unit. With
`--weights FOLDER` it begins with the weights of a model of the same configuration that `save_pretrained` has written.
The same `--name` resumes a run, so give each one of its own to compare options. Needs `pip install ".[examples]"`, and
downloads nothing: the model is small, and learns bytes.
"""

import argparse
from pathlib import Path

import torch
from text import text_windows
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import elastic_ddp as ed

CONTEXT = 64
SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default="runs", type=Path, help="folder of all runs")
    parser.add_argument("--name", default="fsdp", help="name of the run; the same name resumes it")
    parser.add_argument("--workers", default=2, type=int)
    parser.add_argument("--steps", default=60, type=int)
    parser.add_argument("--weights", type=Path, help="folder of a Hugging Face model of this configuration")
    parser.add_argument("--sharding", default="full", choices=("full", "grad_op"), help="fsdp.sharding")
    parser.add_argument("--cpu-offload", action="store_true", help="fsdp.cpu_offload")
    options = parser.parse_args()

    def train(run: ed.Run) -> None:
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT + 1, **SIZES))
        run.prepare(model, shard=LlamaDecoderLayer, param_init_fn=model._init_weights)
        if options.weights is not None:
            run.load_weights(options.weights.absolute())
        optimizer = run.prepare(torch.optim.AdamW(model.parameters(), lr=3e-3))
        run.prepare(torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10))
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    step.backward(loss_of(model, batch))
                step.optimize()
        run.evaluate(loss_of, held_out)

    storage = str(options.storage.absolute())
    data, held_out = text_windows(None, CONTEXT, storage)
    config = ed.RunConfig(
        name=options.name,
        storage=storage,
        steps=options.steps,
        global_batch_size=32,
        micro_batch_size=8,
        max_workers=options.workers,
        strategy="fsdp",
        fsdp=ed.FSDPConfig(sharding=options.sharding, cpu_offload=options.cpu_offload),
        clip_grad_norm=1.0,
    )
    result = ed.ElasticTrainer(train, data=data, config=config).fit()
    if result.status == "finished":
        loss = result.metrics["validation_loss"]
        print(f"{result.steps} steps; held-out loss {loss:.3f}; weights {result.weights_sha256}")


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the mean cross-entropy in nats per byte."""
    tokens = batch["window"].long()
    return model(input_ids=tokens, labels=tokens).loss


if __name__ == "__main__":
    main()
