"""Trains a small GPT on text: `python examples/train.py`.

It uses the Ray cluster at RAY_ADDRESS or on this machine, or starts one on this machine, and its GPUs if it has any. By
default the text is the source code of Python's standard library. Run it again with the same --name to resume. On a
cluster of several nodes, set --storage or ELASTIC_DDP_STORAGE to a folder that they share, or to a bucket.
"""

import argparse
import math

import torch
from gpt import GPT, Block, next_byte_loss
from text import is_text, text_windows

import elastic_ddp as ed


def main() -> None:
    options = parse()
    use_gpu = ed.cluster_has_gpus() if options.gpu is None else options.gpu
    low, high = options.workers
    config = ed.RunConfig(
        name=options.name,
        seed=options.seed,
        steps=options.steps,
        global_batch_size=options.global_batch_size,
        micro_batch_size=options.micro_batch_size,
        min_workers=low,
        max_workers=high,
        standby_workers=options.standbys,
        resources_per_worker={"CPU": 1.0, "GPU": 1.0} if use_gpu else {"CPU": 1.0},
        precision=options.precision,
        strategy=options.strategy,
        **{key: value for key in ("storage", "reduction") if (value := getattr(options, key)) is not None},
        clip_grad_norm=1.0,
        checkpoint=ed.CheckpointConfig(every_steps=options.commit_every),
    )
    data, held_out = options.data, options.held_out
    if is_text(data):
        data, held_out = text_windows(data, options.context, config.storage)

    def train(run: ed.Run) -> None:
        model = run.prepare(GPT(context=options.context, width=128, layers=4, heads=4), shard=Block)
        optimizer = run.prepare(torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05))
        run.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_cosine(step / run.total_steps)))
        for step in run.steps():
            if step.index == 0 and held_out:
                run.evaluate(next_byte_loss, held_out)
            with step:
                for batch in step.micro_batches():
                    step.backward(next_byte_loss(model, batch))
                step.optimize()
        if held_out:
            run.evaluate(next_byte_loss, held_out)

    result = ed.ElasticTrainer(train, data=data, config=config).fit()
    end = f"weights {result.weights_sha256}" if result.weights_sha256 else "run the same command again to resume"
    print(f"\n{options.name} {result.status} after {result.steps} steps; {end}")
    if result.uri:  # debug() has none
        print(f"The run's folder is {result.uri}. Show it with: elastic-ddp show {result.uri}")


def warm_cosine(done: float) -> float:
    """Returns the factor of the learning rate: linear warm-up over the first tenth of the run, then cosine decay."""
    return min(1.0, done / 0.1 + 0.01) * (0.5 + 0.5 * math.cos(math.pi * min(done, 1.0)))


def workers(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low + (high or low)).isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers or MIN:MAX, such as 1:2")
    return int(low), int(high or low)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="gpt", help="name of the run; the same name resumes it")
    parser.add_argument(
        "--storage",
        help="folder of all runs, which all nodes must see: a path, or a URI such as s3://bucket/runs; default: the "
        "environment variable ELASTIC_DDP_STORAGE, or else runs",
    )
    parser.add_argument(
        "--data",
        help="folder of Parquet files with a `window` column, or of text files, which are converted into a folder in "
        "--storage; by default the source code of the standard library",
    )
    parser.add_argument("--held-out", help="Parquet files to evaluate on, if --data is Parquet")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", default="1:2", type=workers, metavar="MIN:MAX", help="number of workers")
    parser.add_argument("--standbys", type=int, default=0, help="processes on each node that replace a failed worker")
    parser.add_argument("--global-batch-size", type=int, default=32)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=128, help="context length in bytes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--reduction", choices=("canonical", "native"), help="default: canonical")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--commit-every", type=int, default=50, help="steps between commits")
    parser.add_argument(
        "--gpu",
        action=argparse.BooleanOptionalAction,
        help="one GPU per worker; default: if the cluster has GPUs",
    )
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except ed.ElasticDDPError as error:
        raise SystemExit(f"error: {error}") from None
