"""Trains the tiny Kimi-Linear checkpoint that ships with the repository.

    python -m tools.train_tiny [--out checkpoints/kimi-linear-tiny] [--steps 1200]

About 1.4 M parameters with the layer kinds of the 48 B model, on the text of Python's own help topics
(pydoc_data.topics), byte by byte, on a CPU. Writes config.json, model.safetensors (bfloat16), tokenizer.json,
tokenizer_config.json and generation_config.json in the published naming.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from functools import partial
from pathlib import Path
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.models.dense_cache import make_dense_cache
from ukv_jax.models.config import ModelConfig, load_config
from ukv_jax.models.decoder import cache_spec, forward
from ukv_jax.models.experts import EXPERTS
from ukv_jax.models.families import FAMILIES
from ukv_jax.models.weights import build_tree

BOS, EOS, PAD, VOCAB = 256, 257, 258, 260
CONFIG = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "model_max_length": 8192,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "full_attn_layers": [4, 8],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
}
MUON_RATE, ADAM_RATE = 0.02, 4e-3  # peak learning rates
BIAS_RATE = 1e-3  # step of the routers' selection bias towards even load (arXiv 2408.15664)


def corpus() -> np.ndarray:
    """Every help topic as bytes between BOS and EOS, in the order of their names."""
    parts = [[BOS, *topics.topics[name].encode(), EOS] for name in sorted(topics.topics)]
    return np.concatenate([np.asarray(p, np.int32) for p in parts])


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose ids 0 to 255 are the bytes of the UTF-8 text, followed by the special tokens."""
    # The printable stand-ins of the ByteLevel pre-tokenizer: a byte that is printable in Latin-1 stands for itself,
    # the others take the code points from 256 on, in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    characters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={c: b for b, c in sorted(characters.items())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>", "<unused>"])
    return tokenizer


def init_weights(config: ModelConfig, seed: int) -> dict[str, jax.Array]:
    """Random weights under their published names, float32."""
    rng = np.random.default_rng(seed)
    weights = {}
    for t in FAMILIES[config.family].tensors(config):
        if t.name.endswith("A_log"):
            value = np.log(rng.uniform(1, 16, t.shape))
        elif t.name.endswith("dt_bias"):  # the inverse softplus of steps between 1e-3 and 1e-1
            dt = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), t.shape))
            value = dt + np.log(-np.expm1(-dt))
        elif t.name.endswith("e_score_correction_bias"):
            value = np.zeros(t.shape)
        elif len(t.shape) == 1:
            value = np.ones(t.shape)
        else:
            value = rng.normal(size=t.shape) * t.shape[-1] ** -0.5
            if t.name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
                value /= math.sqrt(2 * config.num_layers)  # these write to the residual stream
        weights[t.name] = jnp.asarray(value, jnp.float32)
    return weights


def is_bias(name: str) -> bool:
    return name.endswith("e_score_correction_bias")


def loss_fn(weights: dict[str, jax.Array], config: ModelConfig, tokens: jax.Array):
    """Mean cross-entropy in nats and, for each MoE layer, how many tokens every expert got."""
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    tensors = FAMILIES[config.family].tensors(config)
    params = build_tree(tensors, lambda t: weights[t.name], jnp.float32)
    cache = make_dense_cache(cache_spec(config, "float32"), rows, length)
    loads: list[jax.Array] = []

    def dense(x, chosen, weights, gate_up, down, _options):
        """Every expert on every token: with few small experts that beats sorting, forwards and backwards."""
        picked = chosen[..., None] == jnp.arange(config.moe.num_experts)
        loads.append(picked.sum(axis=(0, 1)))
        gate, up = jnp.split(jnp.einsum("th,ewh->tew", x, gate_up), 2, axis=-1)
        share = (picked * weights[..., None]).sum(axis=1)
        return jnp.einsum("tew,ehw->th", jax.nn.silu(gate) * up * share[..., None], down)

    EXPERTS["dense"] = dense
    logits, _ = forward(params, config, tokens[:, :-1], cache.begin(length, [length] * rows), experts="dense")
    logprobs = jax.nn.log_softmax(logits)
    loss = -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()
    return loss, jnp.stack(loads)


def orthogonal(g: jax.Array) -> jax.Array:
    """Roughly the nearest matrices with orthonormal rows or columns: five Newton-Schulz steps on [..., m, n].

    Coefficients of Muon (https://kellerjordan.github.io/posts/muon).
    """
    flip = g.shape[-2] > g.shape[-1]
    x = g.swapaxes(-1, -2) if flip else g
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    for _ in range(5):
        a = x @ x.swapaxes(-1, -2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.swapaxes(-1, -2) if flip else x


def by_muon(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not name.startswith(("lm_head", "model.embed"))


@partial(jax.jit, static_argnames=("config",), donate_argnums=(0, 1))
def train_step(weights, moments, config, tokens, step, rate):
    """One step: Muon for the matrices, Adam for the rest, the load for the selection biases. rate: 1 at the peak."""
    (loss, loads), grads = jax.value_and_grad(loss_fn, has_aux=True)(weights, config, tokens)
    new_weights, new_moments = {}, {}
    biases = [name for name in weights if is_bias(name)]
    for name, load in zip(biases, loads, strict=True):
        new_weights[name] = weights[name] + BIAS_RATE * jnp.sign(load.mean() - load)
        new_moments[name] = moments[name]

    shapes: dict[tuple[int, ...], list[str]] = {}
    for name, w in weights.items():
        if by_muon(name, w.shape):
            shapes.setdefault(w.shape, []).append(name)
        elif not is_bias(name):
            m = 0.9 * moments[name][0] + 0.1 * grads[name]
            v = 0.99 * moments[name][1] + 0.01 * grads[name] ** 2
            update = (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.99**step)) + 1e-8)
            new_weights[name] = w - ADAM_RATE * rate * update
            new_moments[name] = (m, v)
    for shape, names in shapes.items():  # matrices of one shape are orthogonalised together
        g = jnp.stack([grads[name] for name in names])
        m = 0.95 * jnp.stack([moments[name][0] for name in names]) + g
        update = orthogonal(g + 0.95 * m) * max(1, shape[0] / shape[1]) ** 0.5
        for i, name in enumerate(names):
            new_weights[name] = weights[name] * (1 - 0.1 * MUON_RATE * rate) - MUON_RATE * rate * update[i]
            new_moments[name] = (m[i], moments[name][1])
    return new_weights, new_moments, loss


def train(config: ModelConfig, steps: int, rows: int, length: int, seed: int) -> dict[str, jax.Array]:
    """Trains on random windows of the corpus; the rate falls linearly to zero."""
    text = corpus()
    rng = np.random.default_rng(seed)
    weights = init_weights(config, seed)
    moments = {name: (jnp.zeros_like(w), jnp.zeros_like(w)) for name, w in weights.items()}
    start, losses = time.monotonic(), []
    for step in range(1, steps + 1):
        at = rng.integers(0, len(text) - length - 1, rows)
        tokens = jnp.asarray(text[at[:, None] + np.arange(length + 1)])
        rate = min(step / 20, 1 - (step - 1) / steps)
        weights, moments, loss = train_step(
            weights, moments, config, tokens, jnp.float32(step), jnp.float32(rate)
        )
        losses.append(float(loss) / math.log(2))
        if step % 50 == 0:
            spent = time.monotonic() - start
            print(f"step {step}  {np.mean(losses[-50:]):.3f} bits per byte  {spent:.0f} s", flush=True)
    return weights


def save(weights: dict[str, jax.Array], out: Path) -> None:
    bf16 = {name: np.asarray(w.astype(jnp.bfloat16)) for name, w in weights.items()}
    save_file(bf16, out / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save(str(out / "tokenizer.json"))
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "model_max_length": CONFIG["model_max_length"],
        },
    )
    special = {key: CONFIG[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(out / "generation_config.json", special)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("checkpoints/kimi-linear-tiny"))
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--rows", type=int, default=4, help="sequences a step")
    parser.add_argument("--length", type=int, default=256, help="bytes a sequence")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "config.json", CONFIG)
    config = load_config(args.out)
    weights = train(config, args.steps, args.rows, args.length, args.seed)
    print(f"{sum(w.size for w in weights.values())} parameters")
    save(weights, args.out)


if __name__ == "__main__":
    main()
