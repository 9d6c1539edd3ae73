"""Routing and every implementation of the experts against plain numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.deviceless import compile_for, requires_plugin, shape
from ukv_jax.models import moe
from ukv_jax.models.config import MoEConfig
from ukv_jax.models.experts import EXPERTS as IMPLEMENTATIONS
from ukv_jax.models.experts import preferred

TOKENS, HIDDEN, SIZE, EXPERTS = 37, 16, 8, 8


def config(**changes):
    base = {
        "num_experts": EXPERTS, "experts_per_token": 2, "intermediate_size": SIZE, "num_shared_experts": 1,
        "renormalize": True, "scaling_factor": 2.5,
    }  # fmt: skip
    return MoEConfig(**(base | changes))


def random(seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return {
        "x": normal(TOKENS, HIDDEN),
        "router": normal(EXPERTS, HIDDEN),
        "router_bias": normal(EXPERTS) * 0.2,
        "experts_gate_up": normal(EXPERTS, 2 * SIZE, HIDDEN),
        "experts_down": normal(EXPERTS, HIDDEN, SIZE),
        "shared_gate_up": normal(2 * SIZE, HIDDEN),
        "shared_down": normal(HIDDEN, SIZE),
    }


def route_by_hand(x, router, bias, c):
    scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ router.T)))
    chosen, weights = [], []
    for s in scores:
        ranked = s + bias
        groups = ranked.reshape(c.num_groups, -1)
        by_group = np.sort(groups, axis=1)[:, -2:].sum(1)
        allowed = np.argsort(-by_group)[: c.groups_per_token]
        per_group = c.num_experts // c.num_groups
        ranked = [r if e // per_group in allowed else -np.inf for e, r in enumerate(ranked)]
        best = np.argsort(-np.asarray(ranked))[: c.experts_per_token]
        w = s[best]
        chosen.append(best)
        weights.append((w / w.sum() if c.renormalize else w) * c.scaling_factor)
    return np.asarray(chosen), np.asarray(weights)


@pytest.mark.parametrize(
    "changes",
    [{}, {"renormalize": False}, {"num_groups": 4, "groups_per_token": 2}, {"experts_per_token": EXPERTS}],
)
def test_routing(changes):
    c, r = config(**changes), random()
    chosen, weights, _ = moe.route(*map(jnp.asarray, (r["x"], r["router"], r["router_bias"])), c)
    expected_chosen, expected_weights = route_by_hand(r["x"], r["router"], r["router_bias"], c)
    np.testing.assert_array_equal(chosen, expected_chosen)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5)


def gated(x, gate_up, down):
    gate, up = np.split(x @ gate_up.T, 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ down.T


def by_hand(r, c, valid):
    """Each token through its experts, one after the other."""
    x = r["x"].astype(np.float64)
    chosen, weights = route_by_hand(r["x"], r["router"], r["router_bias"], c)
    out = gated(x, r["shared_gate_up"], r["shared_down"])
    for t in np.flatnonzero(valid):
        for e, w in zip(chosen[t], weights[t], strict=True):
            out[t] += w * gated(x[t], r["experts_gate_up"][e], r["experts_down"][e])
    return out


@pytest.mark.parametrize("name", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("live", [TOKENS, 5, 0])
def test_experts(name, live):
    r, c = random(1), config()
    valid = np.random.default_rng(2).permutation(TOKENS) < live
    params = {k: jnp.asarray(v) for k, v in r.items() if k != "x"}
    found = jax.jit(lambda p, x, v: moe.apply(p, c, x, v, name))(params, r["x"][None], valid[None])[0]
    np.testing.assert_allclose(found, by_hand(r, c, valid), rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("name", sorted(IMPLEMENTATIONS))
def test_biases_and_clamped_activation(name):
    """gpt-oss's experts, against a loop over tokens; the limit is reached and the router has a bias."""
    c = config(score_function="softmax", scaling_factor=1.0, num_shared_experts=0, clamp=(1.7, 2.0))
    r = {k: v for k, v in random(4).items() if "shared" not in k and k != "router_bias"}
    rng = np.random.default_rng(5)
    r |= {
        "router_logit_bias": rng.normal(size=EXPERTS).astype(np.float32) * 3,
        "experts_gate_up_bias": rng.normal(size=(EXPERTS, 2 * SIZE)).astype(np.float32),
        "experts_down_bias": rng.normal(size=(EXPERTS, HIDDEN)).astype(np.float32),
    }
    valid = np.arange(TOKENS) % 5 != 2
    params = {k: jnp.asarray(v) for k, v in r.items() if k != "x"}
    found = jax.jit(lambda p, x, v: moe.apply(p, c, x, v, name))(params, r["x"][None], valid[None])[0]
    want = np.zeros((TOKENS, HIDDEN))
    for t in np.flatnonzero(valid):
        x = r["x"][t].astype(np.float64)
        logits = r["router"] @ x + r["router_logit_bias"]
        best = np.argsort(-logits)[:2]
        for e, w in zip(best, np.exp(logits[best]) / np.exp(logits[best]).sum(), strict=True):
            gate, up = np.split(r["experts_gate_up"][e] @ x + r["experts_gate_up_bias"][e], 2)
            gate, up = np.minimum(gate, 2.0), np.clip(up, -2.0, 2.0)
            hidden = gate / (1 + np.exp(-1.7 * gate)) * (up + 1)
            want[t] += w * (r["experts_down"][e] @ hidden + r["experts_down_bias"][e])
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("name", sorted(IMPLEMENTATIONS))
def test_all_tokens_on_one_expert(name):
    r = random(3)
    gate_up, down = jnp.asarray(r["experts_gate_up"]), jnp.asarray(r["experts_down"])
    chosen, weights = jnp.full((TOKENS, 1), 5, jnp.int32), jnp.ones((TOKENS, 1))
    found = IMPLEMENTATIONS[name](jnp.asarray(r["x"]), chosen, weights, gate_up, down)
    np.testing.assert_allclose(found, gated(r["x"], gate_up[5], down[5]), rtol=2e-5, atol=2e-4)


@pytest.mark.deviceless
@requires_plugin
@pytest.mark.parametrize("tokens", [1, 16, 64, 2048])
def test_the_preferred_implementation_makes_no_dense_product(tokens):
    """At the sizes of Kimi-Linear-48B, compiled for an H200: 256 experts on every token would be 1 MB a token."""

    def program(x, chosen, weights, gate_up, down):
        assert preferred(chosen.size) == ("gather" if tokens <= 16 else "grouped")
        return IMPLEMENTATIONS[preferred(chosen.size)](x, chosen, weights, gate_up, down)

    compiled = compile_for(
        program,
        shape((tokens, 2304), "bfloat16"),
        shape((tokens, 8), "int32"),
        shape((tokens, 8), "float32"),
        shape((256, 2048, 2304), "bfloat16"),
        shape((256, 2304, 1024), "bfloat16"),
    )
    if tokens <= 16:
        assert compiled.temp_bytes < tokens * (128 << 10)
    else:
        slots = tokens * 8 + 256 * (64 if tokens == 64 else 128)
        assert compiled.temp_bytes < 4 * slots * (2304 + 2048)


def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match=r"'fast' is not an implementation.*ragged_dot"):
        moe.apply({}, config(), jnp.zeros((1, 1, HIDDEN)), jnp.ones((1, 1), bool), "fast")
