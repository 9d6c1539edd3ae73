"""Writes the golden data of the tiny Kimi-Linear checkpoint with transformers, in float32 on the CPU.

    pip install torch transformers==5.24.0    (an environment of its own)
    python tools/make_golden_kimi.py [--model checkpoints/kimi-linear-tiny]

The file holds, for each prompt i: ids_i Int32[n], positions_i Int32[p], logits_i Float32[p, vocab] of those positions
(every position of short prompts), greedy_i Int32[256] (the tokens that follow, ends of text included) and margin_i,
the smallest gap between the best and the second logit on that way.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import transformers

PROMPTS = [
    "T",
    "The for",
    "A class is defined by its body, and its attributes are looked up",
    "The import statement finds a module, loads it and binds a name in the local scope. When the module is not "
    "found, an error is raised. Note that the order in which",
    "Lists are mutable sequences, typically used to hold items of the same kind. A tuple is immutable: once it "
    "was made, it can't be changed. Both support indexing, slicing and iteration, and both compare item by item. "
    "Expressions are evaluated from left to right. While an assignment is evaluated, the right side comes first.",
]
STEPS = 256


@torch.no_grad()
def golden(model: torch.nn.Module, ids: list[int]) -> dict[str, np.ndarray]:
    """One pass over the prompt, then STEPS greedy tokens through transformers' own cache."""
    out = model(input_ids=torch.tensor([ids]), use_cache=True)
    logits = out.logits[0]
    keep = list(range(len(ids))) if len(ids) <= 64 else sorted({*range(0, len(ids), 16), len(ids) - 1})
    greedy, margin = [], float("inf")
    for _ in range(STEPS):
        best = out.logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        greedy.append(int(best.indices[0]))
        out = model(input_ids=best.indices[None, :1], cache=out.cache, use_cache=True)
    return {
        "ids": np.asarray(ids, np.int32),
        "positions": np.asarray(keep, np.int32),
        "logits": logits[keep].numpy(),
        "greedy": np.asarray(greedy, np.int32),
        "margin": np.float32(margin),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="checkpoints/kimi-linear-tiny")
    parser.add_argument("--out", type=Path, default=Path("tests/models/golden/kimi_linear_tiny.npz"))
    args = parser.parse_args()
    torch.set_num_threads(1)  # tiny matrices, and results that don't depend on the number of cores
    model = transformers.KimiLinearForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    arrays = {}
    for i, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt)["input_ids"]
        found = golden(model, ids)
        print(f"{len(ids)} tokens, margin {found['margin']:.2e}: {prompt!r}")
        print("   ", repr(tokenizer.decode(found["greedy"])))
        arrays |= {f"{name}_{i}": value for name, value in found.items()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, versions=f"transformers {transformers.__version__}", **arrays)


if __name__ == "__main__":
    main()
