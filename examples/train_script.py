"""The same as a job file, written in Python: a small GPT on the standard library.

python examples/train_script.py
shoal run examples/train_script.py --nproc 2 -- --steps 50
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

import shoal
from shoal.models import GPT, GPTConfig, causal_lm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="stdlib", help="stdlib, or a file, directory or glob of text")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", help="the directory of checkpoints")
    args = parser.parse_args()

    text = shoal.open_text(args.source, sequence=128, validation=0.1)
    config = GPTConfig(vocab_size=text.tokenizer.vocab_size, sequence=128, layers=2, d_model=64, heads=4)
    engine = shoal.Engine(
        model=lambda: GPT(config),
        loss=causal_lm,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        global_batch=16,
        clip=1.0,
        schedule=shoal.optim.lr.cosine(args.steps, warmup=args.steps // 10),
        param_groups=shoal.decay_matrices_only(0.1),
    )
    for batch in engine.batches(text.train, steps=args.steps):
        out = engine.step(batch)
        if engine.world.rank == 0 and batch.step % 10 == 0:
            print(f"step {batch.step:4d}  loss {out.loss:.4f}")
    validation = engine.evaluate(text.validation, max_batches=8)
    if engine.world.rank == 0:
        print(f"validation loss {validation.loss:.4f}")
    if args.save:
        engine.save(args.save)
    engine.close()


if __name__ == "__main__":
    main()
