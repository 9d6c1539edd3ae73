"""The fp8 MLA decode kernel above 32 query columns without a GPU: how its queries become e4m3 terms, lane by lane."""

from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.mla_decode import mosaic_fp8_many_registers as many
from pallas_kernels.mla_decode import mosaic_fp8_registers as registers
from tests.kernels.test_mla_fp8 import E4M3, LANES, Shared
from tests.kernels.test_mla_fp8 import warpgroup as warpgroup


@pytest.mark.parametrize("lines", [64, 40])
def test_queries_of_the_ring_become_two_terms(warpgroup, monkeypatch, lines):
    for name in ("plgpu", "ir", "utils"):
        monkeypatch.setattr(many, name, getattr(registers, name))

    def select(condition, a, b):  # of addresses only where all lanes take the same
        if isinstance(a, np.ndarray):
            return np.where(condition, a, b)
        assert condition.all() or not condition.any()
        return a if condition.all() else b

    monkeypatch.setattr(many, "arith", SimpleNamespace(**{**vars(registers.arith), "select": select}))
    number = lambda i: np.full(LANES, i, np.int64)
    monkeypatch.setattr(many, "_for_each", lambda trips, body: [body(number(i)) for i in range(trips)])
    rng = np.random.default_rng(1)
    q = (rng.normal(size=(64, 576)) * 2.0 ** rng.integers(-40, 40, (64, 1))).astype(ml_dtypes.bfloat16)
    raw = q.view(np.uint8)
    early, late, target = Shared(64, 5), Shared(64, 5), Shared(128, 5)
    early.write(np.ascontiguousarray(raw[:, :640]))
    late.write(np.ascontiguousarray(raw[:, 512:]))
    units = SimpleNamespace(memory=np.zeros(4 * 64, np.uint8))
    for part in range(2):
        many.convert_queries(early, late, jnp.int32(lines), jnp.int32(part), target, units, None)
    assert all(free for _, free in warpgroup if _ == "load")
    terms = target.read().view(E4M3)[:, :576].astype(np.float64).reshape(2, 64, 576)
    unit = units.memory.view(np.float32).astype(np.float64)
    want = q.astype(np.float64)[:lines]
    largest = np.abs(want).max(axis=1, keepdims=True)
    got = (terms.sum(axis=0) * unit[:, None])[:lines]
    assert (np.abs(got - want) <= 2.0**-17 * largest).all()
    assert not terms[:, lines:].any()
    assert (np.abs(terms[0, :lines]).max(axis=1) >= 2**7).all()
