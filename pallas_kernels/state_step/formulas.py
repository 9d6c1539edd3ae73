"""What one token does to a state, on plain arrays and in float32."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

UNIT_EPS = 1e-6  # under the root of a vector's length


def einsum(spec: str, *operands: Array) -> Array:
    """The state lives for the whole request: no TF32 where it is read or updated."""
    return jnp.einsum(spec, *operands, precision=lax.Precision.HIGHEST)


def split_qkv(
    qkv: Float[Array, "*batch channels"], heads: int, piece: tuple[int, int]
) -> tuple[
    Float32[Array, "*batch key_heads k"],
    Float32[Array, "*batch key_heads k"],
    Float32[Array, "*batch heads v"],
]:
    """q, k and v, which lie side by side in the last axis. q and k become unit vectors, q then divided by sqrt(k)."""
    depth, width = piece
    keys = (qkv.shape[-1] - heads * width) // 2
    q, k, v = jnp.split(qkv.astype(jnp.float32), (keys, 2 * keys), axis=-1)
    q, k = (x.reshape(*x.shape[:-1], -1, depth) for x in (q, k))
    q, k = (x * lax.rsqrt((x * x).sum(-1, keepdims=True) + UNIT_EPS) for x in (q, k))
    return q * depth**-0.5, k, v.reshape(*v.shape[:-1], heads, width)


def gates(
    f: Float[Array, "*batch heads #k"],
    b: Float[Array, "*batch heads"],
    a_log: Float32[Array, " heads"],
    dt_bias: Float32[Array, "heads #k"],
) -> tuple[Float32[Array, "*batch heads #k"], Float32[Array, "*batch heads"]]:
    """(log of the decay, step size) of the gated delta rule: -exp(a_log) softplus(f + dt_bias), sigmoid(b)."""
    g = -jnp.exp(a_log)[:, None] * jax.nn.softplus(f.astype(jnp.float32) + dt_bias)
    return g, jax.nn.sigmoid(b.astype(jnp.float32))


def delta_rule(
    qkv: Float[Array, "rows channels"],
    f: Float[Array, "rows heads #k"],
    b: Float[Array, "rows heads"],
    a_log: Float32[Array, " heads"],
    dt_bias: Float32[Array, "heads #k"],
    state: Float[Array, "rows heads k v"],
) -> tuple[Float[Array, "rows heads v"], Float[Array, "rows heads k v"]]:
    """The gated delta rule (arXiv 2412.06464, equation 10; arXiv 2510.26692, section 3, for a decay of each key channel):

        S_t = (I - beta k k^T) diag(exp(g)) S_{t-1} + beta k v^T        out = S_t^T q

    with q, k and v as `split_qkv` gives them, g and beta as `gates`. Each key head serves heads / key_heads consecutive heads.
    """
    heads, depth, width = state.shape[1:]
    q, k, v = split_qkv(qkv, heads, (depth, width))
    g, beta = gates(f, b, a_log, dt_bias)
    group = v.shape[1] // q.shape[1]
    if group > 1:
        q, k = (jnp.repeat(part, group, axis=1) for part in (q, k))
    state = state * jnp.exp(g)[..., None]
    delta = (v - einsum("rhkv,rhk->rhv", state, k)) * beta[..., None]
    state = state + k[..., None] * delta[..., None, :]
    return einsum("rhkv,rhk->rhv", state, q), state


def ssm(
    x: Float[Array, "rows heads head_dim"],
    dt: Float[Array, "rows heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "rows groups state"],
    c: Float[Array, "rows groups state"],
    state: Float[Array, "rows heads head_dim state"],
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows heads head_dim state"]]:
    """Mamba-2 (arXiv 2405.21060), without its D x term:

        S_t = exp(dt a) S_{t-1} + dt x b^T        out = S_t c

    a is negative. b and c are shared by the heads / groups consecutive heads of a group.
    """
    b, c = (jnp.repeat(part, x.shape[1] // b.shape[1], axis=1) for part in (b, c))
    decay = jnp.exp(dt * a)[..., None, None]
    state = state * decay + (dt[..., None] * x)[..., None] * b[:, :, None]
    return einsum("rhpn,rhn->rhp", state, c), state


def convolution(
    x: Float[Array, "rows channels"],
    weight: Float[Array, "channels kernel"],
    bias: Float[Array, " channels"] | None,
    state: Float[Array, "rows kernel-1 channels"],
    *,
    residual: bool = False,
) -> tuple[Float[Array, "rows channels"], Float[Array, "rows kernel-1 channels"]]:
    """Causal depthwise convolution over the kernel - 1 inputs in `state`, oldest first, and x; then silu, or with
    `residual` x + the convolution. out in the dtype of x."""
    window = jnp.concatenate([state, x[:, None]], axis=1)
    y: Float32[Array, "rows channels"] = sum(  # type: ignore[assignment]
        window[:, i].astype(jnp.float32) * weight[:, i].astype(jnp.float32) for i in range(weight.shape[1])
    )
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    y = x.astype(jnp.float32) + y if residual else jax.nn.silu(y)
    return y.astype(x.dtype), window[:, 1:]
