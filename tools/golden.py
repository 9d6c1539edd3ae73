"""What the scripts that make golden data with transformers have in common (torch; an environment of its own).

A directory of golden data holds a tiny random checkpoint (bfloat16, published naming) and golden.npz, computed from it in
float32 on the CPU: ids Int32[n] (a prompt over two pages of 64), logits Float32[n, vocab], hidden
Float32[layers + 1, p, hidden] (what enters the first layer and leaves each, at `positions` Int32[p]), greedy Int32[64]
(the tokens that follow), greedy_logits Float32[64, vocab] (those that each was chosen by) and margin, the smallest gap
between best and second on that way.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

PROMPT, STEPS = 150, 64


@torch.no_grad()
def randomize(
    model: torch.nn.Module, special: Callable[[str, torch.Tensor], torch.Tensor | None], seed: int = 0
) -> None:
    """Values large enough that every part shows in the logits, rounded to bfloat16, as they are stored.

    special(name, noise): what a tensor gets instead of scaled normal noise, or None.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        value = special(name, noise)
        if value is None:
            value = 1.5 * noise / tensor.shape[-1] ** 0.5
        tensor.copy_(value.bfloat16())


@torch.no_grad()
def bias_choice(model: torch.nn.Module, seed: int = 1) -> None:
    """Fills the bias of the experts' choice: no parameter, so `randomize` leaves it at zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


@torch.no_grad()
def golden(
    model: torch.nn.Module,
    layers: torch.nn.ModuleList,
    vocab_size: int,
    prompt: int,
    steps: int,
    cached: bool = True,
) -> dict[str, np.ndarray]:
    """One pass over the prompt, then greedy tokens through transformers' own cache, or by passes over all tokens."""
    ids = torch.randint(2, vocab_size, (1, prompt), generator=torch.Generator().manual_seed(3))
    found: list[torch.Tensor] = []
    keep = lambda module, args, out: found.append(out[0] if isinstance(out, tuple) else out)
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    hooks.append(layers[0].register_forward_pre_hook(lambda module, args: found.append(args[0])))
    out = model(input_ids=ids, use_cache=True)
    for hook in hooks:
        hook.remove()
    positions = sorted({*range(0, prompt, 8), prompt - 1})
    logits, greedy, greedy_logits = out.logits[0], [], []
    for _ in range(steps):
        greedy_logits.append(out.logits[0, -1].numpy())
        greedy.append(int(greedy_logits[-1].argmax()))
        if cached:
            out = model(input_ids=torch.tensor([[greedy[-1]]]), cache=out.cache, use_cache=True)
        else:
            out = model(input_ids=torch.cat([ids, torch.tensor([greedy])], dim=1), use_cache=False)
    best = np.sort(np.stack(greedy_logits), axis=1)[:, -2:]
    return {
        "ids": ids[0].numpy().astype(np.int32),
        "positions": np.asarray(positions, np.int32),
        "logits": logits.numpy(),
        "hidden": np.stack([x[0, positions].numpy() for x in found]),
        "greedy": np.asarray(greedy, np.int32),
        "greedy_logits": np.stack(greedy_logits),
        "margin": np.float32((best[:, 1] - best[:, 0]).min()),
    }


def write(
    directory: Path,
    model: torch.nn.Module,
    special: Callable[[str, torch.Tensor], torch.Tensor | None],
    layers: Callable[[torch.nn.Module], torch.nn.ModuleList],
    vocab_size: int,
    *,
    prompt: int = PROMPT,
    steps: int = STEPS,
    seed: int = 0,
    cached: bool = True,
    published: dict[str, Any] | None = None,
) -> tuple[float, float]:
    """Randomizes and saves a model, loads it back in float32 and writes what it computes.

    published: the fields of config.json under their published names, where transformers saves it under others.

    Relative to the largest logit it returns the margin, and how far the greedy logits lie from those of one pass over all
    tokens: what float32 is good for in this model.
    """
    torch.set_num_threads(1)  # tiny matrices, and results that don't depend on the number of cores
    randomize(model, special, seed)
    model.to(torch.bfloat16).save_pretrained(directory)
    if published is not None:
        (directory / "config.json").write_text(json.dumps(published, indent=2) + "\n")
    model = type(model).from_pretrained(directory, dtype=torch.float32).eval()
    arrays = golden(model, layers(model), vocab_size, prompt, steps, cached)
    np.savez_compressed(
        directory / "golden.npz", versions=f"transformers {transformers.__version__}", **arrays
    )
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(
        f"{directory.name}: {size / 1e3:.0f} kB, margin {arrays['margin']:.2e}, "
        f"greedy {arrays['greedy'].tolist()}"
    )
    largest = np.abs(arrays["greedy_logits"]).max()
    tokens = np.concatenate([arrays["ids"], arrays["greedy"][:-1]])
    with torch.no_grad():
        again = model(input_ids=torch.from_numpy(tokens)[None].long(), use_cache=False).logits[
            0, prompt - 1 :
        ]
    spread = np.abs(again.numpy() - arrays["greedy_logits"]).max()
    return float(arrays["margin"] / largest), float(spread / largest)
